#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cc/engine/listen_address.h"

namespace recsync {

void RegisterNetworkBindings(pybind11::module_& m);

void RegisterNetworkBindings(pybind11::module_& m) {
  m.def(
      "confine_listeners",
      [](const std::string& address) {
        if (!IsNumericAddress(address)) {
          throw pybind11::value_error(
              "address must be a numeric IPv4 or IPv6 address without a port, "
              "like 127.0.0.1 or ::1, got \"" +
              address + "\"");
        }
        const Result confined = ConfineListeners(address);
        if (!confined.ok()) throw std::runtime_error(confined.error());
      },
      pybind11::arg("address"),
      R"(Makes TensorFlow's servers in this process listen on one address only.

From this call on, a TCP listener that a loaded TensorFlow library opens on all
interfaces (0.0.0.0 or ::) is opened on `address` instead. Listeners that exist
already stay as they are. Another call changes the address; "0.0.0.0" lifts the
confinement.

Args:
  address: A numeric IPv4 or IPv6 address of this machine, without a port.

Raises:
  ValueError: `address` is malformed.
  RuntimeError: No loaded library could be confined, say because TensorFlow has
    not been imported yet.

Example:
  >>> import tensorflow
  >>> confine_listeners("127.0.0.1")
)");
  m.def("confined_address", &ConfinedAddress,
        "The address that `confine_listeners` put in force, empty if none.");
}

}  // namespace recsync
