#include "cc/engine/message_loop.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace recsync {
namespace {

// In front of a head: its size and that of the body, as both ends' processors
// have them.
constexpr size_t kSizes = sizeof(uint32_t) + sizeof(uint64_t);
// What is read before it is known where it goes; the rest of a body is read to
// its place.
constexpr size_t kScratch = 16 << 10;
constexpr int kEvents = 64;
// Of messages that are sent together.
constexpr int kPieces = 32;
// A peer whose machine is gone is noticed after a minute.
constexpr int kIdleSeconds = 30;
constexpr int kProbeSeconds = 10;
constexpr int kProbes = 3;
constexpr int kSilentMilliseconds = 60000;

std::string ErrorText(int error) {
  return std::generic_category().message(error);
}

int CheckedFd(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return fd;
}

void SetOption(int fd, int level, int name, int value) {
  // What is set makes it faster, or notices sooner; it works without.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

void SetOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  // Nothing probes while something that was sent has not arrived.
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilentMilliseconds);
}

struct AddressesDeleter {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, AddressesDeleter>;

Addresses LookUp(const std::string& host, int port, int flags,
                 std::string* error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                               std::to_string(port).c_str(), &hints, &found);
  if (code != 0) *error = "\"" + host + "\": " + gai_strerror(code);
  return Addresses(code == 0 ? found : nullptr);
}

}  // namespace

Connection::~Connection() {
  if (fd_ >= 0) close(fd_);
}

bool Connection::Send(std::string head, const void* body, uint64_t size,
                      std::shared_ptr<const void> keep) {
  std::string sizes(kSizes, '\0');
  const uint32_t head_size = head.size();
  std::memcpy(sizes.data(), &head_size, sizeof(head_size));
  std::memcpy(sizes.data() + sizeof(head_size), &size, sizeof(size));
  MutexLock lock(&mu_);
  if (fd_ < 0) return false;
  outgoing_.push_back(
      {sizes + head, static_cast<const char*>(body), size, 0, std::move(keep)});
  // Else what came before waits for room.
  if (is_connected_ && !is_watched_for_writing_) Flush();
  return true;
}

void Connection::Close(const std::string& reason) {
  MutexLock lock(&mu_);
  if (fd_ < 0 || !reason_.empty()) return;
  reason_ = reason;
  // The loop sees the end of the data.
  (void)shutdown(fd_, SHUT_RDWR);
}

void Connection::Flush() {
  while (!outgoing_.empty()) {
    iovec pieces[kPieces];
    int count = 0;
    for (const Outgoing& message : outgoing_) {
      if (count + 2 > kPieces) break;
      const uint64_t head = message.head.size();
      if (message.sent < head) {
        pieces[count++] = {
            const_cast<char*>(message.head.data()) + message.sent,
            head - message.sent};
      }
      const uint64_t of_body = message.sent < head ? 0 : message.sent - head;
      if (of_body < message.size) {
        pieces[count++] = {const_cast<char*>(message.body) + of_body,
                           message.size - of_body};
      }
    }
    msghdr header{};
    header.msg_iov = pieces;
    header.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        Watch(/*writable=*/true);
      } else if (reason_.empty()) {
        reason_ = ErrorText(errno);
        (void)shutdown(fd_, SHUT_RDWR);
      }
      return;
    }
    for (uint64_t left = sent; left > 0;) {
      Outgoing& message = outgoing_.front();
      const uint64_t part = std::min<uint64_t>(
          left, message.head.size() + message.size - message.sent);
      message.sent += part;
      left -= part;
      if (message.sent < message.head.size() + message.size) break;
      outgoing_.pop_front();
    }
  }
  if (is_watched_for_writing_) Watch(/*writable=*/false);
}

void Connection::Watch(bool writable) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (writable) event.events |= EPOLLOUT;
  event.data.fd = fd_;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event) == 0) {
    is_watched_for_writing_ = writable;
  } else if (reason_.empty()) {
    reason_ = "epoll: " + ErrorText(errno);
    (void)shutdown(fd_, SHUT_RDWR);
  }
}

bool Connection::Read(std::vector<char>* scratch, std::string* reason) {
  int fd;
  {
    MutexLock lock(&mu_);
    fd = fd_;  // Only this thread ends it.
  }
  while (true) {
    // The rest of a body, and what comes after it.
    iovec pieces[2];
    int count = 0;
    const bool has_place = body_left_ > 0 && body_ != nullptr;
    if (has_place) pieces[count++] = {body_, body_left_};
    pieces[count++] = {scratch->data(), scratch->size()};
    const size_t asked = scratch->size() + (has_place ? body_left_ : 0);
    const ssize_t got = readv(fd, pieces, count);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      *reason = ErrorText(errno);
      return false;
    }
    if (got == 0) {
      *reason = "the other end has closed the connection";
      return false;
    }
    size_t left = got;
    if (has_place) {
      const uint64_t part = std::min<uint64_t>(left, body_left_);
      left -= part;
      TakeBody(part);
    }
    if (!Parse(scratch->data(), left, reason)) return false;
    if (static_cast<size_t>(got) < asked) return true;
  }
}

bool Connection::Parse(const char* data, size_t size, std::string* reason) {
  while (size > 0) {
    if (body_left_ > 0) {
      const size_t part = std::min<uint64_t>(size, body_left_);
      if (body_ != nullptr) std::memcpy(body_, data, part);
      data += part;
      size -= part;
      TakeBody(part);
      continue;
    }
    size_t wanted = kSizes;
    uint32_t head = 0;
    if (partial_.size() >= kSizes) {
      std::memcpy(&head, partial_.data(), sizeof(head));
      wanted += head;
    }
    const size_t part = std::min(size, wanted - partial_.size());
    partial_.append(data, part);
    data += part;
    size -= part;
    if (partial_.size() < wanted) return true;
    if (wanted == kSizes) {
      std::memcpy(&head, partial_.data(), sizeof(head));
      if (head > MessageLoop::kMaxHead) {
        *reason = "a head of " + std::to_string(head) + " bytes";
        return false;
      }
      if (head > 0) continue;
    }
    uint64_t body = 0;
    std::memcpy(&body, partial_.data() + sizeof(uint32_t), sizeof(body));
    body_ = receiver_->Head(std::string_view(partial_).substr(kSizes), body);
    partial_.clear();
    body_left_ = body;
    if (body == 0) receiver_->Body();
  }
  return true;
}

void Connection::TakeBody(uint64_t size) {
  body_left_ -= size;
  if (body_ == nullptr) return;
  body_ += size;
  if (body_left_ == 0) receiver_->Body();
}

MessageLoop::MessageLoop()
    : epoll_fd_(CheckedFd(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_fd_(CheckedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      scratch_(kScratch),
      spare_fd_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_fd_;
  CheckedFd(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event), "epoll_ctl");
  thread_ = std::thread([this] { Run(); });
}

MessageLoop::~MessageLoop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  // It can only fail if the loop has been told already.
  (void)!write(wake_fd_, &one, sizeof(one));
  thread_.join();
  {
    MutexLock lock(&mu_);
    if (listen_fd_ >= 0) close(listen_fd_);
  }
  if (spare_fd_ >= 0) close(spare_fd_);
  close(wake_fd_);
  close(epoll_fd_);
}

int MessageLoop::Listen(const std::string& host, Accept accept,
                        std::string* error) {
  // All interfaces: an IPv6 socket takes IPv4, too, where there is IPv6.
  const Addresses found =
      LookUp(host.empty() ? "::" : host, 0, AI_PASSIVE | AI_NUMERICHOST, error);
  if (found == nullptr) return 0;
  sockaddr_storage any{};
  sockaddr* address = found->ai_addr;
  socklen_t size = found->ai_addrlen;
  int fd =
      socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0 && host.empty()) {
    reinterpret_cast<sockaddr_in*>(&any)->sin_family = AF_INET;
    address = reinterpret_cast<sockaddr*>(&any);
    size = sizeof(sockaddr_in);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  }
  if (fd < 0) {
    *error = ErrorText(errno);
    return 0;
  }
  if (host.empty()) SetOption(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  sockaddr_storage bound{};
  socklen_t bound_size = sizeof(bound);
  if (bind(fd, address, size) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) {
    *error = ErrorText(errno);
    close(fd);
    return 0;
  }
  const int port =
      ntohs(bound.ss_family == AF_INET6
                ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  {
    MutexLock lock(&mu_);
    listen_fd_ = fd;
    accept_ = std::move(accept);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    *error = ErrorText(errno);
    return 0;
  }
  return port;
}

std::vector<std::string> MessageLoop::Resolve(const std::string& host,
                                              std::string* error) {
  const Addresses found = LookUp(host, 0, 0, error);
  std::vector<std::string> addresses;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    char text[NI_MAXHOST];
    const int code = getnameinfo(one->ai_addr, one->ai_addrlen, text,
                                 sizeof(text), nullptr, 0, NI_NUMERICHOST);
    if (code == 0) {
      addresses.emplace_back(text);
    } else {
      *error = gai_strerror(code);
    }
  }
  return addresses;
}

std::shared_ptr<Connection> MessageLoop::Connect(
    const std::string& address, int port,
    std::shared_ptr<MessageReceiver> receiver, std::string* error) {
  const Addresses found = LookUp(address, port, AI_NUMERICHOST, error);
  if (found == nullptr) return nullptr;
  const int fd =
      socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    *error = ErrorText(errno);
    return nullptr;
  }
  SetOptions(fd);
  const bool is_connected = connect(fd, found->ai_addr, found->ai_addrlen) == 0;
  if (!is_connected && errno != EINPROGRESS) {
    *error = ErrorText(errno);
    close(fd);
    return nullptr;
  }
  std::shared_ptr<Connection> connection(
      new Connection(fd, epoll_fd_, is_connected));
  connection->receiver_ = std::move(receiver);
  if (!Add(connection)) {
    *error = "the loop is ending";
    return nullptr;
  }
  return connection;
}

bool MessageLoop::Add(const std::shared_ptr<Connection>& connection) {
  MutexLock lock(&mu_);
  if (stopping_) return false;
  MutexLock of_connection(&connection->mu_);
  const int fd = connection->fd_;
  connections_[fd] = connection;
  connection->is_watched_for_writing_ = !connection->is_connected_;
  epoll_event event{};
  event.events = EPOLLIN;
  if (!connection->is_connected_) event.events |= EPOLLOUT;
  event.data.fd = fd;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    connections_.erase(fd);
    return false;
  }
  return true;
}

void MessageLoop::Run() {
  epoll_event events[kEvents];
  while (true) {
    const int count = epoll_wait(epoll_fd_, events, kEvents, -1);
    std::vector<std::shared_ptr<Connection>> all;
    for (int i = 0; i < std::max(0, count); ++i) {
      const int fd = events[i].data.fd;
      std::shared_ptr<Connection> connection;
      bool is_listener;
      {
        MutexLock lock(&mu_);
        is_listener = fd == listen_fd_;
        const auto found = connections_.find(fd);
        if (found != connections_.end()) connection = found->second;
      }
      if (is_listener) AcceptAll();
      if (connection != nullptr) Handle(connection, events[i].events);
    }
    {
      MutexLock lock(&mu_);
      if (!stopping_) continue;
      for (const auto& [fd, connection] : connections_)
        all.push_back(connection);
    }
    for (const auto& connection : all) End(connection, "the loop has ended");
    return;
  }
}

void MessageLoop::AcceptAll() {
  int listener;
  Accept accept;
  {
    MutexLock lock(&mu_);
    listener = listen_fd_;
    accept = accept_;
  }
  while (true) {
    const int fd =
        accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && spare_fd_ >= 0) {
      // Refused: who waits for nothing would have us called for ever.
      close(spare_fd_);
      const int refused = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (refused >= 0) close(refused);
      spare_fd_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
      if (refused < 0) return;
      continue;
    }
    // Whatever is wrong with it, the next one may be right.
    if (fd < 0) return;
    SetOptions(fd);
    std::shared_ptr<Connection> connection(
        new Connection(fd, epoll_fd_, /*is_connected=*/true));
    connection->receiver_ = accept(connection);
    if (!Add(connection)) End(connection, "the loop is ending");
  }
}

void MessageLoop::Handle(const std::shared_ptr<Connection>& connection,
                         uint32_t events) {
  if (events & EPOLLOUT) {
    MutexLock lock(&connection->mu_);
    if (!connection->is_connected_) {
      int error = 0;
      socklen_t size = sizeof(error);
      getsockopt(connection->fd_, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0 && connection->reason_.empty()) {
        connection->reason_ = ErrorText(error);
      }
      connection->is_connected_ = error == 0;
    }
    if (connection->is_connected_) connection->Flush();
  }
  std::string reason;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) {
    if (!connection->Read(&scratch_, &reason)) {
      End(connection, reason);
    }
  }
}

void MessageLoop::End(const std::shared_ptr<Connection>& connection,
                      const std::string& reason) {
  std::string told;
  std::deque<Connection::Outgoing> dropped;
  {
    MutexLock lock(&mu_);
    MutexLock of_connection(&connection->mu_);
    connections_.erase(connection->fd_);
    // A forked process may hold it, too: closing alone would not end it.
    (void)epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->fd_, nullptr);
    (void)shutdown(connection->fd_, SHUT_RDWR);
    close(connection->fd_);
    connection->fd_ = -1;
    told = connection->reason_.empty() ? reason : connection->reason_;
    dropped.swap(connection->outgoing_);
  }
  dropped.clear();
  connection->receiver_->Closed(told);
  // It may refer to the connection.
  connection->receiver_.reset();
}

}  // namespace recsync
