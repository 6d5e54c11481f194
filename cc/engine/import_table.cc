#include "cc/engine/import_table.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace recsync {
namespace {

// How the names of TensorFlow's C functions for running ops eagerly begin. Its
// Python modules share a library that calls them
// (lib_pywrap_tensorflow_common), which has another name in other versions.
constexpr char kEagerApi[] = "TFE_";

}  // namespace

bool IsTensorFlowObject(const LoadedObject& object) {
  const std::string& path = object.path();
  const size_t slash = path.rfind('/');
  const std::string name =
      slash == std::string::npos ? path : path.substr(slash + 1);
  // Its libraries wherever they lie, what its wheel holds, and what this
  // package adds to its servers.
  return name.rfind("libtensorflow", 0) == 0 || name.rfind("_pywrap", 0) == 0 ||
         name.rfind("_recsync_transport", 0) == 0 ||
         path.find("/site-packages/tensorflow/") != std::string::npos ||
         path.find("/dist-packages/tensorflow/") != std::string::npos ||
         object.RefersTo(kEagerApi);
}

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
namespace {

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

// What is done with a symbol to which an object refers, and the place that
// holds the symbol's address.
using ReferenceFunction = std::function<void(const Elf64_Sym& symbol,
                                             const char* name, uintptr_t slot)>;

struct Patcher {
  const char* name = nullptr;
  void* replacement = nullptr;
  const ObjectFilter* filter = nullptr;
  int entries = 0;
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

void ForEachReference(const dl_phdr_info& object,
                      const ReferenceFunction& function) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    if (object.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const DynamicSection section = ReadDynamicSection(
        object, reinterpret_cast<const Elf64_Dyn*>(
                    object.dlpi_addr + object.dlpi_phdr[i].p_vaddr));
    if (section.symbols == nullptr || section.strings == nullptr) continue;
    const auto visit = [&](const Elf64_Rela* rela, size_t bytes) {
      if (rela == nullptr) return;
      const Elf64_Rela* const end = rela + bytes / sizeof(Elf64_Rela);
      for (; rela != end; ++rela) {
        const uint32_t type = ELF64_R_TYPE(rela->r_info);
        if (type != kJumpSlot && type != kGlobDat) continue;
        const Elf64_Sym& symbol = section.symbols[ELF64_R_SYM(rela->r_info)];
        function(symbol, section.strings + symbol.st_name,
                 object.dlpi_addr + rela->r_offset);
      }
    };
    visit(section.rela, section.rela_bytes);
    visit(section.plt_rela, section.plt_rela_bytes);
  }
}

class ElfObject : public LoadedObject {
 public:
  explicit ElfObject(const dl_phdr_info& info)
      : info_(info), path_(info.dlpi_name) {}
  const std::string& path() const override { return path_; }
  bool RefersTo(const std::string& prefix) const override {
    bool found = false;
    ForEachReference(info_, [&](const Elf64_Sym&, const char* name, uintptr_t) {
      found = found || std::strncmp(name, prefix.c_str(), prefix.size()) == 0;
    });
    return found;
  }

 private:
  const dl_phdr_info& info_;
  const std::string path_;
};

int PatchObject(dl_phdr_info* object, size_t, void* data) {
  Patcher* const patcher = static_cast<Patcher*>(data);
  // Most objects do not import the function, which is soon found out.
  bool is_chosen = false, is_known = false;
  ForEachReference(*object, [&](const Elf64_Sym& symbol, const char* name,
                                uintptr_t slot) {
    if (symbol.st_shndx != SHN_UNDEF || std::strcmp(name, patcher->name) != 0) {
      return;
    }
    if (!is_known) is_chosen = (*patcher->filter)(ElfObject(*object));
    is_known = true;
    if (!is_chosen) return;
    if (WriteSlot(*object, slot,
                  reinterpret_cast<uintptr_t>(patcher->replacement))) {
      ++patcher->entries;
    } else {
      patcher->error = std::string("could not change the entry for ") +
                       patcher->name + " in " + object->dlpi_name + ": " +
                       std::strerror(errno);
    }
  });
  return 0;
}

}  // namespace

Result RedirectImports(const std::string& name, void* replacement,
                       const ObjectFilter& filter, int* entries) {
  // One at a time, as pages become writable and read-only again; never
  // destroyed, as a thread may be here during exit.
  static std::mutex* const mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  Patcher patcher;
  patcher.name = name.c_str();
  patcher.replacement = replacement;
  patcher.filter = &filter;
  dl_iterate_phdr(PatchObject, &patcher);
  *entries = patcher.entries;
  if (!patcher.error.empty()) return Result::Error(patcher.error);
  if (patcher.entries > 0) return Result::Ok();
  return Result::Error("none of the loaded libraries imports ", name,
                       "; load TensorFlow first");
}

void* FindFunction(const std::string& name, const ObjectFilter& filter) {
  std::vector<std::string> paths;
  struct Search {
    const ObjectFilter* filter;
    std::vector<std::string>* paths;
  } search{&filter, &paths};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* data) {
        const auto* const search = static_cast<Search*>(data);
        if ((*search->filter)(ElfObject(*object))) {
          search->paths->push_back(object->dlpi_name);
        }
        return 0;
      },
      &search);
  // Not inside the walk, which holds the loader's lock.
  for (const std::string& path : paths) {
    void* const library =
        dlopen(path.empty() ? nullptr : path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;
    void* const found = dlsym(library, name.c_str());
    dlclose(library);  // It was loaded before, and stays.
    if (found != nullptr) return found;
  }
  return nullptr;
}
#else
Result RedirectImports(const std::string& name, void*, const ObjectFilter&,
                       int* entries) {
  *entries = 0;
  return Result::Error("redirecting ", name,
                       " needs Linux on x86_64 or aarch64");
}

void* FindFunction(const std::string&, const ObjectFilter&) { return nullptr; }
#endif

}  // namespace recsync
