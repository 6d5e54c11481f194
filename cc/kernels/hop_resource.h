// What kernels of decentralized training share: the resource of a worker, which
// lies beside its parameters, and the errors of its protocol.

#ifndef TF_RECSYNC_CC_KERNELS_HOP_RESOURCE_H_
#define TF_RECSYNC_CC_KERNELS_HOP_RESOURCE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "cc/engine/hop_worker.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace recsync {

using Worker = HopWorker<tensorflow::Tensor>;
using WorkerPtr = std::shared_ptr<Worker>;

// What the device's resource manager holds. Ops that wait share the worker but
// not this, so that destroying the resource ends them.
class HopWorkerResource : public tensorflow::ResourceBase {
 public:
  explicit HopWorkerResource(const HopOptions& options)
      : worker_(std::make_shared<Worker>(options)) {}
  ~HopWorkerResource() override { worker_->Close(); }

  const WorkerPtr& worker() const { return worker_; }

  std::string DebugString() const override;

 private:
  const WorkerPtr worker_;
};

// The worker whose handle is the input of this name.
absl::Status LookupWorker(tensorflow::OpKernelContext* ctx, WorkerPtr* worker);

// InvalidArgument if it can't be an update, all of which are vectors.
absl::Status CheckUpdate(const tensorflow::Tensor& update);

// The error that an invariant of the protocol does not hold. Not Internal, as
// TensorFlow's own errors between workers: calls with those are made again.
absl::Status Broken(tensorflow::OpKernelContext* ctx, Worker* worker);

// The error of a wait that ended without what it was for.
absl::Status Ended(Worker::Answer answer);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_HOP_RESOURCE_H_
