// Notes which blocks of a library or program run: linked into the builds of
// scripts/record_coverage.py, which compile with -fsanitize-coverage=trace-pc,
// and into no other.
//
// The compiler puts a call of __sanitizer_cov_trace_pc at the start of every
// basic block. A byte for each four bytes of code, in a file that is mapped
// shared, becomes 1 when the block runs whose call returns there. So nothing
// has to be written at a process's end: what a server did that was killed is
// there, and what a fork does goes into the same file. Whoever reads the file
// sets the bytes back to 0.
//
// The file is $RECORDING_FOLDER/<name of the library or program>.blocks;
// nothing is noted without the variable.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

// Defined by the linker: where this library or program begins, and where its
// code ends.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[];
extern "C" __attribute__((visibility("hidden"))) char etext[];

namespace {

unsigned char* blocks = nullptr;

__attribute__((constructor(101))) void OpenMap() {
  const char* folder = std::getenv("RECORDING_FOLDER");
  Dl_info info;
  if (folder == nullptr || dladdr(__ehdr_start, &info) == 0) return;
  const std::string library(info.dli_fname);
  const std::string path = std::string(folder) + "/" +
                           library.substr(library.rfind('/') + 1) + ".blocks";
  const size_t size = (etext - __ehdr_start) / 4 + 1;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return;
  if (ftruncate(fd, size) == 0) {
    void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) blocks = static_cast<unsigned char*>(map);
  }
  close(fd);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void
__sanitizer_cov_trace_pc() {
  if (blocks == nullptr) return;
  unsigned char& block =
      blocks[(static_cast<char*>(__builtin_return_address(0)) - __ehdr_start) /
             4];
  // Read first: a store takes the cache line from the other threads.
  if (block == 0) block = 1;
}
