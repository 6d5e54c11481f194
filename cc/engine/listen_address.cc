#include "cc/engine/listen_address.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>

namespace recsync {
namespace {

using BindFunction = int (*)(int, const sockaddr*, socklen_t);

// Where listeners go. Immutable once published.
struct Target {
  bool is_any = false;  // no confinement
  bool has_ipv4 = false;
  in_addr ipv4 = {};   // valid if has_ipv4
  in6_addr ipv6 = {};  // the mapped form if has_ipv4
  std::string text;    // canonical spelling
};

// The target in force, null before the first success. The replacement reads it
// without a lock, so that a child forked at a bad moment can still bind.
std::atomic<const Target*> current_target{nullptr};
// The `bind` that the replacement ends in; set before any slot is patched.
std::atomic<BindFunction> real_bind{nullptr};

bool ParseTarget(const std::string& address, Target* target) {
  // inet_pton stops at a NUL that std::string may hold.
  if (address.find('\0') != std::string::npos) return false;
  char text[INET6_ADDRSTRLEN];
  if (inet_pton(AF_INET, address.c_str(), &target->ipv4) == 1) {
    target->has_ipv4 = true;
  } else if (inet_pton(AF_INET6, address.c_str(), &target->ipv6) == 1) {
    target->has_ipv4 = IN6_IS_ADDR_V4MAPPED(&target->ipv6);
    if (target->has_ipv4) {
      std::memcpy(&target->ipv4, &target->ipv6.s6_addr[12], sizeof(in_addr));
    }
  } else {
    return false;
  }
  if (target->has_ipv4) {
    target->ipv6 = {};
    target->ipv6.s6_addr[10] = 0xff;
    target->ipv6.s6_addr[11] = 0xff;
    std::memcpy(&target->ipv6.s6_addr[12], &target->ipv4, sizeof(in_addr));
    target->is_any = target->ipv4.s_addr == htonl(INADDR_ANY);
    inet_ntop(AF_INET, &target->ipv4, text, sizeof(text));
  } else {
    target->is_any = IN6_IS_ADDR_UNSPECIFIED(&target->ipv6);
    inet_ntop(AF_INET6, &target->ipv6, text, sizeof(text));
  }
  target->text = text;
  return true;
}

bool IsTcpSocket(int fd) {
  int type = 0;
  socklen_t size = sizeof(type);
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
         type == SOCK_STREAM;
}

bool IsIpv6Only(int fd) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &value, &size) == 0 &&
         value != 0;
}

bool IsAnyAddress(const in6_addr& address) {
  if (IN6_IS_ADDR_UNSPECIFIED(&address)) return true;
  if (!IN6_IS_ADDR_V4MAPPED(&address)) return false;
  in_addr ipv4;
  std::memcpy(&ipv4, &address.s6_addr[12], sizeof(ipv4));
  return ipv4.s_addr == htonl(INADDR_ANY);
}

// What the patched slots call. Copies the address, as the caller's is const and
// may be reused by it.
int ConfinedBind(int fd, const sockaddr* address, socklen_t size) {
  const BindFunction bind_function = real_bind.load(std::memory_order_acquire);
  const Target* target = current_target.load(std::memory_order_acquire);
  if (target == nullptr || target->is_any || address == nullptr ||
      size < sizeof(sa_family_t)) {
    return bind_function(fd, address, size);
  }
  sa_family_t family;
  std::memcpy(&family, &address->sa_family, sizeof(family));
  if (family == AF_INET && size >= sizeof(sockaddr_in)) {
    sockaddr_in confined;
    std::memcpy(&confined, address, sizeof(confined));
    if (confined.sin_addr.s_addr == htonl(INADDR_ANY) && IsTcpSocket(fd)) {
      if (!target->has_ipv4) {
        errno = EADDRNOTAVAIL;
        return -1;
      }
      confined.sin_addr = target->ipv4;
      return bind_function(fd, reinterpret_cast<const sockaddr*>(&confined),
                           sizeof(confined));
    }
  } else if (family == AF_INET6 && size >= sizeof(sockaddr_in6)) {
    sockaddr_in6 confined;
    std::memcpy(&confined, address, sizeof(confined));
    if (IsAnyAddress(confined.sin6_addr) && IsTcpSocket(fd)) {
      if (target->has_ipv4 && IsIpv6Only(fd)) {
        errno = EADDRNOTAVAIL;
        return -1;
      }
      confined.sin6_addr = target->ipv6;
      return bind_function(fd, reinterpret_cast<const sockaddr*>(&confined),
                           sizeof(confined));
    }
  }
  return bind_function(fd, address, size);
}

}  // namespace

bool IsNumericAddress(const std::string& address) {
  Target target;
  return ParseTarget(address, &target);
}

Result ConfineListeners(const std::string& address,
                        const ObjectFilter& filter) {
  // Serializes callers; never destroyed, as a thread may bind during exit.
  static std::mutex* const mutex = new std::mutex;
  static std::list<Target>* const targets = new std::list<Target>;
  Target target;
  if (!ParseTarget(address, &target)) {
    return Result::Error(
        "address must be a numeric IPv4 or IPv6 address without a port, "
        "like 127.0.0.1 or ::1, got \"" +
        address + "\"");
  }
  std::lock_guard<std::mutex> lock(*mutex);
  if (real_bind.load() == nullptr) {
    // The first `bind` in the global scope: libc's, or that of a shim which the
    // user preloaded, which goes on working behind the replacement.
    void* const found = dlsym(RTLD_DEFAULT, "bind");
    if (found == nullptr)
      return Result::Error("no function bind in this process");
    real_bind.store(reinterpret_cast<BindFunction>(found));
  }
  // The target goes first: no patched object may bind without it, and it stays
  // if some were patched before one failed.
  const Target* const old_target = current_target.load();
  if (old_target == nullptr || old_target->text != target.text) {
    targets->push_back(target);
    current_target.store(&targets->back(), std::memory_order_release);
  }
  int entries = 0;
  Result redirected = RedirectImports(
      "bind", reinterpret_cast<void*>(&ConfinedBind), filter, &entries);
  if (entries == 0) {
    current_target.store(old_target, std::memory_order_release);
  }
  return redirected;
}

std::string ConfinedAddress() {
  const Target* const target = current_target.load(std::memory_order_acquire);
  return target == nullptr || target->is_any ? "" : target->text;
}

}  // namespace recsync
