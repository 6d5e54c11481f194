#include "cc/kernels/checked_shape.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace recsync {

absl::Status MakeShape(std::initializer_list<NamedSize> sizes,
                       tensorflow::TensorShape* shape, int64_t most) {
  int64_t elements = 1;
  bool is_empty = false;
  for (const NamedSize& size : sizes) {
    if (size.size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(size.name, " must be at least 0, not ", size.size));
    }
    is_empty |= size.size == 0;
  }
  for (const NamedSize& size : sizes) {
    // Of an empty tensor each dimension by itself is bounded.
    const bool is_too_large =
        size.size > most || (!is_empty && size.size > most / elements);
    if (is_too_large) {
      const auto join = [&](const auto& format) {
        return absl::StrJoin(sizes, " x ", format);
      };
      return absl::InvalidArgumentError(
          absl::StrCat(join([](std::string* out, const NamedSize& s) {
                         absl::StrAppend(out, s.name);
                       }),
                       " must be at most ", most, " elements, not ",
                       join([](std::string* out, const NamedSize& s) {
                         absl::StrAppend(out, s.size);
                       })));
    }
    if (!is_empty) elements *= size.size;
  }
  shape->Clear();
  // Of an empty one, those before a 0 may be too many together.
  for (const NamedSize& size : sizes) {
    TF_RETURN_IF_ERROR(shape->AddDimWithStatus(size.size));
  }
  return absl::OkStatus();
}

}  // namespace recsync
