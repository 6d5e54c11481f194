#include "cc/simulation/copy_synchronizer.h"

#include <algorithm>

#include "cc/engine/interpolation.h"

namespace recsync {

namespace {

// Between synchronizations of all, threads train this part of the time of one
// at least, as in shadow.py.
constexpr double kLeastTraining = 0.1;
// Between two synchronizations of a trainer with the central copy, at least,
// as in the calls of shadow_trainers.py that synchronize again and again.
constexpr double kRestSeconds = 0.01;

}  // namespace

CopySynchronizer::CopySynchronizer(const CopySyncOptions& options,
                                   EventQueue* events, VirtualNetwork* network,
                                   Copies* copies, Listener listener)
    : options_(options),
      events_(events),
      network_(network),
      copies_(copies),
      listener_(std::move(listener)),
      since_(options.groups * options.threads, 0),
      due_(options.groups),
      syncs_(options.groups, 0),
      seconds_(options.groups, 0.0) {}

void CopySynchronizer::Begin() {
  using Algorithm = CopySyncOptions::Algorithm;
  using Schedule = CopySyncOptions::Schedule;
  if (options_.algorithm == Algorithm::kNone) return;
  center_ = copies_->front();
  global_.assign(options_.groups, center_);
  update_.assign(options_.groups, Vector(center_.size(), 0.0f));
  if (options_.schedule == Schedule::kBackground) {
    for (int64_t shard = 0; shard < options_.shards(); ++shard) {
      if (options_.is_central()) {
        for (int64_t group = 0; group < options_.groups; ++group) {
          Loop(group, shard);
        }
      } else {
        Loop(-1, shard);
      }
    }
  } else if (options_.schedule == Schedule::kInterval &&
             !options_.is_central()) {
    LoopAtOnce(options_.interval);
  }
}

// Threads.

void CopySynchronizer::Enter(int64_t thread, EventQueue::Event then) {
  if (!HasGate()) {
    then();
    return;
  }
  members_.insert(thread);
  if (is_closed_) {
    entering_[thread] = std::move(then);
    return;
  }
  inside_.insert(thread);
  then();
}

void CopySynchronizer::Done(int64_t thread, EventQueue::Event then) {
  using Schedule = CopySyncOptions::Schedule;
  inside_.erase(thread);
  LookAtGate();
  const int64_t group = thread / options_.threads;
  if (options_.algorithm == CopySyncOptions::Algorithm::kNone ||
      options_.schedule == Schedule::kBackground) {
    then();
  } else if (options_.schedule == Schedule::kGap) {
    if (++since_[thread] < options_.gap) {
      then();
      return;
    }
    since_[thread] = 0;
    if (options_.is_central()) {
      SyncShards(group, 0, std::move(then));
    } else {
      waiting_[thread] = std::move(then);
      LookAtGate();
    }
  } else if (options_.is_central() && IsDue(group)) {
    SyncShards(group, 0, std::move(then));
  } else {
    then();
  }
}

void CopySynchronizer::Leave(int64_t thread) {
  ++away_;
  members_.erase(thread);
  inside_.erase(thread);
  LookAtGate();
}

bool CopySynchronizer::HasGate() const {
  return options_.algorithm != CopySyncOptions::Algorithm::kNone &&
         options_.schedule != CopySyncOptions::Schedule::kBackground &&
         !options_.is_central();
}

void CopySynchronizer::LookAtGate() {
  if (when_empty_ != nullptr && inside_.empty()) {
    std::exchange(when_empty_, nullptr)();
    return;
  }
  if (is_closed_ || waiting_.empty() || waiting_.size() < members_.size()) {
    return;
  }
  is_closed_ = true;
  SyncShards(-1, 0, [this] { Open(); });
}

void CopySynchronizer::Open() {
  is_closed_ = false;
  const auto waiting = std::exchange(waiting_, {});
  const auto entering = std::exchange(entering_, {});
  for (const auto& [thread, then] : waiting) then();
  for (const auto& [thread, then] : entering) {
    inside_.insert(thread);
    then();
  }
}

bool CopySynchronizer::IsDue(int64_t group) {
  const double now = events_->now();
  if (!due_[group].has_value()) due_[group] = now + options_.interval;
  const double due = *due_[group];
  if (now < due) return false;
  // After a break none are made up for.
  const bool late = now - due > options_.interval;
  due_[group] = (late ? now : due) + options_.interval;
  return true;
}

// Loops.

void CopySynchronizer::Loop(int64_t group, int64_t shard) {
  if (IsOver()) return;
  const double began = events_->now();
  const auto again = [this, group, shard, began] {
    const double rest = group < 0 ? 0.0 : kRestSeconds;
    const double due =
        std::max(events_->now() + rest, began + options_.interval);
    if (due == began) {
      is_endless_ = true;
      return;
    }
    events_->At(due, [this, group, shard] { Loop(group, shard); });
  };
  if (group < 0) {
    SyncAll(shard, again);
  } else {
    SyncCentral(group, shard, again);
  }
}

void CopySynchronizer::LoopAtOnce(double due) {
  events_->At(due, [this] {
    if (IsOver()) return;
    const double began = events_->now();
    is_closed_ = true;
    when_empty_ = [this, began] {
      SyncShards(-1, 0, [this, began] {
        Open();
        // Between those that take longer than the interval, too, threads train.
        const double ended = events_->now();
        const double rest = kLeastTraining * (ended - began);
        LoopAtOnce(std::max(began + options_.interval, ended + rest));
      });
    };
    LookAtGate();
  });
}

// Synchronizations.

CopySynchronizer::Range CopySynchronizer::Part(Range whole, int64_t part,
                                               int64_t parts) {
  return {whole.begin + whole.size() * part / parts,
          whole.begin + whole.size() * (part + 1) / parts};
}

CopySynchronizer::Range CopySynchronizer::Elements(int64_t shard) const {
  const int64_t size = copies_->front().size();
  return Part({0, size}, shard, options_.shards());
}

CopySynchronizer::Range CopySynchronizer::Bytes(int64_t shard) const {
  return Part({0, options_.bytes}, shard, options_.shards());
}

void CopySynchronizer::SyncShards(int64_t group, int64_t shard, Then then) {
  if (shard == options_.shards()) {
    then();
    return;
  }
  Then next = [this, group, shard, then = std::move(then)] {
    SyncShards(group, shard + 1, then);
  };
  if (group < 0) {
    SyncAll(shard, std::move(next));
  } else {
    SyncCentral(group, shard, std::move(next));
  }
}

void CopySynchronizer::Count(int64_t group, double began) {
  ++syncs_[group];
  seconds_[group] += events_->now() - began;
}

CopySynchronizer::Shared CopySynchronizer::Read(int64_t group, int64_t shard,
                                                int64_t number) {
  const Range range = Elements(shard);
  const Vector& copy = (*copies_)[group];
  Tell(Entry::Kind::kRead, group, shard, number);
  return std::make_shared<Vector>(copy.begin() + range.begin,
                                  copy.begin() + range.end);
}

void CopySynchronizer::Move(int64_t group, int64_t shard, int64_t number,
                            const Vector& target) {
  const Range range = Elements(shard);
  Interpolate(target.data(), options_.alpha, range.size(),
              (*copies_)[group].data() + range.begin, nullptr);
  Tell(Entry::Kind::kMove, group, shard, number);
}

void CopySynchronizer::SyncCentral(int64_t group, int64_t shard, Then then) {
  const double began = events_->now();
  const int64_t number = ++begun_;
  const Shared sent = Read(group, shard, number);
  const Shared answer = std::make_shared<Vector>(sent->size());
  const int64_t parts = options_.sync_ps.size();
  const auto left = std::make_shared<int64_t>(parts);
  const int64_t holder = options_.holders[group][shard];
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t ps = options_.sync_ps[part];
    const int64_t bytes = Part(Bytes(shard), part, parts).size();
    Then arrived = [=, this_ = this] {
      // The parts of a shard, and where they are in the center.
      const Range own =
          Part({0, static_cast<int64_t>(sent->size())}, part, parts);
      const int64_t first = this_->Elements(shard).begin + own.begin;
      Interpolate(sent->data() + own.begin, this_->options_.alpha, own.size(),
                  this_->center_.data() + first, answer->data() + own.begin);
      this_->sync_ps_bytes_ += 2 * bytes;
      this_->Tell(Entry::Kind::kExchange, group, shard, number, part);
      this_->network_->Send(ps, holder, bytes, [=] {
        if (--*left > 0) return;
        this_->Move(group, shard, number, *answer);
        this_->Count(group, began);
        then();
      });
    };
    network_->Send(holder, ps, bytes, std::move(arrived));
  }
}

void CopySynchronizer::SyncAll(int64_t shard, Then then) {
  // What a synchronization has while it goes on.
  struct Sync {
    double began;
    int64_t number;
    std::vector<Shared> read;
    Vector mean;
    std::vector<int64_t> come;      // pieces that each group has to average
    std::vector<int64_t> gathered;  // pieces of the mean that each group has
    int64_t left;                   // groups
    Then then;
  };
  const int64_t groups = options_.groups;
  auto sync = std::make_shared<Sync>();
  sync->began = events_->now();
  sync->number = ++begun_;
  for (int64_t i = 0; i < groups; ++i)
    sync->read.push_back(Read(i, shard, sync->number));
  sync->mean.resize(sync->read.front()->size());
  sync->come.assign(groups, 0);
  sync->gathered.assign(groups, 0);
  sync->left = groups;
  sync->then = std::move(then);
  const auto holder = [this, shard](int64_t group) {
    return options_.holders[group][shard];
  };
  const auto gather = [this, sync, shard](int64_t group) {
    if (++sync->gathered[group] < options_.groups) return;
    Move(group, shard, sync->number, Target(group, shard, sync->mean));
    Count(group, sync->began);
    if (--sync->left == 0) sync->then();
  };
  const auto average = [=, this_ = this](int64_t group) {
    if (++sync->come[group] < groups) return;
    const int64_t size = sync->mean.size();
    const Range piece = Part({0, size}, group, groups);
    for (int64_t e = piece.begin; e < piece.end; ++e) {
      float sum = 0.0f;
      for (const Shared& read : sync->read) sum += (*read)[e];
      sync->mean[e] = sum / static_cast<float>(groups);
    }
    const int64_t bytes = Part(this_->Bytes(shard), group, groups).size();
    for (int64_t to = 0; to < groups; ++to) {
      this_->network_->Send(holder(group), holder(to), bytes,
                            [gather, to] { gather(to); });
    }
  };
  for (int64_t from = 0; from < groups; ++from) {
    for (int64_t to = 0; to < groups; ++to) {
      const int64_t bytes = Part(Bytes(shard), to, groups).size();
      network_->Send(holder(from), holder(to), bytes,
                     [average, to] { average(to); });
    }
  }
}

CopySynchronizer::Vector CopySynchronizer::Target(int64_t group, int64_t shard,
                                                  const Vector& mean) {
  if (options_.algorithm != CopySyncOptions::Algorithm::kBmuf) return mean;
  const int64_t first = Elements(shard).begin;
  Vector target(mean.size());
  for (size_t e = 0; e < mean.size(); ++e) {
    float& global = global_[group][first + e];
    float& last = update_[group][first + e];
    float update = options_.eta * (mean[e] - global);
    if (options_.momentum > 0) update += options_.momentum * last;
    last = update;
    global += update;
    target[e] =
        options_.nesterov ? global + options_.momentum * update : global;
  }
  return target;
}

}  // namespace recsync
