// What message_loop.h needs of the system's sockets.

#ifndef TF_RECSYNC_CC_ENGINE_SOCKETS_H_
#define TF_RECSYNC_CC_ENGINE_SOCKETS_H_

#include <string>
#include <vector>

namespace recsync {

// What errno says, in words.
std::string ErrorText(int error);

// The numeric addresses of a host, the best first; none, and what is wrong, if
// it can't be found. May block, unless it is such an address itself.
std::vector<std::string> ResolveHost(const std::string& host,
                                     std::string* error);

// Sets what connections for messages have in common: messages are not held
// back, and a peer whose machine is gone is noticed after a minute.
void SetConnectionOptions(int fd);

// A socket that listens on a port that is free, on `host` (numeric; empty: all
// interfaces), and does not block; -1, and what is wrong, if there is none.
int ListenOnFreePort(const std::string& host, int* port, std::string* error);

// A socket that connects to a numeric address without blocking; -1, and what is
// wrong, if it can't even begin. `is_connected` says whether it is done.
int BeginToConnect(const std::string& address, int port, bool* is_connected,
                   std::string* error);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SOCKETS_H_
