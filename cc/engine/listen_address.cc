#include "cc/engine/listen_address.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>

namespace recsync {
namespace {

using BindFunction = int (*)(int, const sockaddr*, socklen_t);

// Where listeners go. Immutable once published.
struct Target {
  bool is_any = false;  // no confinement
  bool has_ipv4 = false;
  in_addr ipv4 = {};   // valid if has_ipv4
  in6_addr ipv6 = {};  // the mapped form if has_ipv4
  std::string text;    // canonical spelling
};

// The target in force, null before the first success. The replacement reads it
// without a lock, so that a child forked at a bad moment can still bind.
std::atomic<const Target*> current_target{nullptr};
// The `bind` that the replacement ends in; set before any slot is patched.
std::atomic<BindFunction> real_bind{nullptr};

bool ParseTarget(const std::string& address, Target* target) {
  // inet_pton stops at a NUL that std::string may hold.
  if (address.find('\0') != std::string::npos) return false;
  char text[INET6_ADDRSTRLEN];
  if (inet_pton(AF_INET, address.c_str(), &target->ipv4) == 1) {
    target->has_ipv4 = true;
  } else if (inet_pton(AF_INET6, address.c_str(), &target->ipv6) == 1) {
    target->has_ipv4 = IN6_IS_ADDR_V4MAPPED(&target->ipv6);
    if (target->has_ipv4) {
      std::memcpy(&target->ipv4, &target->ipv6.s6_addr[12], sizeof(in_addr));
    }
  } else {
    return false;
  }
  if (target->has_ipv4) {
    target->ipv6 = {};
    target->ipv6.s6_addr[10] = 0xff;
    target->ipv6.s6_addr[11] = 0xff;
    std::memcpy(&target->ipv6.s6_addr[12], &target->ipv4, sizeof(in_addr));
    target->is_any = target->ipv4.s_addr == htonl(INADDR_ANY);
    inet_ntop(AF_INET, &target->ipv4, text, sizeof(text));
  } else {
    target->is_any = IN6_IS_ADDR_UNSPECIFIED(&target->ipv6);
    inet_ntop(AF_INET6, &target->ipv6, text, sizeof(text));
  }
  target->text = text;
  return true;
}

bool IsTcpSocket(int fd) {
  int type = 0;
  socklen_t size = sizeof(type);
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
         type == SOCK_STREAM;
}

bool IsIpv6Only(int fd) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &value, &size) == 0 &&
         value != 0;
}

bool IsAnyAddress(const in6_addr& address) {
  if (IN6_IS_ADDR_UNSPECIFIED(&address)) return true;
  if (!IN6_IS_ADDR_V4MAPPED(&address)) return false;
  in_addr ipv4;
  std::memcpy(&ipv4, &address.s6_addr[12], sizeof(ipv4));
  return ipv4.s_addr == htonl(INADDR_ANY);
}

// What the patched slots call. Copies the address, as the caller's is const and
// may be reused by it.
int ConfinedBind(int fd, const sockaddr* address, socklen_t size) {
  const BindFunction bind_function = real_bind.load(std::memory_order_acquire);
  const Target* target = current_target.load(std::memory_order_acquire);
  if (target == nullptr || target->is_any || address == nullptr ||
      size < sizeof(sa_family_t)) {
    return bind_function(fd, address, size);
  }
  sa_family_t family;
  std::memcpy(&family, &address->sa_family, sizeof(family));
  if (family == AF_INET && size >= sizeof(sockaddr_in)) {
    sockaddr_in confined;
    std::memcpy(&confined, address, sizeof(confined));
    if (confined.sin_addr.s_addr == htonl(INADDR_ANY) && IsTcpSocket(fd)) {
      if (!target->has_ipv4) {
        errno = EADDRNOTAVAIL;
        return -1;
      }
      confined.sin_addr = target->ipv4;
      return bind_function(fd, reinterpret_cast<const sockaddr*>(&confined),
                           sizeof(confined));
    }
  } else if (family == AF_INET6 && size >= sizeof(sockaddr_in6)) {
    sockaddr_in6 confined;
    std::memcpy(&confined, address, sizeof(confined));
    if (IsAnyAddress(confined.sin6_addr) && IsTcpSocket(fd)) {
      if (target->has_ipv4 && IsIpv6Only(fd)) {
        errno = EADDRNOTAVAIL;
        return -1;
      }
      confined.sin6_addr = target->ipv6;
      return bind_function(fd, reinterpret_cast<const sockaddr*>(&confined),
                           sizeof(confined));
    }
  }
  return bind_function(fd, address, size);
}

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr uint32_t kGlobDat = R_X86_64_GLOB_DAT;
#else
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr uint32_t kGlobDat = R_AARCH64_GLOB_DAT;
#endif

// The parts of an object's dynamic section that name its imported functions.
struct DynamicSection {
  const Elf64_Sym* symbols = nullptr;
  const char* strings = nullptr;
  const Elf64_Rela* rela = nullptr;
  size_t rela_bytes = 0;
  const Elf64_Rela* plt_rela = nullptr;
  size_t plt_rela_bytes = 0;
};

struct Patcher {
  const ObjectFilter* filter = nullptr;
  int num_slots = 0;
  std::string error;
};

DynamicSection ReadDynamicSection(const dl_phdr_info& object,
                                  const Elf64_Dyn* entry) {
  // glibc has relocated the pointers of this section in place, other loaders
  // leave offsets from the load address.
  const auto pointer = [&](const Elf64_Dyn* e) {
    const uint64_t value = e->d_un.d_ptr;
    return value < object.dlpi_addr ? value + object.dlpi_addr : value;
  };
  DynamicSection section;
  for (; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        section.symbols = reinterpret_cast<const Elf64_Sym*>(pointer(entry));
        break;
      case DT_STRTAB:
        section.strings = reinterpret_cast<const char*>(pointer(entry));
        break;
      case DT_RELA:
        section.rela = reinterpret_cast<const Elf64_Rela*>(pointer(entry));
        break;
      case DT_RELASZ:
        section.rela_bytes = entry->d_un.d_val;
        break;
      case DT_JMPREL:
        section.plt_rela = reinterpret_cast<const Elf64_Rela*>(pointer(entry));
        break;
      case DT_PLTRELSZ:
        section.plt_rela_bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  return section;
}

// Whether the loader made the page of `address` read-only after relocation. It
// rounds both ends of the segment down to a page, see _dl_protect_relro.
bool IsRelro(const dl_phdr_info& object, uintptr_t address,
             uintptr_t page_size) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const Elf64_Phdr& header = object.dlpi_phdr[i];
    if (header.p_type != PT_GNU_RELRO) continue;
    const uintptr_t start = object.dlpi_addr + header.p_vaddr;
    const uintptr_t end = start + header.p_memsz;
    if (address >= (start & ~(page_size - 1)) &&
        address < (end & ~(page_size - 1))) {
      return true;
    }
  }
  return false;
}

// Stores `value` in a slot of the global offset table of `object`. Returns
// false, with errno set, if the page could not be made writable.
bool WriteSlot(const dl_phdr_info& object, uintptr_t slot, uintptr_t value) {
  uintptr_t* const entry = reinterpret_cast<uintptr_t*>(slot);
  if (__atomic_load_n(entry, __ATOMIC_RELAXED) == value) return true;
  const uintptr_t page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(slot & ~(page_size - 1));
  const bool relro = IsRelro(object, slot, page_size);
  if (relro && mprotect(page, page_size, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  __atomic_store_n(entry, value, __ATOMIC_RELEASE);
  return !relro || mprotect(page, page_size, PROT_READ) == 0;
}

void PatchRelocations(const dl_phdr_info& object, const DynamicSection& section,
                      const Elf64_Rela* rela, size_t bytes, Patcher* patcher) {
  if (rela == nullptr) return;
  const Elf64_Rela* const end = rela + bytes / sizeof(Elf64_Rela);
  for (; rela != end; ++rela) {
    const uint32_t type = ELF64_R_TYPE(rela->r_info);
    if (type != kJumpSlot && type != kGlobDat) continue;
    const Elf64_Sym& symbol = section.symbols[ELF64_R_SYM(rela->r_info)];
    if (symbol.st_shndx != SHN_UNDEF ||
        std::strcmp(section.strings + symbol.st_name, "bind") != 0) {
      continue;
    }
    if (WriteSlot(object, object.dlpi_addr + rela->r_offset,
                  reinterpret_cast<uintptr_t>(&ConfinedBind))) {
      ++patcher->num_slots;
    } else {
      patcher->error = std::string("could not change the entry for bind in ") +
                       object.dlpi_name + ": " + std::strerror(errno);
    }
  }
}

int PatchObject(dl_phdr_info* object, size_t, void* data) {
  Patcher* const patcher = static_cast<Patcher*>(data);
  if (!(*patcher->filter)(object->dlpi_name)) return 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    if (object->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const DynamicSection section = ReadDynamicSection(
        *object, reinterpret_cast<const Elf64_Dyn*>(
                     object->dlpi_addr + object->dlpi_phdr[i].p_vaddr));
    if (section.symbols == nullptr || section.strings == nullptr) continue;
    PatchRelocations(*object, section, section.rela, section.rela_bytes,
                     patcher);
    PatchRelocations(*object, section, section.plt_rela, section.plt_rela_bytes,
                     patcher);
  }
  return 0;
}

// Patches the objects that `filter` accepts, counting the slots; returns an
// error or "".
std::string PatchObjects(const ObjectFilter& filter, int* num_slots) {
  Patcher patcher;
  patcher.filter = &filter;
  dl_iterate_phdr(PatchObject, &patcher);
  *num_slots = patcher.num_slots;
  if (patcher.error.empty() && patcher.num_slots == 0) {
    return "none of the loaded libraries to confine imports bind; load "
           "TensorFlow before confining its listeners";
  }
  return patcher.error;
}
#else
std::string PatchObjects(const ObjectFilter&, int* num_slots) {
  *num_slots = 0;
  return "confining listeners needs Linux on x86_64 or aarch64";
}
#endif

}  // namespace

bool IsTensorFlowObject(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string name =
      slash == std::string::npos ? path : path.substr(slash + 1);
  // Its libraries wherever they lie, and what its wheel holds.
  return name.rfind("libtensorflow", 0) == 0 || name.rfind("_pywrap", 0) == 0 ||
         path.find("/site-packages/tensorflow/") != std::string::npos ||
         path.find("/dist-packages/tensorflow/") != std::string::npos;
}

bool IsNumericAddress(const std::string& address) {
  Target target;
  return ParseTarget(address, &target);
}

std::string ConfineListeners(const std::string& address,
                             const ObjectFilter& filter) {
  // Serializes callers; never destroyed, as a thread may bind during exit.
  static std::mutex* const mutex = new std::mutex;
  static std::list<Target>* const targets = new std::list<Target>;
  Target target;
  if (!ParseTarget(address, &target)) {
    return "address must be a numeric IPv4 or IPv6 address without a port, "
           "like 127.0.0.1 or ::1, got \"" +
           address + "\"";
  }
  std::lock_guard<std::mutex> lock(*mutex);
  if (real_bind.load() == nullptr) {
    // The first `bind` in the global scope: libc's, or that of a shim which the
    // user preloaded, which goes on working behind the replacement.
    void* const found = dlsym(RTLD_DEFAULT, "bind");
    if (found == nullptr) return "no function bind in this process";
    real_bind.store(reinterpret_cast<BindFunction>(found));
  }
  // The target goes first: no patched object may bind without it, and it stays
  // if some were patched before one failed.
  const Target* const old_target = current_target.load();
  if (old_target == nullptr || old_target->text != target.text) {
    targets->push_back(target);
    current_target.store(&targets->back(), std::memory_order_release);
  }
  int num_slots = 0;
  std::string error = PatchObjects(filter, &num_slots);
  if (num_slots == 0) {
    current_target.store(old_target, std::memory_order_release);
  }
  return error;
}

std::string ConfinedAddress() {
  const Target* const target = current_target.load(std::memory_order_acquire);
  return target == nullptr || target->is_any ? "" : target->text;
}

}  // namespace recsync
