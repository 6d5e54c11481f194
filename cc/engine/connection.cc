#include "cc/engine/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cc/engine/sockets.h"

namespace recsync {
namespace {

// In front of a head: its size and that of the body, as both ends' processors
// have them.
constexpr size_t kSizes = sizeof(uint32_t) + sizeof(uint64_t);
// Of messages that are sent together.
constexpr int kPieces = 32;
// How often a connection is read before the others have their turn.
constexpr int kReads = 16;

}  // namespace

Connection::~Connection() {
  if (fd_ >= 0) close(fd_);
}

bool Connection::Send(std::string head, const void* body, uint64_t size,
                      std::shared_ptr<const void> keep) {
  if (head.size() > kMaxHeadBytes || size > kMaxBodyBytes) return false;
  std::string sizes(kSizes, '\0');
  const uint32_t head_size = head.size();
  std::memcpy(sizes.data(), &head_size, sizeof(head_size));
  std::memcpy(sizes.data() + sizeof(head_size), &size, sizeof(size));
  MutexLock lock(&mu_);
  if (fd_ < 0) return false;
  outgoing_.push_back(
      {sizes + head, static_cast<const char*>(body), size, 0, std::move(keep)});
  queued_ += sizes.size() + head.size() + size;
  // Else what came before waits for room.
  if (is_connected_ && !is_watched_for_writing_) Flush();
  if (is_watched_for_writing_ && !is_full_ && queued_ > kMaxQueuedBytes) {
    is_full_ = true;
    Watch(/*writable=*/true);
  }
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
        if (queued_ <= kMaxQueuedBytes / 2) is_full_ = false;
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
      queued_ -= part;
      if (message.sent < message.head.size() + message.size) break;
      outgoing_.pop_front();
    }
  }
  is_full_ = false;
  if (is_watched_for_writing_) Watch(/*writable=*/false);
}

void Connection::Watch(bool writable) {
  epoll_event event{};
  if (!is_full_) event.events |= EPOLLIN;
  if (writable) event.events |= EPOLLOUT;
  event.data.fd = fd_;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event) == 0) {
    is_watched_for_writing_ = writable;
  } else if (reason_.empty()) {
    reason_ = "epoll: " + ErrorText(errno);
    (void)shutdown(fd_, SHUT_RDWR);
  }
}

bool Connection::is_full() {
  MutexLock lock(&mu_);
  return is_full_;
}

bool Connection::Read(std::vector<char>* scratch, std::string* reason) {
  int fd;
  {
    MutexLock lock(&mu_);
    fd = fd_;  // Only this thread ends it.
  }
  for (int i = 0; i < kReads; ++i) {
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
    if (static_cast<size_t>(got) < asked || is_full()) return true;
  }
  return true;  // There may be more: the loop is told so again.
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
      uint64_t body = 0;
      std::memcpy(&body, partial_.data() + sizeof(head), sizeof(body));
      if (head > kMaxHeadBytes || body > kMaxBodyBytes) {
        *reason = "a message with a head of " + std::to_string(head) +
                  " bytes and a body of " + std::to_string(body) +
                  ", more than the " + std::to_string(kMaxHeadBytes) + " and " +
                  std::to_string(kMaxBodyBytes) + " that are taken";
        return false;
      }
      if (head > 0) continue;
    }
    uint64_t body = 0;
    std::memcpy(&body, partial_.data() + sizeof(head), sizeof(body));
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

}  // namespace recsync
