#include "cc/engine/tensor_messages.h"

#include <cstring>
#include <type_traits>

namespace recsync {
namespace {

constexpr uint32_t kMaxDimensions = 254;  // TensorFlow's.
// "RECSYNC" and a byte, as this processor has it: one of another byte order has
// another number.
constexpr uint64_t kMagic = 0x01434e5953434552;

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

// Greeting and Welcome, in all versions: the magic, the version, and text.
std::string EncodeFirst(uint32_t version, const std::string& text) {
  Writer out;
  out.Put(kMagic);
  out.Put(version);
  return out.Finish(text);
}

bool DecodeFirst(std::string_view head, uint32_t* version, std::string* text) {
  Reader in(head);
  uint64_t magic = 0;
  if (!in.Get(&magic) || magic != kMagic || !in.Get(version)) return false;
  *text = in.Rest();
  return true;
}

}  // namespace

std::string Encode(const Greeting& greeting) {
  return EncodeFirst(greeting.version, greeting.secret);
}

std::string Encode(const Welcome& welcome) {
  return EncodeFirst(welcome.version, welcome.refusal);
}

std::string Encode(const Request& request) {
  Writer out;
  out.Put(request.kind);
  out.Put(request.id);
  out.Put(request.step);
  return out.Finish(request.key);
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

bool Decode(std::string_view head, Greeting* greeting) {
  return DecodeFirst(head, &greeting->version, &greeting->secret);
}

bool Decode(std::string_view head, Welcome* welcome) {
  return DecodeFirst(head, &welcome->version, &welcome->refusal);
}

bool Decode(std::string_view head, Request* request) {
  Reader in(head);
  if (!in.Get(&request->kind) || request->kind > RequestKind::kCancel ||
      !in.Get(&request->id) || !in.Get(&request->step)) {
    return false;
  }
  request->key = in.Rest();
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

Result CheckBody(const Answer& answer, uint64_t size, uint64_t width) {
  if (answer.form == BodyForm::kNone) {
    if (size > 0)
      return Result::Error(std::to_string(size) +
                           " bytes that belong to nothing");
    const bool is_whole = answer.code != 0 || answer.is_dead;
    return is_whole ? Result::Ok()
                    : Result::Error("neither a tensor nor an error");
  }
  if (answer.code != 0 || answer.is_dead) {
    return Result::Error("a tensor and an error at once");
  }
  if (answer.form == BodyForm::kProto) {
    if (size <= kMaxProtoBytes) return Result::Ok();
    return Result::Error("a TensorProto of " + std::to_string(size) +
                         " bytes, more than the " +
                         std::to_string(kMaxProtoBytes) + " that it may have");
  }
  if (width == 0) {
    return Result::Error("elements of type " + std::to_string(answer.dtype) +
                         ", which do not travel as bytes");
  }
  // An empty tensor is one whatever its other dimensions are, but none may be
  // negative. Each product fits: both factors are checked to be small enough.
  bool is_empty = false;
  for (const int64_t dimension : answer.shape) {
    if (dimension < 0) {
      return Result::Error("a dimension of " + std::to_string(dimension));
    }
    is_empty |= dimension == 0;
  }
  uint64_t bytes = is_empty ? 0 : width;
  for (const int64_t dimension : answer.shape) {
    if (bytes > 0 &&
        static_cast<uint64_t>(dimension) > kMaxTensorBytes / bytes) {
      return Result::Error("a shape of more than the " +
                           std::to_string(kMaxTensorBytes) +
                           " bytes that a tensor may have");
    }
    bytes *= dimension;
  }
  if (bytes != size) {
    return Result::Error(std::to_string(size) + " bytes for a tensor of " +
                         std::to_string(bytes));
  }
  return Result::Ok();
}

}  // namespace recsync
