// Redirects functions that the libraries loaded in this process import.
//
// For what TensorFlow does without asking, and no parameter changes.
//
// How: it walks the ELF objects loaded in this process and points the entries
// of a function in the global offset table of the chosen ones at a replacement.
// Objects that are loaded later are not covered: call it again.
//
// Why not an LD_PRELOAD shim: the loader reads that variable before the program
// starts, so a script cannot arrange it for its own process, and the
// coordinator lives in the script's process.
//
// Supported: Linux with ELF objects on x86_64 and aarch64; elsewhere an error
// is returned.

#ifndef TF_RECSYNC_CC_ENGINE_IMPORT_TABLE_H_
#define TF_RECSYNC_CC_ENGINE_IMPORT_TABLE_H_

#include <functional>
#include <string>

#include "cc/engine/result.h"

namespace recsync {

// A library, an extension module or the main program, as it is loaded.
class LoadedObject {
 public:
  virtual ~LoadedObject() = default;
  // The loader's name: a file path, empty for the main program.
  virtual const std::string& path() const = 0;
  // Whether it refers to a symbol whose name begins with `prefix`: one that it
  // imports, or one of its own that others may replace.
  virtual bool RefersTo(const std::string& prefix) const = 0;
};

// Says whether an object's imports are to be redirected.
using ObjectFilter = std::function<bool(const LoadedObject& object)>;

// True for TensorFlow's own shared libraries and extension modules: by their
// names, by where they lie, or, wherever that is, by the names of TensorFlow's
// functions for Python that they refer to.
bool IsTensorFlowObject(const LoadedObject& object);

// Points the entries for the function `name` of the objects that `filter`
// accepts at `replacement`, which must have its signature and stay for as long
// as the process lives. Idempotent. Calls under way in other threads end in
// the old or the new function.
//
// `entries` becomes the number of entries that point at the replacement: it can
// be above 0 even if an error is returned.
Result RedirectImports(const std::string& name, void* replacement,
                       const ObjectFilter& filter, int* entries);

// The function that one of those objects finds under a name, or null.
void* FindFunction(const std::string& name, const ObjectFilter& filter);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_IMPORT_TABLE_H_
