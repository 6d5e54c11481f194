// The heads of the messages by which servers fetch tensors from each other.
//
// A client greets, by the secret that the server has told it, and is welcomed;
// then it asks for tensors by step and rendezvous key, and answers come as they
// are ready, in any order. Tensors whose elements are plain bytes travel as
// they lie in memory, the rest as a TensorProto.
//
// Nothing that the other end says is believed: Decode says no to what is no
// such message, and CheckBody to a body that does not fit its head.

#ifndef TF_RECSYNC_CC_ENGINE_TENSOR_MESSAGES_H_
#define TF_RECSYNC_CC_ENGINE_TENSOR_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cc/engine/connection.h"
#include "cc/engine/result.h"

namespace recsync {

// Of all that follows but Greeting and Welcome, which every version has, as
// they say which one it is. Another version is refused.
constexpr uint32_t kTransportVersion = 1;

// The longest rendezvous key that is asked for, so that a request's head has
// room for it; TensorFlow's own call takes longer ones.
constexpr size_t kMaxKeyBytes = kMaxHeadBytes / 2;
// The largest tensor, and the largest TensorProto, which is protobuf's.
constexpr uint64_t kMaxTensorBytes = kMaxBodyBytes;
constexpr uint64_t kMaxProtoBytes = (uint64_t{1} << 31) - 1;

// A client's first message.
struct Greeting {
  uint32_t version = kTransportVersion;
  std::string secret;
};

// A server's answer to it.
struct Welcome {
  uint32_t version = kTransportVersion;
  std::string refusal;  // Why the client is not welcome; empty if it is.
};

enum class RequestKind : uint8_t { kReceive, kCancel };

struct Request {
  RequestKind kind = RequestKind::kReceive;
  uint64_t id = 0;   // The client's number of the tensor.
  int64_t step = 0;  // kReceive.
  std::string key;   // kReceive: the rendezvous key.
};

enum class BodyForm : uint8_t { kNone, kBytes, kProto };

struct Answer {
  uint64_t id = 0;
  int32_t code = 0;  // An absl::StatusCode; not 0: `text` says what is wrong.
  bool is_derived = false;  // An error that followed another one.
  bool is_dead = false;
  BodyForm form = BodyForm::kNone;
  int32_t dtype = 0;
  std::vector<int64_t> shape;
  std::string text;
};

std::string Encode(const Greeting& greeting);
std::string Encode(const Welcome& welcome);
std::string Encode(const Request& request);
std::string Encode(const Answer& answer);
// False if `head` is no such message.
bool Decode(std::string_view head, Greeting* greeting);
bool Decode(std::string_view head, Welcome* welcome);
bool Decode(std::string_view head, Request* request);
bool Decode(std::string_view head, Answer* answer);

// Whether a body of `size` bytes is what the answer says. `width` is that of an
// element of the answer's dtype, 0 if there is no such dtype or its elements
// are no plain bytes. An error reads on from "an answer with ".
Result CheckBody(const Answer& answer, uint64_t size, uint64_t width);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_TENSOR_MESSAGES_H_
