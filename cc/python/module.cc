// tf_recsync._engine: the engine classes that Python uses outside a graph.

#include <pybind11/pybind11.h>

namespace recsync {
void RegisterGroupClusterBindings(pybind11::module_& m);
void RegisterHopClusterBindings(pybind11::module_& m);
void RegisterLogisticProblemBindings(pybind11::module_& m);
void RegisterWaitingBindings(pybind11::module_& m);
void RegisterNetworkBindings(pybind11::module_& m);
void RegisterSimulationBindings(pybind11::module_& m);
void RegisterStackBindings(pybind11::module_& m);
void RegisterStalenessBindings(pybind11::module_& m);
}  // namespace recsync

PYBIND11_MODULE(_engine, m) {
  m.doc() = "Engine classes of tf_recsync that are used outside a graph.";
  recsync::RegisterLogisticProblemBindings(m);
  recsync::RegisterGroupClusterBindings(m);
  recsync::RegisterHopClusterBindings(m);
  recsync::RegisterStalenessBindings(m);
  recsync::RegisterNetworkBindings(m);
  recsync::RegisterSimulationBindings(m);
  recsync::RegisterStackBindings(m);
  recsync::RegisterWaitingBindings(m);
}
