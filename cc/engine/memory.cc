#include "cc/engine/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace recsync {
namespace {

// The number in a file of the system's, or in its line that has a name.
std::optional<int64_t> ReadNumber(const std::string& path,
                                  const std::string& wanted = "") {
  std::ifstream file(path);
  std::string name;
  while (wanted.empty() || file >> name) {
    int64_t number;
    if (name == wanted) {
      return file >> number ? std::optional(number) : std::nullopt;
    }
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// The same of a number of kibibytes, in bytes.
std::optional<int64_t> ReadKibibytes(const std::string& path,
                                     const std::string& wanted) {
  const auto number = ReadNumber(path, wanted);
  return number.has_value() ? std::optional(*number * 1024) : std::nullopt;
}

// The files of a version of control groups.
struct GroupFiles {
  const char* folder;  // of the group that all are in
  const char* limit;
  const char* usage;
  // Lines of memory.stat: pages of files, counted, and given up if needed.
  const char* inactive;
  const char* active;
};
constexpr GroupFiles kSecond = {"/sys/fs/cgroup", "/memory.max",
                                "/memory.current", "inactive_file",
                                "active_file"};
constexpr GroupFiles kFirst = {
    "/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
    "total_inactive_file", "total_active_file"};

// What the limit of the group in a folder leaves. There may be none.
std::optional<int64_t> LeftInGroup(const GroupFiles& files,
                                   const std::string& folder) {
  const auto limit = ReadNumber(folder + files.limit);
  const auto usage = ReadNumber(folder + files.usage);
  if (!limit.has_value() || !usage.has_value()) return std::nullopt;
  int64_t used = *usage;
  for (const char* name : {files.inactive, files.active}) {
    used -= ReadNumber(folder + "/memory.stat", name).value_or(0);
  }
  return std::max<int64_t>(*limit - std::max<int64_t>(used, 0), 0);
}

}  // namespace

std::optional<int64_t> AvailableMemory(const std::string& root) {
  auto least = ReadKibibytes(root + "/proc/meminfo", "MemAvailable:");
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // number:controllers:path
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first, second - first) + ",";
    const bool is_second = controllers == ":,";
    if (!is_second && controllers.find("memory,") == std::string::npos) {
      continue;
    }
    const GroupFiles& files = is_second ? kSecond : kFirst;
    // The group and those that it is in. In a container there may be the
    // folder of the last of these only, which then is the container's own.
    std::string path = line.substr(second + 1);
    while (true) {
      const auto left = LeftInGroup(files, root + files.folder + path);
      if (left.has_value()) least = std::min(least.value_or(*left), *left);
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

std::optional<int64_t> ResidentMemory() {
  return ReadKibibytes("/proc/self/status", "VmRSS:");
}

}  // namespace recsync
