// Makes servers for the protocol "grpc+recsync": TensorFlow's own, whose
// tensors travel over this package's connections (rendezvous_mgr.h).

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "cc/transport/rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/platform/env.h"
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

// TensorFlow's server, given another rendezvous manager by its own option.
class Server : public tensorflow::GrpcServer {
 public:
  explicit Server(const tensorflow::ServerDef& server_def)
      : GrpcServer(server_def, tensorflow::Env::Default()) {}

  // As TensorFlow's factory does it; `host` is by which others know the server.
  absl::Status Prepare(tensorflow::DeviceMgr* local_devices, std::string host) {
    std::unique_ptr<RendezvousMgr> rendezvous_mgr;
    // Here, as TensorFlow's code lets no exception pass.
    try {
      rendezvous_mgr =
          std::make_unique<RendezvousMgr>(worker_env(), std::move(host));
    } catch (const std::exception& error) {
      return absl::UnknownError(std::string("tensor transport: ") +
                                error.what());
    }
    tensorflow::GrpcServerOptions options;
    options.local_device_mgr = local_devices;
    // The server destroys it.
    options.rendezvous_mgr_func = [&](const tensorflow::WorkerEnv*) {
      return rendezvous_mgr.release();
    };
    return Init(options);
  }
};

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
    auto server = std::make_unique<Server>(inner);
    const absl::Status status =
        server->Prepare(options.local_device_mgr, OwnHost(server_def));
    if (status.ok()) *out_server = std::move(server);
    return status;
  }
};

// Registered when the library is loaded.
[[maybe_unused]] const bool is_registered = [] {
  // TensorFlow keeps it for as long as the process lives.
  tensorflow::ServerFactory::Register(
      kProtocol, std::make_unique<ServerFactory>().release());
  return true;
}();

}  // namespace
}  // namespace recsync
