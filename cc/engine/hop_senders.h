// What a worker of decentralized training knows of its in-neighbors: who takes
// part, which of their updates have come, and what those weigh; see
// hop_worker.h.
//
// Thread compatible: the worker's lock guards it.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_SENDERS_H_
#define TF_RECSYNC_CC_ENGINE_HOP_SENDERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "cc/engine/hop_options.h"

namespace recsync {

class HopSenders {
 public:
  // `until` of a neighbor that has not gone.
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

  explicit HopSenders(const HopOptions& options) : options_(options) {
    for (const int64_t neighbor : options.in_neighbors) senders_[neighbor];
  }

  // All take part from this iteration on.
  void Begin(int64_t first) {
    for (auto& [neighbor, sender] : senders_) {
      const int64_t declined = sender.declined;
      sender = Sender();
      sender.last = first - 1;
      sender.declined = declined;
    }
  }

  // A neighbor takes part from iteration `since` on, which counts for one that
  // is back, and until `until` at most; nothing happens if it is none.
  void Set(int64_t neighbor, int64_t since, int64_t until) {
    const auto found = senders_.find(neighbor);
    if (found == senders_.end()) return;
    Sender& sender = found->second;
    sender.until = until;
    if (until != kForever) return;
    sender.since = since;
    sender.last = since - 1;
    sender.settled = 0;
  }

  // A neighbor asks at this time if an update, in its parcel of this number, is
  // wanted, which is of use by its iteration, or not. One that has come is not
  // wanted.
  bool Ask(int64_t neighbor, int64_t number, int64_t iteration, bool is_of_use,
           int64_t now) {
    const auto found = senders_.find(neighbor);
    if (found == senders_.end()) return is_of_use;
    Sender& sender = found->second;
    if (number <= sender.settled) return false;
    if (is_of_use) {
      sender.wanted = iteration;
      sender.wanted_at = now;
    } else {
      ++sender.declined;
      sender.settled = number;
    }
    return is_of_use;
  }

  // An update has come, in its parcel of this number. Returns since when it was
  // on its way, which is since it was asked for; nothing if it has come before.
  std::optional<int64_t> Arrive(int64_t neighbor, int64_t number,
                                int64_t iteration, int64_t now) {
    const auto found = senders_.find(neighbor);
    if (found == senders_.end()) return now;
    Sender& sender = found->second;
    if (number <= sender.settled) return std::nullopt;
    sender.settled = number;
    return sender.wanted == iteration ? sender.wanted_at : now;
  }

  // The neighbors without whose updates the average of an iteration can't be
  // complete. `has(iteration, neighbor)` says if there are some of a neighbor
  // that were not taken yet; of any iteration where the first is -1.
  template <typename Has>
  std::vector<int64_t> Missing(int64_t iteration, const Has& has) const {
    std::vector<int64_t> missing;
    const int64_t bound = options_.staleness_bound;
    for (const auto& [neighbor, sender] : senders_) {
      if (!sender.Expected(iteration)) continue;
      const bool is_there =
          bound < 0 ? has(iteration, neighbor)
                    : sender.last >= iteration - bound || has(-1, neighbor);
      if (!is_there) missing.push_back(neighbor);
    }
    return missing;
  }

  // Whether the mode can do without those that are missing.
  template <typename Has>
  bool Enough(int64_t iteration, const Has& has) const {
    int64_t expected = 0;
    for (const auto& [neighbor, sender] : senders_) {
      expected += sender.Expected(iteration);
    }
    const int64_t all = options_.in_neighbors.size();
    const int64_t missing = Missing(iteration, has).size();
    return expected - missing >=
           std::min(expected, all - options_.backup_workers);
  }

  // An update of a neighbor is taken for the average of `now`. Returns its
  // weight, beside those of the others; see hop_worker.h.
  double Take(int64_t neighbor, int64_t iteration, int64_t now) {
    Sender& sender = senders_[neighbor];
    sender.last = std::max(sender.last, iteration);
    if (options_.staleness_bound >= 0) {
      return static_cast<double>(iteration - now + options_.staleness_bound +
                                 1);
    }
    if (options_.backup_workers == 0) {
      for (size_t i = 0; i < options_.in_neighbors.size(); ++i) {
        if (options_.in_neighbors[i] == neighbor) return options_.weights[i];
      }
    }
    return 1.0;
  }

  // How many updates of each in-neighbor were not wanted.
  std::vector<int64_t> declined() const {
    std::vector<int64_t> declined;
    for (const int64_t neighbor : options_.in_neighbors) {
      declined.push_back(senders_.at(neighbor).declined);
    }
    return declined;
  }

 private:
  struct Sender {
    int64_t since = 0;
    int64_t until = kForever;
    int64_t last = -1;  // the iteration of its last update that was taken
    int64_t declined = 0;
    int64_t settled = 0;    // the number of its last parcel that came, or was
                            // declined
    int64_t wanted = -1;    // the iteration of the update that may come next
    int64_t wanted_at = 0;  // since when
    bool Expected(int64_t iteration) const {
      return since <= iteration && iteration <= until;
    }
  };

  const HopOptions options_;
  std::map<int64_t, Sender> senders_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_SENDERS_H_
