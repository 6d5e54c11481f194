// The gradient buffer of a parameter server (GBA, section 4.1): it adds up the
// gradients that workers push, and when `capacity` pushes have come it gives
// out sum(weight * gradient) / divisor once, to be applied as one step.
//
//   GradientBuffer buffer(options);
//   std::unique_ptr<Aggregate> aggregate;
//   const Result pushed = buffer.Push(push, &aggregate);
//   if (aggregate != nullptr) {
//     aggregate->WriteDense(0, dense_size, to); ...  // and apply it
//     buffer.Applied(aggregate->step());
//   }
//
// A push carries a token, whose value is the global step that its batch was
// meant for. The token's age is step() - value (0 where it is ahead), and the
// weight is StalenessWeight at tau = age + 1: with the threshold iota 1 up to
// an age of iota, 0 beyond (Eq. 1). A push of weight 0 is excluded: it counts
// towards the capacity and adds nothing, not even if it holds no numbers.
//
// A late push, whose token value is less than step(), is counted like any other
// (GBA, BSP), or with `drop_late` dropped on arrival and not counted (sync,
// Hop-BW). With `drop_late` a token that this step has taken already is dropped
// too, as a duplicate. Nobody whose push is dropped knows that. So the token of
// a lost worker is given out again only if no server has it: Revoke tells which
// tokens a server has, and Spend has the others count those, too.
//
// Only the running sums are kept, nothing per push, but for the ticket of a
// push that completed a step until that is applied: whoever pushed it applies
// it, and if that one is gone, so is the step (Revoke). The oldest versions
// that the included pushes were pulled at go along with the sums, so that the
// optimizer can tell the staleness of what it applies.
//
// Thread safe: Push may be called by any number of threads. Sums are made under
// a mutex; what is given out is divided by its caller's thread, outside of it.
// Nothing blocks otherwise. An error leaves the buffer as it was.

#ifndef TF_RECSYNC_CC_ENGINE_GRADIENT_BUFFER_H_
#define TF_RECSYNC_CC_ENGINE_GRADIENT_BUFFER_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/free_list.h"
#include "cc/engine/mutex.h"
#include "cc/engine/result.h"
#include "cc/engine/row_push.h"
#include "cc/engine/row_sums.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/staleness_weight.h"

namespace recsync {

struct GradientBufferOptions {
  struct Table {
    int64_t rows;
    int64_t width;  // floats of a row
  };
  int64_t capacity = 1;  // pushes that make a step
  double divisor = 1.0;  // of their sum
  StalenessWeight weight;
  bool drop_late = false;
  int64_t dense_size = 0;   // elements of all dense variables, kMostElements
  int64_t dense_count = 0;  // dense variables, at most as many
  std::vector<Table> tables;
};

Result CheckOptions(const GradientBufferOptions& options);

// All of them in a line; two that differ have different ones.
std::string Describe(const GradientBufferOptions& options);

// The gradient of rows of one table; nothing is owned.
struct TableGradient {
  int64_t table = 0;
  const int64_t* ids = nullptr;
  int64_t n = 0;  // of `ids`
  RowPush push;
};

// One push; nothing is owned.
struct GradientPush {
  int64_t token_index = 0;  // of its list; no two batches have the same
  int64_t token_value = 0;
  int64_t ticket = 0;            // of the token when it was taken; 0 for none
  int64_t pulled_step = 0;       // applied() when the parameters were pulled
  const float* dense = nullptr;  // [dense_size], or null for none
  const int64_t* dense_versions = nullptr;  // [dense_count]; null: fresh
  std::vector<TableGradient> tables;        // any of them, also more than once
};

// What a step has added up so far.
struct GradientSums {
  // Whether gradients came with versions: all of a step must do alike.
  enum class Versions { kUnknown, kNone, kGiven };

  bool has_dense = false;
  std::vector<float> dense;
  Versions dense_given = Versions::kUnknown;
  std::vector<int64_t> dense_versions;
  Versions rows_given = Versions::kUnknown;
  std::vector<RowSums> tables;

  void Clear();
};

// The sums of one step, which the caller owns; to be destroyed before the
// buffer that it came from. Thread compatible.
class Aggregate {
 public:
  using Lease = FreeList<GradientSums>::Lease;

  Aggregate(int64_t step, double divisor, std::unique_ptr<Lease> sums);
  ~Aggregate();

  // The number of this application, from 1.
  int64_t step() const { return step_; }
  // Whether any included push had a dense gradient.
  bool has_dense() const { return sums().has_dense; }
  // Writes elements [begin, end) of the dense sum / divisor to those of `to`.
  void WriteDense(int64_t begin, int64_t end, float* to) const;
  // The oldest of each dense variable; empty if the gradients were fresh.
  const std::vector<int64_t>& dense_versions() const;
  // The rows of a table, in the order in which they first came, with their
  // oldest versions.
  const RowSums& rows(int64_t table) const { return sums().tables[table]; }
  // Whether the gradients of rows came with versions.
  bool has_row_versions() const {
    return sums().rows_given == GradientSums::Versions::kGiven;
  }
  // Writes rows [begin, end) of rows(table), summed / divisor, to those of
  // `to`.
  void WriteRows(int64_t table, int64_t begin, int64_t end, float* to) const;

 private:
  const GradientSums& sums() const { return **sums_; }

  const int64_t step_;
  const float divisor_;
  const std::unique_ptr<Lease> sums_;
};

struct GradientBufferState {
  int64_t step = 0;
  int64_t applied = 0;
  int64_t pending = 0;       // pushes that wait for others
  int64_t included = 0;      // pushes of a weight above 0
  int64_t decayed = 0;       // of these, those of a weight below 1
  int64_t excluded = 0;      // pushes of weight 0, which were counted
  int64_t spent = 0;         // tokens counted without a push
  int64_t late = 0;          // dropped
  int64_t duplicates = 0;    // dropped
  int64_t applications = 0;  // given out
  int64_t age_sum = 0;       // of the tokens of included and excluded pushes
  int64_t age_max = 0;
  // StalenessCounters of step() - pulled_step + 1 of these pushes.
  std::array<int64_t, StalenessCounters::kSize> staleness{};
};

// What a buffer has of pushes whose worker is gone.
struct Revoked {
  // The steps that they have completed and that are not applied, rising.
  std::vector<int64_t> unapplied;
  // Those of their tokens that it has taken in its step or in the last one,
  // rising; none without drop_late.
  std::vector<int64_t> taken;
  int64_t step = 0;  // as of the buffer
};

class GradientBuffer {
 public:
  // The options have passed CheckOptions.
  explicit GradientBuffer(const GradientBufferOptions& options);
  GradientBuffer(const GradientBuffer&) = delete;
  GradientBuffer& operator=(const GradientBuffer&) = delete;

  const GradientBufferOptions& options() const { return options_; }

  // Takes one push. Sets `aggregate` if it was the last of a step, else resets
  // it.
  Result Push(const GradientPush& push, std::unique_ptr<Aggregate>* aggregate)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Gives out the pushes that are there, though they are fewer than a step has:
  // their sum / divisor, so that each weighs as in a step that is full. Null if
  // there are none, and then no step is counted.
  std::unique_ptr<Aggregate> Flush() ABSL_LOCKS_EXCLUDED(mu_);

  // Marks an application as done; nothing if it is already: another may say so
  // for one who is gone. Returns an error for a step that was not given out.
  Result Applied(int64_t step) ABSL_LOCKS_EXCLUDED(mu_);

  // Whoever took tokens with these tickets is gone: pushes with them that come
  // from now on are dropped as late. Returns what became of earlier ones.
  Revoked Revoke(const std::vector<int64_t>& tickets) ABSL_LOCKS_EXCLUDED(mu_);

  // Tokens whose value is `step` that others have taken, and that nobody will
  // push any more: if that is this one's step, those that it has not taken
  // count as pushes without gradients, with `ticket`, up to the end of the
  // step. Sets `aggregate` if they complete it, else resets it. With a ticket
  // that was revoked, a step that whoever called this does not apply either is
  // found by Revoke. An error without drop_late, or if ticket is negative.
  Result Spend(int64_t step, const std::vector<int64_t>& token_indices,
               int64_t ticket, std::unique_ptr<Aggregate>* aggregate)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Applications given out: the global step of this server.
  int64_t step() const ABSL_LOCKS_EXCLUDED(mu_);
  // The number up to which all applications are done.
  int64_t applied() const ABSL_LOCKS_EXCLUDED(mu_);

  GradientBufferState state() const ABSL_LOCKS_EXCLUDED(mu_);

  // Sets step() and applied(), at least 0, and drops what is pending; what was
  // counted so far is kept. No application may be in progress.
  void Restore(int64_t step) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What can be checked of a push whatever the step is.
  Result Check(const GradientPush& push) const;
  // The rest.
  Result CheckVersions(const GradientPush& push) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Add(const GradientPush& push, float weight)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::unique_ptr<Aggregate> Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::unique_ptr<Aggregate::Lease> FreshSums();

  const GradientBufferOptions options_;
  FreeList<GradientSums> free_;
  mutable Mutex mu_;
  std::unique_ptr<Aggregate::Lease> sums_ ABSL_GUARDED_BY(mu_);
  GradientBufferState state_ ABSL_GUARDED_BY(mu_);
  // The tokens that this step has taken, with their tickets, and those of the
  // step before; with drop_late.
  std::unordered_map<int64_t, int64_t> taken_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<int64_t, int64_t> taken_before_ ABSL_GUARDED_BY(mu_);
  // Applications that were done before one ahead of them.
  std::set<int64_t> done_ ABSL_GUARDED_BY(mu_);
  // Of each application in progress: the ticket of the push that completed its
  // step, if that had one.
  std::map<int64_t, int64_t> completed_by_ ABSL_GUARDED_BY(mu_);
  std::unordered_set<int64_t> revoked_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_GRADIENT_BUFFER_H_
