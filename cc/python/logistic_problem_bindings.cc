// The small problem that simulated workers learn, for tf_recsync.simulation.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "cc/engine/limits.h"
#include "cc/simulation/logistic_problem.h"

namespace recsync {

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

LogisticProblem Make(int64_t examples, int64_t features, int64_t batch_size,
                     double weight_decay, uint64_t seed) {
  const auto check = [](const char* name, int64_t size) {
    if (1 <= size && size <= kMostEntries) return;
    throw py::value_error(std::string(name) + " must be from 1 to " +
                          std::to_string(kMostEntries) + ", not " +
                          std::to_string(size));
  };
  check("examples", examples);
  check("features", features);
  check("batch_size", batch_size);
  check("examples * features", examples * features);
  return LogisticProblem({examples, features, batch_size, weight_decay, seed});
}

void CheckSize(const LogisticProblem& problem, const Floats& w) {
  if (w.ndim() == 1 && w.size() == problem.parameters()) return;
  throw py::value_error("w must be a vector of " +
                        std::to_string(problem.parameters()) + ", not of " +
                        std::to_string(w.size()));
}

}  // namespace

void RegisterLogisticProblemBindings(py::module_& m);

void RegisterLogisticProblemBindings(py::module_& m) {
  py::class_<LogisticProblem>(
      m, "LogisticProblem", "A small problem to learn; see logistic_problem.h.")
      .def(py::init(&Make), py::kw_only(), py::arg("examples"),
           py::arg("features"), py::arg("batch_size"), py::arg("weight_decay"),
           py::arg("seed"))
      .def(
          "gradient",
          [](const LogisticProblem& problem, const Floats& w, int64_t worker,
             int64_t step) {
            CheckSize(problem, w);
            Floats gradient(problem.parameters());
            problem.Gradient(w.data(), worker, step, gradient.mutable_data());
            return gradient;
          },
          py::arg("w"), py::arg("worker"), py::arg("step"),
          "The gradient of a step's batch at `w`.")
      .def(
          "loss",
          [](const LogisticProblem& problem, const Floats& w) {
            CheckSize(problem, w);
            return problem.Loss(w.data());
          },
          py::arg("w"), "The mean loss of all examples at `w`.");
}

}  // namespace recsync
