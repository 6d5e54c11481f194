// The headers of TensorFlow that most kernels and ops include, which setup.py
// compiles once for all of them: reading them takes a compiler ten seconds for
// each file. Files include what they need as ever, and compile without this
// one.

#ifndef TF_RECSYNC_CC_TENSORFLOW_HEADERS_H_
#define TF_RECSYNC_CC_TENSORFLOW_HEADERS_H_

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

#endif  // TF_RECSYNC_CC_TENSORFLOW_HEADERS_H_
