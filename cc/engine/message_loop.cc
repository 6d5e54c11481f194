#include "cc/engine/message_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "cc/engine/sockets.h"

namespace recsync {
namespace {

// What is read before it is known where it goes; the rest of a body is read to
// its place.
constexpr size_t kScratch = 16 << 10;
constexpr int kEvents = 64;
// How many are accepted before those that are there have their turn.
constexpr int kAccepts = 16;
// When nobody can be accepted, as when there are too few descriptors left.
constexpr std::chrono::seconds kPause(1);
// Descriptors that are left to others. TensorFlow ends the process when there
// is none at the moment at which a thread runs its first function, as it reads
// random numbers from a file.
constexpr rlim_t kSpareDescriptors = 32;

int Checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

// Whether one more would leave others less than the spare ones: the system
// gives the lowest number that is free.
bool AreDescriptorsScarce(int any_fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  const int lowest = fcntl(any_fd, F_DUPFD_CLOEXEC, 0);
  if (lowest < 0) return true;
  close(lowest);
  return lowest + kSpareDescriptors >= limit.rlim_cur;
}

}  // namespace

MessageLoop::Descriptor::~Descriptor() { close(number); }

MessageLoop::MessageLoop(Warn warn, NewcomerLimits newcomer_limits)
    : warn_(std::move(warn)),
      limits_(newcomer_limits),
      epoll_(Checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(Checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      scratch_(kScratch) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_.number;
  Checked(epoll_ctl(epoll_.number, EPOLL_CTL_ADD, wake_.number, &event),
          "epoll_ctl");
  thread_ = std::thread([this] { Run(); });
}

MessageLoop::~MessageLoop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  // It can only fail if the loop has been told already.
  (void)!write(wake_.number, &one, sizeof(one));
  thread_.join();
  {
    MutexLock lock(&mu_);
    if (listen_fd_ >= 0) close(listen_fd_);
  }
}

int MessageLoop::Listen(const std::string& host, MakeReceiver make_receiver,
                        std::string* error) {
  int port = 0;
  const int fd = ListenOnFreePort(host, &port, error);
  if (fd < 0) return 0;
  {
    MutexLock lock(&mu_);
    listen_fd_ = fd;
    make_receiver_ = std::move(make_receiver);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.number, EPOLL_CTL_ADD, fd, &event) != 0) {
    *error = ErrorText(errno);
    return 0;
  }
  return port;
}

std::shared_ptr<Connection> MessageLoop::Connect(
    const std::string& address, int port,
    std::shared_ptr<MessageReceiver> receiver, std::string* error) {
  bool is_connected = false;
  const int fd = BeginToConnect(address, port, &is_connected, error);
  if (fd < 0) return nullptr;
  std::shared_ptr<Connection> connection(
      new Connection(fd, epoll_.number, is_connected));
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
  if (epoll_ctl(epoll_.number, EPOLL_CTL_ADD, fd, &event) != 0) {
    connections_.erase(fd);
    return false;
  }
  return true;
}

void MessageLoop::Run() {
  epoll_event events[kEvents];
  while (true) {
    const int count = epoll_wait(epoll_.number, events, kEvents, KeepTime());
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
      if (is_listener) Accept();
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

int MessageLoop::KeepTime() {
  if (newcomers_.empty() && !paused_until_.has_value()) return -1;
  const Clock::time_point now = Clock::now();
  ForgetAdmitted();
  while (!newcomers_.empty() &&
         now >= newcomers_.front()->accepted_ + limits_.deadline) {
    End(newcomers_.front(), "it has not said in time who it is");
    ForgetAdmitted();
  }
  const bool has_room = is_full_ && newcomers_.size() < limits_.count;
  if (paused_until_.has_value() && (has_room || now >= *paused_until_) &&
      ListenTo(EPOLLIN)) {
    paused_until_.reset();
    is_full_ = false;
  }
  std::optional<Clock::time_point> next = paused_until_;
  if (!newcomers_.empty()) {
    const auto late = newcomers_.front()->accepted_ + limits_.deadline;
    next = std::min(next.value_or(late), late);
  }
  if (!next.has_value()) return -1;
  // Rounded up; and what has just failed is tried again a little later.
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(*next - now);
  return static_cast<int>(std::max<int64_t>(left.count(), 0)) + 1;
}

void MessageLoop::ForgetAdmitted() {
  newcomers_.erase(
      std::remove_if(newcomers_.begin(), newcomers_.end(),
                     [](const std::shared_ptr<Connection>& connection) {
                       return !connection->is_newcomer_;
                     }),
      newcomers_.end());
}

void MessageLoop::PauseUntil(Clock::time_point end) {
  // If that fails, the listener tells us again at once.
  if (ListenTo(0)) paused_until_ = end;
}

bool MessageLoop::ListenTo(uint32_t events) {
  MutexLock lock(&mu_);
  epoll_event event{};
  event.events = events;
  event.data.fd = listen_fd_;
  return epoll_ctl(epoll_.number, EPOLL_CTL_MOD, listen_fd_, &event) == 0;
}

void MessageLoop::RefuseForNow(const std::string& reason) {
  if (!has_warned_ && warn_ != nullptr) {
    warn_("no connection can be accepted for now: " + reason);
  }
  has_warned_ = true;
  // Who goes on waiting would have us called without end.
  PauseUntil(Clock::now() + kPause);
}

void MessageLoop::Accept() {
  int listener;
  MakeReceiver make_receiver;
  {
    MutexLock lock(&mu_);
    listener = listen_fd_;
    make_receiver = make_receiver_;
  }
  for (int i = 0; i < kAccepts; ++i) {
    ForgetAdmitted();
    if (newcomers_.size() >= limits_.count) {
      const auto patient_until =
          newcomers_.front()->accepted_ + limits_.patience;
      if (Clock::now() < patient_until) {
        is_full_ = true;
        PauseUntil(patient_until);
        return;
      }
      End(newcomers_.front(), "others wait that may say who they are");
    }
    if (AreDescriptorsScarce(listener)) return RefuseForNow(ErrorText(EMFILE));
    const int fd =
        accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // Whatever is wrong with it, the next one may be right.
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      return RefuseForNow(ErrorText(errno));
    }
    has_warned_ = false;
    SetConnectionOptions(fd);
    std::shared_ptr<Connection> connection(
        new Connection(fd, epoll_.number, /*is_connected=*/true));
    connection->is_newcomer_ = true;
    connection->accepted_ = Clock::now();
    connection->receiver_ = make_receiver(connection);
    if (Add(connection)) {
      newcomers_.push_back(std::move(connection));
    } else {
      End(connection, "the loop is ending");
    }
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
    (void)epoll_ctl(epoll_.number, EPOLL_CTL_DEL, connection->fd_, nullptr);
    (void)shutdown(connection->fd_, SHUT_RDWR);
    close(connection->fd_);
    connection->fd_ = -1;
    told = connection->reason_.empty() ? reason : connection->reason_;
    dropped.swap(connection->outgoing_);
  }
  dropped.clear();
  connection->is_newcomer_ = false;
  connection->receiver_->Closed(told);
  // It may refer to the connection.
  connection->receiver_.reset();
}

}  // namespace recsync
