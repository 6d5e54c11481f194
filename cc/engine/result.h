// That something went well, or why it did not: for what is compiled without
// TensorFlow, and so without absl::Status.

#ifndef TF_RECSYNC_CC_ENGINE_RESULT_H_
#define TF_RECSYNC_CC_ENGINE_RESULT_H_

#include <optional>
#include <string>

#include "cc/engine/message.h"

namespace recsync {

class [[nodiscard]] Result {
 public:
  static Result Ok() { return Result(); }
  // With a reason, composed of parts.
  template <typename... Parts>
  static Result Error(const Parts&... parts) {
    Result result;
    result.error_ = Message(parts...);
    return result;
  }

  bool ok() const { return !error_.has_value(); }
  // The reason; empty if it went well.
  std::string error() const { return error_.value_or(""); }

 private:
  Result() = default;

  std::optional<std::string> error_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_RESULT_H_
