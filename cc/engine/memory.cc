#include "cc/engine/memory.h"

#include <fstream>
#include <limits>
#include <string>

namespace recsync {
namespace {

// The line of a file of the system's that has a name, in bytes.
std::optional<int64_t> ReadKibibytes(const char* path, const char* wanted) {
  std::ifstream file(path);
  std::string name;
  while (file >> name) {
    int64_t kibibytes;
    if (name == wanted && file >> kibibytes) return kibibytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> AvailableMemory() {
  return ReadKibibytes("/proc/meminfo", "MemAvailable:");
}

std::optional<int64_t> ResidentMemory() {
  return ReadKibibytes("/proc/self/status", "VmRSS:");
}

}  // namespace recsync
