// What a worker has to tell one of its neighbors: its updates, and how far it
// has got (Hop, section 4). A loop of the edge's own takes it from here, so
// that a slow or dead neighbor holds up nobody but that loop.
//
//   Outbox<std::string> outbox(/*newest_only=*/false);
//   outbox.Put(3, "x", /*progress=*/3);
//   outbox.Collect([](auto answer, auto parcel) { ... });
//   outbox.Acknowledge(parcel.number);
//
// Progress is a number that only rises, so the last one stands for all before;
// updates are kept in their order, or only the newest (`newest_only`).
//
// A parcel is handed out by every Collect until it is acknowledged, as a call
// that was to carry it may fail. Its number tells the receiver whether it has
// got it already. A call that was given up may wait here still: the next one
// takes its place.
//
// Thread safe. Nothing blocks: a wait ends by a callback, which is called
// without a lock by the thread whose call ended it. The destructor closes the
// outbox.

#ifndef TF_RECSYNC_CC_ENGINE_OUTBOX_H_
#define TF_RECSYNC_CC_ENGINE_OUTBOX_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

template <typename Update>
class Outbox {
 public:
  struct Parcel {
    int64_t number = 0;      // rises from one to the next; 0: nothing is told
    int64_t progress = -1;   // the last one that was put
    int64_t iteration = -1;  // of the update, -1 without one
    std::optional<Update> update;
    bool repeated = false;  // it has been handed out before
  };
  enum class Answer { kParcel, kClosed, kReplaced };
  using Callback = std::function<void(Answer, Parcel)>;

  // `first_number`, at least 1, is that of the first parcel.
  explicit Outbox(bool newest_only, int64_t first_number = 1)
      : newest_only_(newest_only), next_number_(first_number) {}
  ~Outbox() { Close(); }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Iterations rise. Returns how many updates this one replaced; one that was
  // handed out stays.
  int64_t Put(int64_t iteration, Update update, int64_t progress)
      ABSL_LOCKS_EXCLUDED(mu_) {
    Reply reply;
    int64_t replaced = 0;
    {
      MutexLock lock(&mu_);
      if (closed_ || discarding_) return 0;
      if (newest_only_) {
        replaced = updates_.size();
        updates_.clear();
      }
      updates_.emplace_back(iteration, std::move(update));
      Advance(progress);
      Serve(&reply);
    }
    Send(&reply);
    return replaced;
  }

  void Tell(int64_t progress) ABSL_LOCKS_EXCLUDED(mu_) {
    Reply reply;
    {
      MutexLock lock(&mu_);
      if (closed_ || discarding_) return;
      Advance(progress);
      Serve(&reply);
    }
    Send(&reply);
  }

  // Calls `done` once, as soon as there is something to tell, perhaps before
  // Collect returns. Whoever waits already is answered kReplaced. `caller`
  // names the wait, for Cancel.
  void Collect(Callback done, int64_t caller = 0) ABSL_LOCKS_EXCLUDED(mu_) {
    Reply replaced, reply;
    {
      MutexLock lock(&mu_);
      replaced.answer = Answer::kReplaced;
      replaced.done = std::exchange(waiting_, std::move(done));
      caller_ = caller;
      Serve(&reply);
    }
    Send(&replaced);
    Send(&reply);
  }

  // The parcel of this number is not handed out again; without effect if it is
  // not the one that was handed out last.
  void Acknowledge(int64_t number) ABSL_LOCKS_EXCLUDED(mu_) {
    std::optional<Parcel> dropped;  // Destroyed without the lock.
    MutexLock lock(&mu_);
    if (!handed_.has_value() || handed_->number != number) return;
    handed_.swap(dropped);
  }

  // Takes a caller's wait back: true if its callback was not called and never
  // will be.
  bool Cancel(int64_t caller = 0) ABSL_LOCKS_EXCLUDED(mu_) {
    Callback dropped;  // Destroyed without the lock.
    MutexLock lock(&mu_);
    if (caller != caller_) return false;
    dropped = std::exchange(waiting_, nullptr);
    return dropped != nullptr;
  }

  // While discarding, nothing is kept: the neighbor is gone.
  void Discard(bool discarding) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    discarding_ = discarding;
    if (discarding) Clear();
  }

  // While held, nothing is told: the wait, and every one that comes, ends at
  // once with an empty parcel. What is put is kept.
  void Hold(bool held) ABSL_LOCKS_EXCLUDED(mu_) {
    Reply reply;
    {
      MutexLock lock(&mu_);
      held_ = held;
      Serve(&reply);
    }
    Send(&reply);
  }

  // As a new outbox, with nothing to tell, but for the numbers, which rise on;
  // a wait goes on.
  void Reset() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    discarding_ = false;
    held_ = false;
    Clear();
  }

  // The updates that were not handed out yet.
  int64_t size() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return updates_.size();
  }

  // Ends the wait, and every later one, with kClosed once all is told and
  // acknowledged.
  void Close() ABSL_LOCKS_EXCLUDED(mu_) {
    Reply reply;
    {
      MutexLock lock(&mu_);
      closed_ = true;
      Serve(&reply);
    }
    Send(&reply);
  }

  // Takes Close back.
  void Reopen() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    closed_ = false;
  }

 private:
  struct Reply {
    Callback done;
    Answer answer = Answer::kParcel;
    Parcel parcel;
  };

  static void Send(Reply* reply) {
    if (reply->done == nullptr) return;
    reply->done(reply->answer, std::move(reply->parcel));
  }

  void Advance(int64_t progress) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (progress <= progress_) return;
    progress_ = progress;
    news_ = true;
  }

  void Clear() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    updates_.clear();
    handed_.reset();
    progress_ = -1;
    news_ = false;
  }

  // Makes the next parcel, if there is something to tell.
  void Pack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (updates_.empty() && !news_) return;
    handed_.emplace();
    handed_->number = next_number_++;
    handed_->progress = progress_;
    news_ = false;
    if (updates_.empty()) return;
    handed_->iteration = updates_.front().first;
    handed_->update = std::move(updates_.front().second);
    updates_.pop_front();
  }

  void Serve(Reply* reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (waiting_ == nullptr) return;
    if (held_) {
      reply->done = std::exchange(waiting_, nullptr);
      return;
    }
    if (!handed_.has_value()) Pack();
    if (handed_.has_value()) {
      reply->parcel = *handed_;
      handed_->repeated = true;
    } else if (closed_) {
      reply->answer = Answer::kClosed;
    } else {
      return;
    }
    reply->done = std::exchange(waiting_, nullptr);
  }

  const bool newest_only_;
  Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool discarding_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::pair<int64_t, Update>> updates_ ABSL_GUARDED_BY(mu_);
  int64_t progress_ ABSL_GUARDED_BY(mu_) = -1;
  bool news_ ABSL_GUARDED_BY(mu_) = false;  // progress_ was not told yet
  std::optional<Parcel> handed_ ABSL_GUARDED_BY(mu_);  // not acknowledged
  int64_t next_number_ ABSL_GUARDED_BY(mu_);
  Callback waiting_ ABSL_GUARDED_BY(mu_);
  int64_t caller_ ABSL_GUARDED_BY(mu_) = 0;  // whose wait it is
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_OUTBOX_H_
