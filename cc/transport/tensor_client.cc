#include "cc/transport/tensor_client.h"

#include <new>
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

// Of an element that travels as bytes; 0 for others, and for no type at all.
uint64_t WidthOf(int32_t dtype) {
  if (!tensorflow::DataType_IsValid(dtype)) return 0;
  const DataType type = static_cast<DataType>(dtype);
  return tensorflow::DataTypeCanUseMemcpy(type) ? tensorflow::DataTypeSize(type)
                                                : 0;
}

// The tensor that an answer announces, not yet filled. CheckBody knows
// nothing against it.
absl::Status Allocate(const Answer& answer, tensorflow::Allocator* allocator,
                      Tensor* tensor) {
  TensorShape shape;
  const absl::Status built =
      TensorShape::BuildTensorShape(answer.shape, &shape);
  if (!built.ok()) return built;
  *tensor = Tensor(allocator, static_cast<DataType>(answer.dtype), shape);
  if (tensor->IsInitialized()) return absl::OkStatus();
  return absl::ResourceExhaustedError("there is no memory for a tensor of " +
                                      shape.DebugString());
}

// The tensor of a TensorProto that came as so many bytes.
absl::Status Parse(const char* bytes, uint64_t size, Tensor* tensor) {
  tensorflow::TensorProto proto;
  TensorShape shape;
  if (!proto.ParseFromArray(bytes, static_cast<int>(size)) ||
      !TensorShape::BuildTensorShape(proto.tensor_shape(), &shape).ok()) {
    return absl::InternalError("no TensorProto");
  }
  // As TensorFlow writes them; and few bytes can't fill the memory.
  if (static_cast<uint64_t>(shape.num_elements()) > size) {
    return absl::InternalError("a TensorProto of " + std::to_string(size) +
                               " bytes for a shape of " + shape.DebugString());
  }
  if (tensor->FromProto(proto)) return absl::OkStatus();
  return absl::InternalError("a TensorProto whose values do not fit");
}

}  // namespace

void TensorClient::Connect(MessageLoop* loop, const std::string& address,
                           int port, const std::string& secret,
                           std::function<void(const absl::Status&)> ready,
                           const std::shared_ptr<TensorClient>& self) {
  std::string error;
  Greeting greeting;
  greeting.secret = secret;
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
  request.key = std::string(key);
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mu_);
    if (connection_ == nullptr || key.size() > kMaxKeyBytes) return 0;
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

void TensorClient::Close(const std::string& reason) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  if (connection != nullptr) connection->Close(reason);
}

void TensorClient::TakeWelcome(std::string_view head, uint64_t size) {
  Welcome welcome;
  if (size > 0 || !Decode(head, &welcome)) {
    Close("what listens there does not know the transport");
  } else if (!welcome.refusal.empty()) {
    Close("it says: " + welcome.refusal);
  } else if (welcome.version != kTransportVersion) {
    Close("it has version " + std::to_string(welcome.version) +
          " of the transport, not " + std::to_string(kTransportVersion));
  } else {
    is_welcome_ = true;
    std::function<void(const absl::Status&)> ready;
    {
      MutexLock lock(&mu_);
      ready.swap(ready_);
    }
    if (ready) ready(absl::OkStatus());
  }
}

char* TensorClient::Head(std::string_view head, uint64_t size) {
  answer_ = Answer();
  // Nobody's, unless it is an answer: Body has nothing to do then.
  if (!is_welcome_) {
    TakeWelcome(head, size);
    return nullptr;
  }
  if (!Decode(head, &answer_)) {
    answer_ = Answer();
    Close("an answer that can't be read");
    return nullptr;
  }
  const Result checked = CheckBody(answer_, size, WidthOf(answer_.dtype));
  if (!checked.ok()) {
    Fail(absl::InternalError("an answer with " + checked.error()), size);
    return nullptr;
  }
  if (answer_.form == BodyForm::kNone) return nullptr;
  tensorflow::Allocator* const allocator = AllocatorOf(answer_.id);
  if (allocator == nullptr) return nullptr;  // It was given up.
  if (answer_.form == BodyForm::kBytes) {
    const absl::Status status = Allocate(answer_, allocator, &tensor_);
    if (status.ok()) return const_cast<char*>(tensor_.tensor_data().data());
    Fail(status, size);
    return nullptr;
  }
  // Not written to before the bytes come.
  proto_.reset(new (std::nothrow) char[size]);
  proto_size_ = size;
  if (proto_ == nullptr && size > 0) {
    Fail(absl::ResourceExhaustedError(
             "there is no memory for a TensorProto of " + std::to_string(size) +
             " bytes"),
         size);
  }
  return proto_.get();
}

void TensorClient::Fail(const absl::Status& status, uint64_t size) {
  // What comes is dropped, and the other answers are as good as before.
  answer_.code = static_cast<int32_t>(status.code());
  answer_.text =
      name_ + " sent what can't be taken: " + std::string(status.message());
  answer_.form = BodyForm::kNone;
  if (size > 0) Finish();  // Else Body is called.
}

void TensorClient::Body() { Finish(); }

void TensorClient::Finish() {
  // The tensor is theirs alone, who may write to it.
  Tensor tensor;
  std::swap(tensor, tensor_);
  const std::unique_ptr<char[]> proto = std::move(proto_);
  Done done;
  if (!Take(answer_.id, &done)) return;  // It was given up.
  absl::Status status(static_cast<absl::StatusCode>(answer_.code),
                      answer_.text);
  if (answer_.is_derived) status = tsl::StatusGroup::MakeDerived(status);
  if (status.ok() && answer_.form == BodyForm::kProto) {
    status = Parse(proto.get(), proto_size_, &tensor);
    if (!status.ok()) {
      status = absl::InternalError(name_ + " sent what can't be taken: " +
                                   std::string(status.message()));
    }
  }
  done(status, tensor, answer_.is_dead);
}

void TensorClient::Closed(const std::string& reason) {
  // What has come of a tensor goes now: this client is kept, as long as nobody
  // asks its server's next life for anything.
  tensor_ = Tensor();
  proto_.reset();
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
