#include "cc/kernels/write_session.h"

#include "cc/engine/huge_pages.h"

namespace recsync {

using tensorflow::Var;

WriteSession::WriteSession(tensorflow::OpKernelContext* ctx,
                           const std::vector<Var*>& variables)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (Var* variable : LockOrder(variables)) {
    const bool leads = WriterGroups::Global().Enter(
        variable, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
          variable->mu()->lock();
          // By the leader, before anybody holds a pointer into the buffer.
          status_.Update(MakeWritable(ctx, variable));
          tensorflow::Tensor* value = variable->tensor();
          if (value->IsInitialized()) {
            AdviseHugePages(value->data(), value->TotalBytes());
          }
        });
    entered_.emplace_back(variable, leads);
    const tensorflow::Tensor& value = *variable->tensor();
    // Without elements there is no buffer that could be anybody's.
    if (!leads && value.IsInitialized() && value.NumElements() > 0 &&
        !value.RefCountIsOne()) {
      status_.Update(absl::ResourceExhaustedError(
          "the value of a variable could not be copied before its update"));
    }
  }
}

WriteSession::~WriteSession() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (auto it = entered_.rbegin(); it != entered_.rend(); ++it) {
    Var* variable = it->first;
    WriterGroups::Global().Leave(
        variable, it->second,
        [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { variable->mu()->unlock(); });
  }
}

WriteLocks::WriteLocks(tensorflow::OpKernelContext* ctx,
                       const std::vector<Var*>& variables, bool hogwild) {
  if (hogwild) {
    session_.emplace(ctx, variables);
    status_ = session_->status();
    return;
  }
  locks_.emplace(variables);
  for (Var* variable : variables) status_.Update(MakeWritable(ctx, variable));
}

ReadSession::ReadSession(const std::vector<Var*>& variables)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (Var* variable : LockOrder(variables)) {
    const bool joined = WriterGroups::Global().Join(variable);
    if (!joined) variable->mu()->lock_shared();
    needs_row_locks_ |= joined;
    entered_.emplace_back(variable, joined);
  }
}

ReadSession::~ReadSession() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (auto it = entered_.rbegin(); it != entered_.rend(); ++it) {
    if (it->second) {
      WriterGroups::Global().Leave(it->first, /*leads=*/false, [] {});
    } else {
      it->first->mu()->unlock_shared();
    }
  }
}

}  // namespace recsync
