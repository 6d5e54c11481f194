#include "cc/engine/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace recsync {
namespace {

TEST(MemoryTest, AvailableIsSomethingThatAMachineMayHave) {
  const auto bytes = AvailableMemory();
#ifdef __linux__
  ASSERT_TRUE(bytes.has_value());
  EXPECT_GT(*bytes, int64_t{1} << 20);
  EXPECT_LT(*bytes, int64_t{1} << 50);
#else
  EXPECT_FALSE(bytes.has_value());
#endif
}

// A folder that stands for the root of a file system.
class Root {
 public:
  Root()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ("memory_test." + std::to_string(getpid()))) {
    Write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");
  }
  ~Root() { std::filesystem::remove_all(folder_); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  void Write(const std::string& path, const std::string& text) const {
    const auto file = folder_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  int64_t Available() const {
    return AvailableMemory(folder_.string()).value_or(-1);
  }

 private:
  const std::filesystem::path folder_;
};

TEST(MemoryTest, WithoutALimitTheMachinesMemoryIsAvailable) {
  const Root root;
  EXPECT_EQ(root.Available(), 8000 * 1024);
  root.Write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(root.Available(), 8000 * 1024);
  root.Write("sys/fs/cgroup/memory.max", "max\n");
  root.Write("sys/fs/cgroup/memory.current", "3000\n");
  EXPECT_EQ(root.Available(), 8000 * 1024);
}

TEST(MemoryTest, AContainersLimitIsWhatIsAvailable) {
  const Root root;
  root.Write("proc/self/cgroup", "0::/\n");
  root.Write("sys/fs/cgroup/memory.max", "500000\n");
  EXPECT_EQ(root.Available(), 8000 * 1024);  // Nothing says what is used.
  root.Write("sys/fs/cgroup/memory.current", "300000\n");
  EXPECT_EQ(root.Available(), 200000);
  // Pages of files are given up when memory is needed.
  root.Write("sys/fs/cgroup/memory.stat",
             "anon 7\nactive_file 40000\ninactive_file 50000\n");
  EXPECT_EQ(root.Available(), 290000);
  root.Write("sys/fs/cgroup/memory.current", "600000\n");
  EXPECT_EQ(root.Available(), 0);
  root.Write("sys/fs/cgroup/memory.max", "500000000000\n");
  EXPECT_EQ(root.Available(), 8000 * 1024);  // More than the machine has.
}

TEST(MemoryTest, TheLeastLimitOfAllGroupsThatAProcessIsInHolds) {
  const Root root;
  const std::string folder = "sys/fs/cgroup/machine.slice/pod.scope/";
  root.Write("proc/self/cgroup", "0::/machine.slice/pod.scope\n");
  root.Write(folder + "memory.max", "500000\n");
  root.Write(folder + "memory.current", "100000\n");
  EXPECT_EQ(root.Available(), 400000);
  root.Write("sys/fs/cgroup/machine.slice/memory.max", "600000\n");
  root.Write("sys/fs/cgroup/machine.slice/memory.current", "300000\n");
  EXPECT_EQ(root.Available(), 300000);
}

TEST(MemoryTest, LimitsOfTheFirstVersionOfControlGroupsHoldToo) {
  const Root root;
  root.Write("proc/self/cgroup",
             "5:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/c304\n0::/\n");
  // A container has the folder of its own group only, where all are.
  const std::string folder = "sys/fs/cgroup/memory/";
  root.Write(folder + "memory.limit_in_bytes", "9223372036854771712\n");
  root.Write(folder + "memory.usage_in_bytes", "300000\n");
  root.Write(folder + "memory.stat",
             "inactive_file 7\ntotal_inactive_file 15000\n"
             "total_active_file 5000\n");
  EXPECT_EQ(root.Available(), 8000 * 1024);
  root.Write(folder + "memory.limit_in_bytes", "500000\n");
  EXPECT_EQ(root.Available(), 220000);
  root.Write(folder + "docker/c304/memory.limit_in_bytes", "400000\n");
  root.Write(folder + "docker/c304/memory.usage_in_bytes", "300000\n");
  EXPECT_EQ(root.Available(), 100000);
}

TEST(MemoryTest, ResidentIsMoreWithMemoryThatHasBeenWritten) {
#ifdef __linux__
  const auto before = ResidentMemory();
  ASSERT_TRUE(before.has_value());
  const std::vector<char> written(64 << 20, 1);
  const auto after = ResidentMemory();
  ASSERT_TRUE(after.has_value());
  EXPECT_GT(*after, *before + (48 << 20)) << written[12345];
#else
  EXPECT_FALSE(ResidentMemory().has_value());
#endif
}

}  // namespace
}  // namespace recsync
