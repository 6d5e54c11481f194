// The tests confine the test program itself: the functions under test patch the
// entry for `bind` in its own global offset table.

#include "cc/engine/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

bool IsMainProgram(const LoadedObject& object) { return object.path().empty(); }

// A socket that is closed at the end of its scope.
class Socket {
 public:
  Socket(int family, int type) : fd_(socket(family, type, 0)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// Binds to `address`; returns the address bound to, or the error's name.
std::string BindIpv4(const char* address, int type = SOCK_STREAM) {
  Socket socket(AF_INET, type);
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  inet_pton(AF_INET, address, &name.sin_addr);
  if (bind(socket.fd(), reinterpret_cast<sockaddr*>(&name), sizeof(name))) {
    return std::strerror(errno);
  }
  socklen_t size = sizeof(name);
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &size);
  char text[INET_ADDRSTRLEN];
  return inet_ntop(AF_INET, &name.sin_addr, text, sizeof(text));
}

std::string BindIpv6(const char* address, bool ipv6_only = false) {
  Socket socket(AF_INET6, SOCK_STREAM);
  const int value = ipv6_only ? 1 : 0;
  setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &value, sizeof(value));
  sockaddr_in6 name = {};
  name.sin6_family = AF_INET6;
  inet_pton(AF_INET6, address, &name.sin6_addr);
  if (bind(socket.fd(), reinterpret_cast<sockaddr*>(&name), sizeof(name))) {
    return std::strerror(errno);
  }
  socklen_t size = sizeof(name);
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &size);
  char text[INET6_ADDRSTRLEN];
  return inet_ntop(AF_INET6, &name.sin6_addr, text, sizeof(text));
}

bool HasIpv6() { return BindIpv6("::1") == "::1"; }

class ListenAddressTest : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(ConfineListeners("0.0.0.0", IsMainProgram).error(), "");
  }
};

TEST_F(ListenAddressTest, RecognizesNumericAddresses) {
  for (const char* address : {"127.0.0.1", "0.0.0.0", "10.1.2.3", "::1",
                              "::", "::ffff:127.0.0.1", "fe80::1"}) {
    EXPECT_TRUE(IsNumericAddress(address)) << address;
  }
  for (const std::string& address :
       {std::string(""), std::string("localhost"), std::string("127.0.0.1:80"),
        std::string("127.0.0"), std::string("[::1]"), std::string("fe80::1%lo"),
        std::string(" 127.0.0.1"), std::string("256.0.0.1"),
        std::string("127.0.0.1\0x", 11)}) {
    EXPECT_FALSE(IsNumericAddress(address)) << address;
  }
}

TEST_F(ListenAddressTest, MalformedAddressChangesNothing) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  const std::string error =
      ConfineListeners("localhost", IsMainProgram).error();
  EXPECT_NE(error.find("got \"localhost\""), std::string::npos) << error;
  EXPECT_EQ(ConfinedAddress(), "127.0.0.1");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "127.0.0.1");
}

TEST_F(ListenAddressTest, NoObjectToPatchIsAnError) {
  const std::string error =
      ConfineListeners("127.0.0.1", [](const LoadedObject&) {
        return false;
      }).error();
  EXPECT_NE(error.find("none of the loaded libraries"), std::string::npos);
  EXPECT_EQ(ConfinedAddress(), "");
}

TEST_F(ListenAddressTest, Ipv4ListenerGoesToTheAddress) {
  EXPECT_EQ(BindIpv4("0.0.0.0"), "0.0.0.0");
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "127.0.0.1");
}

TEST_F(ListenAddressTest, DualStackListenerGoesToTheMappedAddress) {
  if (!HasIpv6()) GTEST_SKIP() << "no IPv6 here";
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv6("::"), "::ffff:127.0.0.1");
  EXPECT_EQ(BindIpv6("::ffff:0.0.0.0"), "::ffff:127.0.0.1");
}

TEST_F(ListenAddressTest, MappedListenerIsReachedThroughIpv4) {
  if (!HasIpv6()) GTEST_SKIP() << "no IPv6 here";
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  Socket server(AF_INET6, SOCK_STREAM);
  const int dual_stack = 0;
  setsockopt(server.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &dual_stack,
             sizeof(dual_stack));
  sockaddr_in6 name = {};
  name.sin6_family = AF_INET6;
  socklen_t size = sizeof(name);
  ASSERT_EQ(bind(server.fd(), reinterpret_cast<sockaddr*>(&name), size), 0);
  ASSERT_EQ(listen(server.fd(), 1), 0);
  getsockname(server.fd(), reinterpret_cast<sockaddr*>(&name), &size);

  Socket client(AF_INET, SOCK_STREAM);
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_port = name.sin6_port;
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(client.fd(), reinterpret_cast<const sockaddr*>(&peer),
                    sizeof(peer)),
            0)
      << std::strerror(errno);
}

TEST_F(ListenAddressTest, SocketsThatCannotCarryTheAddressFail) {
  if (!HasIpv6()) GTEST_SKIP() << "no IPv6 here";
  const std::string refused = std::strerror(EADDRNOTAVAIL);
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv6("::", /*ipv6_only=*/true), refused);
  ASSERT_EQ(ConfineListeners("::1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("0.0.0.0"), refused);
}

TEST_F(ListenAddressTest, OtherAddressesAndSocketsAreLeftAlone) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("127.0.0.2"), "127.0.0.2");
  EXPECT_EQ(BindIpv4("0.0.0.0", SOCK_DGRAM), "0.0.0.0");
  if (HasIpv6()) {
    EXPECT_EQ(BindIpv6("::1", /*ipv6_only=*/true), "::1");
  }
}

TEST_F(ListenAddressTest, ErrorsOfBindReachTheCaller) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(bind(-1, nullptr, 0), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST_F(ListenAddressTest, AnotherCallChangesTheAddress) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "127.0.0.1");
  ASSERT_EQ(ConfineListeners("127.0.0.2", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "127.0.0.2");
  EXPECT_EQ(ConfinedAddress(), "127.0.0.2");
  ASSERT_EQ(ConfineListeners("::ffff:127.0.0.3", IsMainProgram).error(), "");
  EXPECT_EQ(ConfinedAddress(), "127.0.0.3");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "127.0.0.3");
}

TEST_F(ListenAddressTest, AnyAddressLiftsTheConfinement) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  ASSERT_EQ(ConfineListeners("0.0.0.0", IsMainProgram).error(), "");
  EXPECT_EQ(BindIpv4("0.0.0.0"), "0.0.0.0");
  EXPECT_EQ(ConfinedAddress(), "");
}

TEST_F(ListenAddressTest, ThreadsBindWhileTheAddressChanges) {
  ASSERT_EQ(ConfineListeners("127.0.0.1", IsMainProgram).error(), "");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      for (int round = 0; round < 200; ++round) {
        if (i < 2) {
          EXPECT_EQ(ConfineListeners(round % 2 == 0 ? "127.0.0.2" : "127.0.0.1",
                                     IsMainProgram)
                        .error(),
                    "");
        } else {
          const std::string address = BindIpv4("0.0.0.0");
          EXPECT_TRUE(address == "127.0.0.1" || address == "127.0.0.2")
              << address;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace recsync
