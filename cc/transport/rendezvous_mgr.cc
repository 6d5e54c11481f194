#include "cc/transport/rendezvous_mgr.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/log/log.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "cc/engine/sockets.h"
#include "cc/engine/tensor_messages.h"
#include "cc/transport/receive_call.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace recsync {
namespace {

using tensorflow::BaseRemoteRendezvous;
using tensorflow::Rendezvous;
using tensorflow::Tensor;
using tensorflow::WorkerEnv;

// The step of which a server tells its address. Steps of programs are not
// negative.
constexpr int64_t kAddressStep = -0x7ec5c0;
// How long a step lives when a tensor of it is given up: the error that led to
// that may come first then. TensorFlow waits as long.
constexpr double kGiveUpSeconds = 1.0;
// How long a server may take to tell its address. One that takes part by
// TensorFlow's calls alone waits for somebody to send the tensor that we ask
// for.
constexpr double kAddressSeconds = 5.0;
// When a server that could not be reached is asked again: first, and at most,
// as each attempt that fails doubles it.
constexpr double kAgainSeconds = 2.0;
constexpr double kMostAgainSeconds = 300.0;

// What a server tells: its version of the transport, host, port and secret.
constexpr int64_t kAddressParts = 4;

bool IsInMemory(const Rendezvous::ParsedKey& key) {
  return key.src.type == "CPU" && key.dst.type == "CPU";
}

class RemoteRendezvous : public BaseRemoteRendezvous {
 public:
  RemoteRendezvous(const WorkerEnv* env, int64_t step_id, RendezvousMgr* mgr)
      : BaseRemoteRendezvous(env, step_id), mgr_(mgr) {}

 protected:
  void RecvFromRemoteAsync(const Rendezvous::ParsedKey& parsed,
                           const Rendezvous::Args& args,
                           Rendezvous::DoneCallback done) override {
    std::string worker, device;
    if (!tensorflow::DeviceNameUtils::SplitDeviceName(parsed.src_device,
                                                      &worker, &device)) {
      done(absl::InternalError(std::string(parsed.src_device) +
                               " is no valid device name"),
           Rendezvous::Args(), args, Tensor(), false);
      return;
    }
    std::shared_ptr<ReceiveCall> call;
    tensorflow::Device* destination = nullptr;
    const absl::Status found =
        session()->device_mgr()->LookupDevice(parsed.dst_device, &destination);
    if (!found.ok()) {
      done(found, Rendezvous::Args(), args, Tensor(), false);
      return;
    }
    // A key that is too long for a request's head goes TensorFlow's way.
    if (IsInMemory(parsed) && parsed.FullKey().size() <= kMaxKeyBytes) {
      auto client = mgr_->ClientOf(parsed, worker, session());
      if (client != nullptr) {
        call = std::make_shared<TransportCall>(
            std::move(client), step_id_, std::string(parsed.FullKey()),
            destination->GetAllocator(args.alloc_attrs), mgr_->timer());
      }
    }
    if (call == nullptr) {
      auto rpc =
          std::make_shared<RpcCall>(session()->GetSharedWorkerCache(), worker);
      if (!rpc->exists()) {
        done(absl::InternalError("no worker known as " + worker),
             Rendezvous::Args(), args, Tensor(), false);
        return;
      }
      rpc->Init(step_id_, std::string(parsed.FullKey()), destination,
                args.alloc_attrs);
      call = std::move(rpc);
    }
    // From here on it can be aborted.
    RegisterCall(call.get(), args);
    if (!call->status().ok()) {
      DeregisterCall(call.get(), args);
      done(call->status(), Rendezvous::Args(), args, Tensor(), false);
      return;
    }
    Ref();
    // The call lives until it is done: this is kept by it.
    ReceiveCall* const started = call.get();
    started->Start(
        [this, call = std::move(call), args, done = std::move(done)]() mutable {
          DeregisterCall(call.get(), args);
          const absl::Status status = call->status();
          // What `done` does may end the session, and the call's worker before
          // it.
          const Tensor tensor = call->tensor();
          const bool is_dead = call->is_dead();
          done(status, Rendezvous::Args(), args, tensor, is_dead);
          Unref();
        });
  }

 private:
  ~RemoteRendezvous() override = default;

  RendezvousMgr* const mgr_;
};

}  // namespace

RendezvousMgr::RendezvousMgr(const WorkerEnv* env, std::string host)
    : BaseRendezvousMgr(env),
      env_(env),
      host_(std::move(host)),
      loop_(
          [](const std::string& text) { LOG(WARNING) << "Tensors: " << text; }),
      server_(
          &loop_,
          [this](int64_t step, const Rendezvous::ParsedKey& key,
                 Rendezvous::DoneCallback done) {
            BaseRendezvousMgr::RecvLocalAsync(step, key, std::move(done));
          },
          [this](int64_t step) { GiveUp(step); }) {}

tsl::core::RefCountPtr<BaseRemoteRendezvous> RendezvousMgr::Create(
    int64_t step_id, const WorkerEnv* env) {
  return tsl::core::RefCountPtr<BaseRemoteRendezvous>(
      new RemoteRendezvous(env, step_id, this));
}

void RendezvousMgr::RecvLocalAsync(int64_t step_id,
                                   const Rendezvous::ParsedKey& parsed,
                                   Rendezvous::DoneCallback done) {
  if (step_id != kAddressStep) {
    BaseRendezvousMgr::RecvLocalAsync(step_id, parsed, std::move(done));
    return;
  }
  Tensor address(tensorflow::DT_STRING, {kAddressParts});
  auto parts = address.vec<tsl::tstring>();
  parts(0) = std::to_string(kTransportVersion);
  parts(1) = host_;
  parts(2) = std::to_string(server_.port());
  parts(3) = server_.secret();
  done(absl::OkStatus(), Rendezvous::Args(), Rendezvous::Args(), address,
       false);
}

std::shared_ptr<TensorClient> RendezvousMgr::ClientOf(
    const Rendezvous::ParsedKey& parsed, const std::string& worker,
    tensorflow::WorkerSession* session) {
  {
    MutexLock lock(&mu_);
    const auto found = peers_.find(parsed.src_incarnation);
    if (found != peers_.end() && !found->second.is_gone()) {
      Peer& peer = found->second;
      if (peer.is_ready) return peer.client;
      if (std::chrono::steady_clock::now() < peer.again) return nullptr;
      peer.again = kNever;
    } else {
      // One that is started again has another incarnation: nobody asks for what
      // it was. One that was not can perhaps be reached again.
      for (auto peer = peers_.begin(); peer != peers_.end();) {
        peer = peer->second.is_gone() ? peers_.erase(peer) : std::next(peer);
      }
      peers_.try_emplace(parsed.src_incarnation);
    }
  }
  Ask(parsed, worker, session);
  return nullptr;
}

void RendezvousMgr::Ask(const Rendezvous::ParsedKey& parsed,
                        const std::string& worker,
                        tensorflow::WorkerSession* session) {
  auto call =
      std::make_shared<RpcCall>(session->GetSharedWorkerCache(), worker);
  tensorflow::Device* device = nullptr;
  if (!call->exists() ||
      !session->device_mgr()->LookupDevice(parsed.dst_device, &device).ok()) {
    Forget(parsed.src_incarnation);
    return;  // The call for the tensor says so.
  }
  call->Init(kAddressStep, std::string(parsed.FullKey()), device, {});
  timer_.CallAfter(kAddressSeconds, [asked = std::weak_ptr<RpcCall>(call)] {
    const auto call = asked.lock();
    if (call != nullptr) {
      call->StartAbort(absl::DeadlineExceededError("it tells no address"));
    }
  });
  RpcCall* const started = call.get();
  started->Start([this, call = std::move(call), worker,
                  incarnation = parsed.src_incarnation] {
    if (absl::IsDeadlineExceeded(call->status())) {
      // One that takes part by TensorFlow's calls alone; or one that stood
      // still.
      AskLater(incarnation, worker, "");
      return;
    }
    if (!call->status().ok()) {
      // It may be started again, or reached again.
      Forget(incarnation);
      return;
    }
    // Looking a name up may take long, which gRPC's threads must not.
    env_->env->SchedClosure(
        [this, worker, incarnation, address = call->tensor()] {
          const Result begun = ConnectToAddress(incarnation, worker, address);
          if (begun.ok()) return;
          LOG(WARNING) << "Tensors of " << worker
                       << " go through gRPC: " << begun.error();
        });
  });
}

Result RendezvousMgr::ConnectToAddress(uint64_t incarnation,
                                       const std::string& worker,
                                       const Tensor& address) {
  // The version comes first in all versions.
  if (address.dtype() != tensorflow::DT_STRING || address.NumElements() < 1) {
    return Result::Error("what it tells is no address");
  }
  const auto parts = address.flat<tsl::tstring>();
  const std::string version(parts(0));
  if (version != std::to_string(kTransportVersion)) {
    return Result::Error("it has version \"",
                         absl::CHexEscape(version.substr(0, 32)),
                         "\" of the transport, not ", kTransportVersion);
  }
  int port = 0;
  if (parts.size() != kAddressParts ||
      !absl::SimpleAtoi(absl::string_view(parts(2)), &port) || port < 1 ||
      port > 65535) {
    return Result::Error("what it tells is no address");
  }
  const std::string host(parts(1));
  std::string error;
  auto addresses = ResolveHost(host, &error);
  if (addresses.empty()) {
    AskLater(incarnation, worker, error);
    return Result::Ok();
  }
  ConnectTo(incarnation, worker, std::move(addresses), port,
            std::string(parts(3)));
  return Result::Ok();
}

void RendezvousMgr::Forget(uint64_t incarnation) {
  MutexLock lock(&mu_);
  peers_.erase(incarnation);
}

void RendezvousMgr::AskLater(uint64_t incarnation, const std::string& worker,
                             const std::string& why) {
  MutexLock lock(&mu_);
  const auto found = peers_.find(incarnation);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  if (!peer.has_warned && !why.empty()) {
    peer.has_warned = true;
    LOG(WARNING) << "Tensors of " << worker << " go through gRPC: " << why;
  }
  peer.wait = std::clamp(2 * peer.wait, kAgainSeconds, kMostAgainSeconds);
  peer.again = std::chrono::steady_clock::now() +
               std::chrono::milliseconds(static_cast<int64_t>(1e3 * peer.wait));
}

void RendezvousMgr::ConnectTo(uint64_t incarnation, const std::string& worker,
                              std::vector<std::string> addresses, int port,
                              const std::string& secret) {
  const std::string address = addresses.front();
  addresses.erase(addresses.begin());
  auto client = std::make_shared<TensorClient>(worker);
  {
    MutexLock lock(&mu_);
    peers_[incarnation].client = client;
  }
  auto ready = [this, incarnation, worker, address, port, secret,
                others = std::move(addresses)](const absl::Status& status) {
    if (status.ok()) {
      MutexLock lock(&mu_);
      peers_[incarnation].is_ready = true;
    } else if (!others.empty()) {
      ConnectTo(incarnation, worker, others, port, secret);
    } else {
      AskLater(incarnation, worker,
               "port " + std::to_string(port) + " of " + address +
                   " can't be reached: " + std::string(status.message()));
    }
  };
  client->Connect(&loop_, address, port, secret, std::move(ready), client);
}

void RendezvousMgr::GiveUp(int64_t step) {
  // Found now: the step may be over then, and would begin again.
  const std::shared_ptr<tensorflow::RemoteRendezvous> rendezvous = Find(step);
  if (rendezvous->IsRemoteEagerContextDefault()) return;
  timer_.CallAfter(kGiveUpSeconds, [rendezvous, step] {
    rendezvous->StartAbort(absl::AbortedError(
        "a tensor of step " + std::to_string(step) + " was given up"));
  });
}

}  // namespace recsync
