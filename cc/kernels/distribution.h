// Reads what kernels are told of the distribution of first values.

#ifndef TF_RECSYNC_CC_KERNELS_DISTRIBUTION_H_
#define TF_RECSYNC_CC_KERNELS_DISTRIBUTION_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/initial_rows.h"

namespace recsync {

inline absl::Status ParseDistribution(const std::string& name,
                                      Distribution* distribution) {
  constexpr std::pair<const char*, Distribution> kNames[] = {
      {"constant", Distribution::kConstant},
      {"uniform", Distribution::kUniform},
      {"normal", Distribution::kNormal},
      {"truncated_normal", Distribution::kTruncatedNormal}};
  for (const auto& [known, meaning] : kNames) {
    if (name == known) {
      *distribution = meaning;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("distributions can't be '", name, "'"));
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_KERNELS_DISTRIBUTION_H_
