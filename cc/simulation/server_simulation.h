// Workers that train on parameter servers, in virtual time: what waits for
// what is as in a step of this package, and who decides is the engine itself:
// TokenList, GradientBuffer, StalenessCounters and Link.
//
//   ServerSimulation simulation(options);
//   Result done = simulation.Run([] { return true; });
//   simulation.after().staleness[0]  // StalenessCounters of server 0
//
// A step of a worker:
//   data     it waits for its batch. Its reader takes batches one after the
//            other, which nobody else gets, and keeps `reader_ahead` of them
//            ready; with 0 it begins when the step before is done.
//   token    in modes with tokens it asks server 0 for one, which goes from
//            there to all servers.
//   pull     each server's processor reads `pull_bytes / servers`, which pass
//            the server's outgoing link and the incoming one of the worker's
//            machine.
//   compute  compute_seconds[worker] x lognormal noise of mean 1 x factor.
//   push     `push_bytes / servers` pass the outgoing link of the worker's
//            machine and the incoming one of each server, whose processor then
//            applies them, or adds them up in its gradient buffer and applies
//            what that gives out.
// Without tokens, a server answers the next pull as soon as it has applied the
// push before, if the worker has its batch. With tokens, or if the reader keeps
// none ahead, the worker begins its next step when all servers have said that
// they are done.
//
// A message takes `latency` from a machine to another, before it comes to the
// link there. A processor does `threads` things side by side, who came first
// first. The same options give the same result.
//
// Thread compatible: one thread has it.

#ifndef TF_RECSYNC_CC_SIMULATION_SERVER_SIMULATION_H_
#define TF_RECSYNC_CC_SIMULATION_SERVER_SIMULATION_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <vector>

#include "cc/engine/gradient_buffer.h"
#include "cc/engine/link.h"
#include "cc/engine/result.h"
#include "cc/engine/staleness_counters.h"
#include "cc/engine/staleness_weight.h"
#include "cc/engine/token_list.h"
#include "cc/simulation/event_queue.h"
#include "cc/simulation/learner.h"

namespace recsync {

struct ServerSimulationOptions {
  static constexpr double kUnlimited = std::numeric_limits<double>::infinity();
  // By which a step's compute time is multiplied: of the worker, the steps that
  // it has done, and the seconds since all began. At least 0 and finite.
  using Factor = std::function<double(int, int64_t, double)>;

  int workers = 1;
  int servers = 1;
  int64_t steps = 1;           // of all workers together
  int64_t warmup_steps = 0;    // of these, the first: before before()
  int64_t cooldown_steps = 0;  // and the last: after after()
  int64_t evaluate_every = 0;  // steps, of what is learned; 0: not at all
  uint64_t seed = 0;

  // The mode; see synchronization/modes.py.
  bool uses_tokens = false;
  bool uses_buffers = false;  // which needs tokens
  TokenList::Gate gate = TokenList::Gate::kNone;
  int64_t repeats = 1;
  int64_t clock_bound = 0;
  int64_t capacity = 1;
  bool drop_late = false;
  StalenessWeight weight;
  // Whether what buffers still hold at the end is applied, or left over.
  bool flush = true;

  std::vector<double> compute_seconds;  // by worker
  double noise = 0.0;                   // sigma of the lognormal
  Factor factor;                        // none: 1
  double reader_seconds = 0.0;          // for a batch
  int reader_ahead = 2;                 // batches

  // Of each direction of a machine's card, in bytes per second.
  double worker_bandwidth = kUnlimited;
  double server_bandwidth = kUnlimited;
  double latency = 0.0;  // seconds, one way
  int workers_per_machine = 1;
  int64_t pull_bytes = 0;  // of a step, from all servers together
  int64_t push_bytes = 0;

  int threads = 1;  // of a server
  double seconds_per_pull = 0.0;
  double seconds_per_application = 0.0;
  double seconds_per_byte = 0.0;  // pulled, pushed, or applied from a buffer
};

Result CheckOptions(const ServerSimulationOptions& options);

// What there is at a moment.
struct ServerSimulationState {
  // Where a worker's time has gone, in seconds.
  struct Times {
    double data = 0.0;
    double token = 0.0;  // from when it has its batch
    double pull = 0.0;
    double compute = 0.0;
    double push = 0.0;  // to when the last server is done
    int64_t steps = 0;  // done
  };

  double seconds = 0.0;
  int64_t steps = 0;  // done, by all workers together
  std::vector<Times> workers;
  // By server: StalenessCounters of what it has applied at once, the state of
  // its buffer if it has one, and for how long it was busy, in seconds: its
  // processor (the sum of its threads) and its links.
  std::vector<StalenessTotals> staleness;
  std::vector<StalenessTotals> rows_staleness;  // none without a learner
  std::vector<GradientBufferState> buffers;
  std::vector<double> processor;
  std::vector<double> server_in;
  std::vector<double> server_out;
  // By the workers' machine.
  std::vector<double> worker_in;
  std::vector<double> worker_out;
  TokenList::Counts tokens;
};

class ServerSimulation {
 public:
  // The options have passed CheckOptions.
  // `learner` is not owned; without one, nobody learns.
  explicit ServerSimulation(const ServerSimulationOptions& options,
                            Learner* learner = nullptr);
  ServerSimulation(const ServerSimulation&) = delete;
  ServerSimulation& operator=(const ServerSimulation&) = delete;

  // Runs to the end of all steps; once. Asks every now and then whether it
  // shall go on; an error if not, or if a factor is out of its range.
  Result Run(const std::function<bool()>& goes_on);

  // After the first `warmup_steps`, and before the last `cooldown_steps`; at
  // the end if there are none of these.
  const ServerSimulationState& before() const { return before_; }
  const ServerSimulationState& after() const { return after_; }
  // How long all took.
  double seconds() const { return events_.now(); }
  // Pushes that the buffers held at the end and that were not applied.
  int64_t left_over() const { return left_over_; }

 private:
  using Times = ServerSimulationState::Times;

  struct Batch {
    int64_t number;
    double ready;  // when its reader has made it
  };

  struct Worker {
    int machine = 0;
    int64_t begun = 0;    // steps
    int to_answer = 0;    // servers, of the pull
    int to_finish = 0;    // servers, of the push
    double done = 0.0;    // when the step before was, on all servers
    double batch = 0.0;   // when it had its batch
    double token = 0.0;   // when the last server had its token
    double pulled = 0.0;  // when the last answer had come
    double computed = 0.0;
    bool has_next = false;    // a batch after this one
    double next_batch = 0.0;  // when it has that
    TokenList::Token taken{-1, -1, -1};
    double made = 0.0;        // when its reader has made the last batch
    std::deque<Batch> ahead;  // of the worker
    Times times;
  };

  // A server's threads.
  class Processor {
   public:
    explicit Processor(int threads);
    // When what comes now and takes so long is done.
    double Reserve(double seconds, double now);
    // For how long its threads were busy until now, together.
    double Busy(double now) const;

   private:
    std::priority_queue<double, std::vector<double>, std::greater<double>>
        free_at_;
    double reserved_ = 0.0;  // seconds, of which some are yet to come
  };

  struct Server {
    Server(const ServerSimulationOptions& options,
           std::vector<GradientBufferOptions::Table> tables);
    Link in;
    Link out;
    Processor processor;
    int64_t version = 0;
    StalenessTotals staleness{};
    std::unique_ptr<GradientBuffer> buffer;
  };

  struct Machine {
    Link in;
    Link out;
  };

  // Whether a server answers the next pull when it has applied a push.
  bool answers_at_once() const {
    return !options_.uses_tokens && options_.reader_ahead > 0;
  }
  int64_t& pulled(int worker, int server) {
    return pulled_[static_cast<size_t>(worker) * options_.servers + server];
  }
  double latency_to_home(int server) const {
    return server == 0 ? 0.0 : options_.latency;
  }
  // When something of a size has passed a link that it comes to now.
  double Pass(Link* link, int64_t bytes, double bandwidth);
  // Has something happen when a time has come, at once if that is now.
  template <typename Event>
  void When(double time, Event event);

  // Keeps the first error, with which all ends; whether this is none.
  bool Fail(const Result& result);

  // A worker's reader takes another batch, if there is one, at a time.
  void Fetch(Worker* worker, double time);
  // Gives a worker its next batch, which it has at `time`; false if there is
  // none left.
  bool NextBatch(int worker, double* time);

  // In the order of a step.
  void Begin(int worker);
  void HasBatch(int worker);
  void HasToken(int worker, TokenList::Answer answer, TokenList::Token token);
  void Pull(int worker, int server);
  void Read(int worker, int server);
  void Answer(int worker);
  void Answered(int worker, double time);
  void Computed(int worker);
  void Arrived(int worker, int server);
  void Enqueue(int worker, int server);
  void Collect(int worker, int server);
  void ApplyStep(int worker, int server, const Aggregate& aggregate);
  void Applied(int worker, int server);
  // A server is done with a worker's step, which hears of it at `heard`.
  void Finished(int worker, double heard);
  void StepDone(int worker);

  double ComputeSeconds(int worker, double now);
  void Flush();
  ServerSimulationState Now() const;

  const ServerSimulationOptions options_;
  Learner* const learner_;    // or null
  const int64_t pull_bytes_;  // of a server
  const int64_t push_bytes_;
  std::vector<Worker> workers_;
  std::vector<Machine> machines_;
  std::vector<std::unique_ptr<Server>> servers_;
  // The version, or the step of the buffer, that a worker has pulled.
  std::vector<int64_t> pulled_;
  std::unique_ptr<TokenList> tokens_;
  // Has aggregates that must be gone before their buffers are.
  EventQueue events_;
  int64_t claimed_ = 0;  // batches
  int64_t done_ = 0;     // steps
  int64_t left_over_ = 0;
  Result error_ = Result::Ok();
  ServerSimulationState before_;
  ServerSimulationState after_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_SIMULATION_SERVER_SIMULATION_H_
