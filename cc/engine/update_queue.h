// A queue whose entries carry two tags: the iteration that they belong to and
// the worker that sent them. The update queue of decentralized training (Hop,
// section 4.1).
//
//   UpdateQueue<std::string> queue({/*slots=*/6, /*capacity=*/12});
//   queue.Enqueue("x", {/*iteration=*/3, /*sender=*/1});
//   queue.Dequeue(2, {3, kAny}, [](auto answer, auto entries) { ... });
//
// Entries lie in rotating slots, which their iteration selects (modulo their
// number), so that a dequeue by iteration looks at that iteration's entries
// only. Entries of iterations below the floor can no longer be used; they are
// dropped, and counted, when the floor rises or they come. With `newest_only`
// so are all of a sender but its newest. The capacity counts what is left;
// whoever sizes it by the protocol's bounds sees it exceeded only by a bug, and
// Enqueue says so instead of dropping or waiting. Unlimit is for the time when
// the protocol has no bounds.
//
// Thread safe. Nothing blocks: a wait ends by a callback, which is called
// without a lock by the thread whose call ended it. Callbacks may call the
// queue but must not block. Who waits first is served first. The destructor
// closes the queue.

#ifndef TF_RECSYNC_CC_ENGINE_UPDATE_QUEUE_H_
#define TF_RECSYNC_CC_ENGINE_UPDATE_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

// Matches every iteration, or every sender.
inline constexpr int64_t kAny = -1;

struct Tag {
  int64_t iteration;  // at least 0
  int64_t sender;     // at least 0

  // Whether this tag, some of it perhaps kAny, asks for `other`.
  bool Matches(const Tag& other) const {
    return (iteration == kAny || iteration == other.iteration) &&
           (sender == kAny || sender == other.sender);
  }
};

struct UpdateQueueOptions {
  int64_t slots = 1;         // at least 1
  int64_t capacity = 1;      // at least 1
  bool newest_only = false;  // keep the newest entry of each sender only
};

struct UpdateQueueCounts {
  int64_t enqueued = 0;    // that came, the dropped ones too
  int64_t dequeued = 0;    // that were taken
  int64_t unusable = 0;    // dropped: their iteration was below the floor
  int64_t superseded = 0;  // dropped: there was a newer one of the same sender
};

template <typename Update>
class UpdateQueue {
 public:
  struct Entry {
    Tag tag;
    int64_t number;  // in the order in which entries came
    Update update;
  };

  enum class Enqueued { kQueued, kUnusable, kSuperseded, kFull, kClosed };
  enum class Answer { kEntries, kClosed };

  using Callback = std::function<void(Answer, std::vector<Entry>)>;
  using Ticket = int64_t;

  // The entries as a rule sees them, under the queue's lock.
  class Entries {
   public:
    explicit Entries(const UpdateQueueOptions& options)
        : options_(options), slots_(options.slots) {}

    int64_t floor() const { return floor_; }

    int64_t Size(const Tag& tag) const {
      int64_t size = 0;
      ForSlots(tag, [&](const std::vector<Entry>& slot) {
        size += std::count_if(slot.begin(), slot.end(), [&](const Entry& e) {
          return tag.Matches(e.tag);
        });
      });
      return size;
    }

    // Takes at most `limit` entries, those that came first.
    std::vector<Entry> Take(int64_t limit, const Tag& tag) {
      std::vector<std::pair<int64_t, Entry*>> found;
      ForSlots(tag, [&](const std::vector<Entry>& slot) {
        for (const Entry& entry : slot) {
          if (!tag.Matches(entry.tag)) continue;
          found.emplace_back(entry.number, const_cast<Entry*>(&entry));
        }
      });
      std::sort(found.begin(), found.end());
      if (static_cast<int64_t>(found.size()) > limit) found.resize(limit);
      std::vector<Entry> taken;
      taken.reserve(found.size());
      for (const auto& item : found) {
        taken.push_back(std::move(*item.second));
        item.second->number = kTaken;
      }
      ForSlots(tag, [&](const std::vector<Entry>& slot) {
        Erase(const_cast<std::vector<Entry>*>(&slot),
              [](const Entry& entry) { return entry.number == kTaken; });
      });
      counts_.dequeued += taken.size();
      return taken;
    }

    // Drops the entries of iterations below `floor`, now and when they come.
    void Raise(int64_t floor) {
      if (floor <= floor_) return;
      floor_ = floor;
      for (std::vector<Entry>& slot : slots_) {
        counts_.unusable += Erase(&slot, [&](const Entry& entry) {
          return entry.tag.iteration < floor_;
        });
      }
    }

    // Drops all entries of a sender; they count as superseded.
    void Forget(int64_t sender) {
      for (std::vector<Entry>& slot : slots_) {
        counts_.superseded += Erase(&slot, [&](const Entry& entry) {
          return entry.tag.sender == sender;
        });
      }
    }

    // From now on, until Reset, the capacity is no limit.
    void Unlimit() { limited_ = false; }

    // Empties the queue and sets its floor, up or down.
    void Reset(int64_t floor) {
      for (std::vector<Entry>& slot : slots_) slot.clear();
      size_ = 0;
      floor_ = floor;
      limited_ = true;
    }

   private:
    friend class UpdateQueue;
    static constexpr int64_t kTaken = -1;

    Enqueued Add(Update update, const Tag& tag) {
      ++counts_.enqueued;
      if (tag.iteration < floor_) {
        ++counts_.unusable;
        return Enqueued::kUnusable;
      }
      if (options_.newest_only) {
        const Tag sender = {kAny, tag.sender};
        bool superseded = false;
        ForSlots(sender, [&](const std::vector<Entry>& slot) {
          for (const Entry& entry : slot) {
            superseded |= sender.Matches(entry.tag) &&
                          entry.tag.iteration >= tag.iteration;
          }
        });
        if (superseded) {
          ++counts_.superseded;
          return Enqueued::kSuperseded;
        }
        Forget(tag.sender);
      }
      if (limited_ && size_ >= options_.capacity) return Enqueued::kFull;
      slots_[tag.iteration % options_.slots].push_back(
          {tag, next_number_++, std::move(update)});
      ++size_;
      return Enqueued::kQueued;
    }

    template <typename Visit>
    void ForSlots(const Tag& tag, Visit visit) const {
      if (tag.iteration != kAny) {
        visit(slots_[tag.iteration % options_.slots]);
        return;
      }
      for (const std::vector<Entry>& slot : slots_) visit(slot);
    }

    template <typename Condition>
    int64_t Erase(std::vector<Entry>* slot, Condition condition) {
      const auto end = std::remove_if(slot->begin(), slot->end(), condition);
      const int64_t erased = slot->end() - end;
      slot->erase(end, slot->end());
      size_ -= erased;
      return erased;
    }

    const UpdateQueueOptions options_;
    std::vector<std::vector<Entry>> slots_;
    int64_t size_ = 0;
    bool limited_ = true;
    int64_t floor_ = 0;
    int64_t next_number_ = 0;
    UpdateQueueCounts counts_;
  };

  // Decides whether a wait has come to its end, and what it takes; called under
  // the lock after every change. It must not call the queue.
  using Rule = std::function<bool(Entries*, std::vector<Entry>*)>;

  explicit UpdateQueue(const UpdateQueueOptions& options)
      : options_(options), entries_(options) {}
  ~UpdateQueue() { Close(); }
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  const UpdateQueueOptions& options() const { return options_; }

  // `tag` has no kAny.
  Enqueued Enqueue(Update update, const Tag& tag) ABSL_LOCKS_EXCLUDED(mu_) {
    Replies replies;
    Enqueued result;
    {
      MutexLock lock(&mu_);
      if (closed_) return Enqueued::kClosed;
      result = entries_.Add(std::move(update), tag);
      if (result == Enqueued::kQueued) Serve(&replies);
    }
    Send(&replies);
    return result;
  }

  // Calls `done` once with the first `m` entries of this tag, as soon as there
  // are so many, perhaps before Dequeue returns.
  Ticket Dequeue(int64_t m, const Tag& tag, Callback done) {
    return Await(
        [m, tag](Entries* entries, std::vector<Entry>* taken) {
          if (entries->Size(tag) < m) return false;
          *taken = entries->Take(m, tag);
          return true;
        },
        std::move(done));
  }

  // Calls `done` once with what the rule takes when it first returns true.
  Ticket Await(Rule rule, Callback done) ABSL_LOCKS_EXCLUDED(mu_) {
    Replies replies;
    Ticket ticket;
    {
      MutexLock lock(&mu_);
      ticket = next_ticket_++;
      if (closed_) {
        replies.push_back({std::move(done), Answer::kClosed, {}});
      } else {
        waits_.emplace(ticket, Wait{std::move(rule), std::move(done)});
        Serve(&replies);
      }
    }
    Send(&replies);
    return ticket;
  }

  // Takes a wait back: true if its callback was not called and never will be.
  bool Cancel(Ticket ticket) ABSL_LOCKS_EXCLUDED(mu_) {
    Wait dropped;  // Destroyed without the lock.
    MutexLock lock(&mu_);
    const auto found = waits_.find(ticket);
    if (found == waits_.end()) return false;
    dropped = std::move(found->second);
    waits_.erase(found);
    return true;
  }

  // Takes all entries of this tag that are there.
  std::vector<Entry> Drain(const Tag& tag) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return entries_.Take(options_.capacity, tag);
  }

  int64_t Size(const Tag& tag) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return entries_.Size(tag);
  }

  // Lets `change` at the entries, and looks at the rules again; they may depend
  // on more than entries, too.
  void Change(const std::function<void(Entries*)>& change)
      ABSL_LOCKS_EXCLUDED(mu_) {
    Replies replies;
    {
      MutexLock lock(&mu_);
      change(&entries_);
      Serve(&replies);
    }
    Send(&replies);
  }

  UpdateQueueCounts counts() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return entries_.counts_;
  }

  // Answers all that wait, and every later wait, with kClosed.
  void Close() ABSL_LOCKS_EXCLUDED(mu_) {
    Replies replies;
    {
      MutexLock lock(&mu_);
      closed_ = true;
      for (auto& item : waits_) {
        replies.push_back({std::move(item.second.done), Answer::kClosed, {}});
      }
      waits_.clear();
    }
    Send(&replies);
  }

 private:
  struct Wait {
    Rule rule;
    Callback done;
  };

  // A callback to be called when the lock is gone.
  struct Reply {
    Callback done;
    Answer answer;
    std::vector<Entry> entries;
  };
  using Replies = std::vector<Reply>;

  static void Send(Replies* replies) {
    for (Reply& reply : *replies) {
      reply.done(reply.answer, std::move(reply.entries));
    }
  }

  void Serve(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto wait = waits_.begin(); wait != waits_.end();) {
      std::vector<Entry> taken;
      if (!wait->second.rule(&entries_, &taken)) {
        ++wait;
        continue;
      }
      replies->push_back(
          {std::move(wait->second.done), Answer::kEntries, std::move(taken)});
      wait = waits_.erase(wait);
    }
  }

  const UpdateQueueOptions options_;
  Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Entries entries_ ABSL_GUARDED_BY(mu_);
  Ticket next_ticket_ ABSL_GUARDED_BY(mu_) = 1;
  // Tickets rise, so this is the order in which they came.
  std::map<Ticket, Wait> waits_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_UPDATE_QUEUE_H_
