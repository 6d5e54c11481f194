// What an op that waits needs so that cancelling its step ends the wait.

#ifndef TF_RECSYNC_CC_KERNELS_CANCELLABLE_H_
#define TF_RECSYNC_CC_KERNELS_CANCELLABLE_H_

#include <functional>
#include <utility>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// The cancellation of an op's step. An op is ended by one of two: by what it
// waits for, which deregisters first, or by `cancel`. Which one it is, they
// have to settle between them: cancelling may come at any time after Register,
// also before the op waits. The other one must not touch the op's context.
//
// Copied into what is called at the end of the wait.
class Cancellable {
 public:
  // Has `cancel` called when the step is cancelled. False if it has been
  // already: then the op ends without waiting.
  bool Register(tensorflow::OpKernelContext* ctx,
                std::function<void()> cancel) {
    manager_ = ctx->cancellation_manager();
    if (manager_ == nullptr) return true;
    token_ = manager_->get_cancellation_token();
    return manager_->RegisterCallback(token_, std::move(cancel));
  }

  // Not while `cancel` may have ended the op. Does not wait for it.
  void Deregister() const {
    if (manager_ != nullptr) manager_->TryDeregisterCallback(token_);
  }

 private:
  tensorflow::CancellationManager* manager_ = nullptr;  // Outlives the op.
  tensorflow::CancellationToken token_ = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_CANCELLABLE_H_
