// One end of a connection over which messages go; see message_loop.h.

#ifndef TF_RECSYNC_CC_ENGINE_CONNECTION_H_
#define TF_RECSYNC_CC_ENGINE_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

// The largest head and body that are sent, or taken: what announces more ends
// its connection.
constexpr uint32_t kMaxHeadBytes = 64 << 10;
constexpr uint64_t kMaxBodyBytes = uint64_t{16} << 30;
// Of what is to be sent: who goes on asking without reading the answers is not
// listened to any more, until half of it is gone.
constexpr uint64_t kMaxQueuedBytes = 64 << 20;

// Gets what arrives on a connection. The loop's thread calls it, one call after
// the other; no call may block, nor destroy the loop.
class MessageReceiver {
 public:
  virtual ~MessageReceiver() = default;

  // A message begins. Returns where its body goes: `size` bytes that are there
  // until Body or Closed is called. Null drops the body, and there is no call
  // of Body then.
  virtual char* Head(std::string_view head, uint64_t size) = 0;

  // The message whose head came last is there as a whole, also one of size 0.
  virtual void Body() = 0;

  // The connection has ended, whoever ended it; the last call.
  virtual void Closed(const std::string& reason) = 0;
};

class MessageLoop;

class Connection {
 public:
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Sends a message: at once as far as the network takes it, the rest by the
  // loop's thread. `keep` is kept until `body` has been sent, or never will be.
  // False if the connection has ended: then the message is lost, as are those
  // before it that are still on their way. False, too, and nothing is lost but
  // this message, if it is larger than kMaxHeadBytes and kMaxBodyBytes say.
  // While the other end leaves more than kMaxQueuedBytes on their way, nothing
  // more is read of what it sends.
  bool Send(std::string head, const void* body = nullptr, uint64_t size = 0,
            std::shared_ptr<const void> keep = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the connection; `reason` is what the receiver gets to hear.
  void Close(const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);

  // Whoever connected has said who it is. Until then the connection is a
  // newcomer, of which the loop has few, and none for long. Only its receiver
  // calls this, in the loop's thread.
  void Admit() { is_newcomer_ = false; }

 private:
  friend class MessageLoop;

  struct Outgoing {
    std::string head;  // With the sizes in front of it.
    const char* body;
    uint64_t size;
    uint64_t sent;  // Of both.
    std::shared_ptr<const void> keep;
  };

  Connection(int fd, int epoll_fd, bool is_connected)
      : fd_(fd), epoll_fd_(epoll_fd), is_connected_(is_connected) {}

  // Sends what is waiting as far as the network takes it.
  void Flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Has the loop told when there is room to write, and, unless too much is
  // queued, when there is something to read.
  void Watch(bool writable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool is_full() ABSL_LOCKS_EXCLUDED(mu_);

  // The loop's thread alone uses these. Read takes what is there, up to an
  // amount; false, and why, if there will be no more.
  bool Read(std::vector<char>* scratch, std::string* reason);
  bool Parse(const char* data, size_t size, std::string* reason);
  void TakeBody(uint64_t size);

  Mutex mu_;
  int fd_ ABSL_GUARDED_BY(mu_);  // -1 when it has ended.
  const int epoll_fd_;
  bool is_connected_ ABSL_GUARDED_BY(mu_);
  bool is_watched_for_writing_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mu_);
  uint64_t queued_ ABSL_GUARDED_BY(mu_) = 0;   // Bytes of these to be sent.
  bool is_full_ ABSL_GUARDED_BY(mu_) = false;  // Nothing is read meanwhile.
  std::string reason_ ABSL_GUARDED_BY(mu_);

  bool is_newcomer_ = false;
  std::chrono::steady_clock::time_point accepted_;  // If it is a newcomer.
  std::shared_ptr<MessageReceiver> receiver_;
  std::string partial_;     // Of a head, with the sizes in front of it.
  char* body_ = nullptr;    // Where the rest of the body goes; null drops it.
  uint64_t body_left_ = 0;  // Of the body that is being read.
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_CONNECTION_H_
