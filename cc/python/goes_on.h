// What simulations that Python has called ask every now and then.

#ifndef TF_RECSYNC_CC_PYTHON_GOES_ON_H_
#define TF_RECSYNC_CC_PYTHON_GOES_ON_H_

#include <pybind11/pybind11.h>

namespace recsync {

// Always true; throws what a handler of signals in Python raises, as it does of
// Ctrl-C. Other threads of Python have their turn.
inline bool GoesOn() {
  namespace py = pybind11;
  py::gil_scoped_acquire acquire;
  { py::gil_scoped_release release; }
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  return true;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_PYTHON_GOES_ON_H_
