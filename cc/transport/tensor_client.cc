#include "cc/transport/tensor_client.h"

#include <utility>

#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/tsl/platform/status.h"

namespace recsync {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The tensor that an answer announces, not yet filled; false if it can't be
// one.
bool Allocate(const Answer& answer, uint64_t size,
              tensorflow::Allocator* allocator, Tensor* tensor) {
  const DataType dtype = static_cast<DataType>(answer.dtype);
  TensorShape shape;
  if (!tensorflow::DataType_IsValid(answer.dtype) ||
      !tensorflow::DataTypeCanUseMemcpy(dtype) ||
      !TensorShape::BuildTensorShape(answer.shape, &shape).ok()) {
    return false;
  }
  const uint64_t width = tensorflow::DataTypeSize(dtype);
  if (size != width * shape.num_elements()) return false;
  *tensor = Tensor(allocator, dtype, shape);
  return tensor->IsInitialized();
}

}  // namespace

void TensorClient::Connect(MessageLoop* loop, const std::string& address,
                           int port, const std::string& secret,
                           std::function<void(const absl::Status&)> ready,
                           const std::shared_ptr<TensorClient>& self) {
  std::string error;
  Request greeting;
  greeting.text = secret;
  {
    MutexLock lock(&mu_);
    ready_ = std::move(ready);
  }
  const auto connection = loop->Connect(address, port, self, &error);
  if (connection == nullptr) {
    Closed(error);
    return;
  }
  {
    // First of all: it is used as soon as the greeting is answered.
    MutexLock lock(&mu_);
    if (!is_closed_) connection_ = connection;
  }
  connection->Send(Encode(greeting));
}

uint64_t TensorClient::Receive(int64_t step, std::string_view key,
                               tensorflow::Allocator* allocator, Done done) {
  Request request;
  request.kind = RequestKind::kReceive;
  request.step = step;
  request.text = std::string(key);
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mu_);
    if (connection_ == nullptr) return 0;
    connection = connection_;
    request.id = ++last_id_;
    asked_[request.id] = {allocator, std::move(done)};
  }
  // If the connection ends, Closed sees to what was asked.
  connection->Send(Encode(request));
  return request.id;
}

bool TensorClient::Cancel(uint64_t id) {
  Done done;
  if (!Take(id, &done)) return false;
  Request request;
  request.kind = RequestKind::kCancel;
  request.id = id;
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  if (connection != nullptr) connection->Send(Encode(request));
  return true;
}

bool TensorClient::is_closed() {
  MutexLock lock(&mu_);
  return is_closed_;
}

bool TensorClient::Take(uint64_t id, Done* done) {
  MutexLock lock(&mu_);
  const auto found = asked_.find(id);
  if (found == asked_.end()) return false;
  *done = std::move(found->second.done);
  asked_.erase(found);
  return true;
}

tensorflow::Allocator* TensorClient::AllocatorOf(uint64_t id) {
  MutexLock lock(&mu_);
  const auto found = asked_.find(id);
  return found == asked_.end() ? nullptr : found->second.allocator;
}

char* TensorClient::Head(std::string_view head, uint64_t size) {
  answer_ = Answer();
  bool is_right = Decode(head, &answer_);
  if (is_right && answer_.form == BodyForm::kBytes) {
    tensorflow::Allocator* const allocator = AllocatorOf(answer_.id);
    if (allocator == nullptr) return nullptr;  // It was given up.
    is_right = Allocate(answer_, size, allocator, &tensor_);
    if (is_right) return const_cast<char*>(tensor_.tensor_data().data());
  } else if (is_right && answer_.form == BodyForm::kProto) {
    proto_.resize(size);
    return proto_.data();
  } else if (is_right && size == 0) {
    return nullptr;
  }
  MutexLock lock(&mu_);
  if (connection_ != nullptr)
    connection_->Close("an answer that can't be read");
  answer_.id = ~uint64_t{0};  // Nobody's.
  return nullptr;
}

void TensorClient::Body() {
  if (answer_.id == 0) {  // The greeting's.
    std::function<void(const absl::Status&)> ready;
    {
      MutexLock lock(&mu_);
      ready.swap(ready_);
    }
    if (ready) ready(absl::OkStatus());
    return;
  }
  // The tensor is theirs alone, who may write to it.
  Tensor tensor;
  std::swap(tensor, tensor_);
  std::string text;
  text.swap(proto_);
  Done done;
  if (!Take(answer_.id, &done)) return;  // It was given up.
  absl::Status status(static_cast<absl::StatusCode>(answer_.code),
                      answer_.text);
  if (answer_.is_derived) status = tsl::StatusGroup::MakeDerived(status);
  if (status.ok() && answer_.form == BodyForm::kProto) {
    tensorflow::TensorProto proto;
    if (!proto.ParseFromString(text) || !tensor.FromProto(proto)) {
      status = absl::InternalError("a tensor of " + name_ + " can't be read");
    }
  }
  done(status, tensor, answer_.is_dead);
}

void TensorClient::Closed(const std::string& reason) {
  const absl::Status status = absl::UnavailableError(
      "the connection to " + name_ + " has ended: " + reason);
  std::function<void(const absl::Status&)> ready;
  std::unordered_map<uint64_t, Asked> asked;
  {
    MutexLock lock(&mu_);
    is_closed_ = true;
    connection_.reset();
    ready.swap(ready_);
    asked.swap(asked_);
  }
  if (ready) ready(status);
  for (const auto& [id, one] : asked) one.done(status, Tensor(), false);
}

}  // namespace recsync
