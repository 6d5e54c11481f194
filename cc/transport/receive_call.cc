#include "cc/transport/receive_call.h"

#include "tensorflow/core/distributed_runtime/request_id.h"

namespace recsync {

absl::Status ReceiveCall::status() const {
  MutexLock lock(&mu_);
  return status_;
}

void ReceiveCall::Update(const absl::Status& status) {
  MutexLock lock(&mu_);
  status_.Update(status);
}

void TransportCall::Start(std::function<void()> recv_done) {
  recv_done_ = std::move(recv_done);
  // It may be done before Receive returns.
  const auto self = shared_from_this();
  const uint64_t id =
      client_->Receive(step_, key_, allocator_,
                       [self](const absl::Status& status,
                              const tensorflow::Tensor& tensor, bool is_dead) {
                         self->Update(status);
                         self->tensor_ = tensor;
                         self->is_dead_ = is_dead;
                         self->Finish();
                       });
  if (id == 0) {
    Update(absl::UnavailableError("the connection has ended"));
    Finish();
    return;
  }
  {
    MutexLock lock(&mu_);
    id_ = id;
  }
  // It may have been aborted when there was no number to cancel.
  if (!status().ok()) GiveUp(id);
}

void TransportCall::StartAbort(const absl::Status& status) {
  Update(status);
  uint64_t id;
  {
    MutexLock lock(&mu_);
    id = id_;
  }
  if (id != 0) GiveUp(id);
}

void TransportCall::Finish() {
  // It may keep this call.
  const auto recv_done = std::move(recv_done_);
  recv_done();
}

void TransportCall::GiveUp(uint64_t id) {
  if (!client_->Cancel(id)) return;
  // Who aborts holds locks that those take who hear of it; a pool of threads
  // whose queue is full would run it here; and TensorFlow's closures have a
  // thread each, of which there would be one for each tensor of a step.
  timer_->CallAfter(0.0, [self = shared_from_this()] { self->Finish(); });
}

RpcCall::RpcCall(std::shared_ptr<tensorflow::WorkerCacheInterface> cache,
                 std::string worker)
    : cache_(std::move(cache)),
      name_(std::move(worker)),
      worker_(cache_->GetOrCreateWorker(name_)) {}

RpcCall::~RpcCall() {
  if (worker_ != nullptr) cache_->ReleaseWorker(name_, worker_);
}

void RpcCall::Init(int64_t step, const std::string& key,
                   tensorflow::DeviceBase* device,
                   tensorflow::AllocatorAttributes attributes) {
  request_.set_step_id(step);
  request_.set_rendezvous_key(key);
  request_.set_request_id(tensorflow::GetUniqueRequestId());
  response_.InitAlloc(device, attributes);
}

void RpcCall::Start(std::function<void()> recv_done) {
  // It may be done, and let go of, before RecvTensorAsync returns.
  const auto self = shared_from_this();
  worker_->RecvTensorAsync(
      &options_, &request_, &response_,
      [this, done = std::move(recv_done)](const absl::Status& status) {
        Update(status);
        done();
      });
  // It may have been aborted when there was nothing to cancel.
  if (!status().ok()) options_.StartCancel();
}

void RpcCall::StartAbort(const absl::Status& status) {
  Update(status);
  options_.StartCancel();
}

}  // namespace recsync
