#include <unistd.h>

#include <array>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/internal/globals.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace recsync {
namespace {

struct Message {
  absl::string_view file;
  absl::string_view prefix;
};

// What TensorFlow logs about servers that are lost, which it tells of every
// function that is traced or dropped, and about ends that are as they should
// be. What matters of it, a strategy says in a line, or an exception does.
constexpr std::array<Message, 13> kNoise = {{
    {"context.cc", "Failed to register function remotely"},
    {"context.cc", "Failed to remove function remotely"},
    {"context.cc", "Unable to close remote context"},
    {"context_distributed_manager.cc", ""},  // Errors that are raised as well.
    {"destroy_tensor_handle_node.h", "Ignoring an error"},
    {"dispatcher_impl.cc", "Started tf.data service dispatcher"},
    {"kernel_and_device.cc",
     "Ignoring error status when releasing multi-device function"},
    {"local_rendezvous.cc",
     "Local rendezvous is aborting with status: OUT_OF_RANGE"},
    {"remote_tensor_handle_data.cc", "Unable to destroy remote tensor handle"},
    {"server_lib.cc", "Shut down"},
    {"server_lib.cc", "Started"},
    {"grpc_server_lib.cc", "Started server with target"},
    {"worker_impl.cc", "Worker registered with dispatcher"},
}};

bool IsNoise(const absl::LogEntry& entry) {
  for (const Message& message : kNoise) {
    if (entry.source_basename() == message.file &&
        absl::StartsWith(entry.text_message(), message.prefix)) {
      return true;
    }
  }
  return false;
}

// Writes everything else to the standard error, as absl would.
class LogFilter : public absl::LogSink {
 public:
  // With the least severity that is written.
  explicit LogFilter(absl::LogSeverityAtLeast least) : least_(least) {}

  void Send(const absl::LogEntry& entry) override {
    // Fatal ones absl writes itself.
    const absl::LogSeverity severity = entry.log_severity();
    if (severity == absl::LogSeverity::kFatal || severity < least_) return;
    if (IsNoise(entry)) return;
    absl::log_internal::WriteToStderr(
        entry.text_message_with_prefix_and_newline(), severity);
  }

 private:
  const absl::LogSeverityAtLeast least_;
};

}  // namespace
}  // namespace recsync

// Keeps noise out of what TensorFlow logs in this process; does nothing the
// second time.
extern "C" __attribute__((visibility("default"))) void RecsyncFilterLogs() {
  static recsync::LogFilter* const filter = [] {
    // Until it is initialized, absl writes all to the standard error, whatever
    // its threshold.
    const bool is_initialized = absl::log_internal::IsInitialized();
    // Never freed: threads log until the very end.
    auto* made = new recsync::LogFilter(is_initialized
                                            ? absl::StderrThreshold()
                                            : absl::LogSeverityAtLeast::kInfo);
    absl::AddLogSink(made);
    absl::SetStderrThreshold(absl::LogSeverityAtLeast::kFatal);
    if (!is_initialized) {  // As absl::InitializeLog does, which TensorFlow
                            // does not export.
      absl::log_internal::SetTimeZone(absl::LocalTimeZone());
      absl::log_internal::SetInitialized();
    }
    return made;
  }();
  (void)filter;
}
