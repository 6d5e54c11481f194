// Decentralized training in virtual time, for tf_recsync.simulation.

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/engine/hop_options.h"
#include "cc/python/goes_on.h"
#include "cc/simulation/hop_cluster.h"
#include "cc/simulation/logistic_problem.h"
#include "cc/simulation/virtual_network.h"

namespace recsync {

namespace py = pybind11;

namespace {

// A worker's options, by the names that the op RecsyncHopWorker has for them.
HopOptions OptionsOf(const py::dict& given) {
  HopOptions options;
  const auto read = [&given](const char* name, auto* value) {
    *value = given[name].cast<std::remove_reference_t<decltype(*value)>>();
  };
  read("in_neighbors", &options.in_neighbors);
  read("weights", &options.weights);
  read("out_neighbors", &options.out_neighbors);
  read("max_iteration_gap", &options.max_iteration_gap);
  read("slots", &options.slots);
  read("capacity", &options.capacity);
  read("backup_workers", &options.backup_workers);
  read("staleness_bound", &options.staleness_bound);
  read("max_jump", &options.max_jump);
  read("jump_trigger", &options.jump_trigger);
  read("notify_ack", &options.notify_ack);
  read("gap_bounds", &options.gap_bounds);
  return options;
}

py::dict Told(const HopState& state) {
  py::dict told;
  told["iteration"] = state.iteration;
  told["phase"] = static_cast<int>(state.phase);
  told["seconds"] = state.seconds;
  told["missing"] = state.missing;
  told["tokens"] = state.tokens;
  told["declined"] = state.declined;
  told["counts"] = state.Numbers();
  return told;
}

py::array_t<int64_t> Told(const std::vector<std::vector<int64_t>>& matrix) {
  const auto size = static_cast<py::ssize_t>(matrix.size());
  py::array_t<int64_t> told({size, size});
  auto cells = told.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < size; ++i) {
    for (py::ssize_t j = 0; j < size; ++j) cells(i, j) = matrix[i][j];
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

py::array_t<int64_t> Told(const std::vector<HopCluster::Event>& events) {
  py::array_t<int64_t> told(
      {static_cast<py::ssize_t>(events.size()), static_cast<py::ssize_t>(6)});
  auto rows = told.mutable_unchecked<2>();
  for (size_t i = 0; i < events.size(); ++i) {
    const auto& [worker, event] = events[i];
    rows(i, 0) = worker;
    rows(i, 1) = static_cast<int64_t>(event.activity);
    rows(i, 2) = event.begin;
    rows(i, 3) = event.end;
    rows(i, 4) = event.iteration;
    rows(i, 5) = event.neighbor;
  }
  return told;
}

py::dict RunHopCluster(
    const std::vector<py::dict>& workers, bool serial,
    std::function<double(int64_t, int64_t, double)> compute_seconds,
    std::vector<int64_t> machines, std::vector<double> bytes_per_second,
    bool duplex, double latency, int64_t update_bytes, int64_t steps,
    double seconds, bool keeps_events, const LogisticProblem* problem,
    double learning_rate, double momentum, double loss_seconds,
    double target_loss) {
  HopClusterOptions options;
  for (const py::dict& worker : workers) {
    options.workers.push_back(OptionsOf(worker));
  }
  options.serial = serial;
  options.compute_seconds = std::move(compute_seconds);
  options.machines = std::move(machines);
  options.bytes_per_second = std::move(bytes_per_second);
  options.duplex = duplex;
  options.latency = latency;
  options.update_bytes = update_bytes;
  options.steps = steps;
  options.seconds = seconds;
  options.keeps_events = keeps_events;
  if (problem != nullptr) {
    options.learning = HopLearning{problem, learning_rate, momentum,
                                   loss_seconds, target_loss};
  }
  HopCluster cluster(std::move(options));
  const Result result = cluster.Run(GoesOn);
  if (!result.ok()) throw py::value_error(result.error());
  py::dict told;
  told["seconds"] = cluster.seconds();
  told["steps"] = cluster.steps();
  py::list states;
  for (const HopState& state : cluster.States()) states.append(Told(state));
  told["states"] = states;
  told["largest_gaps"] = Told(cluster.largest_gaps());
  told["events"] = Told(cluster.events());
  py::list losses;
  for (const HopCluster::Loss& loss : cluster.losses()) {
    losses.append(py::make_tuple(loss.seconds, loss.steps, loss.loss));
  }
  told["losses"] = losses;
  told["traffic"] = Told(cluster.traffic());
  return told;
}

}  // namespace

void RegisterHopClusterBindings(py::module_& m);

void RegisterHopClusterBindings(py::module_& m) {
  m.def("run_hop_cluster", &RunHopCluster, py::kw_only(), py::arg("workers"),
        py::arg("serial"), py::arg("compute_seconds"), py::arg("machines"),
        py::arg("bytes_per_second"), py::arg("duplex"), py::arg("latency"),
        py::arg("update_bytes"), py::arg("steps"), py::arg("seconds"),
        py::arg("keeps_events"), py::arg("problem"), py::arg("learning_rate"),
        py::arg("momentum"), py::arg("loss_seconds"), py::arg("target_loss"),
        R"(Runs decentralized training in virtual time; see hop_cluster.h.

Args:
  workers: Of each worker, the options of `RecsyncHopWorker` by their names.
  compute_seconds: Of a worker, its steps and the time now: how long it computes.
  problem: What is learned, or None.

Returns:
  A dict of what became of it.

Raises:
  ValueError: If arguments are wrong, or an invariant does not hold.
)");
}

}  // namespace recsync
