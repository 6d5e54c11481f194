#include "cc/engine/tensor_messages.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

Answer WithTensor(const std::vector<int64_t>& shape) {
  Answer answer;
  answer.form = BodyForm::kBytes;
  answer.dtype = 1;
  answer.shape = shape;
  return answer;
}

// What is said of a body of `size` bytes, with four for each element.
std::string ProblemOf(const std::vector<int64_t>& shape, uint64_t size) {
  return CheckBody(WithTensor(shape), size, 4).error();
}

TEST(TensorMessagesTest, WhatIsEncodedIsDecodedAsItWas) {
  Request request{RequestKind::kCancel, 7, -8, std::string("key\0key", 7)};
  Request request_read;
  ASSERT_TRUE(Decode(Encode(request), &request_read));
  EXPECT_EQ(request_read.kind, request.kind);
  EXPECT_EQ(request_read.id, 7);
  EXPECT_EQ(request_read.step, -8);
  EXPECT_EQ(request_read.key, request.key);

  Answer answer = WithTensor({3, 0, kLargest});
  answer.id = 9;
  answer.code = 5;
  answer.is_derived = answer.is_dead = true;
  answer.text = "what is wrong";
  Answer answer_read;
  ASSERT_TRUE(Decode(Encode(answer), &answer_read));
  EXPECT_EQ(answer_read.id, 9);
  EXPECT_EQ(answer_read.code, 5);
  EXPECT_TRUE(answer_read.is_derived);
  EXPECT_TRUE(answer_read.is_dead);
  EXPECT_EQ(answer_read.form, BodyForm::kBytes);
  EXPECT_EQ(answer_read.dtype, 1);
  EXPECT_EQ(answer_read.shape, answer.shape);
  EXPECT_EQ(answer_read.text, answer.text);
}

TEST(TensorMessagesTest,
     GreetingsOfOtherVersionsAreReadAndTheirVersionIsKnown) {
  Greeting greeting;
  ASSERT_TRUE(Decode(Encode(Greeting{17, "secret"}), &greeting));
  EXPECT_EQ(greeting.version, 17);
  EXPECT_EQ(greeting.secret, "secret");
  Welcome welcome;
  ASSERT_TRUE(Decode(Encode(Welcome{18, "too old"}), &welcome));
  EXPECT_EQ(welcome.version, 18);
  EXPECT_EQ(welcome.refusal, "too old");
}

TEST(TensorMessagesTest, AGreetingOfAnotherProtocolIsNone) {
  Greeting greeting;
  EXPECT_FALSE(Decode("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &greeting));
  EXPECT_FALSE(Decode("", &greeting));
  // As a processor of the other byte order would write it.
  EXPECT_FALSE(Decode(std::string("\x01"
                                  "CNYSCER\0\0\0\1",
                                  12),
                      &greeting));
  EXPECT_TRUE(Decode(std::string("RECSYNC\x01\1\0\0\0", 12), &greeting));
}

TEST(TensorMessagesTest, AKeyOfTheGreatestLengthFitsInARequest) {
  Request request;
  request.key.assign(kMaxKeyBytes, 'k');
  EXPECT_LE(Encode(request).size(), kMaxHeadBytes);
}

TEST(TensorMessagesTest, WhatIsCutShortIsNoMessage) {
  const std::string request = Encode(Request{RequestKind::kReceive, 1, 2, ""});
  const std::string answer = Encode(WithTensor({1, 2, 3}));
  for (size_t size = 0; size < request.size(); ++size) {
    Request read;
    EXPECT_FALSE(Decode(request.substr(0, size), &read)) << size;
  }
  for (size_t size = 0; size < answer.size(); ++size) {
    Answer read;
    EXPECT_FALSE(Decode(answer.substr(0, size), &read)) << size;
  }
}

TEST(TensorMessagesTest, RandomBytesAreReadWithinTheirBounds) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    // Half of them begin as an answer does.
    std::string head = random() % 2 ? Encode(WithTensor({1, 2})) : "";
    head.resize(random() % 80);
    for (char& byte : head) {
      if (random() % 4 == 0) byte = static_cast<char>(random());
    }
    Answer answer;
    if (Decode(head, &answer)) {
      EXPECT_LE(answer.shape.size(), 254);
      (void)CheckBody(answer, random() >> (random() % 64), random() % 17);
    }
    Request request;
    Decode(head, &request);
  }
}

TEST(TensorMessagesTest, ABodyMustHaveTheBytesOfItsShape) {
  EXPECT_EQ(ProblemOf({}, 4), "");
  EXPECT_EQ(ProblemOf({2, 3}, 24), "");
  EXPECT_EQ(ProblemOf({2, 0, 3}, 0), "");
  EXPECT_EQ(ProblemOf({2, 3}, 20), "20 bytes for a tensor of 24");
  EXPECT_EQ(ProblemOf({0}, 4), "4 bytes for a tensor of 0");
  EXPECT_EQ(ProblemOf({-1}, 4), "a dimension of -1");
  EXPECT_EQ(ProblemOf({0, -1}, 0), "a dimension of -1");
}

TEST(TensorMessagesTest, ShapesWhoseSizeWouldOverflowAreTooLarge) {
  // 4 * 2^62 is 0 in 64 bits, and 4 * (2^62 + 1) is 4.
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{int64_t{1} << 62},
                                         {(int64_t{1} << 62) + 1},
                                         {int64_t{1} << 31, int64_t{1} << 31},
                                         {kLargest, kLargest, kLargest},
                                         {int64_t{1} << 33}}) {
    EXPECT_NE(ProblemOf(shape, 4).find("more than the 17179869184 bytes"),
              std::string::npos)
        << ProblemOf(shape, 4);
    EXPECT_NE(ProblemOf(shape, 0), "");
  }
  EXPECT_EQ(ProblemOf({int64_t{1} << 32}, uint64_t{1} << 34), "");
  // An empty one has no size that could.
  EXPECT_EQ(ProblemOf({kLargest, 0, kLargest}, 0), "");
}

TEST(TensorMessagesTest, AnAnswerIsATensorOrAnError) {
  Answer answer;
  EXPECT_EQ(CheckBody(answer, 0, 0).error(), "neither a tensor nor an error");
  EXPECT_EQ(CheckBody(answer, 1, 0).error(), "1 bytes that belong to nothing");
  answer.is_dead = true;
  EXPECT_EQ(CheckBody(answer, 0, 0).error(), "");
  answer.form = BodyForm::kProto;
  EXPECT_EQ(CheckBody(answer, 8, 0).error(), "a tensor and an error at once");
  answer.is_dead = false;
  EXPECT_EQ(CheckBody(answer, kMaxProtoBytes, 0).error(), "");
  EXPECT_NE(CheckBody(answer, kMaxProtoBytes + 1, 0).error(), "");
  answer = WithTensor({1});
  EXPECT_EQ(CheckBody(answer, 4, 0).error(),
            "elements of type 1, which do not travel as bytes");
}

}  // namespace
}  // namespace recsync
