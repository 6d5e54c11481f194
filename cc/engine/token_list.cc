#include "cc/engine/token_list.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace recsync {
namespace {

constexpr TokenList::Token kNoToken = {-1, -1, -1};

}  // namespace

TokenList::TokenList(const Options& options)
    : options_(options),
      steps_(options.servers, 0),
      workers_(options.workers) {}

TokenList::~TokenList() { Close(); }

int64_t TokenList::max_step() const {
  // The last token of a step is below (step + 1) * repeats.
  return std::numeric_limits<int64_t>::max() / options_.repeats - 1;
}

TokenList::Ticket TokenList::Take(int worker, Callback done) {
  Replies replies;
  Ticket ticket;
  {
    MutexLock lock(&mu_);
    ticket = next_ticket_++;
    if (closed_) {
      replies.push_back({std::move(done), Answer::kClosed, kNoToken});
    } else {
      Worker& caller = workers_[worker];
      if (!caller.live) {
        const bool alone =
            std::none_of(workers_.begin(), workers_.end(),
                         [](const Worker& other) { return other.live; });
        if (!alone) caller.clock = SlowestClock();
        caller.live = true;
      }
      if (options_.gate != Gate::kStep) caller.held.clear();
      calls_.emplace(ticket, Call{worker, std::chrono::steady_clock::now(),
                                  std::move(done)});
      Serve(&replies);
    }
  }
  Send(replies);
  return ticket;
}

bool TokenList::Cancel(Ticket ticket) {
  // Destroyed after the lock is gone: what a callback holds may call back.
  Callback dropped;
  MutexLock lock(&mu_);
  const auto found = calls_.find(ticket);
  if (found == calls_.end()) return false;
  dropped = std::move(found->second.done);
  calls_.erase(found);
  return true;
}

TokenList::Loss TokenList::Lose(int worker) {
  Replies replies;
  Loss loss;
  {
    MutexLock lock(&mu_);
    std::map<int64_t, Ticket>& held = workers_[worker].held;
    for (const auto& [index, ticket] : held) {
      loss.tickets.push_back(ticket);
      if (options_.gate != Gate::kStep) {
        ++loss.lost;
        continue;
      }
      withheld_.insert(index);
      loss.withheld.push_back(index);
    }
    counts_.lost += loss.lost;
    held.clear();
    Remove(worker, &replies);
  }
  Send(replies);
  return loss;
}

int64_t TokenList::Reissue(const std::vector<int64_t>& indices) {
  Replies replies;
  int64_t reissued = 0;
  {
    MutexLock lock(&mu_);
    for (const int64_t index : indices) {
      if (withheld_.erase(index) == 0) continue;
      reissues_.insert(index);
      ++reissued;
    }
    counts_.reissued += reissued;
    Serve(&replies);
  }
  Send(replies);
  return reissued;
}

void TokenList::Leave(int worker) {
  Replies replies;
  {
    MutexLock lock(&mu_);
    workers_[worker].held.clear();
    Remove(worker, &replies);
  }
  Send(replies);
}

void TokenList::ReportStep(int server, int64_t step) {
  Replies replies;
  {
    MutexLock lock(&mu_);
    if (step <= steps_[server]) return;
    steps_[server] = step;
    smallest_step_ = *std::min_element(steps_.begin(), steps_.end());
    if (options_.gate != Gate::kStep) return;
    SkipUseless();
    Serve(&replies);
  }
  Send(replies);
}

bool TokenList::Seek(int64_t step) {
  MutexLock lock(&mu_);
  if (!calls_.empty()) return false;
  position_ = step * options_.repeats;
  reissues_.clear();
  withheld_.clear();
  steps_.assign(steps_.size(), step);
  smallest_step_ = step;
  workers_.assign(workers_.size(), Worker());
  return true;
}

TokenList::State TokenList::GetState() {
  const Time now = std::chrono::steady_clock::now();
  MutexLock lock(&mu_);
  State state;
  state.position = position_;
  state.smallest_step = smallest_step_;
  state.steps = steps_;
  state.workers = workers_;
  state.reissues.assign(reissues_.begin(), reissues_.end());
  state.withheld.assign(withheld_.begin(), withheld_.end());
  for (const auto& entry : calls_) {
    const std::chrono::duration<double> wait = now - entry.second.since;
    state.waiting.push_back({entry.second.worker, std::max(0.0, wait.count())});
  }
  state.counts = counts_;
  return state;
}

void TokenList::Close() {
  Replies replies;
  {
    MutexLock lock(&mu_);
    closed_ = true;
    for (auto& entry : calls_) {
      replies.push_back(
          {std::move(entry.second.done), Answer::kClosed, kNoToken});
    }
    calls_.clear();
  }
  Send(replies);
}

void TokenList::Send(const Replies& replies) {
  for (const Reply& reply : replies) reply.done(reply.answer, reply.token);
}

int64_t TokenList::SlowestClock() const {
  int64_t slowest = std::numeric_limits<int64_t>::max();
  for (const Worker& worker : workers_) {
    if (worker.live) slowest = std::min(slowest, worker.clock);
  }
  return slowest;
}

int64_t TokenList::NextIndex() const {
  return reissues_.empty() ? position_ : *reissues_.begin();
}

bool TokenList::IsOpen(int worker) const {
  switch (options_.gate) {
    case Gate::kNone:
      return true;
    case Gate::kStep:
      return NextIndex() / options_.repeats <= smallest_step_;
    case Gate::kClock:
      return workers_[worker].clock - SlowestClock() <= options_.clock_bound;
  }
  return true;
}

TokenList::Token TokenList::HandOut(int worker, Ticket ticket) {
  const int64_t index = NextIndex();
  if (reissues_.empty()) {
    ++position_;
  } else {
    reissues_.erase(reissues_.begin());
  }
  workers_[worker].held[index] = ticket;
  ++workers_[worker].clock;
  ++counts_.taken;
  return {index, index / options_.repeats, ticket};
}

void TokenList::Serve(Replies* replies) {
  auto call = calls_.begin();
  while (call != calls_.end()) {
    const int worker = call->second.worker;
    if (!IsOpen(worker)) {
      ++call;
      continue;
    }
    replies->push_back({std::move(call->second.done), Answer::kToken,
                        HandOut(worker, call->first)});
    calls_.erase(call);
    // The clock that moved may have opened the gate of one who came before.
    call = calls_.begin();
  }
}

void TokenList::Remove(int worker, Replies* replies) {
  workers_[worker].live = false;
  for (auto call = calls_.begin(); call != calls_.end();) {
    if (call->second.worker != worker) {
      ++call;
      continue;
    }
    replies->push_back({std::move(call->second.done), Answer::kGone, kNoToken});
    call = calls_.erase(call);
  }
  Serve(replies);
}

void TokenList::SkipUseless() {
  const int64_t first = smallest_step_ * options_.repeats;
  if (position_ < first) {
    counts_.skipped += first - position_;
    position_ = first;
  }
  const auto end = reissues_.lower_bound(first);
  counts_.skipped += std::distance(reissues_.begin(), end);
  reissues_.erase(reissues_.begin(), end);
  withheld_.erase(withheld_.begin(), withheld_.lower_bound(first));
  for (Worker& worker : workers_) {
    worker.held.erase(worker.held.begin(), worker.held.lower_bound(first));
  }
}

}  // namespace recsync
