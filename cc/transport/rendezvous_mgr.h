// A server's rendezvous, as TensorFlow's own, but for how tensors get from one
// server to another: over connections of this package (tensor_client.h), which
// cost less processor time than TensorFlow's calls.
//
// Where the other server is found: the first tensor of a server is fetched as
// TensorFlow does it, and beside it the server is asked for the address of its
// TensorServer, by the same kind of call, for a step that no program has. What
// has no such address, or one of another version, does not let us connect, or
// keeps its tensors elsewhere than in a CPU's memory, is asked TensorFlow's way
// on and on; a warning says why, unless it has told nothing at all. What could
// not be reached, or told nothing, is asked again after some seconds, then
// minutes.

#ifndef TF_RECSYNC_CC_TRANSPORT_RENDEZVOUS_MGR_H_
#define TF_RECSYNC_CC_TRANSPORT_RENDEZVOUS_MGR_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/engine/message_loop.h"
#include "cc/engine/mutex.h"
#include "cc/engine/result.h"
#include "cc/engine/timer.h"
#include "cc/transport/tensor_client.h"
#include "cc/transport/tensor_server.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"

namespace recsync {

class RendezvousMgr : public tensorflow::BaseRendezvousMgr {
 public:
  // `host` is by which others know this server. Throws std::exception if it
  // can't listen. Once its server has started, it must outlive what that does,
  // and so the process.
  RendezvousMgr(const tensorflow::WorkerEnv* env, std::string host);

  // Also tells the address; see above.
  void RecvLocalAsync(int64_t step_id,
                      const tensorflow::Rendezvous::ParsedKey& parsed,
                      tensorflow::Rendezvous::DoneCallback done) override;

  // The connection to the server that has a key's tensor; null if there is
  // none, for now or for ever. Asks for its address now and then.
  std::shared_ptr<TensorClient> ClientOf(
      const tensorflow::Rendezvous::ParsedKey& parsed,
      const std::string& worker, tensorflow::WorkerSession* session)
      ABSL_LOCKS_EXCLUDED(mu_);

  Timer* timer() { return &timer_; }

 protected:
  tsl::core::RefCountPtr<tensorflow::BaseRemoteRendezvous> Create(
      int64_t step_id, const tensorflow::WorkerEnv* env) override;

 private:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr Time kNever = Time::max();

  struct Peer {
    std::shared_ptr<TensorClient> client;
    bool is_ready = false;
    bool has_warned = false;  // That it can't be reached.
    double wait = 0.0;        // Seconds, before the last attempt.
    Time again = kNever;      // When to ask again.

    // Whether it could be reached, and can't any more.
    bool is_gone() const { return is_ready && client->is_closed(); }
  };

  void Ask(const tensorflow::Rendezvous::ParsedKey& parsed,
           const std::string& worker, tensorflow::WorkerSession* session);
  // Begins to connect to what a server has told, unless something is wrong with
  // that. May block.
  Result ConnectToAddress(uint64_t incarnation, const std::string& worker,
                          const tensorflow::Tensor& address)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A server could not be reached, for now; the first time a warning says why,
  // unless that is empty.
  void AskLater(uint64_t incarnation, const std::string& worker,
                const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Forget(uint64_t incarnation) ABSL_LOCKS_EXCLUDED(mu_);
  // Tries one of a server's addresses after the other, from the first on.
  void ConnectTo(uint64_t incarnation, const std::string& worker,
                 std::vector<std::string> addresses, int port,
                 const std::string& secret) ABSL_LOCKS_EXCLUDED(mu_);
  void GiveUp(int64_t step);

  const tensorflow::WorkerEnv* const env_;
  const std::string host_;
  Mutex mu_;
  // By the incarnation of their first device, which a server that is started
  // again has another of.
  std::unordered_map<uint64_t, Peer> peers_ ABSL_GUARDED_BY(mu_);
  // After what its thread uses.
  Timer timer_;
  MessageLoop loop_;
  const TensorServer server_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_TRANSPORT_RENDEZVOUS_MGR_H_
