#include "cc/engine/token_queue.h"

#include <algorithm>
#include <utility>

namespace recsync {
namespace {

void Send(const std::vector<TokenQueue::Callback>& callbacks,
          TokenQueue::Answer answer) {
  for (const TokenQueue::Callback& done : callbacks) done(answer);
}

}  // namespace

int64_t TokenQueue::size() {
  MutexLock lock(&mu_);
  return granted_ - taken_;
}

TokenQueue::Totals TokenQueue::totals() {
  MutexLock lock(&mu_);
  return {granted_, taken_, lifted_};
}

void TokenQueue::Insert(int64_t tokens) {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    granted_ += tokens;
    Serve(&served);
  }
  Send(served, Answer::kTokens);
}

void TokenQueue::GrantUpTo(int64_t total) {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    granted_ = std::max(granted_, total);
    Serve(&served);
  }
  Send(served, Answer::kTokens);
}

TokenQueue::Ticket TokenQueue::Acquire(int64_t tokens, Callback done) {
  std::vector<Callback> served;
  Answer answer = Answer::kTokens;
  Ticket ticket;
  {
    MutexLock lock(&mu_);
    ticket = next_ticket_++;
    if (closed_) {
      answer = Answer::kClosed;
      served.push_back(std::move(done));
    } else {
      waits_.emplace(ticket, Wait{tokens, std::move(done)});
      Serve(&served);
    }
  }
  Send(served, answer);
  return ticket;
}

bool TokenQueue::Cancel(Ticket ticket) {
  Callback dropped;  // Destroyed without the lock.
  MutexLock lock(&mu_);
  const auto found = waits_.find(ticket);
  if (found == waits_.end()) return false;
  dropped = std::move(found->second.done);
  waits_.erase(found);
  return true;
}

void TokenQueue::Lift(bool lifted) {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    lifted_ = lifted;
    Serve(&served);
  }
  Send(served, Answer::kTokens);
}

bool TokenQueue::lifted() {
  MutexLock lock(&mu_);
  return lifted_;
}

void TokenQueue::Restore(int64_t granted) {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    lifted_ = false;
    granted_ = granted;
    Serve(&served);
  }
  Send(served, Answer::kTokens);
}

void TokenQueue::Reset(int64_t granted, int64_t taken) {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    lifted_ = false;
    granted_ = granted;
    taken_ = taken;
    Serve(&served);
  }
  Send(served, Answer::kTokens);
}

void TokenQueue::Close() {
  std::vector<Callback> served;
  {
    MutexLock lock(&mu_);
    closed_ = true;
    for (auto& item : waits_) served.push_back(std::move(item.second.done));
    waits_.clear();
  }
  Send(served, Answer::kClosed);
}

void TokenQueue::Serve(std::vector<Callback>* served) {
  while (!waits_.empty()) {
    const auto first = waits_.begin();
    if (!lifted_ && granted_ - taken_ < first->second.tokens) return;
    taken_ += first->second.tokens;
    served->push_back(std::move(first->second.done));
    waits_.erase(first);
  }
}

}  // namespace recsync
