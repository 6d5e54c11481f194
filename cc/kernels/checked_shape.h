// Shapes of outputs whose sizes come from inputs and attributes.

#ifndef TF_RECSYNC_CC_KERNELS_CHECKED_SHAPE_H_
#define TF_RECSYNC_CC_KERNELS_CHECKED_SHAPE_H_

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/engine/limits.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace recsync {

// The size of a dimension, and the argument that it comes from.
struct NamedSize {
  absl::string_view name;
  int64_t size;
};

// Makes a shape of these dimensions. InvalidArgument, naming the arguments,
// where one is negative or there would be more than `most` elements:
// TensorShape's own constructor ends the process then, and an allocation of
// that size may, too.
absl::Status MakeShape(std::initializer_list<NamedSize> sizes,
                       tensorflow::TensorShape* shape,
                       int64_t most = kMostElements);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_CHECKED_SHAPE_H_
