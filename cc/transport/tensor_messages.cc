#include "cc/transport/tensor_messages.h"

namespace recsync {
namespace {

constexpr uint32_t kMaxDimensions = 254;  // TensorFlow's.

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t end = out_.size();
    out_.resize(end + sizeof(T));
    std::memcpy(out_.data() + end, &value, sizeof(T));
  }
  std::string Finish(const std::string& text) { return out_ + text; }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}

  template <typename T>
  bool Get(T* value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (in_.size() < sizeof(T)) return false;
    std::memcpy(value, in_.data(), sizeof(T));
    in_.remove_prefix(sizeof(T));
    return true;
  }
  std::string Rest() const { return std::string(in_); }

 private:
  std::string_view in_;
};

}  // namespace

std::string Encode(const Request& request) {
  Writer out;
  out.Put(request.kind);
  out.Put(request.id);
  out.Put(request.step);
  return out.Finish(request.text);
}

std::string Encode(const Answer& answer) {
  Writer out;
  out.Put(answer.id);
  out.Put(answer.code);
  out.Put(static_cast<uint8_t>(answer.is_derived));
  out.Put(static_cast<uint8_t>(answer.is_dead));
  out.Put(answer.form);
  out.Put(answer.dtype);
  out.Put(static_cast<uint32_t>(answer.shape.size()));
  for (const int64_t size : answer.shape) out.Put(size);
  return out.Finish(answer.text);
}

bool Decode(std::string_view head, Request* request) {
  Reader in(head);
  if (!in.Get(&request->kind) || request->kind > RequestKind::kCancel ||
      !in.Get(&request->id) || !in.Get(&request->step)) {
    return false;
  }
  request->text = in.Rest();
  return true;
}

bool Decode(std::string_view head, Answer* answer) {
  Reader in(head);
  uint8_t is_derived = 0, is_dead = 0;
  uint32_t dimensions = 0;
  if (!in.Get(&answer->id) || !in.Get(&answer->code) || !in.Get(&is_derived) ||
      !in.Get(&is_dead) || !in.Get(&answer->form) ||
      answer->form > BodyForm::kProto || !in.Get(&answer->dtype) ||
      !in.Get(&dimensions) || dimensions > kMaxDimensions) {
    return false;
  }
  answer->is_derived = is_derived != 0;
  answer->is_dead = is_dead != 0;
  answer->shape.resize(dimensions);
  for (int64_t& size : answer->shape) {
    if (!in.Get(&size)) return false;
  }
  answer->text = in.Rest();
  return true;
}

}  // namespace recsync
