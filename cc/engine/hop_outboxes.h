// What a worker of decentralized training has to tell its neighbors: an outbox
// for each, and the progress that all of them are told. See hop_worker.h.
//
// Thread safe. Nothing blocks: waits end by callbacks, which are called without
// a lock.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_OUTBOXES_H_
#define TF_RECSYNC_CC_ENGINE_HOP_OUTBOXES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "cc/engine/hop_options.h"
#include "cc/engine/hop_state.h"
#include "cc/engine/outbox.h"

namespace recsync {

template <typename Update>
class HopOutboxes {
 public:
  using Parcel = typename Outbox<Update>::Parcel;
  using Collected = std::function<void(HopAnswer, Parcel)>;

  explicit HopOutboxes(const HopOptions& options) : options_(options) {
    // The numbers of parcels are above those of this worker's life before.
    const int64_t first_number = std::max<int64_t>(1, options.now());
    for (const auto* side : {&options.in_neighbors, &options.out_neighbors}) {
      for (const int64_t neighbor : *side) {
        boxes_.try_emplace(neighbor,
                           /*newest_only=*/options.staleness_bound >= 0,
                           first_number);
      }
    }
  }

  // Nothing is to be told; the worker begins with this iteration.
  void Begin(int64_t first) {
    progress_.store(first - 1);
    for (auto& [neighbor, box] : boxes_) {
      box.Reset();
      box.Reopen();
    }
  }

  // That of a neighbor; null if it is none.
  Outbox<Update>* Of(int64_t neighbor) {
    const auto found = boxes_.find(neighbor);
    return found == boxes_.end() ? nullptr : &found->second;
  }

  // Sends an update to the out-neighbors.
  void Put(int64_t iteration, const Update& update) {
    for (const int64_t neighbor : options_.out_neighbors) {
      replaced_ += boxes_.at(neighbor).Put(iteration, update, progress());
    }
  }

  // Waits until there is something for a neighbor, as Outbox::Collect does;
  // whoever waited already is answered kCancelled. False, and nothing happens,
  // if it is no neighbor.
  bool Collect(int64_t neighbor, Collected done, int64_t caller) {
    Outbox<Update>* const box = Of(neighbor);
    if (box == nullptr) return false;
    using Told = typename Outbox<Update>::Answer;
    box->Collect(
        [this, done = std::move(done)](Told answer, Parcel parcel) {
          if (answer != Told::kParcel) {
            done(answer == Told::kClosed ? HopAnswer::kClosed
                                         : HopAnswer::kCancelled,
                 std::move(parcel));
            return;
          }
          sent_ += parcel.update.has_value() && !parcel.repeated;
          done(HopAnswer::kOk, std::move(parcel));
        },
        caller);
    return true;
  }

  // How far the worker is, which all are told from now on.
  void SetProgress(int64_t progress) { progress_.store(progress); }
  int64_t progress() const { return progress_.load(); }

  // Tells the in-neighbors, whose tokens it grants, how far the worker is.
  void Tell() {
    if (options_.Allowance() == 0) return;
    for (const int64_t neighbor : options_.in_neighbors) {
      boxes_.at(neighbor).Tell(progress());
    }
  }

  void Hold(bool held) {
    for (auto& [neighbor, box] : boxes_) box.Hold(held);
  }

  // Ends all waits once everything is told.
  void Close() {
    for (auto& [neighbor, box] : boxes_) box.Close();
  }

  // Ends all waits.
  void Discard() {
    for (auto& [neighbor, box] : boxes_) {
      box.Discard(true);
      box.Close();
    }
  }

  void Fill(HopState* state) const {
    state->counts.sent = sent_.load();
    state->counts.replaced = replaced_.load();
  }

 private:
  const HopOptions options_;
  std::map<int64_t, Outbox<Update>> boxes_;
  std::atomic<int64_t> progress_{-1};
  std::atomic<int64_t> sent_{0};
  std::atomic<int64_t> replaced_{0};
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_OUTBOXES_H_
