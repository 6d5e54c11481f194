// The heads of the messages by which servers fetch tensors from each other.
//
// A client greets with the secret that the server has told it, and then asks
// for tensors by step and rendezvous key; answers come as they are ready, in
// any order. Tensors whose elements are plain bytes travel as they lie in
// memory, the rest as a TensorProto.

#ifndef TF_RECSYNC_CC_TRANSPORT_TENSOR_MESSAGES_H_
#define TF_RECSYNC_CC_TRANSPORT_TENSOR_MESSAGES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace recsync {

enum class RequestKind : uint8_t { kGreeting, kReceive, kCancel };

struct Request {
  RequestKind kind = RequestKind::kGreeting;
  uint64_t id = 0;   // The client's number of the tensor; 0 is the greeting.
  int64_t step = 0;  // kReceive.
  std::string text;  // kGreeting: the secret; kReceive: the rendezvous key.
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

std::string Encode(const Request& request);
std::string Encode(const Answer& answer);
// False if `head` is no such message.
bool Decode(std::string_view head, Request* request);
bool Decode(std::string_view head, Answer* answer);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_TRANSPORT_TENSOR_MESSAGES_H_
