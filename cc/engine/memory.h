// How much memory the machine can give, and this process has.

#ifndef TF_RECSYNC_CC_ENGINE_MEMORY_H_
#define TF_RECSYNC_CC_ENGINE_MEMORY_H_

#include <cstdint>
#include <optional>

namespace recsync {

// Bytes that processes may still take without any of them being ended for it,
// as the system estimates it; nothing where it does not say (on Linux it does).
// A container's limit may be below it.
std::optional<int64_t> AvailableMemory();

// Bytes of memory that this process has at the moment; nothing as above.
std::optional<int64_t> ResidentMemory();

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_MEMORY_H_
