#include "cc/engine/message_loop.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/mutex.h"
#include "cc/engine/sockets.h"
#include "gtest/gtest.h"

namespace recsync {
namespace {

using Message = std::pair<std::string, std::string>;  // Head and body.

constexpr std::chrono::seconds kLimit(60);

// Keeps what arrives, and drops the bodies of messages whose head is "drop".
class Mailbox : public MessageReceiver {
 public:
  char* Head(std::string_view head, uint64_t size) override {
    if (blocked_.valid()) blocked_.wait();
    head_ = std::string(head);
    body_.assign(size, '\0');
    return head == "drop" ? nullptr : body_.data();
  }

  void Body() override {
    MutexLock lock(&mu_);
    messages_.emplace_back(head_, body_);
    changed_.SignalAll();
  }

  void Closed(const std::string& reason) override {
    MutexLock lock(&mu_);
    ++times_closed_;
    reason_ = reason;
    changed_.SignalAll();
  }

  // Has the loop stand still at the next head; call it before there is one.
  void BlockUntil(std::shared_future<void> released) {
    blocked_ = std::move(released);
  }

  std::vector<Message> WaitFor(size_t messages) {
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    MutexLock lock(&mu_);
    while (messages_.size() < messages &&
           std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(&mu_, deadline);
    }
    return messages_;
  }

  std::string WaitForEnd() {
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    MutexLock lock(&mu_);
    while (times_closed_ == 0 && std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(&mu_, deadline);
    }
    return reason_;
  }

  int times_closed() {
    MutexLock lock(&mu_);
    return times_closed_;
  }

 private:
  std::shared_future<void> blocked_;
  std::string head_, body_;  // The loop's thread alone uses them.
  Mutex mu_;
  CondVar changed_;
  std::vector<Message> messages_ ABSL_GUARDED_BY(mu_);
  int times_closed_ ABSL_GUARDED_BY(mu_) = 0;
  std::string reason_ ABSL_GUARDED_BY(mu_);
};

// Two loops, one of which has a connection to the other.
class MessageLoopTest : public testing::Test {
 protected:
  void SetUp() override {
    port_ = server_.value().Listen(
        "127.0.0.1",
        [this](std::shared_ptr<Connection> connection) {
          connection->Admit();
          accepted_.set_value(std::move(connection));
          return at_server_;
        },
        &error_);
    ASSERT_GT(port_, 0) << error_;
    to_server_ =
        client_.value().Connect("127.0.0.1", port_, at_client_, &error_);
    ASSERT_NE(to_server_, nullptr) << error_;
    auto accepted = accepted_.get_future();
    ASSERT_EQ(accepted.wait_for(kLimit), std::future_status::ready);
    to_client_ = accepted.get();
  }

  static bool Send(Connection* connection, const std::string& head,
                   const std::string& body) {
    return SendKept(connection, head, std::make_shared<std::string>(body));
  }

  static bool SendKept(Connection* connection, const std::string& head,
                       std::shared_ptr<std::string> body) {
    const std::string& bytes = *body;
    return connection->Send(head, bytes.data(), bytes.size(), std::move(body));
  }

  // Returns when the server's loop has done with accepting. Even to find that
  // nobody waits, it holds a file descriptor for a moment.
  void WaitUntilAccepted() {
    ASSERT_TRUE(Send(to_server_.get(), "accepted", ""));
    ASSERT_EQ(at_server_->WaitFor(1).size(), 1);
  }

  // A connection to the server that is no connection of a loop.
  int ConnectRaw() const {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port_);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(
        connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  std::string error_;
  std::shared_ptr<Mailbox> at_server_ = std::make_shared<Mailbox>();
  std::shared_ptr<Mailbox> at_client_ = std::make_shared<Mailbox>();
  std::promise<std::shared_ptr<Connection>> accepted_;
  Mailbox warned_;  // What the server's loop says, as heads.
  std::optional<MessageLoop> server_{std::in_place,
                                     [this](const std::string& text) {
                                       warned_.Head(text, 0);
                                       warned_.Body();
                                     }};
  std::optional<MessageLoop> client_{std::in_place};
  int port_ = 0;
  std::shared_ptr<Connection> to_server_, to_client_;
};

std::vector<Message> RandomMessages(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Message> messages;
  for (int i = 0; i < count; ++i) {
    // Sizes of all orders of magnitude, 0 among them.
    const auto size = [&random](int most) {
      return (uint64_t{1} << (random() % most)) * (random() % 4) / 2;
    };
    std::string head(size(12), static_cast<char>('a' + i % 26));
    std::string body(size(19), '\0');
    for (char& byte : body) byte = static_cast<char>(random());
    messages.emplace_back(std::move(head), std::move(body));
  }
  return messages;
}

TEST_F(MessageLoopTest, MessagesOfAllSizesArriveWholeAndInOrderBothWays) {
  const auto there = RandomMessages(200, 1), back = RandomMessages(200, 2);
  std::thread other([&] {
    for (const auto& [head, body] : back) {
      EXPECT_TRUE(Send(to_client_.get(), head, body));
    }
  });
  for (const auto& [head, body] : there) {
    EXPECT_TRUE(Send(to_server_.get(), head, body));
  }
  other.join();
  EXPECT_EQ(at_server_->WaitFor(there.size()), there);
  EXPECT_EQ(at_client_->WaitFor(back.size()), back);
}

TEST_F(MessageLoopTest, WhatIsDroppedLeavesTheRestAsItIs) {
  const std::string large(3 << 20, 'x');
  Send(to_server_.get(), "first", large);
  Send(to_server_.get(), "drop", large);
  Send(to_server_.get(), "last", large);
  const std::vector<Message> expected = {{"first", large}, {"last", large}};
  EXPECT_EQ(at_server_->WaitFor(2), expected);
}

TEST_F(MessageLoopTest, MessagesOfSeveralThreadsDoNotMix) {
  constexpr int kThreads = 4, kMessages = 100;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < kMessages; ++i) {
        Send(to_server_.get(), std::to_string(t),
             std::string(1000 * i, static_cast<char>('a' + t)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> next(kThreads, 0);
  for (const auto& [head, body] : at_server_->WaitFor(kThreads * kMessages)) {
    const int t = std::stoi(head);
    EXPECT_EQ(body, std::string(1000 * next[t]++, static_cast<char>('a' + t)));
  }
  EXPECT_EQ(next, std::vector<int>(kThreads, kMessages));
}

TEST_F(MessageLoopTest, WhoSendsDoesNotWaitForWhoReads) {
  std::promise<void> release;
  at_server_->BlockUntil(release.get_future().share());
  const std::string large(8 << 20, 'x');  // More than the network holds.
  std::vector<Message> expected;
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(Send(to_server_.get(), std::to_string(i), large));
    expected.emplace_back(std::to_string(i), large);
  }
  release.set_value();
  EXPECT_EQ(at_server_->WaitFor(4), expected);
}

TEST_F(MessageLoopTest, WhoDoesNotReadTheAnswersIsNotListenedToUntilItDoes) {
  std::promise<void> released;
  at_client_->BlockUntil(released.get_future().share());
  const auto body = std::make_shared<std::string>(16 << 20, 'x');
  const int answers = 2 * kMaxQueuedBytes / body->size();
  for (int i = 0; i < answers; ++i) SendKept(to_client_.get(), "answer", body);
  for (int i = 0; i < 3; ++i) Send(to_server_.get(), "asked", "");
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(at_server_->WaitFor(0).size(), 0);
  released.set_value();
  EXPECT_EQ(at_client_->WaitFor(answers).size(), answers);
  EXPECT_EQ(at_server_->WaitFor(3).size(), 3);
}

TEST_F(MessageLoopTest, ABodyIsKeptUntilItHasBeenSentAndNoLonger) {
  auto body = std::make_shared<std::string>(5 << 20, 'x');
  const std::weak_ptr<std::string> alive = body;
  const std::string expected = *body;
  SendKept(to_server_.get(), "kept", std::move(body));
  EXPECT_EQ(at_server_->WaitFor(1).at(0).second, expected);
  // The answer comes when the loop's thread is done with the request.
  Send(to_client_.get(), "answer", "");
  at_client_->WaitFor(1);
  EXPECT_TRUE(alive.expired());
}

TEST_F(MessageLoopTest, ABodyThatCannotBeSentAnyMoreIsNotKept) {
  std::promise<void> release;
  at_server_->BlockUntil(release.get_future().share());
  auto body = std::make_shared<std::string>(32 << 20, 'x');
  const std::weak_ptr<std::string> alive = body;
  SendKept(to_server_.get(), "kept", std::move(body));
  EXPECT_FALSE(alive.expired());
  to_server_->Close("no more");
  EXPECT_EQ(at_client_->WaitForEnd(), "no more");
  EXPECT_TRUE(alive.expired());
  release.set_value();
}

TEST_F(MessageLoopTest, BothEndsHearOnceThatAConnectionHasEnded) {
  to_server_->Close("enough");
  to_server_->Close("again");
  EXPECT_EQ(at_client_->WaitForEnd(), "enough");
  EXPECT_EQ(at_server_->WaitForEnd(),
            "the other end has closed the connection");
  EXPECT_FALSE(Send(to_server_.get(), "late", ""));
  EXPECT_FALSE(Send(to_client_.get(), "late", ""));
  server_.reset();
  client_.reset();
  EXPECT_EQ(at_client_->times_closed(), 1);
  EXPECT_EQ(at_server_->times_closed(), 1);
}

TEST_F(MessageLoopTest, ALoopThatIsDestroyedEndsItsConnections) {
  client_.reset();
  EXPECT_EQ(at_client_->WaitForEnd(), "the loop has ended");
  EXPECT_FALSE(Send(to_server_.get(), "late", ""));
  EXPECT_EQ(at_server_->WaitForEnd(),
            "the other end has closed the connection");
}

TEST_F(MessageLoopTest, AReceiverIsLetGoWhenItsConnectionHasEnded) {
  std::weak_ptr<Mailbox> alive = at_client_;
  to_server_->Close("enough");
  at_client_->WaitForEnd();
  at_client_.reset();
  client_.reset();  // Joins the thread that has called it.
  EXPECT_TRUE(alive.expired());
}

TEST_F(MessageLoopTest, MessagesOnTheirWayToNobodyEndWithAReason) {
  server_.reset();  // Nobody listens at its port any more.
  auto mailbox = std::make_shared<Mailbox>();
  const auto connection =
      client_.value().Connect("127.0.0.1", port_, mailbox, &error_);
  ASSERT_NE(connection, nullptr);
  Send(connection.get(), "to nobody", "");
  EXPECT_EQ(mailbox->WaitForEnd(), "Connection refused");
  EXPECT_FALSE(Send(connection.get(), "late", ""));
}

TEST_F(MessageLoopTest, NamesAndAddressesThatAreNoneAreErrors) {
  EXPECT_TRUE(ResolveHost("no such host.invalid", &error_).empty());
  EXPECT_NE(error_.find("no such host.invalid"), std::string::npos) << error_;
  EXPECT_EQ(client_.value().Connect("a host", 1, std::make_shared<Mailbox>(),
                                    &error_),
            nullptr);
  EXPECT_NE(error_.find("a host"), std::string::npos) << error_;
  MessageLoop loop;
  EXPECT_EQ(loop.Listen("192.0.2.1", nullptr, &error_), 0);
  EXPECT_EQ(error_, "Cannot assign requested address");
  EXPECT_EQ(loop.Listen("a name", nullptr, &error_), 0);
  EXPECT_NE(error_.find("a name"), std::string::npos) << error_;
}

TEST_F(MessageLoopTest, HostsAreResolvedToNumericAddresses) {
  EXPECT_EQ(ResolveHost("127.0.0.5", &error_),
            std::vector<std::string>{"127.0.0.5"});
  EXPECT_EQ(ResolveHost("::1", &error_), std::vector<std::string>{"::1"});
  const auto addresses = ResolveHost("localhost", &error_);
  EXPECT_NE(std::find(addresses.begin(), addresses.end(), "127.0.0.1"),
            addresses.end());
}

// A process with few descriptors left, as when somebody opens connections and
// says nothing.
TEST_F(MessageLoopTest, WhatThereIsNoRoomForWaitsUntilThereIs) {
  WaitUntilAccepted();
  std::promise<std::shared_ptr<Connection>> next;
  accepted_ = std::move(next);
  auto accepted = accepted_.get_future();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int probe = open("/dev/null", O_RDONLY);
  ASSERT_GE(probe, 0);
  close(probe);
  rlimit few = before;
  few.rlim_cur = probe + 20;  // For the end that connects, and for others.
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const int fd = ConnectRaw();
  EXPECT_EQ(warned_.WaitFor(1).at(0).first,
            "no connection can be accepted for now: Too many open files");
  EXPECT_TRUE(Send(to_server_.get(), "still", "there"));
  EXPECT_EQ(at_server_->WaitFor(2).at(1), Message("still", "there"));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(accepted.wait_for(kLimit), std::future_status::ready);
  close(fd);
  EXPECT_EQ(warned_.WaitFor(1).size(), 1);
}

// A loop whose newcomers nobody admits, unless they say something.
class NewcomersTest : public testing::Test {
 protected:
  class Guest : public MessageReceiver {
   public:
    explicit Guest(std::shared_ptr<Connection> connection)
        : connection_(std::move(connection)) {}
    char* Head(std::string_view, uint64_t) override {
      connection_->Admit();
      connection_->Send("welcome");
      return nullptr;
    }
    void Body() override {}
    void Closed(const std::string&) override { connection_.reset(); }

   private:
    std::shared_ptr<Connection> connection_;
  };

  void Start(NewcomerLimits limits) {
    loop_.emplace(nullptr, limits);
    port_ = loop_->Listen(
        "127.0.0.1",
        [](std::shared_ptr<Connection> connection) {
          return std::make_shared<Guest>(std::move(connection));
        },
        &error_);
    ASSERT_GT(port_, 0) << error_;
  }

  std::shared_ptr<Mailbox> Connect(std::shared_ptr<Connection>* connection) {
    auto mailbox = std::make_shared<Mailbox>();
    *connection = clients_.Connect("127.0.0.1", port_, mailbox, &error_);
    EXPECT_NE(*connection, nullptr) << error_;
    return mailbox;
  }

  // Whether one that connects now is welcomed.
  bool IsWelcomed() {
    std::shared_ptr<Connection> connection;
    const auto mailbox = Connect(&connection);
    connection->Send("hello");
    return mailbox->WaitFor(1).size() == 1;
  }

  std::string error_;
  int port_ = 0;
  std::optional<MessageLoop> loop_;
  MessageLoop clients_;
};

TEST_F(NewcomersTest, WhoDoesNotSayWhoItIsIsSentAwayAndOthersStay) {
  Start({/*count=*/256, /*patience=*/std::chrono::milliseconds(1),
         /*deadline=*/std::chrono::milliseconds(300)});
  std::shared_ptr<Connection> silent, known;
  const auto of_known = Connect(&known);
  known->Send("hello");
  EXPECT_EQ(of_known->WaitFor(1).size(), 1);
  EXPECT_EQ(Connect(&silent)->WaitForEnd(),
            "the other end has closed the connection");
  known->Send("hello again");
  EXPECT_EQ(of_known->WaitFor(2).size(), 2);
  EXPECT_EQ(of_known->times_closed(), 0);
}

TEST_F(NewcomersTest, TheOldestMakesRoomWhenThereAreTooManyWhoSayNothing) {
  Start({/*count=*/3, /*patience=*/std::chrono::milliseconds(50),
         /*deadline=*/std::chrono::hours(1)});
  std::vector<std::shared_ptr<Connection>> silent(6);
  std::vector<std::shared_ptr<Mailbox>> mailboxes;
  for (auto& one : silent) mailboxes.push_back(Connect(&one));
  EXPECT_TRUE(IsWelcomed());
  // That one has been the seventh, and three at most have said nothing since.
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(mailboxes[i]->WaitForEnd(),
              "the other end has closed the connection");
  }
  EXPECT_EQ(mailboxes[5]->times_closed(), 0);
}

TEST_F(NewcomersTest, MoreThanThereMayBeAreAllAdmittedIfTheySayWhoTheyAre) {
  Start({/*count=*/2, /*patience=*/std::chrono::seconds(30),
         /*deadline=*/std::chrono::hours(1)});
  std::vector<std::shared_ptr<Connection>> all(40);
  std::vector<std::shared_ptr<Mailbox>> mailboxes;
  for (auto& one : all) mailboxes.push_back(Connect(&one));
  // Those that wait hear nothing before those who are there have spoken.
  for (auto& one : all) one->Send("hello");
  for (const auto& mailbox : mailboxes) {
    EXPECT_EQ(mailbox->WaitFor(1).size(), 1);
  }
}

// What does not know the protocol.
TEST_F(MessageLoopTest, AHeadThatIsTooLargeEndsTheConnection) {
  WaitUntilAccepted();
  std::promise<std::shared_ptr<Connection>> unused;
  accepted_ = std::move(unused);
  const int fd = ConnectRaw();
  const std::string text = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(write(fd, text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  char byte;
  EXPECT_EQ(read(fd, &byte, 1), 0);
  close(fd);
  EXPECT_NE(at_server_->WaitForEnd().find("a head of 542393671 bytes"),
            std::string::npos);
  EXPECT_TRUE(Send(to_server_.get(), "still", "there"));
  EXPECT_EQ(at_server_->WaitFor(2).at(1), Message("still", "there"));
}

TEST_F(MessageLoopTest, ABodyThatIsTooLargeEndsTheConnection) {
  WaitUntilAccepted();
  std::promise<std::shared_ptr<Connection>> unused;
  accepted_ = std::move(unused);
  const int fd = ConnectRaw();
  // A head of one byte, and a body of 2^64 - 1.
  const std::string text = std::string("\1\0\0\0", 4) + std::string(8, '\xff');
  ASSERT_EQ(write(fd, text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  char byte;
  EXPECT_EQ(read(fd, &byte, 1), 0);
  close(fd);
  EXPECT_NE(at_server_->WaitForEnd().find("a body of 18446744073709551615"),
            std::string::npos);
}

TEST_F(MessageLoopTest, AMessageThatIsTooLargeIsNotSentAndTheOthersAre) {
  EXPECT_FALSE(Send(to_server_.get(), std::string(kMaxHeadBytes + 1, 'x'), ""));
  EXPECT_FALSE(to_server_->Send("head", nullptr, kMaxBodyBytes + 1));
  const std::string largest(kMaxHeadBytes, 'x');
  EXPECT_TRUE(Send(to_server_.get(), largest, "body"));
  EXPECT_EQ(at_server_->WaitFor(1).at(0), Message(largest, "body"));
}

}  // namespace
}  // namespace recsync
