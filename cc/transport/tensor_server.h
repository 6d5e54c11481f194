// Gives tensors to other servers, over connections of its own.

#ifndef TF_RECSYNC_CC_TRANSPORT_TENSOR_SERVER_H_
#define TF_RECSYNC_CC_TRANSPORT_TENSOR_SERVER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "cc/engine/message_loop.h"
#include "tensorflow/core/framework/rendezvous.h"

namespace recsync {

class TensorServer {
 public:
  // Has a tensor given to a callback when it is there; see RendezvousMgr.
  using Produce =
      std::function<void(int64_t step, const tensorflow::Rendezvous::ParsedKey&,
                         tensorflow::Rendezvous::DoneCallback)>;
  // Hears that nobody wants a tensor of a step any more that had been asked
  // for.
  using GiveUp = std::function<void(int64_t step)>;

  // Listens, on all interfaces unless the process's listeners are confined (see
  // listen_address.h). `loop` and what the functions refer to must outlive the
  // process's connections. Throws std::runtime_error.
  TensorServer(MessageLoop* loop, Produce produce, GiveUp give_up);

  int port() const { return port_; }
  // What a client has to greet with, drawn anew for each server.
  const std::string& secret() const { return secret_; }

 private:
  const std::string secret_;
  int port_ = 0;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_TRANSPORT_TENSOR_SERVER_H_
