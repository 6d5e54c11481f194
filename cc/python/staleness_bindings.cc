#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/staleness_counters.h"
#include "cc/engine/staleness_weight.h"

namespace recsync {

namespace py = pybind11;

using CounterArray =
    py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

namespace {

void CheckSize(const CounterArray& counters) {
  if (counters.ndim() != 1 || counters.size() != StalenessCounters::kSize) {
    throw py::value_error("counters must hold " +
                          std::to_string(StalenessCounters::kSize) +
                          " values, not " + std::to_string(counters.size()));
  }
}

// Calls `read` on a private copy of the counters.
template <typename Read>
auto WithCounters(const CounterArray& counters, Read read) {
  CheckSize(counters);
  std::vector<int64_t> copy(counters.data(), counters.data() + counters.size());
  return read(StalenessCounters(copy.data()));
}

py::dict Summary(const CounterArray& counters) {
  return WithCounters(counters, [](const StalenessCounters& c) {
    py::dict summary;
    summary["count"] = c.count();
    summary["mean"] = c.Mean();
    summary["variance"] = c.Variance();
    summary["max"] = c.max();
    summary["skipped"] = c.skipped();
    return summary;
  });
}

int64_t Quantile(const CounterArray& counters, double quantile) {
  return WithCounters(counters, [quantile](const StalenessCounters& c) {
    return c.Quantile(quantile);
  });
}

py::list Histogram(const CounterArray& counters) {
  CheckSize(counters);
  py::list histogram;
  for (int b = 0; b < StalenessCounters::kBuckets; ++b) {
    const int64_t count = counters.at(StalenessCounters::kFirstBucket + b);
    if (count > 0) {
      histogram.append(py::make_tuple(StalenessCounters::UpperEdge(b), count));
    }
  }
  return histogram;
}

double Weight(double tau, const std::string& decay, double power,
              double baseline, bool normalized, double iota,
              double update_sensitivity, double target_deviation,
              double target_mean, double last_update, double deviation,
              double mean) {
  StalenessWeight weight;
  if (!ParseStalenessDecay(decay, &weight.decay)) {
    throw py::value_error(
        "decay must be constant, inverse_power or threshold, not " + decay);
  }
  weight.power = power;
  weight.baseline = baseline;
  weight.normalized = normalized;
  weight.iota = iota;
  weight.update_sensitivity = update_sensitivity;
  weight.target_deviation = target_deviation;
  weight.target_mean = target_mean;
  return weight.Of(tau, last_update, deviation, mean);
}

}  // namespace

void RegisterStalenessBindings(py::module_& m) {
  m.attr("STALENESS_COUNTERS") = static_cast<int>(StalenessCounters::kSize);
  m.attr("STALENESS_FIRST_BUCKET") =
      static_cast<int>(StalenessCounters::kFirstBucket);
  m.attr("STALENESS_BUCKETS") = static_cast<int>(StalenessCounters::kBuckets);
  m.def("staleness_summary", &Summary, py::arg("counters"),
        "Count, mean, variance, max and skipped of staleness counters.");
  m.def("staleness_quantile", &Quantile, py::arg("counters"),
        py::arg("quantile"), "The staleness that a quantile did not exceed.");
  m.def("staleness_histogram", &Histogram, py::arg("counters"),
        "The buckets in use, as (largest staleness, count).");
  m.def("staleness_weight", &Weight, py::arg("tau"), py::kw_only(),
        py::arg("decay"), py::arg("power"), py::arg("baseline"),
        py::arg("normalized"), py::arg("iota"), py::arg("update_sensitivity"),
        py::arg("target_deviation"), py::arg("target_mean"),
        py::arg("last_update"), py::arg("deviation"), py::arg("mean"),
        "rho(tau), as the update ops compute it.");
}

}  // namespace recsync
