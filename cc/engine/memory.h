// How much memory this process can still get, and has.

#ifndef TF_RECSYNC_CC_ENGINE_MEMORY_H_
#define TF_RECSYNC_CC_ENGINE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace recsync {

// Bytes that this process may still take without any being ended for it, as the
// system estimates it: what the machine has, and what the limits of its control
// groups leave, which are those of a container. Nothing where the system does
// not say (on Linux it does). Tests give a folder that stands for `root`.
std::optional<int64_t> AvailableMemory(const std::string& root = "");

// Bytes of memory that this process has at the moment; nothing as above.
std::optional<int64_t> ResidentMemory();

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MEMORY_H_
