// The tests redirect what the test program itself imports.

#include "cc/engine/import_table.h"

#include <unistd.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace recsync {
namespace {

constexpr int kOther = 12345;

bool IsMainProgram(const LoadedObject& object) { return object.path().empty(); }
bool IsNoObject(const LoadedObject&) { return false; }

pid_t OtherParent() { return kOther; }
uid_t OtherUser() { return kOther; }
gid_t OtherGroup() { return kOther; }

TEST(ImportTableTest, CallsEndInTheReplacementAndBackInTheOriginal) {
  const pid_t parent = getppid();
  void* const original = FindFunction("getppid", IsMainProgram);
  ASSERT_NE(original, nullptr);
  int entries = 0;
  ASSERT_EQ(RedirectImports("getppid", reinterpret_cast<void*>(&OtherParent),
                            IsMainProgram, &entries)
                .error(),
            "");
  EXPECT_GE(entries, 1);
  EXPECT_EQ(getppid(), kOther);
  EXPECT_EQ(reinterpret_cast<pid_t (*)()>(original)(), parent);
  // The replacement is not what is found, and can be replaced again.
  EXPECT_EQ(FindFunction("getppid", IsMainProgram), original);
  ASSERT_EQ(
      RedirectImports("getppid", original, IsMainProgram, &entries).error(),
      "");
  EXPECT_EQ(getppid(), parent);
}

TEST(ImportTableTest, ObjectsThatAreNotChosenKeepTheirs) {
  const pid_t parent = getppid();
  int entries = 7;
  EXPECT_NE(RedirectImports("getppid", reinterpret_cast<void*>(&OtherParent),
                            IsNoObject, &entries)
                .error(),
            "");
  EXPECT_EQ(entries, 0);
  EXPECT_EQ(getppid(), parent);
  EXPECT_EQ(FindFunction("getppid", IsNoObject), nullptr);
}

TEST(ImportTableTest, FunctionsThatNobodyImportsAreNamed) {
  int entries = 7;
  const std::string error =
      RedirectImports("recsync_no_such_function",
                      reinterpret_cast<void*>(&OtherParent), IsMainProgram,
                      &entries)
          .error();
  EXPECT_NE(error.find("recsync_no_such_function"), std::string::npos) << error;
  EXPECT_EQ(entries, 0);
  EXPECT_EQ(FindFunction("recsync_no_such_function", IsMainProgram), nullptr);
}

TEST(ImportTableTest, ObjectsAreKnownByTheSymbolsTheyReferTo) {
  int entries = 0;
  const auto refers_to = [&](const std::string& prefix) {
    bool found = false;
    RedirectImports(
        "getppid", reinterpret_cast<void*>(&OtherParent),
        [&](const LoadedObject& object) {
          if (object.path().empty()) found = object.RefersTo(prefix);
          return false;
        },
        &entries)
        .error();
    return found;
  };
  EXPECT_TRUE(refers_to("getppid"));
  EXPECT_TRUE(refers_to("getpp"));
  EXPECT_FALSE(refers_to("getppid_of_nobody"));
  EXPECT_FALSE(refers_to("TFE_"));
}

// An object of a name and symbols of our choice.
class NamedObject : public LoadedObject {
 public:
  NamedObject(std::string path, std::string symbol)
      : path_(std::move(path)), symbol_(std::move(symbol)) {}
  const std::string& path() const override { return path_; }
  bool RefersTo(const std::string& prefix) const override {
    return symbol_.rfind(prefix, 0) == 0;
  }

 private:
  const std::string path_, symbol_;
};

TEST(ImportTableTest, TensorFlowObjectsAreRecognizedByPath) {
  for (const char* path :
       {"/a/site-packages/tensorflow/libtensorflow_cc.so.2",
        "/opt/lib/libtensorflow_framework.so.2", "libtensorflow.so",
        "/a/site-packages/tensorflow/python/_pywrap_tfe.so",
        "/a/site-packages/tensorflow/compiler/tf2xla/ops/_xla_ops.so",
        "/a/site-packages/tf_recsync/_recsync_transport.so"}) {
    EXPECT_TRUE(IsTensorFlowObject(NamedObject(path, "bind"))) << path;
  }
  for (const char* path :
       {"", "/lib/x86_64-linux-gnu/libc.so.6", "linux-vdso.so.1",
        "/a/lib/python3.11/lib-dynload/_socket.cpython-311-x86_64.so",
        "/a/site-packages/tf_recsync/_engine.cpython-311-x86_64.so"}) {
    EXPECT_FALSE(IsTensorFlowObject(NamedObject(path, "bind"))) << path;
  }
}

TEST(ImportTableTest, TensorFlowObjectsElsewhereAreRecognizedByTheirSymbols) {
  const std::string path = "/target/tensorflow/lib_pywrap_tensorflow_common.so";
  EXPECT_TRUE(IsTensorFlowObject(NamedObject(path, "TFE_Execute")));
  EXPECT_FALSE(IsTensorFlowObject(NamedObject(path, "TFLite_Execute")));
}

TEST(ImportTableTest, ThreadsRedirectAndCallSideBySide) {
  const uid_t user = getuid();
  const gid_t group = getgid();
  const auto flip = [](const char* name, void* replacement) {
    void* const original = FindFunction(name, IsMainProgram);
    for (int round = 0; round < 200; ++round) {
      int entries;
      EXPECT_EQ(RedirectImports(name, round % 2 == 0 ? replacement : original,
                                IsMainProgram, &entries)
                    .error(),
                "");
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back(
      [&] { flip("getuid", reinterpret_cast<void*>(&OtherUser)); });
  threads.emplace_back(
      [&] { flip("getgid", reinterpret_cast<void*>(&OtherGroup)); });
  for (int round = 0; round < 10000; ++round) {
    const uid_t seen_user = getuid();
    const gid_t seen_group = getgid();
    EXPECT_TRUE(seen_user == user || seen_user == kOther) << seen_user;
    EXPECT_TRUE(seen_group == group || seen_group == kOther) << seen_group;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(getuid(), user);
  EXPECT_EQ(getgid(), group);
}

}  // namespace
}  // namespace recsync
