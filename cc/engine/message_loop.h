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

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/connection.h"
#include "cc/engine/mutex.h"

namespace recsync {

// What a loop allows those that connect to it and have not been admitted
// (Connection::Admit): anybody who reaches the port can be one.
struct NewcomerLimits {
  // How many there are at a time. One more takes the place of the oldest, or
  // waits, as long as that one has not had its patience.
  size_t count = 256;
  std::chrono::milliseconds patience{1000};
  // How long one has to be admitted.
  std::chrono::milliseconds deadline{10000};
};

class MessageLoop {
 public:
  using MakeReceiver = std::function<std::shared_ptr<MessageReceiver>(
      std::shared_ptr<Connection>)>;

  // Gets a sentence for a log, in the loop's thread.
  using Warn = std::function<void(const std::string& text)>;

  explicit MessageLoop(Warn warn = nullptr,
                       NewcomerLimits newcomer_limits = {});
  ~MessageLoop();
  MessageLoop(const MessageLoop&) = delete;
  MessageLoop& operator=(const MessageLoop&) = delete;

  // Listens on a port that is free, on `host` (numeric; empty: all interfaces),
  // and has `make_receiver` make the receiver of each connection, in the loop's
  // thread. Returns the port, or 0 and what is wrong. Once per loop. When a
  // connection can't be accepted, as with hardly a descriptor left, that is
  // tried again a second later; those that connect wait meanwhile.
  int Listen(const std::string& host, MakeReceiver make_receiver,
             std::string* error) ABSL_LOCKS_EXCLUDED(mu_);

  // Connects, which goes on in the loop's thread: what is sent meanwhile is
  // sent when it is done. Null, and what is wrong, if it can't even begin, as
  // when `address` is not numeric.
  std::shared_ptr<Connection> Connect(const std::string& address, int port,
                                      std::shared_ptr<MessageReceiver> receiver,
                                      std::string* error)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Clock = std::chrono::steady_clock;

  // Closed when it goes, also where the constructor fails behind it.
  struct Descriptor {
    explicit Descriptor(int number) : number(number) {}
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    const int number;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends newcomers whose time is over, and a pause. Returns for how many
  // milliseconds there is nothing more of that to do; -1: for ever.
  int KeepTime() ABSL_LOCKS_EXCLUDED(mu_);
  void ForgetAdmitted();
  // Says why, once, and tries again a little later.
  void RefuseForNow(const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);
  // Listens to nobody until then.
  void PauseUntil(Clock::time_point end) ABSL_LOCKS_EXCLUDED(mu_);
  bool ListenTo(uint32_t events) ABSL_LOCKS_EXCLUDED(mu_);
  // Accepts some of those that wait.
  void Accept() ABSL_LOCKS_EXCLUDED(mu_);
  void Handle(const std::shared_ptr<Connection>& connection, uint32_t events)
      ABSL_LOCKS_EXCLUDED(mu_);
  void End(const std::shared_ptr<Connection>& connection,
           const std::string& reason) ABSL_LOCKS_EXCLUDED(mu_);
  // False if the loop is ending.
  bool Add(const std::shared_ptr<Connection>& connection)
      ABSL_LOCKS_EXCLUDED(mu_);

  const Warn warn_;
  const NewcomerLimits limits_;
  const Descriptor epoll_;
  const Descriptor wake_;
  // The loop's thread alone uses these.
  std::vector<char> scratch_;
  // Those that have been accepted and not admitted, the oldest first.
  std::deque<std::shared_ptr<Connection>> newcomers_;
  // When the listener is listened to again; unset if it is.
  std::optional<Clock::time_point> paused_until_;
  bool is_full_ = false;     // Paused as there are enough newcomers.
  bool has_warned_ = false;  // Of what keeps it from accepting.
  Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int listen_fd_ ABSL_GUARDED_BY(mu_) = -1;
  MakeReceiver make_receiver_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<int, std::shared_ptr<Connection>> connections_
      ABSL_GUARDED_BY(mu_);  // By descriptor.
  std::thread thread_;       // Started last, joined by the destructor.
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MESSAGE_LOOP_H_
