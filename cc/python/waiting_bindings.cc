// Keeps Python's threads running while TensorFlow waits for servers.
//
// Whenever Python makes or drops a function, TensorFlow tells all servers of
// the cluster, one after the other, and waits for their answers while it holds
// Python's lock; so it does when it makes a constant on a server, or fetches a
// tensor. One server that stands still then stops all threads of the
// coordinator, also those that watch for servers that stand still; and a
// function is dropped whenever the garbage collector finds one, in any thread.
//
// So TensorFlow's entries for these calls are redirected (import_table.h): they
// are made without the lock, and a function is dropped in a thread of ours, for
// which nobody waits.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/engine/import_table.h"

// As in tensorflow/c/eager/c_api.h and c_api.h, of which we need the names
// only.
struct TFE_Context;
struct TFE_Op;
struct TFE_TensorHandle;
struct TF_Function;
struct TF_Status;
struct TF_Tensor;

namespace recsync {

void RegisterWaitingBindings(pybind11::module_& m);

namespace {

// What the replacements end in; set before anything is redirected.
struct RealFunctions {
  void (*add)(TFE_Context*, TF_Function*, TF_Status*) = nullptr;
  void (*add_def)(TFE_Context*, const char*, size_t, TF_Status*) = nullptr;
  void (*remove)(TFE_Context*, const char*, TF_Status*) = nullptr;
  TF_Function* (*get)(TFE_Context*, const char*, TF_Status*) = nullptr;
  void (*delete_function)(TF_Function*) = nullptr;
  void (*delete_context)(TFE_Context*) = nullptr;
  void (*execute)(TFE_Op*, TFE_TensorHandle**, int*, TF_Status*) = nullptr;
  TF_Tensor* (*resolve)(TFE_TensorHandle*, TF_Status*) = nullptr;
  TFE_TensorHandle* (*copy)(TFE_TensorHandle*, TFE_Context*, const char*,
                            TF_Status*) = nullptr;
  TF_Status* (*new_status)() = nullptr;
  void (*delete_status)(TF_Status*) = nullptr;
};
RealFunctions real;

// Removes functions in a thread of its own.
class Remover {
 public:
  // Whether calls are to come here; the thread begins with the first one.
  void SetDeferring(bool deferring) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    deferring_ = deferring;
    if (deferring && !started_) {
      started_ = true;
      std::thread([this] { Run(); }).detach();
    }
  }

  // Takes a call; false if the caller has to make it.
  bool Take(TFE_Context* context, const char* name) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!deferring_) return false;
    calls_.emplace_back(context, name);
    changed_.notify_all();
    return true;
  }

  // For the end of a connection, without Python's lock: waits for what is to be
  // done, if that does not take long, as servers that have forgotten the
  // connection answer with errors, which TensorFlow logs.
  void Finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kFinishTime,
                      [this] { return calls_.empty() && current_ == nullptr; });
  }

  // For the end of the process, without Python's lock: forgets what is to be
  // done, and waits for what is being done, if that does not take long. Then
  // the thread does not need Python any more, which may be gone.
  void Stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    deferring_ = false;
    stopped_ = true;
    calls_.clear();
    changed_.wait_for(lock, kStopTime, [this] { return current_ == nullptr; });
  }

  // Forgets a context's calls; false if one is under way.
  bool Forget(TFE_Context* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.erase(
        std::remove_if(calls_.begin(), calls_.end(),
                       [&](const auto& call) { return call.first == context; }),
        calls_.end());
    return current_ != context;
  }

 private:
  static constexpr std::chrono::seconds kFinishTime{1};
  static constexpr std::chrono::seconds kStopTime{2};

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !calls_.empty(); });
      const auto [context, name] = std::move(calls_.front());
      calls_.pop_front();
      current_ = context;
      lock.unlock();
      // An error means that a server is gone, or the cluster is closed. Then
      // there is nothing to be removed there.
      TF_Status* const status = real.new_status();
      // With a function go stack traces, for which Python's lock is needed.
      // Inside of `remove` that would be a deadlock: somebody who holds it may
      // wait for TensorFlow's lock. So it is kept beyond.
      TF_Function* const function = real.get(context, name.c_str(), status);
      real.remove(context, name.c_str(), status);
      real.delete_status(status);
      lock.lock();
      if (function != nullptr && !stopped_) {
        lock.unlock();
        real.delete_function(function);
        lock.lock();
      }
      current_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool deferring_ = false;
  bool started_ = false;
  bool stopped_ = false;
  TFE_Context* current_ = nullptr;  // of the call under way
  std::deque<std::pair<TFE_Context*, std::string>> calls_;
};

// Never destroyed: its thread runs until the process ends.
Remover& TheRemover() {
  static Remover* const remover = new Remover;
  return *remover;
}

// Releases Python's lock in its scope, if this thread holds it.
class Unlocked {
 public:
  Unlocked() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

void AddFunction(TFE_Context* context, TF_Function* function,
                 TF_Status* status) {
  Unlocked unlocked;
  real.add(context, function, status);
}

void AddFunctionDef(TFE_Context* context, const char* serialized, size_t size,
                    TF_Status* status) {
  Unlocked unlocked;
  real.add_def(context, serialized, size, status);
}

void RemoveFunction(TFE_Context* context, const char* name, TF_Status* status) {
  // Not without Python's lock, see above; no server waits for it.
  if (TheRemover().Take(context, name)) return;
  real.remove(context, name, status);
}

void Execute(TFE_Op* op, TFE_TensorHandle** results, int* num_results,
             TF_Status* status) {
  Unlocked unlocked;
  real.execute(op, results, num_results, status);
}

TF_Tensor* Resolve(TFE_TensorHandle* handle, TF_Status* status) {
  Unlocked unlocked;
  return real.resolve(handle, status);
}

TFE_TensorHandle* Copy(TFE_TensorHandle* handle, TFE_Context* context,
                       const char* device, TF_Status* status) {
  Unlocked unlocked;
  return real.copy(handle, context, device, status);
}

void DeleteContext(TFE_Context* context) {
  // Else the process is ending, and a server does not answer.
  if (TheRemover().Forget(context)) real.delete_context(context);
}

template <typename F>
void Find(const char* name, F** function) {
  *function = reinterpret_cast<F*>(FindFunction(name, IsTensorFlowObject));
  if (*function == nullptr) {
    throw std::runtime_error(std::string("no function ") + name +
                             " in this process; import TensorFlow first");
  }
}

// All are found before one is redirected.
void RedirectAll() {
  std::vector<std::pair<const char*, void*>> replacements;
  const auto replace = [&](const char* name, auto* replacement, auto* real) {
    Find(name, real);
    replacements.emplace_back(name, reinterpret_cast<void*>(replacement));
  };
  Find("TF_NewStatus", &real.new_status);
  Find("TF_DeleteStatus", &real.delete_status);
  replace("TFE_ContextAddFunction", &AddFunction, &real.add);
  replace("TFE_ContextAddFunctionDef", &AddFunctionDef, &real.add_def);
  replace("TFE_ContextRemoveFunction", &RemoveFunction, &real.remove);
  replace("TFE_DeleteContext", &DeleteContext, &real.delete_context);
  Find("TFE_ContextGetFunction", &real.get);
  Find("TF_DeleteFunction", &real.delete_function);
  replace("TFE_Execute", &Execute, &real.execute);
  replace("TFE_TensorHandleResolve", &Resolve, &real.resolve);
  replace("TFE_TensorHandleCopyToDevice", &Copy, &real.copy);
  for (const auto& [name, replacement] : replacements) {
    int entries;
    const Result redirected =
        RedirectImports(name, replacement, IsTensorFlowObject, &entries);
    if (!redirected.ok()) throw std::runtime_error(redirected.error());
  }
}

}  // namespace

void RegisterWaitingBindings(pybind11::module_& m) {
  m.def(
      "keep_python_running",
      [](bool connected) {
        // Guarded by Python's lock.
        static bool redirected = false;
        if (!redirected) {
          RedirectAll();
          redirected = true;
          pybind11::module_::import("atexit").attr("register")(
              pybind11::cpp_function([] {
                pybind11::gil_scoped_release unlocked;
                TheRemover().Stop();
              }));
        }
        TheRemover().SetDeferring(connected);
        if (!connected) {
          pybind11::gil_scoped_release unlocked;
          TheRemover().Finish();
        }
      },
      pybind11::arg("connected"),
      R"(Has TensorFlow wait for servers without Python's lock.

From the first call on, TensorFlow makes functions, runs ops and fetches tensors
without the lock; while `connected`, it drops functions in a thread for which
nobody waits. So a server that stands still does not stop all of Python's threads.

Args:
  connected: Whether this process is connected to servers. False waits, a second at
    most, for functions to be dropped that were waiting for it: to be called while the
    servers are still there.

Raises:
  RuntimeError: TensorFlow's calls could not be redirected.

Example:
  >>> import tensorflow
  >>> keep_python_running(connected=True)
)");
}

}  // namespace recsync
