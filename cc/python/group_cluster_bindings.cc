// Groups of trainers in virtual time, for tf_recsync.simulation.

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/engine/staleness_counters.h"
#include "cc/python/goes_on.h"
#include "cc/simulation/copy_synchronizer.h"
#include "cc/simulation/group_cluster.h"
#include "cc/simulation/logistic_problem.h"
#include "cc/simulation/virtual_network.h"

namespace recsync {

namespace py = pybind11;

namespace {

// Device, amount, bytes to it and back, whether it reads and updates its shard.
using Work = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool>;

// The value of a name among some.
template <typename Value>
Value Named(const char* what, const std::string& name,
            const std::vector<std::pair<std::string, Value>>& values) {
  for (const auto& [known, value] : values) {
    if (known == name) return value;
  }
  throw py::value_error(std::string(what) + " is unknown: " + name);
}

py::array_t<int64_t> Told(const std::vector<std::vector<int64_t>>& counters) {
  py::array_t<int64_t> told(
      {static_cast<py::ssize_t>(counters.size()),
       static_cast<py::ssize_t>(StalenessCounters::kSize)});
  auto rows = told.mutable_unchecked<2>();
  for (size_t i = 0; i < counters.size(); ++i) {
    for (size_t c = 0; c < counters[i].size(); ++c) rows(i, c) = counters[i][c];
  }
  return told;
}

py::list Told(const std::vector<VirtualNetwork::Traffic>& traffic) {
  py::list told;
  for (const auto& [sent, received, seconds] : traffic) {
    told.append(py::make_tuple(sent, received, seconds));
  }
  return told;
}

py::list Told(const std::vector<GroupCluster::Entry>& log) {
  py::list told;
  for (const auto& [kind, group, shard, thread, step] : log) {
    told.append(
        py::make_tuple(static_cast<int>(kind), group, shard, thread, step));
  }
  return told;
}

py::dict RunGroupCluster(
    int64_t groups, int64_t trainers, int64_t threads, int64_t servers,
    std::function<double(int64_t, int64_t, double)> compute_seconds,
    std::function<double(int64_t, int64_t, double)> factor,
    const std::vector<std::vector<Work>>& stages, double trainer_per_second,
    double server_per_second, double trainer_bytes_per_second,
    double server_bytes_per_second, double sync_ps_bytes_per_second,
    bool duplex, double latency, int64_t sync_ps, const std::string& algorithm,
    float alpha, float eta, float momentum, bool nesterov,
    const std::string& schedule, int64_t gap, double interval, int64_t bytes,
    int64_t steps, double seconds, const LogisticProblem* problem,
    float learning_rate, double loss_seconds, bool keeps_log) {
  using Algorithm = CopySyncOptions::Algorithm;
  using Schedule = CopySyncOptions::Schedule;
  GroupClusterOptions options;
  options.groups = groups;
  options.trainers = trainers;
  options.threads = threads;
  options.servers = servers;
  options.compute_seconds = std::move(compute_seconds);
  options.factor = std::move(factor);
  for (const std::vector<Work>& stage : stages) {
    options.stages.emplace_back();
    for (const auto& [device, amount, to, back, reads, updates] : stage) {
      options.stages.back().push_back(
          {device, amount, to, back, reads, updates});
    }
  }
  options.trainer_per_second = trainer_per_second;
  options.server_per_second = server_per_second;
  options.trainer_bytes_per_second = trainer_bytes_per_second;
  options.server_bytes_per_second = server_bytes_per_second;
  options.sync_ps_bytes_per_second = sync_ps_bytes_per_second;
  options.duplex = duplex;
  options.latency = latency;
  options.sync_ps = sync_ps;
  options.sync.algorithm =
      Named<Algorithm>("algorithm", algorithm,
                       {{"none", Algorithm::kNone},
                        {"easgd", Algorithm::kEasgd},
                        {"model_averaging", Algorithm::kModelAveraging},
                        {"bmuf", Algorithm::kBmuf}});
  options.sync.alpha = alpha;
  options.sync.eta = eta;
  options.sync.momentum = momentum;
  options.sync.nesterov = nesterov;
  options.sync.schedule =
      Named<Schedule>("schedule", schedule,
                      {{"background", Schedule::kBackground},
                       {"gap", Schedule::kGap},
                       {"interval", Schedule::kInterval}});
  options.sync.gap = gap;
  options.sync.interval = interval;
  options.sync.bytes = bytes;
  options.steps = steps;
  options.seconds = seconds;
  if (problem != nullptr) {
    options.learning = GroupLearning{problem, learning_rate, loss_seconds};
  }
  options.keeps_log = keeps_log;
  GroupCluster cluster(std::move(options));
  const Result result = cluster.Run(GoesOn);
  if (!result.ok()) throw py::value_error(result.error());
  py::dict told;
  told["seconds"] = cluster.seconds();
  told["steps"] = cluster.steps();
  told["syncs"] = cluster.synchronizer().syncs();
  told["sync_seconds"] = cluster.synchronizer().seconds();
  told["sync_ps_bytes"] = cluster.synchronizer().sync_ps_bytes();
  told["center"] = cluster.synchronizer().center();
  told["staleness"] = Told(cluster.staleness());
  told["traffic"] = Told(cluster.traffic());
  told["trainers_busy"] = cluster.busy().trainers;
  told["servers_busy"] = cluster.busy().servers;
  py::list losses;
  for (const GroupCluster::Loss& loss : cluster.losses()) {
    losses.append(py::make_tuple(loss.seconds, loss.steps, loss.loss));
  }
  told["losses"] = losses;
  told["copies"] = cluster.copies();
  told["log"] = Told(cluster.log());
  return told;
}

}  // namespace

void RegisterGroupClusterBindings(py::module_& m);

void RegisterGroupClusterBindings(py::module_& m) {
  m.def("run_group_cluster", &RunGroupCluster, py::kw_only(), py::arg("groups"),
        py::arg("trainers"), py::arg("threads"), py::arg("servers"),
        py::arg("compute_seconds"), py::arg("factor"), py::arg("stages"),
        py::arg("trainer_per_second"), py::arg("server_per_second"),
        py::arg("trainer_bytes_per_second"), py::arg("server_bytes_per_second"),
        py::arg("sync_ps_bytes_per_second"), py::arg("duplex"),
        py::arg("latency"), py::arg("sync_ps"), py::arg("algorithm"),
        py::arg("alpha"), py::arg("eta"), py::arg("momentum"),
        py::arg("nesterov"), py::arg("schedule"), py::arg("gap"),
        py::arg("interval"), py::arg("bytes"), py::arg("steps"),
        py::arg("seconds"), py::arg("problem"), py::arg("learning_rate"),
        py::arg("loss_seconds"), py::arg("keeps_log"),
        R"(Runs groups of trainers in virtual time; see group_cluster.h.

Args:
  compute_seconds: Of a trainer, its steps and the time now: how long a thread
    computes by itself.
  factor: Of the same: by which all that the trainer does in the step is
    multiplied; or None.
  stages: Of a step, lists of (device, amount, bytes to it, bytes back, reads,
    updates).
  problem: What is learned, or None.

Returns:
  A dict of what became of it.

Raises:
  ValueError: If arguments are wrong.
)");
}

}  // namespace recsync
