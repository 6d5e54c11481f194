#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cc/engine/staleness_counters.h"
#include "cc/python/goes_on.h"
#include "cc/simulation/click_learner.h"
#include "cc/simulation/server_simulation.h"

namespace recsync {

namespace py = pybind11;

namespace {

using Options = ServerSimulationOptions;
using State = ServerSimulationState;

// By worker and step, float32 [workers, steps]: the factors of the steps from
// `first` on, or none where factors depend on the time.
using FactorBlock =
    py::array_t<float, py::array::c_style | py::array::forcecast>;

TokenList::Gate GateOf(const std::string& name) {
  if (name == "none") return TokenList::Gate::kNone;
  if (name == "step") return TokenList::Gate::kStep;
  if (name == "clock") return TokenList::Gate::kClock;
  throw py::value_error("gate must be none, step or clock, not " + name);
}

// The factors of blocks of steps, which Python is asked for when it is needed.
class Blocks {
 public:
  Blocks(int workers, std::function<FactorBlock(int64_t)> more)
      : workers_(workers), more_(std::move(more)) {}

  double Of(int worker, int64_t step) {
    while (step >= known_) {
      py::gil_scoped_acquire acquire;
      const FactorBlock block = more_(known_);
      if (block.ndim() != 2 || block.shape(0) != workers_ ||
          block.shape(1) < 1) {
        throw py::value_error("factors must be of all workers and some steps");
      }
      blocks_.push_back({known_,
                         block.shape(1),
                         {block.data(), block.data() + block.size()}});
      known_ += block.shape(1);
    }
    const auto after = std::upper_bound(
        blocks_.begin(), blocks_.end(), step,
        [](int64_t s, const Block& block) { return s < block.first; });
    const Block& block = *(after - 1);
    return block.factors[worker * block.steps + step - block.first];
  }

 private:
  struct Block {
    int64_t first;
    int64_t steps;
    std::vector<float> factors;  // [workers, steps]
  };

  const int workers_;
  const std::function<FactorBlock(int64_t)> more_;
  std::vector<Block> blocks_;
  int64_t known_ = 0;
};

py::array_t<int64_t> Array(const std::vector<StalenessTotals>& rows) {
  py::array_t<int64_t> array({rows.size(), size_t{StalenessCounters::kSize}});
  int64_t* to = array.mutable_data();
  for (const auto& row : rows) to = std::copy(row.begin(), row.end(), to);
  return array;
}

py::array_t<double> Array(const std::vector<double>& values) {
  return py::array_t<double>(values.size(), values.data());
}

py::dict DictOf(const GradientBufferState& state) {
  py::dict dict;
  dict["step"] = state.step;
  dict["applied"] = state.applied;
  dict["pending"] = state.pending;
  dict["included"] = state.included;
  dict["decayed"] = state.decayed;
  dict["excluded"] = state.excluded;
  dict["late"] = state.late;
  dict["duplicates"] = state.duplicates;
  dict["spent"] = state.spent;
  dict["applications"] = state.applications;
  dict["age_sum"] = state.age_sum;
  dict["age_max"] = state.age_max;
  dict["staleness"] = Array({state.staleness})[py::int_(0)];
  return dict;
}

py::dict DictOf(const State& state) {
  py::dict dict;
  dict["seconds"] = state.seconds;
  dict["steps"] = state.steps;
  py::array_t<double> times({state.workers.size(), size_t{6}});
  double* to = times.mutable_data();
  for (const State::Times& t : state.workers) {
    for (const double value : {t.data, t.token, t.pull, t.compute, t.push,
                               static_cast<double>(t.steps)}) {
      *to++ = value;
    }
  }
  dict["times"] = times;
  dict["staleness"] = Array(state.staleness);
  dict["rows_staleness"] = Array(state.rows_staleness);
  py::list buffers;
  for (const GradientBufferState& buffer : state.buffers) {
    buffers.append(DictOf(buffer));
  }
  dict["buffers"] = buffers;
  dict["processor"] = Array(state.processor);
  dict["server_in"] = Array(state.server_in);
  dict["server_out"] = Array(state.server_out);
  dict["worker_in"] = Array(state.worker_in);
  dict["worker_out"] = Array(state.worker_out);
  return dict;
}

// A policy's attributes, without their prefix.
StalenessWeight WeightOf(const py::dict& attributes) {
  StalenessWeight weight;
  const auto number = [&](const char* name) {
    return attributes[name].cast<double>();
  };
  if (!ParseStalenessDecay(attributes["decay"].cast<std::string>(),
                           &weight.decay)) {
    throw py::value_error("decay must be constant, inverse_power or threshold");
  }
  weight.power = number("power");
  weight.baseline = number("baseline");
  weight.normalized = attributes["normalized"].cast<bool>();
  weight.iota = number("iota");
  weight.update_sensitivity = number("update_sensitivity");
  weight.target_deviation = number("target_deviation");
  weight.target_mean = number("target_mean");
  weight.window = attributes["deviation_window"].cast<int64_t>();
  return weight;
}

LearnerUpdate UpdateOf(const py::dict& optimizer) {
  LearnerUpdate update;
  const auto rule = optimizer["rule"].cast<std::string>();
  if (rule == "sgd") {
    update.rule = LearnerUpdate::Rule::kSgd;
  } else if (rule == "adagrad") {
    update.rule = LearnerUpdate::Rule::kAdagrad;
  } else if (rule == "rowwise_adagrad") {
    update.rule = LearnerUpdate::Rule::kRowwiseAdagrad;
  } else {
    throw py::value_error("rule must be sgd, adagrad or rowwise_adagrad, not " +
                          rule);
  }
  update.learning_rate = optimizer["learning_rate"].cast<float>();
  update.epsilon = optimizer["epsilon"].cast<float>();
  update.initial_accumulator =
      optimizer["initial_accumulator_value"].cast<float>();
  update.options.swap.period = optimizer["swap_period"].cast<int64_t>();
  update.options.swap.decay = optimizer["swap_decay"].cast<double>();
  update.options.weight = WeightOf(optimizer["staleness"].cast<py::dict>());
  if (!ParseNonfinite(optimizer["nonfinite"].cast<std::string>(),
                      &update.options.nonfinite)) {
    throw py::value_error("nonfinite must be apply, skip or error");
  }
  return update;
}

std::unique_ptr<ClickLearner> LearnerOf(int workers, int servers,
                                        const py::dict& model) {
  ClickLearnerOptions options;
  options.workers = workers;
  options.servers = servers;
  options.data.features = model["features"].cast<int>();
  options.data.vocabulary = model["vocabulary"].cast<int>();
  options.data.numbers = model["numbers"].cast<int>();
  options.data.dimension = model["dimension"].cast<int>();
  options.data.signal = model["signal"].cast<double>();
  options.data.number_mean = model["number_mean"].cast<double>();
  options.data.number_pairs = model["number_pairs"].cast<double>();
  options.data.drift = model["drift"].cast<double>();
  options.data.day_batches = model["day_batches"].cast<int64_t>();
  options.hidden.units = model["hidden_units"].cast<std::vector<int>>();
  options.hidden.mean_normalization = model["mean_normalization"].cast<bool>();
  options.hidden.momentum = model["momentum"].cast<float>();
  options.hidden.epsilon = model["epsilon"].cast<float>();
  options.data.seed = model["seed"].cast<uint64_t>();
  options.batch_size = model["batch_size"].cast<int>();
  options.test_examples = model["test_examples"].cast<int>();
  options.dense = UpdateOf(model["dense"].cast<py::dict>());
  options.rows = UpdateOf(model["rows"].cast<py::dict>());
  if (const Result checked = CheckOptions(options); !checked.ok()) {
    throw py::value_error(checked.error());
  }
  return std::make_unique<ClickLearner>(options);
}

py::dict SimulateServers(
    int workers, int servers, int64_t steps, int64_t warmup_steps,
    int64_t cooldown_steps, uint64_t seed, bool uses_tokens, bool uses_buffers,
    const std::string& gate, int64_t repeats, int64_t clock_bound,
    int64_t capacity, bool drop_late, const py::dict& weight, bool flush,
    const std::vector<double>& compute_seconds, double noise,
    const std::function<FactorBlock(int64_t)>& more_factors,
    const std::function<double(int, int64_t, double)>& factor,
    double reader_seconds, int reader_ahead, double worker_bandwidth,
    double server_bandwidth, double latency, int workers_per_machine,
    int64_t pull_bytes, int64_t push_bytes, int threads,
    double seconds_per_pull, double seconds_per_application,
    double seconds_per_byte, const std::optional<py::dict>& model,
    int64_t evaluate_every) {
  Options options;
  options.workers = workers;
  options.servers = servers;
  options.steps = steps;
  options.warmup_steps = warmup_steps;
  options.cooldown_steps = cooldown_steps;
  options.seed = seed;
  options.uses_tokens = uses_tokens;
  options.uses_buffers = uses_buffers;
  options.gate = GateOf(gate);
  options.repeats = repeats;
  options.clock_bound = clock_bound;
  options.capacity = capacity;
  options.drop_late = drop_late;
  options.weight = WeightOf(weight);
  options.flush = flush;
  options.compute_seconds = compute_seconds;
  options.noise = noise;
  Blocks blocks(workers, more_factors);
  if (more_factors) {
    options.factor = [&blocks](int worker, int64_t step, double) {
      return blocks.Of(worker, step);
    };
  } else if (factor) {
    options.factor = [&factor](int worker, int64_t step, double seconds) {
      py::gil_scoped_acquire acquire;
      return factor(worker, step, seconds);
    };
  }
  options.reader_seconds = reader_seconds;
  options.reader_ahead = reader_ahead;
  options.worker_bandwidth = worker_bandwidth;
  options.server_bandwidth = server_bandwidth;
  options.latency = latency;
  options.workers_per_machine = workers_per_machine;
  options.pull_bytes = pull_bytes;
  options.push_bytes = push_bytes;
  options.threads = threads;
  options.seconds_per_pull = seconds_per_pull;
  options.seconds_per_application = seconds_per_application;
  options.seconds_per_byte = seconds_per_byte;
  if (const Result checked = CheckOptions(options); !checked.ok()) {
    throw py::value_error(checked.error());
  }
  std::unique_ptr<ClickLearner> learner;
  if (model) learner = LearnerOf(workers, servers, *model);
  options.evaluate_every = evaluate_every;
  ServerSimulation simulation(options, learner.get());
  Result done = Result::Ok();
  {
    py::gil_scoped_release release;
    done = simulation.Run(GoesOn);
  }
  if (!done.ok()) throw py::value_error(done.error());
  py::dict result;
  result["before"] = DictOf(simulation.before());
  result["after"] = DictOf(simulation.after());
  result["seconds"] = simulation.seconds();
  result["left_over"] = simulation.left_over();
  if (learner) {
    learner->TestAfter(steps);
    result["auc"] = learner->Auc();
    result["bayes_auc"] = learner->bayes_auc();
    py::list evaluations;
    for (const ClickLearner::Evaluation& one : learner->evaluations()) {
      evaluations.append(
          py::make_tuple(one.steps, one.seconds, one.auc, one.bayes_auc));
    }
    result["evaluations"] = evaluations;
  }
  return result;
}

}  // namespace

void RegisterSimulationBindings(py::module_& m) {
  m.def("simulate_servers", &SimulateServers, py::kw_only(), py::arg("workers"),
        py::arg("servers"), py::arg("steps"), py::arg("warmup_steps"),
        py::arg("cooldown_steps"), py::arg("seed"), py::arg("uses_tokens"),
        py::arg("uses_buffers"), py::arg("gate"), py::arg("repeats"),
        py::arg("clock_bound"), py::arg("capacity"), py::arg("drop_late"),
        py::arg("weight"), py::arg("flush"), py::arg("compute_seconds"),
        py::arg("noise"), py::arg("more_factors").none(true),
        py::arg("factor").none(true), py::arg("reader_seconds"),
        py::arg("reader_ahead"), py::arg("worker_bandwidth"),
        py::arg("server_bandwidth"), py::arg("latency"),
        py::arg("workers_per_machine"), py::arg("pull_bytes"),
        py::arg("push_bytes"), py::arg("threads"), py::arg("seconds_per_pull"),
        py::arg("seconds_per_application"), py::arg("seconds_per_byte"),
        py::arg("model").none(true), py::arg("evaluate_every"),
        R"(Runs workers on parameter servers in virtual time.

The arguments are those of ServerSimulationOptions in C++, which says more.
`weight` is a policy's attributes, without their prefix. `more_factors(first)`
gives the factors of some steps from `first` on, float32 [workers, steps];
`factor(worker, step, seconds)` one; both may be None. `model` is a ClickLearner's
options, with the optimizers of its "dense" part and of its "rows" as dicts; None
for time alone.

Returns:
  What there is "before" (after the first `warmup_steps`) and "after" (before the last
  `cooldown_steps`), and the "seconds" of all: `times` is
  float64 [workers, 6], the seconds of data, token, pull, compute and push, and
  the steps; `staleness` int64 [servers, STALENESS_COUNTERS], as `rows_staleness`;
  `buffers` a dict for each server. And the pushes that were "left_over" in buffers;
  with a model its "auc", "bayes_auc", and "evaluations" as (steps, seconds,
  AUC, the best possible AUC).

Raises:
  ValueError: An option is out of its range, or a factor.
)");
}

}  // namespace recsync
