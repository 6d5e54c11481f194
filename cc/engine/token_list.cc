#include "cc/engine/token_list.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace recsync {
namespace {

constexpr TokenList::Token kNoToken = {-1, -1, -1};

}  // namespace

TokenList::TokenList(const Options& options, std::function<Time()> now)
    : options_(options),
      now_(std::move(now)),
      steps_(options.servers, 0),
      workers_(options.workers),
      tickets_(options.workers),
      live_clocks_{{0, options.workers}} {}

TokenList::~TokenList() { Close(); }

int64_t TokenList::max_step() const {
  // The last token of a step is below (step + 1) * repeats.
  return std::numeric_limits<int64_t>::max() / options_.repeats - 1;
}

TokenList::Ticket TokenList::Take(int worker, Callback done) {
  const Time now = now_();
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
        if (!live_clocks_.empty()) caller.clock = SlowestClock();
        caller.live = true;
        ++live_clocks_[caller.clock];
      }
      caller.lost.clear();
      if (options_.gate != Gate::kStep) caller.held.clear();
      calls_.emplace(ticket, Call{worker, now, std::move(done)});
      TakeOut(worker);
      tickets_[worker].insert(ticket);
      PutBack(worker);
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
  const int worker = found->second.worker;
  calls_.erase(found);
  TakeOut(worker);
  tickets_[worker].erase(ticket);
  PutBack(worker);
  return true;
}

TokenList::Loss TokenList::Lose(int worker) {
  Replies replies;
  Loss loss;
  {
    MutexLock lock(&mu_);
    Worker& gone = workers_[worker];
    for (const auto& [index, ticket] : std::exchange(gone.held, {})) {
      if (options_.gate == Gate::kStep) {
        withheld_[index] = {worker, ticket};
      } else {
        gone.lost[index] = ticket;
        ++counts_.lost;
      }
    }
    for (const auto& [index, withheld] : withheld_) {
      if (withheld.worker != worker) continue;
      loss.withheld.push_back(index);
      loss.tickets.push_back(withheld.ticket);
    }
    for (const auto& [index, ticket] : gone.lost) {
      loss.tickets.push_back(ticket);
      ++loss.lost;
    }
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
    workers_[worker].lost.clear();
    Remove(worker, &replies);
  }
  Send(replies);
}

void TokenList::ReportStep(int server, int64_t step) {
  Replies replies;
  {
    MutexLock lock(&mu_);
    if (step <= steps_[server]) return;
    const bool was_smallest = steps_[server] == smallest_step_;
    steps_[server] = step;
    if (!was_smallest) return;
    const int64_t smallest = *std::min_element(steps_.begin(), steps_.end());
    if (smallest == smallest_step_) return;
    smallest_step_ = smallest;
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
  live_clocks_ = {{0, options_.workers}};
  return true;
}

TokenList::State TokenList::GetState() {
  const Time now = now_();
  MutexLock lock(&mu_);
  State state;
  state.position = position_;
  state.smallest_step = smallest_step_;
  state.steps = steps_;
  state.workers = workers_;
  state.reissues.assign(reissues_.begin(), reissues_.end());
  for (const auto& entry : withheld_) state.withheld.push_back(entry.first);
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
    for (std::set<Ticket>& tickets : tickets_) tickets.clear();
    waiters_.clear();
  }
  Send(replies);
}

void TokenList::Send(const Replies& replies) {
  for (const Reply& reply : replies) reply.done(reply.answer, reply.token);
}

int64_t TokenList::SlowestClock() const { return live_clocks_.begin()->first; }

int64_t TokenList::NextIndex() const {
  return reissues_.empty() ? position_ : *reissues_.begin();
}

TokenList::Token TokenList::HandOut(int worker, Ticket ticket) {
  const int64_t index = NextIndex();
  if (reissues_.empty()) {
    ++position_;
  } else {
    reissues_.erase(reissues_.begin());
  }
  Worker& holder = workers_[worker];
  holder.held[index] = ticket;
  // Who waits is live.
  const auto clock = live_clocks_.find(holder.clock);
  if (--clock->second == 0) live_clocks_.erase(clock);
  ++live_clocks_[++holder.clock];
  ++counts_.taken;
  return {index, index / options_.repeats, ticket};
}

void TokenList::Serve(Replies* replies) {
  if (options_.gate == Gate::kClock) return ServeClocks(replies);
  // The gate is the same for all.
  while (!calls_.empty() &&
         (options_.gate == Gate::kNone ||
          NextIndex() / options_.repeats <= smallest_step_)) {
    Answered(calls_.begin()->first, replies);
  }
}

void TokenList::ServeClocks(Replies* replies) {
  std::set<Waiter> open;
  while (!waiters_.empty() || !open.empty()) {
    // The slowest clock rises from one answer to the next: who is in `open`
    // stays there, and others come.
    const int64_t slowest = SlowestClock();
    while (!waiters_.empty() &&
           waiters_.begin()->first - slowest <= options_.clock_bound) {
      open.merge(waiters_.begin()->second);
      waiters_.erase(waiters_.begin());
    }
    if (open.empty()) return;
    const Ticket ticket = open.begin()->first;
    open.erase(open.begin());
    Answered(ticket, replies);
  }
}

void TokenList::Answered(Ticket ticket, Replies* replies) {
  const auto call = calls_.find(ticket);
  const int worker = call->second.worker;
  TakeOut(worker);
  tickets_[worker].erase(ticket);
  replies->push_back(
      {std::move(call->second.done), Answer::kToken, HandOut(worker, ticket)});
  calls_.erase(call);
  PutBack(worker);
}

void TokenList::TakeOut(int worker) {
  const std::set<Ticket>& tickets = tickets_[worker];
  if (options_.gate != Gate::kClock || tickets.empty()) return;
  const auto waiters = waiters_.find(workers_[worker].clock);
  if (waiters == waiters_.end()) return;
  waiters->second.erase({*tickets.begin(), worker});
  if (waiters->second.empty()) waiters_.erase(waiters);
}

void TokenList::PutBack(int worker) {
  const std::set<Ticket>& tickets = tickets_[worker];
  if (options_.gate != Gate::kClock || tickets.empty()) return;
  waiters_[workers_[worker].clock].insert({*tickets.begin(), worker});
}

void TokenList::Remove(int worker, Replies* replies) {
  TakeOut(worker);
  for (const Ticket ticket : std::exchange(tickets_[worker], {})) {
    const auto call = calls_.find(ticket);
    replies->push_back({std::move(call->second.done), Answer::kGone, kNoToken});
    calls_.erase(call);
  }
  Worker& gone = workers_[worker];
  if (gone.live) {
    gone.live = false;
    const auto clock = live_clocks_.find(gone.clock);
    if (--clock->second == 0) live_clocks_.erase(clock);
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
