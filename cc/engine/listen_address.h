// Keeps the network servers inside this process off the network.
//
// TensorFlow's gRPC servers (tf.distribute.Server, the server that an eager
// client starts when it connects to a cluster, tf.data service) listen on every
// network interface, without authentication, and run what they are sent. None
// of them has a parameter for the address. `ConfineListeners` gives them one:
//
//   const recsync::Result confined = recsync::ConfineListeners("127.0.0.1");
//   if (!error.empty()) { ... }        // nothing is guaranteed in this case
//   // From here on, TensorFlow servers listen on 127.0.0.1 only.
//
// How: it redirects `bind` in the objects loaded in this process, see
// import_table.h.
//
// Guaranteed after success, for `bind` calls of the chosen objects that were
// loaded by then, and for as long as the process lives:
//   * a TCP socket bound to the any-address (0.0.0.0, :: or ::ffff:0.0.0.0) is
//     bound to the configured address instead; an IPv6 socket that also accepts
//     IPv4 gets an IPv4 address in its mapped form, ::ffff:a.b.c.d, and is
//     reached through a.b.c.d as usual;
//   * a TCP socket that cannot carry the configured address (an IPv4 socket and
//     an IPv6 address, an IPv6-only socket and an IPv4 address) fails with
//     EADDRNOTAVAIL: it never falls back to the any-address;
//   * the port, every other address, and every other kind of socket (UDP, Unix
//     domain) are left as they are.
// Not covered: sockets that are bound already (call this before the first
// server starts), objects loaded later (call it again), a `listen` without a
// `bind`, and programs that list the interfaces and bind to each by its address
// (gRPC does so when GRPC_EXPAND_WILDCARD_ADDRS is in the environment).
//
// Thread-safe, and idempotent: a call with another address changes the address
// for the sockets bound from then on. The replacement itself takes no lock.

#ifndef TF_RECSYNC_CC_ENGINE_LISTEN_ADDRESS_H_
#define TF_RECSYNC_CC_ENGINE_LISTEN_ADDRESS_H_

#include <string>

#include "cc/engine/import_table.h"
#include "cc/engine/result.h"

namespace recsync {

// True for what `ConfineListeners` takes as an address: a numeric IPv4 or IPv6
// address without port, brackets or zone.
bool IsNumericAddress(const std::string& address);

// Confines the objects that `filter` accepts to `address`, see
// `IsNumericAddress`. The any-address (0.0.0.0 or ::) lifts the confinement.
//
// An error is a malformed address, or no object in which `bind` could be
// replaced.
Result ConfineListeners(const std::string& address,
                        const ObjectFilter& filter = IsTensorFlowObject);

// The address in force in its canonical spelling, empty if there is none.
std::string ConfinedAddress();

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_LISTEN_ADDRESS_H_
