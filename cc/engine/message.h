// Text of error messages, made of strings and numbers.

#ifndef TF_RECSYNC_CC_ENGINE_MESSAGE_H_
#define TF_RECSYNC_CC_ENGINE_MESSAGE_H_

#include <sstream>
#include <string>

namespace recsync {

// Strings and numbers, one after the other.
template <typename... Parts>
std::string Message(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return message.str();
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MESSAGE_H_
