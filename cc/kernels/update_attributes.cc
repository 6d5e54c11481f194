#include "cc/kernels/update_attributes.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

namespace recsync {
namespace {

absl::Status Check(bool ok, const char* name, double value,
                   const char* allowed) {
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be ", allowed, ", not ", value));
}

}  // namespace

absl::Status ReadStalenessWeight(tensorflow::OpKernelConstruction* ctx,
                                 StalenessWeight* weight) {
  float power, baseline, iota;
  std::string decay;
  TF_RETURN_IF_ERROR(ctx->GetAttr("staleness_decay", &decay));
  TF_RETURN_IF_ERROR(ctx->GetAttr("staleness_power", &power));
  TF_RETURN_IF_ERROR(ctx->GetAttr("staleness_baseline", &baseline));
  TF_RETURN_IF_ERROR(ctx->GetAttr("staleness_normalized", &weight->normalized));
  TF_RETURN_IF_ERROR(ctx->GetAttr("staleness_iota", &iota));
  if (!ParseStalenessDecay(decay, &weight->decay)) {
    return absl::InvalidArgumentError(
        absl::StrCat("staleness_decay must be constant, inverse_power or "
                     "threshold, not ",
                     decay));
  }
  TF_RETURN_IF_ERROR(Check(power > 0.0f && std::isfinite(power),
                           "staleness_power", power, "positive"));
  TF_RETURN_IF_ERROR(Check(baseline >= 1.0f && std::isfinite(baseline),
                           "staleness_baseline", baseline, "at least 1"));
  TF_RETURN_IF_ERROR(Check(iota >= 0.0f, "staleness_iota", iota, "at least 0"));
  weight->power = power;
  weight->baseline = baseline;
  weight->iota = iota;
  return absl::OkStatus();
}

absl::Status ReadUpdateAttributes(tensorflow::OpKernelConstruction* ctx,
                                  UpdateOptions* options) {
  Swap& swap = options->swap;
  StalenessWeight& weight = options->weight;
  float swap_decay, sensitivity, deviation, mean;
  std::string nonfinite;
  TF_RETURN_IF_ERROR(ctx->GetAttr("swap_period", &swap.period));
  TF_RETURN_IF_ERROR(ctx->GetAttr("swap_decay", &swap_decay));
  TF_RETURN_IF_ERROR(ctx->GetAttr("swap_offset", &swap.offset));
  TF_RETURN_IF_ERROR(ReadStalenessWeight(ctx, &weight));
  TF_RETURN_IF_ERROR(ctx->GetAttr("update_sensitivity", &sensitivity));
  TF_RETURN_IF_ERROR(ctx->GetAttr("target_deviation", &deviation));
  TF_RETURN_IF_ERROR(ctx->GetAttr("target_mean", &mean));
  TF_RETURN_IF_ERROR(ctx->GetAttr("deviation_window", &weight.window));
  TF_RETURN_IF_ERROR(ctx->GetAttr("nonfinite", &nonfinite));
  TF_RETURN_IF_ERROR(ctx->GetAttr("names", &options->names));
  TF_RETURN_IF_ERROR(Check(swap.period >= 0, "swap_period", swap.period,
                           "0 (off) or a positive number of global steps"));
  TF_RETURN_IF_ERROR(Check(swap_decay > 0.0f && swap_decay <= 1.0f,
                           "swap_decay", swap_decay, "in (0, 1]"));
  if (!ParseNonfinite(nonfinite, &options->nonfinite)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "nonfinite must be apply, skip or error, not ", nonfinite));
  }
  TF_RETURN_IF_ERROR(Check(deviation >= 0.0f && std::isfinite(deviation),
                           "target_deviation", deviation, "at least 0"));
  TF_RETURN_IF_ERROR(Check(mean >= 0.0f && std::isfinite(mean), "target_mean",
                           mean, "at least 0"));
  TF_RETURN_IF_ERROR(Check(weight.window >= 1, "deviation_window",
                           weight.window, "at least 1"));
  TF_RETURN_IF_ERROR(Check(std::isfinite(sensitivity), "update_sensitivity",
                           sensitivity, "finite; negative for off"));
  swap.decay = swap_decay;
  weight.update_sensitivity = sensitivity;
  weight.target_deviation = deviation;
  weight.target_mean = mean;
  return absl::OkStatus();
}

}  // namespace recsync
