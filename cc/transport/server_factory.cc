// Makes servers for the protocol "grpc+recsync": TensorFlow's own, whose
// tensors travel over this package's connections (rendezvous_mgr.h).

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "cc/transport/rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/protobuf/cluster.pb.h"
#include "tensorflow/core/protobuf/tensorflow_server.pb.h"

namespace recsync {
namespace {

constexpr char kProtocol[] = "grpc+recsync";
constexpr char kInner[] = "grpc";

// The host by which the cluster knows the server; empty if it does not.
std::string OwnHost(const tensorflow::ServerDef& server_def) {
  for (const auto& job : server_def.cluster().job()) {
    if (job.name() != server_def.job_name()) continue;
    const auto found = job.tasks().find(server_def.task_index());
    if (found == job.tasks().end()) continue;
    std::string host = found->second.substr(0, found->second.rfind(':'));
    if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    }
    return host;
  }
  return "";
}

class ServerFactory : public tensorflow::ServerFactory {
 public:
  bool AcceptsOptions(const tensorflow::ServerDef& server_def) override {
    return server_def.protocol() == kProtocol;
  }

  absl::Status NewServer(
      const tensorflow::ServerDef& server_def, const Options& options,
      std::unique_ptr<tensorflow::ServerInterface>* out_server) override {
    tensorflow::ServerDef inner = server_def;
    inner.set_protocol(kInner);
    absl::Status status =
        tensorflow::NewServerWithOptions(inner, options, out_server);
    if (!status.ok()) return status;
    tensorflow::WorkerEnv* const env = (*out_server)->worker_env();
    try {
      // Before anything asks for it: the server has not been started. As the
      // one whose place it takes, it lives as long as the process.
      auto rendezvous_mgr =
          std::make_unique<RendezvousMgr>(env, OwnHost(server_def));
      env->rendezvous_mgr = rendezvous_mgr.release();
    } catch (const std::exception& error) {
      return absl::UnknownError(std::string("tensor transport: ") +
                                error.what());
    }
    return absl::OkStatus();
  }
};

// Registered when the library is loaded.
[[maybe_unused]] const bool is_registered = [] {
  tensorflow::ServerFactory::Register(kProtocol, new ServerFactory());
  return true;
}();

}  // namespace
}  // namespace recsync
