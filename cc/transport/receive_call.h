// A tensor that is being fetched from another server, in one of two ways.

#ifndef TF_RECSYNC_CC_TRANSPORT_RECEIVE_CALL_H_
#define TF_RECSYNC_CC_TRANSPORT_RECEIVE_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "cc/engine/mutex.h"
#include "cc/engine/timer.h"
#include "cc/transport/tensor_client.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/tensor_coding.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace recsync {

// Start runs its argument when the tensor is there, or when it is known that it
// won't be; tensor and is_dead may be asked then.
class ReceiveCall : public tensorflow::BaseRecvTensorCall {
 public:
  absl::Status status() const override ABSL_LOCKS_EXCLUDED(mu_);
  virtual const tensorflow::Tensor& tensor() const = 0;
  virtual bool is_dead() const = 0;

 protected:
  // The first error is the one that counts.
  void Update(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  mutable Mutex mu_;

 private:
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// Over a connection of this package.
class TransportCall : public ReceiveCall,
                      public std::enable_shared_from_this<TransportCall> {
 public:
  // `timer` outlives all calls.
  TransportCall(std::shared_ptr<TensorClient> client, int64_t step,
                std::string key, tensorflow::Allocator* allocator, Timer* timer)
      : client_(std::move(client)),
        step_(step),
        key_(std::move(key)),
        allocator_(allocator),
        timer_(timer) {}

  void Start(std::function<void()> recv_done) override;
  void StartAbort(const absl::Status& status) override;
  const tensorflow::Tensor& tensor() const override { return tensor_; }
  bool is_dead() const override { return is_dead_; }

 private:
  void Finish();
  void GiveUp(uint64_t id);

  const std::shared_ptr<TensorClient> client_;
  const int64_t step_;
  const std::string key_;
  tensorflow::Allocator* const allocator_;
  Timer* const timer_;
  std::function<void()> recv_done_;
  tensorflow::Tensor tensor_;
  bool is_dead_ = false;
  uint64_t id_ ABSL_GUARDED_BY(mu_) = 0;  // 0: not asked for yet.
};

// By TensorFlow's own call.
class RpcCall : public ReceiveCall,
                public std::enable_shared_from_this<RpcCall> {
 public:
  // `cache` has to know `worker`; see Exists.
  RpcCall(std::shared_ptr<tensorflow::WorkerCacheInterface> cache,
          std::string worker);
  ~RpcCall() override;

  // Whether there is such a worker.
  bool exists() const { return worker_ != nullptr; }
  // Where the tensor is to be allocated, and what is asked for.
  void Init(int64_t step, const std::string& key,
            tensorflow::DeviceBase* device,
            tensorflow::AllocatorAttributes attributes);

  void Start(std::function<void()> recv_done) override;
  void StartAbort(const absl::Status& status) override;
  const tensorflow::Tensor& tensor() const override {
    return response_.tensor();
  }
  bool is_dead() const override { return response_.metadata().is_dead(); }

 private:
  const std::shared_ptr<tensorflow::WorkerCacheInterface> cache_;
  const std::string name_;
  tensorflow::WorkerInterface* const worker_;  // Released by the destructor.
  tensorflow::CallOptions options_;
  tensorflow::RecvTensorRequest request_;
  tensorflow::TensorResponse response_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_TRANSPORT_RECEIVE_CALL_H_
