#include "cc/engine/timer.h"

#include <algorithm>

namespace recsync {

Timer::Timer() : thread_([this] { Loop(); }) {}

Timer::~Timer() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
  // What a dropped callback holds may call back while it is destroyed.
  decltype(calls_) dropped;
  MutexLock lock(&mu_);
  dropped.swap(calls_);
  due_.clear();
}

int64_t Timer::CallAfter(double seconds, std::function<void()> callback) {
  // More would overflow the clock; 31 years are as good as never.
  constexpr double kLongest = 1e9;
  const double wait = seconds > 0.0 ? std::min(seconds, kLongest) : 0.0;
  const auto due =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(wait));
  MutexLock lock(&mu_);
  const int64_t id = next_id_++;
  const auto placed =
      calls_.emplace(std::make_pair(due, id), std::move(callback)).first;
  due_.emplace(id, due);
  if (placed == calls_.begin()) changed_.Signal();
  return id;
}

bool Timer::Cancel(int64_t id) {
  // Destroyed after the lock is gone: what a callback holds may call back.
  std::function<void()> dropped;
  MutexLock lock(&mu_);
  const auto found = due_.find(id);
  if (found == due_.end()) return false;
  const auto call = calls_.find({found->second, id});
  dropped = std::move(call->second);
  calls_.erase(call);
  due_.erase(found);
  return true;
}

void Timer::Loop() {
  mu_.Lock();
  while (!stopping_) {
    if (calls_.empty()) {
      changed_.Wait(&mu_);
      continue;
    }
    const auto first = calls_.begin();
    const Time due = first->first.first;
    if (due > std::chrono::steady_clock::now()) {
      changed_.WaitUntil(&mu_, due);
      continue;
    }
    std::function<void()> callback = std::move(first->second);
    due_.erase(first->first.second);
    calls_.erase(first);
    mu_.Unlock();
    callback();
    callback = nullptr;
    mu_.Lock();
  }
  mu_.Unlock();
}

}  // namespace recsync
