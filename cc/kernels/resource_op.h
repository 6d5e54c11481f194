// Ops of resources of ours, which a device's resource manager holds.

#ifndef TF_RECSYNC_CC_KERNELS_RESOURCE_OP_H_
#define TF_RECSYNC_CC_KERNELS_RESOURCE_OP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/inputs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {

// Looks up the resource whose handle is the input `name`.
template <typename Resource>
absl::Status LookupInput(tensorflow::OpKernelContext* ctx, const char* name,
                         tensorflow::core::RefCountPtr<Resource>* resource) {
  const tensorflow::Tensor* input;
  TF_RETURN_IF_ERROR(ctx->input(name, &input));
  if (input->NumElements() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be one resource handle, not ",
                     input->shape().DebugString()));
  }
  return tensorflow::LookupResource(
      ctx, input->flat<tensorflow::ResourceHandle>()(0), resource);
}

// Makes a resource, unless one of its name is there already, and outputs its
// handle. The op has the attributes container and shared_name.
template <typename Resource>
class ResourceOp : public tensorflow::OpKernel {
 public:
  explicit ResourceOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) final {
    const auto handle =
        tensorflow::MakeResourceHandle<Resource>(ctx, container_, shared_name_);
    tensorflow::core::RefCountPtr<Resource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupOrCreateResource<Resource>(
                            ctx, handle, &resource, [this](Resource** made) {
                              *made = Make().release();
                              return absl::OkStatus();
                            }));
    OP_REQUIRES_OK(ctx, CheckSame(*resource));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, 0, handle));
  }

 protected:
  virtual tensorflow::core::RefCountPtr<Resource> Make() const = 0;
  // InvalidArgument if what is there is not what Make would have made.
  virtual absl::Status CheckSame(const Resource& found) const = 0;

  std::string shared_name_;

 private:
  std::string container_;
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_RESOURCE_OP_H_
