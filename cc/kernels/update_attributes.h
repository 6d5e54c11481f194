// The attributes that all update ops share: SWAP, the staleness weight and what
// happens to gradients that are not finite.

#ifndef TF_RECSYNC_CC_KERNELS_UPDATE_ATTRIBUTES_H_
#define TF_RECSYNC_CC_KERNELS_UPDATE_ATTRIBUTES_H_

#include "absl/status/status.h"
#include "cc/engine/update_options.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace recsync {

// Read and check the attributes; InvalidArgument names the one at fault.

// Those of the weight as far as it depends on staleness alone.
absl::Status ReadStalenessWeight(tensorflow::OpKernelConstruction* ctx,
                                 StalenessWeight* weight);

absl::Status ReadUpdateAttributes(tensorflow::OpKernelConstruction* ctx,
                                  UpdateOptions* options);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_UPDATE_ATTRIBUTES_H_
