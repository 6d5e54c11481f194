#include "cc/simulation/hop_cluster.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "cc/engine/message.h"
#include "cc/engine/weighted_average.h"

namespace recsync {

HopCluster::HopCluster(HopClusterOptions options)
    : options_(std::move(options)),
      n_(options_.workers.size()),
      network_(options_.bytes_per_second, options_.duplex, options_.latency,
               &events_),
      members_(n_),
      timeless_(n_, options_.steps) {
  for (int64_t i = 0; i < n_; ++i) {
    HopOptions own = options_.workers[i];
    own.now = [this] { return Microseconds(); };
    members_[i].worker = std::make_unique<Worker>(own);
    if (options_.learning.has_value()) {
      const int64_t size = options_.learning->problem->parameters();
      members_[i].parameters.assign(size, 0.0f);
      members_[i].velocity.assign(size, 0.0f);
    }
  }
  steps_.assign(n_, 0);
  largest_gaps_.assign(n_, std::vector<int64_t>(n_, 0));
}

Result HopCluster::Check() const {
  const int64_t machines = options_.bytes_per_second.size();
  if (static_cast<int64_t>(options_.machines.size()) != n_) {
    return Result::Error("machines must be one for each of the ", n_,
                         " workers, not ", options_.machines.size());
  }
  for (const int64_t machine : options_.machines) {
    if (machine >= 0 && machine < machines) continue;
    return Result::Error("machines must be from 0 to ", machines - 1, ", not ",
                         machine);
  }
  for (const double bytes_per_second : options_.bytes_per_second) {
    if (bytes_per_second > 0) continue;
    return Result::Error("bytes_per_second must be positive, not ",
                         bytes_per_second);
  }
  if (!(options_.latency >= 0 && std::isfinite(options_.latency))) {
    return Result::Error("latency must be finite and at least 0, not ",
                         options_.latency);
  }
  if (options_.update_bytes < 0 ||
      options_.update_bytes > VirtualNetwork::kMostBytes) {
    return Result::Error("update_bytes must be from 0 to ",
                         VirtualNetwork::kMostBytes, ", not ",
                         options_.update_bytes);
  }
  if (options_.steps < 0) {
    return Result::Error("steps must be at least 0, not ", options_.steps);
  }
  if (!(options_.seconds >= 0)) {
    return Result::Error("seconds must be at least 0, not ", options_.seconds);
  }
  if (options_.learning.has_value() && !(options_.learning->loss_seconds > 0)) {
    return Result::Error("loss_seconds must be positive, not ",
                         options_.learning->loss_seconds);
  }
  // Who sends knows its receivers, and they know who sends.
  std::set<std::pair<int64_t, int64_t>> sent;
  std::set<std::pair<int64_t, int64_t>> received;
  for (int64_t i = 0; i < n_; ++i) {
    const HopOptions& own = options_.workers[i];
    for (const int64_t j : own.out_neighbors) sent.emplace(i, j);
    for (const int64_t j : own.in_neighbors) received.emplace(j, i);
    if (own.weights.size() == own.in_neighbors.size()) continue;
    return Result::Error("weights of worker ", i, " must be ",
                         own.in_neighbors.size(), ", not ", own.weights.size());
  }
  if (sent != received) {
    return Result::Error(
        "in_neighbors and out_neighbors of all workers must "
        "be the same edges");
  }
  for (const auto& [i, j] : sent) {
    if (i != j && j >= 0 && j < n_) continue;
    return Result::Error("neighbors of worker ", i,
                         " must be others from 0 to ", n_ - 1, ", not ", j);
  }
  return Result::Ok();
}

Result HopCluster::Run(const std::function<bool()>& goes_on) {
  const Result checked = Check();
  if (!checked.ok()) return checked;
  there_ = n_;
  for (int64_t i = 0; i < n_; ++i) {
    const HopOptions& own = options_.workers[i];
    std::set<int64_t> neighbors(own.in_neighbors.begin(),
                                own.in_neighbors.end());
    neighbors.insert(own.out_neighbors.begin(), own.out_neighbors.end());
    for (const int64_t j : neighbors) Collect(i, j);
    Begin(i);
  }
  if (options_.learning.has_value()) LookAtLoss();
  if (std::isfinite(options_.seconds)) {
    events_.At(options_.seconds, [this] {
      if (there_ > 0) Stop();
    });
  }
  const Result done = events_.RunWhile(
      [this] { return !has_stopped_ && !timeless_.are_endless(); }, goes_on);
  if (!done.ok()) return done;
  for (int64_t i = 0; i < n_; ++i) KeepEvents(i);
  if (!error_.empty()) return Result::Error(error_);
  if (timeless_.are_endless()) return timeless_.Error(options_.seconds);
  if (!has_stopped_ && there_ > 0) return Result::Error(Standstill());
  return Result::Ok();
}

std::vector<HopState> HopCluster::States() const {
  std::vector<HopState> states;
  for (const Member& member : members_) {
    states.push_back(member.worker->GetState());
  }
  return states;
}

// Workers.

void HopCluster::Begin(int64_t i) {
  if (taken_ == options_.steps) {
    Leave(i);
    return;
  }
  ++taken_;
  Worker* const worker = members_[i].worker.get();
  const int64_t next = worker->PlanNext();
  if (!worker->IsJump(next)) {
    Acquire(i, next);
    return;
  }
  // Before it jumps the worker renews its parameters.
  worker->Receive(next - 1, [this, i, next](HopAnswer answer, auto received) {
    if (!IsOk(i, answer)) return;
    Soon([this, i, next, received = std::move(received)] {
      Average(i, received, nullptr);
      Acquire(i, next);
    });
  });
}

void HopCluster::Acquire(int64_t i, int64_t next) {
  members_[i].worker->AcquireTokens(next, [this, i, next](HopAnswer answer) {
    if (!IsOk(i, answer)) return;
    Soon([this, i, next] { Enter(i, next); });
  });
}

void HopCluster::Enter(int64_t i, int64_t next) {
  Member& member = members_[i];
  std::optional<Update> update;
  member.base = nullptr;
  if (!options_.serial) {
    if (options_.learning.has_value()) {
      member.base =
          std::make_shared<const std::vector<float>>(member.parameters);
    }
    update = member.base;
  }
  // Both the update is on its way and the gradient is computed, in any order.
  auto rest = std::make_shared<int>(2);
  const auto go_on = [this, i, next, rest] {
    if (--*rest == 0) Computed(i, next);
  };
  const double seconds = options_.compute_seconds(i, steps_[i], events_.now());
  member.worker->Enter(next, std::move(update),
                       [this, i, go_on](HopAnswer answer) {
                         if (IsOk(i, answer)) Soon(go_on);
                       });
  NoteGaps(i);
  events_.After(seconds, [this, i, go_on] {
    Learn(i);
    go_on();
  });
}

void HopCluster::Learn(int64_t i) {
  if (!options_.learning.has_value()) return;
  const HopLearning& learning = *options_.learning;
  Member& member = members_[i];
  std::vector<float> gradient(member.parameters.size());
  learning.problem->Gradient(member.parameters.data(), i, steps_[i],
                             gradient.data());
  const float momentum = static_cast<float>(learning.momentum);
  const float rate = static_cast<float>(learning.learning_rate);
  for (size_t p = 0; p < gradient.size(); ++p) {
    member.velocity[p] = momentum * member.velocity[p] - rate * gradient[p];
    member.parameters[p] += member.velocity[p];
  }
}

void HopCluster::Computed(int64_t i, int64_t iteration) {
  if (!options_.serial) {
    Receive(i, iteration);
    return;
  }
  Member& member = members_[i];
  Update update;
  if (options_.learning.has_value()) {
    update = std::make_shared<const std::vector<float>>(member.parameters);
  }
  member.worker->Send(std::move(update),
                      [this, i, iteration](HopAnswer answer) {
                        if (!IsOk(i, answer)) return;
                        Soon([this, i, iteration] { Receive(i, iteration); });
                      });
}

void HopCluster::Receive(int64_t i, int64_t iteration) {
  members_[i].worker->Receive(iteration,
                              [this, i](HopAnswer answer, auto received) {
                                if (!IsOk(i, answer)) return;
                                Soon([this, i, received = std::move(received)] {
                                  Average(i, received, members_[i].base);
                                  Finish(i);
                                });
                              });
}

void HopCluster::Finish(int64_t i) {
  members_[i].worker->Reduced();
  ++steps_[i];
  ++done_;
  seconds_ = events_.now();
  timeless_.Add(seconds_);
  KeepEvents(i);
  Begin(i);
}

void HopCluster::Average(int64_t i,
                         const std::vector<Worker::Received>& received,
                         const Update& base) {
  if (!options_.learning.has_value() || received.empty()) return;
  std::vector<float>& own = members_[i].parameters;
  std::vector<const float*> copies;
  std::vector<double> weights;
  for (const Worker::Received& item : received) {
    copies.push_back(item.update->data());
    weights.push_back(item.weight);
  }
  AverageInto<float>(copies, weights,
                     base == nullptr ? own.data() : base->data(), own.data(),
                     own.size());
}

void HopCluster::Leave(int64_t i) {
  members_[i].has_left = true;
  if (--there_ == 0 && options_.learning.has_value()) NoteLoss();
  const int64_t last = members_[i].worker->iteration();
  // As Exchange.leave does: all have to know that bounds by paths over others
  // are void before the neighbors go on; for that they are told of themselves.
  for (int64_t j = 0; j < n_; ++j) {
    members_[j].worker->SetNeighbor(j, 0, last);
  }
  for (int64_t j = 0; j < n_; ++j) {
    if (j != i) members_[j].worker->SetNeighbor(i, 0, last);
  }
}

void HopCluster::NoteGaps(int64_t i) {
  if (there_ < n_) return;
  const int64_t own = members_[i].worker->iteration();
  for (int64_t j = 0; j < n_; ++j) {
    // Before its first iteration a worker is in it already.
    const int64_t other = std::max<int64_t>(members_[j].worker->iteration(), 0);
    largest_gaps_[i][j] = std::max(largest_gaps_[i][j], own - other);
  }
}

// Edges.

void HopCluster::Collect(int64_t from, int64_t to) {
  members_[from].worker->Collect(
      to, [this, from, to](HopAnswer answer, Parcel parcel) {
        if (answer != HopAnswer::kOk) return;
        auto shared = std::make_shared<Parcel>(std::move(parcel));
        Soon([this, from, to, shared] { Ask(from, to, shared); });
      });
}

void HopCluster::Ask(int64_t from, int64_t to, std::shared_ptr<Parcel> parcel) {
  const int64_t began = Microseconds();
  events_.After(Latency(from, to), [this, from, to, parcel, began] {
    Worker* const worker = members_[to].worker.get();
    if (parcel->progress >= 0 && !worker->Announce(from, parcel->progress)) {
      Fail(to);
      return;
    }
    const bool wanted = parcel->update.has_value() &&
                        worker->Wanted(from, parcel->number, parcel->iteration);
    events_.After(Latency(to, from), [this, from, to, parcel, began, wanted] {
      if (wanted) {
        Transfer(from, to, parcel, began);
        return;
      }
      members_[from].worker->Carried(to, parcel->number, -1, began);
      Collect(from, to);
    });
  });
}

void HopCluster::Transfer(int64_t from, int64_t to,
                          std::shared_ptr<Parcel> parcel, int64_t began) {
  network_.Send(
      options_.machines[from], options_.machines[to], options_.update_bytes,
      [this, from, to, parcel, began] { Deliver(from, to, parcel, began); });
}

void HopCluster::Deliver(int64_t from, int64_t to,
                         std::shared_ptr<Parcel> parcel, int64_t began) {
  const HopDelivered delivered = members_[to].worker->Deliver(
      from, parcel->number, parcel->iteration, *parcel->update);
  if (delivered == HopDelivered::kBroken) {
    Fail(to);
    return;
  }
  events_.After(Latency(to, from), [this, from, to, parcel, began] {
    members_[from].worker->Carried(to, parcel->number, parcel->iteration,
                                   began);
    Collect(from, to);
  });
}

// The rest.

void HopCluster::Stop() {
  has_stopped_ = true;
  seconds_ = events_.now();
  if (options_.learning.has_value()) NoteLoss();
}

int64_t HopCluster::Microseconds() const {
  return std::llround(std::min(1e6 * events_.now(), 1e18));
}

void HopCluster::Fail(int64_t i) {
  const auto violation = members_[i].worker->violation();
  error_ = Message("an invariant of the protocol does not hold at worker ", i);
  if (violation.has_value()) {
    error_ += Message(", in iteration ", violation->iteration, ", of worker ",
                      violation->neighbor, ", which is in iteration ",
                      violation->progress, ": ", violation->found,
                      " where the bound is ", violation->bound);
  }
  Stop();
}

bool HopCluster::IsOk(int64_t i, HopAnswer answer) {
  // This is the end: the cluster may be gone by half.
  if (answer == HopAnswer::kClosed) return false;
  if (answer != HopAnswer::kOk) Fail(i);
  return answer == HopAnswer::kOk;
}

void HopCluster::LookAtLoss() {
  if (there_ == 0) return;
  NoteLoss();
  if (losses_.back().loss <= options_.learning->target_loss) Stop();
  // Where nothing else is going to happen, nothing changes.
  if (events_.empty()) return;
  events_.After(options_.learning->loss_seconds, [this] { LookAtLoss(); });
}

void HopCluster::NoteLoss() {
  std::vector<double> sums(options_.learning->problem->parameters(), 0.0);
  for (const Member& member : members_) {
    for (size_t p = 0; p < sums.size(); ++p) sums[p] += member.parameters[p];
  }
  std::vector<float> mean;
  for (const double sum : sums) mean.push_back(static_cast<float>(sum / n_));
  if (!losses_.empty() && losses_.back().seconds == events_.now()) {
    losses_.pop_back();
  }
  losses_.push_back(
      {events_.now(), done_, options_.learning->problem->Loss(mean.data())});
}

void HopCluster::KeepEvents(int64_t i) {
  const std::vector<recsync::Event> events = members_[i].worker->TakeEvents();
  if (!options_.keeps_events) return;
  for (const recsync::Event& event : events) kept_events_.push_back({i, event});
}

std::string HopCluster::Standstill() const {
  std::string text = "workers wait for each other for good:";
  for (int64_t i = 0; i < n_; ++i) {
    if (members_[i].has_left) continue;
    const HopState state = members_[i].worker->GetState();
    text += Message(" worker ", i, " is in iteration ", state.iteration,
                    " and waits for");
    for (const int64_t j : state.missing) text += Message(" ", j);
    text += ";";
  }
  return text;
}

}  // namespace recsync
