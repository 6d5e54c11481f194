#include "cc/simulation/server_simulation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "cc/simulation/random_numbers.h"

namespace recsync {
namespace {

// Links and token lists have whole nanoseconds, of less than 292 years.
Link::Time TimeOf(double seconds) {
  constexpr double kMostSeconds = 8e9;
  return Link::Time(std::chrono::duration_cast<Link::Time::duration>(
      std::chrono::duration<double>(std::min(seconds, kMostSeconds))));
}

// For how long something was passing a link.
double BusySeconds(const Link& link, double now) {
  return link.Busy(TimeOf(now)).count();
}

double SecondsOf(Link::Time time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

int64_t ShareOf(int64_t bytes, int servers) {
  return bytes / servers + (bytes % servers != 0);
}

Result CheckNumber(const char* name, double value, double most) {
  if (value >= 0.0 && value <= most) return Result::Ok();
  return Result::Error(name, " must be from 0 to ", most, ", not ", value);
}

}  // namespace

Result CheckOptions(const ServerSimulationOptions& options) {
  constexpr int64_t kMostSteps = int64_t{1} << 40;
  constexpr int kMostOfAll = 1 << 20;
  constexpr int64_t kMostPairs = int64_t{1} << 28;
  constexpr double kMostSeconds = 1e6;
  constexpr double kMostNoise = 5.0;
  for (const auto& [name, value, most] :
       {std::tuple<const char*, int64_t, int64_t>("workers", options.workers,
                                                  kMostOfAll),
        {"servers", options.servers, kMostOfAll},
        {"steps", options.steps, kMostSteps},
        {"repeats", options.repeats, kMostOfAll},
        {"capacity", options.capacity, kMostOfAll},
        {"workers_per_machine", options.workers_per_machine, kMostOfAll},
        {"threads", options.threads, kMostOfAll}}) {
    if (value < 1 || value > most) {
      return Result::Error(name, " must be from 1 to ", most, ", not ", value);
    }
  }
  if (int64_t{options.workers} * options.servers > kMostPairs) {
    return Result::Error("workers * servers must be at most ", kMostPairs,
                         ", not ", int64_t{options.workers} * options.servers);
  }
  for (const auto& [name, value, most] :
       {std::tuple<const char*, int64_t, int64_t>(
            "warmup_steps", options.warmup_steps, options.steps - 1),
        {"cooldown_steps", options.cooldown_steps,
         options.steps - options.warmup_steps - 1},
        {"evaluate_every", options.evaluate_every, kMostSteps},
        {"clock_bound", options.clock_bound,
         std::numeric_limits<int64_t>::max()},
        {"reader_ahead", options.reader_ahead, kMostOfAll},
        {"pull_bytes", options.pull_bytes, int64_t{1} << 50},
        {"push_bytes", options.push_bytes, int64_t{1} << 50}}) {
    if (value < 0 || value > most) {
      return Result::Error(name, " must be from 0 to ", most, ", not ", value);
    }
  }
  if (static_cast<int>(options.compute_seconds.size()) != options.workers) {
    return Result::Error("compute_seconds must be of ", options.workers,
                         " workers, not ", options.compute_seconds.size());
  }
  std::vector<std::tuple<const char*, double, double>> numbers{
      {"noise", options.noise, kMostNoise},
      {"reader_seconds", options.reader_seconds, kMostSeconds},
      {"latency", options.latency, kMostSeconds},
      {"seconds_per_pull", options.seconds_per_pull, kMostSeconds},
      {"seconds_per_application", options.seconds_per_application,
       kMostSeconds},
      {"seconds_per_byte", options.seconds_per_byte, kMostSeconds}};
  for (const double seconds : options.compute_seconds) {
    numbers.emplace_back("compute_seconds", seconds, kMostSeconds);
  }
  for (const auto& [name, value, most] : numbers) {
    if (Result checked = CheckNumber(name, value, most); !checked.ok()) {
      return checked;
    }
  }
  for (const auto& [name, value] :
       {std::pair("worker_bandwidth", options.worker_bandwidth),
        std::pair("server_bandwidth", options.server_bandwidth)}) {
    if (!(value > 0.0)) {
      return Result::Error(name, " must be positive, not ", value);
    }
  }
  if (options.uses_buffers && !options.uses_tokens) {
    return Result::Error("uses_buffers needs uses_tokens");
  }
  GradientBufferOptions buffer;
  buffer.capacity = options.capacity;
  buffer.weight = options.weight;
  return CheckOptions(buffer);
}

ServerSimulation::Processor::Processor(int threads) {
  for (int i = 0; i < threads; ++i) free_at_.push(0.0);
}

double ServerSimulation::Processor::Busy(double now) const {
  double left = 0.0;
  for (auto free_at = free_at_; !free_at.empty(); free_at.pop()) {
    left += std::max(free_at.top() - now, 0.0);
  }
  return std::max(reserved_ - left, 0.0);
}

double ServerSimulation::Processor::Reserve(double seconds, double now) {
  if (seconds <= 0.0 && free_at_.top() <= now) return now;
  const double done = std::max(free_at_.top(), now) + seconds;
  free_at_.pop();
  free_at_.push(done);
  reserved_ += seconds;
  return done;
}

ServerSimulation::Server::Server(
    const ServerSimulationOptions& options,
    std::vector<GradientBufferOptions::Table> tables)
    : processor(options.threads) {
  if (!options.uses_buffers) return;
  GradientBufferOptions mode;
  mode.capacity = options.capacity;
  mode.divisor = static_cast<double>(options.capacity);
  mode.weight = options.weight;
  mode.drop_late = options.drop_late;
  mode.tables = std::move(tables);
  buffer = std::make_unique<GradientBuffer>(mode);
}

ServerSimulation::ServerSimulation(const ServerSimulationOptions& options,
                                   Learner* learner)
    : options_(options),
      learner_(learner),
      pull_bytes_(ShareOf(options.pull_bytes, options.servers)),
      push_bytes_(ShareOf(options.push_bytes, options.servers)),
      workers_(options.workers),
      machines_((options.workers - 1) / options.workers_per_machine + 1),
      pulled_(static_cast<size_t>(options.workers) * options.servers) {
  for (int w = 0; w < options.workers; ++w) {
    workers_[w].machine = w / options.workers_per_machine;
  }
  for (int s = 0; s < options.servers; ++s) {
    servers_.push_back(std::make_unique<Server>(
        options, learner == nullptr
                     ? std::vector<GradientBufferOptions::Table>()
                     : learner->TablesOf(s)));
  }
  if (options.uses_tokens) {
    TokenList::Options list;
    list.repeats = options.repeats;
    list.gate = options.gate;
    list.clock_bound = options.clock_bound;
    list.servers = options.uses_buffers ? options.servers : 1;
    list.workers = options.workers;
    tokens_ = std::make_unique<TokenList>(
        list, [this] { return TimeOf(events_.now()); });
  }
}

Result ServerSimulation::Run(const std::function<bool()>& goes_on) {
  before_ = Now();
  for (int i = 0; i < options_.reader_ahead; ++i) {
    for (Worker& worker : workers_) Fetch(&worker, 0.0);
  }
  for (int w = 0; w < options_.workers; ++w) Begin(w);
  const Result done = events_.RunWhile([this] { return error_.ok(); }, goes_on);
  if (!done.ok()) return done;
  if (!error_.ok()) return error_;
  if (done_ != options_.steps) {
    return Result::Error("all wait for each other after ", done_, " steps");
  }
  Flush();
  if (options_.cooldown_steps == 0) after_ = Now();
  return error_;
}

bool ServerSimulation::Fail(const Result& result) {
  if (error_.ok()) error_ = result;
  return result.ok();
}

double ServerSimulation::Pass(Link* link, int64_t bytes, double bandwidth) {
  const double now = events_.now();
  if (bandwidth == ServerSimulationOptions::kUnlimited) return now;
  return std::max(now, SecondsOf(link->Reserve(bytes, bandwidth, TimeOf(now))));
}

template <typename Event>
void ServerSimulation::When(double time, Event event) {
  if (time > events_.now()) {
    events_.At(time, std::move(event));
  } else {
    event();
  }
}

void ServerSimulation::Fetch(Worker* worker, double time) {
  if (claimed_ == options_.steps) return;
  worker->made = std::max(worker->made, time) + options_.reader_seconds;
  worker->ahead.push_back({claimed_++, worker->made});
}

bool ServerSimulation::NextBatch(int w, double* time) {
  Worker& worker = workers_[w];
  if (options_.reader_ahead == 0) Fetch(&worker, events_.now());
  if (worker.ahead.empty()) return false;
  const Batch batch = worker.ahead.front();
  worker.ahead.pop_front();
  *time = std::max(events_.now(), batch.ready);
  if (options_.reader_ahead > 0) Fetch(&worker, *time);
  if (learner_ != nullptr) learner_->Begin(w, batch.number);
  return true;
}

// The worker has nothing of another step to do.
void ServerSimulation::Begin(int w) {
  workers_[w].done = events_.now();
  double time;
  if (NextBatch(w, &time)) {
    When(time, [this, w] { HasBatch(w); });
  } else if (options_.gate == TokenList::Gate::kClock) {
    tokens_->Leave(w);  // Nobody waits for it any more.
  }
}

void ServerSimulation::HasBatch(int w) {
  Worker& worker = workers_[w];
  const double now = worker.batch = worker.token = events_.now();
  worker.to_answer = options_.servers;
  if (options_.uses_tokens) {
    When(now + options_.latency, [this, w] {
      tokens_->Take(
          w, [this, w](TokenList::Answer answer, TokenList::Token token) {
            HasToken(w, answer, token);
          });
    });
    return;
  }
  When(now + options_.latency, [this, w] {
    for (int s = 0; s < options_.servers; ++s) Pull(w, s);
  });
}

void ServerSimulation::HasToken(int w, TokenList::Answer answer,
                                TokenList::Token token) {
  if (answer != TokenList::Answer::kToken) return;  // At the end of all.
  Worker& worker = workers_[w];
  worker.taken = token;
  const double there =
      events_.now() + latency_to_home(options_.servers > 1 ? 1 : 0);
  worker.token = there;
  // Not within the call of who opened the gate.
  events_.After(0.0, [this, w] { Pull(w, 0); });
  if (options_.servers == 1) return;
  events_.At(there, [this, w] {
    for (int s = 1; s < options_.servers; ++s) Pull(w, s);
  });
}

void ServerSimulation::Pull(int w, int s) {
  Server& server = *servers_[s];
  if (options_.uses_buffers) pulled(w, s) = server.buffer->applied();
  const double read = server.processor.Reserve(
      options_.seconds_per_pull +
          options_.seconds_per_byte * static_cast<double>(pull_bytes_),
      events_.now());
  When(read, [this, w, s] { Read(w, s); });
}

void ServerSimulation::Read(int w, int s) {
  Server& server = *servers_[s];
  if (!options_.uses_buffers) pulled(w, s) = server.version;
  if (learner_ != nullptr) learner_->Pull(w, s);
  const double sent = Pass(&server.out, pull_bytes_, options_.server_bandwidth);
  if (options_.worker_bandwidth == ServerSimulationOptions::kUnlimited) {
    Answered(w, sent + options_.latency);
  } else {
    When(sent + options_.latency, [this, w] { Answer(w); });
  }
}

void ServerSimulation::Answer(int w) {
  Answered(w, Pass(&machines_[workers_[w].machine].in, pull_bytes_,
                   options_.worker_bandwidth));
}

void ServerSimulation::Answered(int w, double time) {
  Worker& worker = workers_[w];
  worker.pulled = std::max(worker.pulled, time);
  if (--worker.to_answer > 0) return;
  const double began = std::max(worker.batch, worker.done);
  worker.times.data += began - worker.done;
  const double token = std::max(began, worker.token);
  worker.times.token += token - began;
  worker.times.pull += worker.pulled - token;
  worker.computed = worker.pulled + ComputeSeconds(w, worker.pulled);
  worker.times.compute += worker.computed - worker.pulled;
  ++worker.begun;
  if (learner_ != nullptr) learner_->Compute(w);
  events_.At(worker.computed, [this, w] { Computed(w); });
}

double ServerSimulation::ComputeSeconds(int w, double now) {
  double seconds = options_.compute_seconds[w];
  const int64_t step = workers_[w].begun;
  if (options_.noise > 0.0) {
    const double sigma = options_.noise;
    RandomNumbers random(options_.seed, RandomNumbers::kNoise,
                         static_cast<uint32_t>(w), step);
    seconds *= std::exp(sigma * random.Normal() - sigma * sigma / 2);
  }
  if (options_.factor) {
    const double factor = options_.factor(w, step, now);
    if (!(factor >= 0.0 && std::isfinite(factor))) {
      Fail(
          Result::Error("a slowdown's factor must be finite and at least 0, "
                        "not ",
                        factor, " of worker ", w, " in step ", step));
      return 0.0;
    }
    seconds *= factor;
  }
  return seconds;
}

void ServerSimulation::Computed(int w) {
  Worker& worker = workers_[w];
  worker.to_finish = options_.servers;
  worker.done = events_.now();
  if (answers_at_once()) {
    worker.to_answer = options_.servers;
    worker.has_next = NextBatch(w, &worker.next_batch);
  }
  // Workers begin with different servers.
  for (int i = 0; i < options_.servers; ++i) {
    const int s = static_cast<int>((int64_t{w} + i) % options_.servers);
    const double sent = Pass(&machines_[worker.machine].out, push_bytes_,
                             options_.worker_bandwidth);
    events_.At(sent + options_.latency, [this, w, s] { Arrived(w, s); });
  }
}

void ServerSimulation::Arrived(int w, int s) {
  When(Pass(&servers_[s]->in, push_bytes_, options_.server_bandwidth),
       [this, w, s] { Enqueue(w, s); });
}

void ServerSimulation::Enqueue(int w, int s) {
  const double of_bytes =
      options_.seconds_per_byte * static_cast<double>(push_bytes_);
  if (options_.uses_buffers) {
    When(servers_[s]->processor.Reserve(of_bytes, events_.now()),
         [this, w, s] { Collect(w, s); });
    return;
  }
  When(servers_[s]->processor.Reserve(
           options_.seconds_per_application + of_bytes, events_.now()),
       [this, w, s] { Applied(w, s); });
}

void ServerSimulation::Collect(int w, int s) {
  Server& server = *servers_[s];
  GradientPush push;
  push.token_index = workers_[w].taken.index;
  push.token_value = workers_[w].taken.value;
  push.ticket = workers_[w].taken.ticket;
  push.pulled_step = pulled(w, s);
  if (learner_ != nullptr) learner_->Collect(w, s, &push);
  std::unique_ptr<Aggregate> aggregate;
  if (!Fail(server.buffer->Push(push, &aggregate))) return;
  if (aggregate == nullptr) return Applied(w, s);
  const double applied = server.processor.Reserve(
      options_.seconds_per_application +
          options_.seconds_per_byte * static_cast<double>(push_bytes_),
      events_.now());
  When(applied,
       [this, w, s, given = std::shared_ptr<Aggregate>(std::move(aggregate))] {
         ApplyStep(w, s, *given);
       });
}

void ServerSimulation::ApplyStep(int w, int s, const Aggregate& aggregate) {
  GradientBuffer& buffer = *servers_[s]->buffer;
  if (learner_ != nullptr) learner_->ApplyStep(s, aggregate);
  if (!Fail(buffer.Applied(aggregate.step()))) return;
  if (options_.gate == TokenList::Gate::kStep) {
    events_.After(latency_to_home(s), [this, s, at = buffer.applied()] {
      tokens_->ReportStep(s, at);
    });
  }
  Applied(w, s);
}

void ServerSimulation::Applied(int w, int s) {
  Worker& worker = workers_[w];
  const double now = events_.now();
  if (!options_.uses_buffers) {
    Server& server = *servers_[s];
    StalenessCounters(server.staleness.data())
        .Add(server.version - pulled(w, s) + 1);
    ++server.version;
    if (learner_ != nullptr) learner_->Apply(w, s);
  }
  if (!answers_at_once()) {
    // A server tells the token list how far it is, and the list the worker.
    const bool tells = options_.gate == TokenList::Gate::kStep;
    return Finished(
        w, now + (tells ? latency_to_home(s) : 0.0) + options_.latency);
  }
  Finished(w, now);
  if (worker.has_next) {
    When(worker.next_batch + options_.latency, [this, w, s] { Pull(w, s); });
  }
}

void ServerSimulation::Finished(int w, double heard) {
  Worker& worker = workers_[w];
  worker.done = std::max(worker.done, heard);
  if (--worker.to_finish > 0) return;
  worker.times.push += worker.done - worker.computed;
  if (answers_at_once()) {
    worker.batch = worker.token = worker.next_batch;
    StepDone(w);
    return;
  }
  When(worker.done, [this, w] { StepDone(w); });
}

void ServerSimulation::StepDone(int w) {
  ++workers_[w].times.steps;
  ++done_;
  if (done_ == options_.warmup_steps) before_ = Now();
  // At the end, buffers are flushed before.
  if (options_.cooldown_steps > 0 &&
      done_ == options_.steps - options_.cooldown_steps) {
    after_ = Now();
  }
  if (learner_ != nullptr && options_.evaluate_every > 0 &&
      done_ % options_.evaluate_every == 0) {
    learner_->Evaluate(done_, events_.now());
  }
  if (!answers_at_once()) Begin(w);
}

void ServerSimulation::Flush() {
  if (!options_.uses_buffers) return;
  for (int s = 0; s < options_.servers; ++s) {
    GradientBuffer& buffer = *servers_[s]->buffer;
    if (!options_.flush) {
      left_over_ += buffer.state().pending;
    } else if (const auto aggregate = buffer.Flush()) {
      if (learner_ != nullptr) learner_->ApplyStep(s, *aggregate);
      Fail(buffer.Applied(aggregate->step()));
    }
  }
}

ServerSimulationState ServerSimulation::Now() const {
  ServerSimulationState state;
  const double now = state.seconds = events_.now();
  state.steps = done_;
  for (const Worker& worker : workers_) state.workers.push_back(worker.times);
  for (const std::unique_ptr<Server>& server : servers_) {
    state.staleness.push_back(server->staleness);
    if (server->buffer) state.buffers.push_back(server->buffer->state());
    state.processor.push_back(server->processor.Busy(now));
    state.server_in.push_back(BusySeconds(server->in, now));
    state.server_out.push_back(BusySeconds(server->out, now));
  }
  for (int s = 0; learner_ != nullptr && s < options_.servers; ++s) {
    state.rows_staleness.push_back(learner_->RowsStaleness(s));
  }
  for (const Machine& machine : machines_) {
    state.worker_in.push_back(BusySeconds(machine.in, now));
    state.worker_out.push_back(BusySeconds(machine.out, now));
  }
  if (tokens_) state.tokens = tokens_->GetState().counts;
  return state;
}

}  // namespace recsync
