#include "cc/simulation/group_cluster.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "cc/engine/staleness_counters.h"
#include "cc/engine/update_rules.h"

namespace recsync {

GroupCluster::GroupCluster(GroupClusterOptions options)
    : options_(std::move(options)),
      timeless_(options_.groups * options_.trainers * options_.threads,
                options_.steps) {}

Result GroupCluster::Check() const {
  constexpr int64_t kMost = int64_t{1} << 14;  // of each; and in all 64 times
  constexpr int64_t kBytes = VirtualNetwork::kMostBytes;
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  for (const auto& [name, value, least, most] :
       {std::tuple("groups", options_.groups, int64_t{1}, kMost),
        std::tuple("trainers", options_.trainers, int64_t{1}, kMost),
        std::tuple("threads", options_.threads, int64_t{1}, kMost),
        std::tuple("servers", options_.servers, int64_t{0}, kMost),
        std::tuple("sync_ps", options_.sync_ps, int64_t{0}, kMost),
        std::tuple("bytes", options_.sync.bytes, int64_t{0}, kBytes),
        std::tuple("gap", options_.sync.gap, int64_t{1}, kAny),
        std::tuple("steps", options_.steps, int64_t{0}, kAny)}) {
    if (least <= value && value <= most) continue;
    return Result::Error(name, " must be from ", least, " to ", most, ", not ",
                         value);
  }
  for (const auto& [name, each] :
       {std::pair("threads", options_.trainers * options_.threads),
        std::pair("servers", options_.servers)}) {
    if (options_.groups * each <= 64 * kMost) continue;
    return Result::Error(name, " of all groups must be at most ", 64 * kMost,
                         ", not ", options_.groups * each);
  }
  if (options_.servers == 0 && options_.trainers > 1) {
    return Result::Error("a group without servers is one trainer, not ",
                         options_.trainers);
  }
  if (options_.sync.is_central() != (options_.sync_ps > 0)) {
    return Result::Error("sync_ps must be at least 1 with EASGD, and 0 else, ",
                         "not ", options_.sync_ps);
  }
  for (const auto& [name, value] :
       {std::pair("trainer_per_second", options_.trainer_per_second),
        std::pair("server_per_second", options_.server_per_second),
        std::pair("trainer_bytes_per_second",
                  options_.trainer_bytes_per_second),
        std::pair("server_bytes_per_second", options_.server_bytes_per_second),
        std::pair("sync_ps_bytes_per_second",
                  options_.sync_ps_bytes_per_second),
        std::pair("seconds", options_.seconds)}) {
    if (value > 0) continue;
    return Result::Error(name, " must be positive, not ", value);
  }
  for (const auto& [name, value] :
       {std::pair("latency", options_.latency),
        std::pair("interval", options_.sync.interval)}) {
    if (value >= 0 && std::isfinite(value)) continue;
    return Result::Error(name, " must be finite and at least 0, not ", value);
  }
  if (options_.sync.schedule == CopySyncOptions::Schedule::kInterval &&
      options_.sync.interval == 0) {
    return Result::Error("interval must be positive, not 0");
  }
  for (const auto& stage : options_.stages) {
    for (const GroupWork& work : stage) {
      const bool on_trainer = work.device == GroupWork::kTrainer;
      if (!on_trainer && (work.device < 0 || work.device >= options_.servers)) {
        return Result::Error("device must be ", GroupWork::kTrainer,
                             ", the trainer, or a server from 0 to ",
                             options_.servers - 1, ", not ", work.device);
      }
      if (on_trainer && (work.reads || work.updates || work.bytes_to != 0 ||
                         work.bytes_back != 0)) {
        return Result::Error("only servers have shards and messages");
      }
      if (work.amount < 0) {
        return Result::Error("amount must be at least 0, not ", work.amount);
      }
      for (const int64_t bytes : {work.bytes_to, work.bytes_back}) {
        if (0 <= bytes && bytes <= kBytes) continue;
        return Result::Error("bytes of work must be from 0 to ", kBytes,
                             ", not ", bytes);
      }
    }
  }
  if (options_.learning.has_value() && !(options_.learning->loss_seconds > 0)) {
    return Result::Error("loss_seconds must be positive, not ",
                         options_.learning->loss_seconds);
  }
  return Result::Ok();
}

Result GroupCluster::Run(const std::function<bool()>& goes_on) {
  const Result checked = Check();
  if (!checked.ok()) return checked;
  const int64_t servers = options_.groups * options_.servers;
  std::vector<double> bandwidths(trainers(), options_.trainer_bytes_per_second);
  bandwidths.insert(bandwidths.end(), servers,
                    options_.server_bytes_per_second);
  bandwidths.insert(bandwidths.end(), options_.sync_ps,
                    options_.sync_ps_bytes_per_second);
  network_ = std::make_unique<VirtualNetwork>(bandwidths, options_.duplex,
                                              options_.latency, &events_);
  for (int64_t i = 0; i < trainers(); ++i) {
    devices_.emplace_back(options_.trainer_per_second);
  }
  for (int64_t i = 0; i < servers; ++i) {
    devices_.emplace_back(options_.server_per_second);
  }
  const int64_t size = options_.learning.has_value()
                           ? options_.learning->problem->parameters()
                           : 0;
  copies_.assign(options_.groups, std::vector<float>(size, 0.0f));
  CopySyncOptions sync = options_.sync;
  sync.groups = options_.groups;
  sync.threads = options_.trainers * options_.threads;
  sync.holders.clear();
  for (int64_t group = 0; group < options_.groups; ++group) {
    sync.holders.emplace_back();
    for (int64_t shard = 0; shard < shards(); ++shard) {
      sync.holders.back().push_back(
          options_.servers > 0 ? ServerOf(group, shard) : group);
    }
  }
  sync.sync_ps.clear();
  for (int64_t ps = 0; ps < options_.sync_ps; ++ps) {
    sync.sync_ps.push_back(trainers() + servers + ps);
  }
  CopySynchronizer::Listener listener;
  if (options_.keeps_log) {
    listener = [this](const CopySynchronizer::Entry& entry) {
      using Kind = CopySynchronizer::Entry::Kind;
      const Entry::Kind kind =
          entry.kind == Kind::kRead       ? Entry::Kind::kSyncRead
          : entry.kind == Kind::kExchange ? Entry::Kind::kExchange
                                          : Entry::Kind::kMove;
      log_.push_back(
          {kind, entry.group, entry.shard, entry.part, entry.number});
    };
  }
  synchronizer_ = std::make_unique<CopySynchronizer>(
      sync, &events_, network_.get(), &copies_, std::move(listener));
  for (int64_t i = 0; i < trainers() * options_.threads; ++i) {
    Thread thread;
    thread.trainer = i / options_.threads;
    thread.group = thread.trainer / options_.trainers;
    thread.gradient.resize(size);
    thread.versions.assign(shards(), 0);
    threads_.push_back(std::move(thread));
  }
  steps_.assign(trainers(), 0);
  begun_.assign(trainers(), 0);
  versions_.assign(options_.groups * shards(), 0);
  staleness_.assign(options_.groups * shards(),
                    std::vector<int64_t>(StalenessCounters::kSize, 0));
  there_ = threads_.size();
  synchronizer_->Begin();
  for (size_t i = 0; i < threads_.size(); ++i) Begin(i);
  if (options_.learning.has_value()) LookAtLoss();
  if (std::isfinite(options_.seconds)) {
    events_.At(options_.seconds, [this] { Stop(); });
  }
  const Result done = events_.RunWhile(
      [this] {
        return !has_stopped_ && !synchronizer_->is_endless() &&
               !timeless_.are_endless();
      },
      goes_on);
  if (!done.ok()) return done;
  if (synchronizer_->is_endless()) {
    return Result::Error(
        "synchronizations in the background must take time: by an interval, a "
        "latency, or bytes and a bandwidth");
  }
  if (timeless_.are_endless()) return timeless_.Error(options_.seconds);
  return Result::Ok();
}

GroupCluster::Busy GroupCluster::busy() const {
  Busy busy;
  for (size_t i = 0; i < devices_.size(); ++i) {
    auto& kind =
        static_cast<int64_t>(i) < trainers() ? busy.trainers : busy.servers;
    kind.push_back(devices_[i].Busy(events_.now()));
  }
  return busy;
}

// Steps.

void GroupCluster::Begin(int64_t thread) {
  if (taken_ == options_.steps) {
    Leave(thread);
    return;
  }
  ++taken_;
  synchronizer_->Enter(thread, [this, thread] { Compute(thread); });
}

void GroupCluster::Compute(int64_t thread) {
  Thread& own = threads_[thread];
  own.snapshot = copies_[own.group];
  own.has_gradient = false;
  own.has_read.assign(shards(), false);
  for (int64_t shard = 0; shard < shards(); ++shard) {
    own.versions[shard] = versions_[own.group * shards() + shard];
  }
  if (options_.servers == 0) Read(thread, 0);
  const int64_t step = begun_[own.trainer]++;
  if (options_.factor) {
    own.factor = options_.factor(own.trainer, step, events_.now());
  }
  const double seconds =
      options_.compute_seconds(own.trainer, step, events_.now());
  events_.After(own.factor * seconds, [this, thread] { Stage(thread, 0); });
}

void GroupCluster::Stage(int64_t thread, size_t number) {
  if (number == options_.stages.size()) {
    Finish(thread);
    return;
  }
  const std::vector<GroupWork>& stage = options_.stages[number];
  const auto left = std::make_shared<size_t>(stage.size() + 1);
  const auto done = [this, thread, number, left] {
    if (--*left == 0) Stage(thread, number + 1);
  };
  for (const GroupWork& work : stage) Use(thread, work, done);
  done();
}

void GroupCluster::Use(int64_t thread, const GroupWork& work,
                       EventQueue::Event then) {
  const Thread& own = threads_[thread];
  if (work.device == GroupWork::kTrainer) {
    const double done =
        devices_[own.trainer].Reserve(work.amount, events_.now(), own.factor);
    events_.At(done, std::move(then));
    return;
  }
  const int64_t server = ServerOf(own.group, work.device);
  network_->Send(own.trainer, server, work.bytes_to,
                 [this, thread, server, work, then = std::move(then)] {
                   if (work.reads) Read(thread, work.device);
                   const double done =
                       devices_[server].Reserve(work.amount, events_.now());
                   events_.At(done, [this, thread, server, work, then] {
                     if (work.updates) Update(thread, work.device);
                     network_->Send(server, threads_[thread].trainer,
                                    work.bytes_back, then);
                   });
                 });
}

void GroupCluster::Finish(int64_t thread) {
  Thread& own = threads_[thread];
  if (options_.servers == 0) Update(thread, 0);
  ++own.step;
  ++steps_[own.trainer];
  ++done_;
  seconds_ = events_.now();
  timeless_.Add(seconds_);
  synchronizer_->Done(thread, [this, thread] { Begin(thread); });
}

void GroupCluster::Leave(int64_t thread) {
  synchronizer_->Leave(thread);
  if (--there_ == 0) Stop();
}

void GroupCluster::Read(int64_t thread, int64_t shard) {
  Thread& own = threads_[thread];
  if (own.has_read[shard]) return;
  own.has_read[shard] = true;
  own.versions[shard] = versions_[own.group * shards() + shard];
  const std::vector<float>& copy = copies_[own.group];
  const int64_t size = copy.size();
  const int64_t first = size * shard / shards();
  const int64_t last = size * (shard + 1) / shards();
  std::copy(copy.begin() + first, copy.begin() + last,
            own.snapshot.begin() + first);
  if (options_.keeps_log) {
    log_.push_back({Entry::Kind::kRead, own.group, shard, thread, own.step});
  }
}

void GroupCluster::Update(int64_t thread, int64_t shard) {
  Thread& own = threads_[thread];
  const int64_t holder = own.group * shards() + shard;
  StalenessCounters(staleness_[holder].data())
      .Add(versions_[holder] - own.versions[shard] + 1);
  ++versions_[holder];
  if (options_.keeps_log) {
    log_.push_back({Entry::Kind::kUpdate, own.group, shard, thread, own.step});
  }
  if (!options_.learning.has_value()) return;
  const GroupLearning& learning = *options_.learning;
  if (!own.has_gradient) {
    learning.problem->Gradient(own.snapshot.data(), thread, own.step,
                               own.gradient.data());
    own.has_gradient = true;
  }
  std::vector<float>& copy = copies_[own.group];
  const int64_t size = copy.size();
  const int64_t first = size * shard / shards();
  const int64_t last = size * (shard + 1) / shards();
  SgdRule rule;
  rule.learning_rate = learning.learning_rate;
  rule.Apply<false>(copy.data() + first, nullptr, own.gradient.data() + first,
                    last - first, /*rho=*/1.0f, /*decay=*/1.0f);
}

// The loss.

void GroupCluster::LookAtLoss() {
  if (there_ == 0) return;
  NoteLoss();
  if (events_.empty()) return;
  events_.After(options_.learning->loss_seconds, [this] { LookAtLoss(); });
}

void GroupCluster::NoteLoss() {
  if (!losses_.empty() && losses_.back().seconds == events_.now()) {
    losses_.pop_back();
  }
  losses_.push_back({events_.now(), done_,
                     options_.learning->problem->Loss(copies_[0].data())});
}

void GroupCluster::Stop() {
  has_stopped_ = true;
  seconds_ = events_.now();
  if (options_.learning.has_value()) NoteLoss();
}

}  // namespace recsync
