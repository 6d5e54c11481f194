#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace recsync {
namespace {

// A collection may run Python code, in which another thread may take over.
class NoCollections {
 public:
  NoCollections() : was_enabled_(PyGC_Disable() != 0) {}
  NoCollections(const NoCollections&) = delete;
  NoCollections& operator=(const NoCollections&) = delete;
  ~NoCollections() {
    if (was_enabled_) PyGC_Enable();
  }

 private:
  const bool was_enabled_;
};

bool IsOnStack(uint64_t thread, uint64_t frame, pybind11::handle code) {
  const pybind11::object all =
      pybind11::module_::import("sys").attr("_current_frames");
  const pybind11::int_ key(thread);
  const NoCollections no_collections;
  const pybind11::dict frames = all();
  if (!frames.contains(key)) return false;
  // Who is let go may run Python code, too: not before the end.
  std::vector<pybind11::object> seen = {frames[key]};
  while (seen.back()) {
    auto* const at = reinterpret_cast<PyFrameObject*>(seen.back().ptr());
    const auto own = pybind11::reinterpret_steal<pybind11::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
    if (reinterpret_cast<uintptr_t>(at) == frame && own.is(code)) return true;
    seen.push_back(pybind11::reinterpret_steal<pybind11::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(at))));
  }
  return false;
}

}  // namespace

void RegisterStackBindings(pybind11::module_& m);

void RegisterStackBindings(pybind11::module_& m) {
  m.def("is_on_stack", &IsOnStack, pybind11::arg("thread"),
        pybind11::arg("frame"), pybind11::arg("code"),
        R"(Whether a call is on a thread's stack.

Python code can't find out of another thread: that may return from the frames
that are being looked at, between any two of its steps. Here none can.

Args:
  thread: What `threading.get_ident` gives in the thread.
  frame: The `id` of the call's frame, which need not be there any more.
  code: The code that it runs.
)");
}

}  // namespace recsync
