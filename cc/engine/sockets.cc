#include "cc/engine/sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

namespace recsync {
namespace {

constexpr int kFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
// A peer whose machine is gone is noticed after a minute.
constexpr int kIdleSeconds = 30;
constexpr int kProbeSeconds = 10;
constexpr int kProbes = 3;
constexpr int kSilentMilliseconds = 60000;

struct AddressesDeleter {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, AddressesDeleter>;

void SetOption(int fd, int level, int name, int value) {
  // What is set makes it faster, or notices sooner; it works without.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

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

std::string ErrorText(int error) {
  return std::generic_category().message(error);
}

std::vector<std::string> ResolveHost(const std::string& host,
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

void SetConnectionOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  // Nothing probes while something that was sent has not arrived.
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilentMilliseconds);
}

int ListenOnFreePort(const std::string& host, int* port, std::string* error) {
  // All interfaces: an IPv6 socket takes IPv4, too, where there is IPv6.
  const Addresses found =
      LookUp(host.empty() ? "::" : host, 0, AI_PASSIVE | AI_NUMERICHOST, error);
  if (found == nullptr) return -1;
  sockaddr_storage any{};
  sockaddr* address = found->ai_addr;
  socklen_t size = found->ai_addrlen;
  int fd = socket(found->ai_family, kFlags, 0);
  if (fd < 0 && host.empty()) {
    reinterpret_cast<sockaddr_in*>(&any)->sin_family = AF_INET;
    address = reinterpret_cast<sockaddr*>(&any);
    size = sizeof(sockaddr_in);
    fd = socket(AF_INET, kFlags, 0);
  }
  if (fd < 0) {
    *error = ErrorText(errno);
    return -1;
  }
  if (host.empty()) SetOption(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  sockaddr_storage bound{};
  socklen_t bound_size = sizeof(bound);
  if (bind(fd, address, size) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) {
    *error = ErrorText(errno);
    close(fd);
    return -1;
  }
  *port = ntohs(bound.ss_family == AF_INET6
                    ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                    : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return fd;
}

int BeginToConnect(const std::string& address, int port, bool* is_connected,
                   std::string* error) {
  const Addresses found = LookUp(address, port, AI_NUMERICHOST, error);
  if (found == nullptr) return -1;
  const int fd = socket(found->ai_family, kFlags, 0);
  if (fd < 0) {
    *error = ErrorText(errno);
    return -1;
  }
  SetConnectionOptions(fd);
  *is_connected = connect(fd, found->ai_addr, found->ai_addrlen) == 0;
  if (!*is_connected && errno != EINPROGRESS) {
    *error = ErrorText(errno);
    close(fd);
    return -1;
  }
  return fd;
}

}  // namespace recsync
