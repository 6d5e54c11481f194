// Membership in the groups of writers that work on variables row by row.

#ifndef TF_RECSYNC_CC_KERNELS_WRITE_SESSION_H_
#define TF_RECSYNC_CC_KERNELS_WRITE_SESSION_H_

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/writer_groups.h"
#include "cc/kernels/variable_access.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"

namespace recsync {

// While this lives, stock ops (assignments, reads, checkpoints) are kept out of
// the variables by the variables' own mutexes, which the group holds, and other
// sessions are not: rows are read and written under their row locks, in buffers
// that nobody else holds and that stay where they are.
//
// Blocks in the constructor (until stock ops are done) and in the destructor
// (the group's leader, until the other members are done), so it belongs in the
// op's own thread. The variables come in any order, also twice.
class WriteSession {
 public:
  WriteSession(tensorflow::OpKernelContext* ctx,
               const std::vector<tensorflow::Var*>& variables);
  ~WriteSession();
  WriteSession(const WriteSession&) = delete;
  WriteSession& operator=(const WriteSession&) = delete;

  // An error where a buffer could not be copied: then nothing may be written.
  const absl::Status& status() const { return status_; }

 private:
  std::vector<std::pair<tensorflow::Var*, bool>> entered_;  // and if it leads
  absl::Status status_;
};

// Keeps stock ops out of variables, and makes them writable; other updates too,
// unless both are Hogwild's. Blocking as above.
class WriteLocks {
 public:
  WriteLocks(tensorflow::OpKernelContext* ctx,
             const std::vector<tensorflow::Var*>& variables, bool hogwild);

  // An error where a buffer could not be copied: then nothing may be written.
  const absl::Status& status() const { return status_; }

 private:
  std::optional<ExclusiveLocks> locks_;
  std::optional<WriteSession> session_;
  absl::Status status_;
};

// Shared access to variables: to those that a group of writers works on as a
// member, so that rows must be read under their row locks; to the others by
// their mutexes, shared. Blocking as above.
class ReadSession {
 public:
  explicit ReadSession(const std::vector<tensorflow::Var*>& variables);
  ~ReadSession();
  ReadSession(const ReadSession&) = delete;
  ReadSession& operator=(const ReadSession&) = delete;

  bool needs_row_locks() const { return needs_row_locks_; }

 private:
  std::vector<std::pair<tensorflow::Var*, bool>> entered_;  // and if as member
  bool needs_row_locks_ = false;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_WRITE_SESSION_H_
