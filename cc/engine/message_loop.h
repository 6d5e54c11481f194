// Messages over TCP, moved by one thread, and read where they are wanted.
//
// A message is a head, which is small, and a body, which may be large: what the
// bytes mean is the user's affair. The body is written from where it lies and
// read to where the receiver wants it, without a copy in between.
//
//   MessageLoop loop;
//   std::string error;
//   int port = loop.Listen("127.0.0.1", [](std::shared_ptr<Connection> c) {
//     return std::make_shared<MyReceiver>(std::move(c));
//   }, &error);
//   std::shared_ptr<Connection> c =
//       loop.Connect("127.0.0.1", port, std::make_shared<MyReceiver>(),
//       &error);
//   c->Send("head", body.data(), body.size(), keeps_the_body);
//
// Thread safe. A loop ends its connections and joins its thread when it is
// destroyed; connections may outlive it, closed.

#ifndef TF_RECSYNC_CC_ENGINE_MESSAGE_LOOP_H_
#define TF_RECSYNC_CC_ENGINE_MESSAGE_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

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
  // before it that are still on their way.
  bool Send(std::string head, const void* body = nullptr, uint64_t size = 0,
            std::shared_ptr<const void> keep = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the connection; `reason` is what the receiver gets to hear.
  void Close(const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);

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
  // Has the loop told when there is something to read, or room to write.
  void Watch(bool writable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The loop's thread alone uses these.
  bool Read(std::vector<char>* scratch, std::string* reason);
  bool Parse(const char* data, size_t size, std::string* reason);
  void TakeBody(uint64_t size);

  Mutex mu_;
  int fd_ ABSL_GUARDED_BY(mu_);  // -1 when it has ended.
  const int epoll_fd_;
  bool is_connected_ ABSL_GUARDED_BY(mu_);
  bool is_watched_for_writing_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mu_);
  std::string reason_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<MessageReceiver> receiver_;
  std::string partial_;     // Of a head, with the sizes in front of it.
  char* body_ = nullptr;    // Where the rest of the body goes; null drops it.
  uint64_t body_left_ = 0;  // Of the body that is being read.
};

class MessageLoop {
 public:
  using Accept = std::function<std::shared_ptr<MessageReceiver>(
      std::shared_ptr<Connection>)>;

  // The largest head that is taken; a larger one ends its connection.
  static constexpr uint32_t kMaxHead = 64 << 10;

  MessageLoop();
  ~MessageLoop();
  MessageLoop(const MessageLoop&) = delete;
  MessageLoop& operator=(const MessageLoop&) = delete;

  // Listens on a port that is free, on `host` (numeric; empty: all interfaces),
  // and has `accept` make the receiver of each connection, in the loop's
  // thread. Returns the port, or 0 and what is wrong. Once per loop.
  int Listen(const std::string& host, Accept accept, std::string* error)
      ABSL_LOCKS_EXCLUDED(mu_);

  // The numeric addresses of a host, the best first; none, and what is wrong,
  // if it can't be found. May block, unless it is such an address itself.
  static std::vector<std::string> Resolve(const std::string& host,
                                          std::string* error);

  // Connects, which goes on in the loop's thread: what is sent meanwhile is
  // sent when it is done. Null, and what is wrong, if it can't even begin, as
  // when `address` is not numeric.
  std::shared_ptr<Connection> Connect(const std::string& address, int port,
                                      std::shared_ptr<MessageReceiver> receiver,
                                      std::string* error)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void AcceptAll() ABSL_LOCKS_EXCLUDED(mu_);
  void Handle(const std::shared_ptr<Connection>& connection, uint32_t events)
      ABSL_LOCKS_EXCLUDED(mu_);
  void End(const std::shared_ptr<Connection>& connection,
           const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);
  // False if the loop is ending.
  bool Add(const std::shared_ptr<Connection>& connection)
      ABSL_LOCKS_EXCLUDED(mu_);

  const int epoll_fd_;
  const int wake_fd_;
  // The loop's thread alone uses these.
  std::vector<char> scratch_;
  int spare_fd_;  // Makes room to refuse a connection when there is none.
  Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int listen_fd_ ABSL_GUARDED_BY(mu_) = -1;
  Accept accept_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<int, std::shared_ptr<Connection>> connections_
      ABSL_GUARDED_BY(mu_);  // By descriptor.
  std::thread thread_;       // Started last, joined by the destructor.
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MESSAGE_LOOP_H_
