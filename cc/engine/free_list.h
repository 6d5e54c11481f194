// Objects that are costly to make anew, such as buffers, kept for the next use.
//
//   FreeList<Scratch> list;
//   { FreeList<Scratch>::Lease scratch(&list); scratch->...; }
//
// As many objects are kept as were ever in use at once. Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_FREE_LIST_H_
#define TF_RECSYNC_CC_ENGINE_FREE_LIST_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

template <typename T>
class FreeList {
 public:
  // An object for as long as this one lives; it holds what its last user left.
  class Lease {
   public:
    explicit Lease(FreeList* list) : list_(list), object_(list->Take()) {}
    ~Lease() { list_->Give(std::move(object_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    T& operator*() const { return *object_; }
    T* operator->() const { return object_.get(); }

   private:
    FreeList* const list_;
    std::unique_ptr<T> object_;
  };

 private:
  std::unique_ptr<T> Take() {
    {
      MutexLock lock(&mu_);
      if (!free_.empty()) {
        std::unique_ptr<T> object = std::move(free_.back());
        free_.pop_back();
        return object;
      }
    }
    return std::make_unique<T>();
  }
  void Give(std::unique_ptr<T> object) {
    MutexLock lock(&mu_);
    free_.push_back(std::move(object));
  }

  Mutex mu_;
  std::vector<std::unique_ptr<T>> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_FREE_LIST_H_
