#include "cc/transport/tensor_server.h"

#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/tensor_messages.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "xla/tsl/platform/status.h"

namespace recsync {
namespace {

// Of an error: what is longer is cut off, as TensorFlow does.
constexpr size_t kMaxText = 3072;
// What one client may have asked for and not got yet.
constexpr size_t kMaxAsked = 1 << 20;

using tensorflow::Rendezvous;
using tensorflow::Tensor;

std::string RandomSecret() {
  std::random_device random;
  std::string secret;
  for (int i = 0; i < 4; ++i) {
    const uint32_t part = random();
    secret.append(reinterpret_cast<const char*>(&part), sizeof(part));
  }
  return secret;
}

// What one client has asked for.
class Serving : public MessageReceiver,
                public std::enable_shared_from_this<Serving> {
 public:
  Serving(std::shared_ptr<Connection> connection, std::string secret,
          TensorServer::Produce produce, TensorServer::GiveUp give_up)
      : connection_(std::move(connection)),
        secret_(std::move(secret)),
        produce_(std::move(produce)),
        give_up_(std::move(give_up)) {}

  char* Head(std::string_view head, uint64_t size) override {
    Request request;
    if (!has_greeted_) {
      Greet(head, size);
    } else if (size > 0 || !Decode(head, &request)) {
      connection_->Close("a request that can't be read");
    } else if (request.kind == RequestKind::kReceive) {
      Produce(request);
    } else if (request.kind == RequestKind::kCancel) {
      GiveUp(request.id);
    }
    return nullptr;
  }

  void Body() override {}

  void Closed(const std::string& reason) override {
    std::unordered_map<uint64_t, int64_t> asked;
    {
      MutexLock lock(&mu_);
      asked.swap(asked_);
    }
    std::set<int64_t> steps;
    for (const auto& [id, step] : asked) steps.insert(step);
    for (const int64_t step : steps) give_up_(step);
  }

 private:
  void Greet(std::string_view head, uint64_t size) {
    Greeting greeting;
    if (size > 0 || !Decode(head, &greeting)) {
      connection_->Close("no greeting");
    } else if (greeting.version != kTransportVersion) {
      Welcome welcome;
      welcome.refusal =
          "this server has version " + std::to_string(kTransportVersion) +
          " of the transport, not " + std::to_string(greeting.version);
      connection_->Send(Encode(welcome));
      connection_->Close("a greeting of another version");
    } else if (greeting.secret != secret_) {
      connection_->Close("a greeting with another secret");
    } else {
      has_greeted_ = true;
      connection_->Admit();
      connection_->Send(Encode(Welcome()));
    }
  }

  void Produce(const Request& request) {
    const uint64_t id = request.id;
    Rendezvous::ParsedKey key;
    absl::Status status = Rendezvous::ParseKey(request.key, &key);
    if (status.ok()) {
      MutexLock lock(&mu_);
      if (asked_.size() < kMaxAsked) {
        asked_[id] = request.step;
      } else {
        status = absl::ResourceExhaustedError(
            std::to_string(kMaxAsked) +
            " tensors have been asked for over one connection and not sent");
      }
    }
    if (!status.ok()) {
      SendError(id, status);
      return;
    }
    auto done = [self = shared_from_this(), id](
                    const absl::Status& status, const Rendezvous::Args&,
                    const Rendezvous::Args&, const Tensor& tensor,
                    bool is_dead) {
      if (self->Take(id)) self->Send(id, status, tensor, is_dead);
    };
    produce_(request.step, key, std::move(done));
  }

  void GiveUp(uint64_t id) {
    int64_t step;
    {
      MutexLock lock(&mu_);
      const auto found = asked_.find(id);
      if (found == asked_.end()) return;
      step = found->second;
      asked_.erase(found);
    }
    give_up_(step);
  }

  // Whether a tensor is still wanted.
  bool Take(uint64_t id) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return asked_.erase(id) > 0;
  }

  void SendError(uint64_t id, const absl::Status& status) {
    Answer answer;
    answer.id = id;
    answer.code = static_cast<int32_t>(status.code());
    answer.text = std::string(status.message().substr(0, kMaxText));
    answer.is_derived = tsl::StatusGroup::IsDerived(status);
    connection_->Send(Encode(answer));
  }

  // If it can't be, whoever waits for it has to hear so.
  void SendBody(const Answer& answer, const char* bytes, uint64_t size,
                uint64_t most, std::shared_ptr<const void> keep) {
    if (size <= most) {
      connection_->Send(Encode(answer), bytes, size, std::move(keep));
    } else {
      SendError(answer.id,
                absl::InvalidArgumentError(
                    "a tensor of " + std::to_string(size) +
                    " bytes can't be sent, only " + std::to_string(most) +
                    "; with transport=\"grpc\" fewer still"));
    }
  }

  void Send(uint64_t id, const absl::Status& status, const Tensor& tensor,
            bool is_dead) {
    if (!status.ok()) {
      SendError(id, status);
      return;
    }
    Answer answer;
    answer.id = id;
    answer.is_dead = is_dead;
    if (is_dead) {
      connection_->Send(Encode(answer));
      return;
    }
    answer.dtype = tensor.dtype();
    if (tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) {
      answer.form = BodyForm::kBytes;
      for (int i = 0; i < tensor.dims(); ++i) {
        answer.shape.push_back(tensor.dim_size(i));
      }
      auto keep = std::make_shared<Tensor>(tensor);
      const auto bytes = keep->tensor_data();
      SendBody(answer, bytes.data(), bytes.size(), kMaxTensorBytes,
               std::move(keep));
      return;
    }
    answer.form = BodyForm::kProto;
    tensorflow::TensorProto proto;
    tensor.AsProtoTensorContent(&proto);
    auto keep = std::make_shared<std::string>();
    // Fails for more than it may have.
    const bool is_whole = proto.SerializeToString(keep.get());
    const uint64_t size = is_whole ? keep->size() : proto.ByteSizeLong();
    SendBody(answer, keep->data(), size, kMaxProtoBytes, keep);
  }

  const std::shared_ptr<Connection> connection_;
  const std::string secret_;
  const TensorServer::Produce produce_;
  const TensorServer::GiveUp give_up_;
  bool has_greeted_ = false;  // The loop's thread alone uses it.
  Mutex mu_;
  // The steps of the tensors that were asked for and not sent, by number.
  std::unordered_map<uint64_t, int64_t> asked_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

TensorServer::TensorServer(MessageLoop* loop, Produce produce, GiveUp give_up)
    : secret_(RandomSecret()) {
  auto accept = [secret = secret_, produce = std::move(produce),
                 give_up = std::move(give_up)](std::shared_ptr<Connection> c) {
    return std::make_shared<Serving>(std::move(c), secret, produce, give_up);
  };
  std::string error;
  port_ = loop->Listen("", std::move(accept), &error);
  if (port_ == 0) throw std::runtime_error("can't listen: " + error);
}

}  // namespace recsync
