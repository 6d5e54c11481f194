// Fetches tensors from another server, over a connection of its own.
//
// The server's answers are not believed: one that can't be, as its bytes don't
// fit its shape, fails the one tensor that it is about, and what is no answer
// at all ends the connection.

#ifndef TF_RECSYNC_CC_TRANSPORT_TENSOR_CLIENT_H_
#define TF_RECSYNC_CC_TRANSPORT_TENSOR_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/status.h"
#include "cc/engine/message_loop.h"
#include "cc/engine/mutex.h"
#include "cc/engine/tensor_messages.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"

namespace recsync {

class TensorClient : public MessageReceiver {
 public:
  // Gets a tensor, or what is wrong; in the loop's thread.
  using Done =
      std::function<void(const absl::Status& status,
                         const tensorflow::Tensor& tensor, bool is_dead)>;

  // `name` is what errors call the server.
  explicit TensorClient(std::string name) : name_(std::move(name)) {}

  // Connects to a numeric address; call it once. `ready` is called with OK when
  // the server has welcomed us, or with an error when the connection has ended
  // before.
  void Connect(MessageLoop* loop, const std::string& address, int port,
               const std::string& secret,
               std::function<void(const absl::Status&)> ready,
               const std::shared_ptr<TensorClient>& self)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Asks for a tensor, whose memory is the allocator's; returns its number, or
  // 0 if the connection has ended, or the key is longer than kMaxKeyBytes, and
  // `done` will not be called.
  uint64_t Receive(int64_t step, std::string_view key,
                   tensorflow::Allocator* allocator, Done done)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Gives up a tensor. True: `done` has not been called and never will be.
  bool Cancel(uint64_t id) ABSL_LOCKS_EXCLUDED(mu_);

  bool is_closed() ABSL_LOCKS_EXCLUDED(mu_);

  char* Head(std::string_view head, uint64_t size) override;
  void Body() override;
  void Closed(const std::string& reason) override;

 private:
  struct Asked {
    tensorflow::Allocator* allocator;
    Done done;
  };

  bool Take(uint64_t id, Done* done) ABSL_LOCKS_EXCLUDED(mu_);
  // Null if nobody waits for the tensor any more.
  tensorflow::Allocator* AllocatorOf(uint64_t id) ABSL_LOCKS_EXCLUDED(mu_);

  void Close(const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);
  // The loop's thread alone calls these.
  void TakeWelcome(std::string_view head, uint64_t size)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the answer, `size` bytes of which follow, an error.
  void Fail(const absl::Status& status, uint64_t size) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string name_;
  // The loop's thread alone uses these; all but the first are of the answer
  // that is being read.
  bool is_welcome_ = false;
  Answer answer_;
  tensorflow::Tensor tensor_;
  std::unique_ptr<char[]> proto_;
  uint64_t proto_size_ = 0;

  Mutex mu_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  std::function<void(const absl::Status&)> ready_ ABSL_GUARDED_BY(mu_);
  bool is_closed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  std::unordered_map<uint64_t, Asked> asked_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_TRANSPORT_TENSOR_CLIENT_H_
