#include "cc/kernels/update_op.h"

#include <cmath>

namespace recsync {
namespace {

absl::Status Check(bool ok, const char* name, double value,
                   const char* allowed) {
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be ", allowed, ", not ", value));
}

absl::Status ReadPositive(tensorflow::OpKernelConstruction* ctx,
                          const char* name, float* value) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, value));
  return Check(*value > 0.0f && std::isfinite(*value), name, *value,
               "positive");
}

absl::Status ReadStrength(tensorflow::OpKernelConstruction* ctx,
                          const char* name, float* value) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, value));
  return Check(*value >= 0.0f && std::isfinite(*value), name, *value,
               "at least 0");
}

absl::Status ReadBeta(tensorflow::OpKernelConstruction* ctx, const char* name,
                      double* value) {
  float beta;
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, &beta));
  *value = beta;
  return Check(beta >= 0.0f && beta < 1.0f, name, beta, "in [0, 1)");
}

}  // namespace

absl::Status ReadRule(tensorflow::OpKernelConstruction*, SgdRule*) {
  return absl::OkStatus();
}

absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx,
                      AdagradRule* rule) {
  return ReadPositive(ctx, "epsilon", &rule->epsilon);
}

absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx,
                      RowwiseAdagradRule* rule) {
  return ReadPositive(ctx, "epsilon", &rule->epsilon);
}

absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, AdamRule* rule) {
  TF_RETURN_IF_ERROR(ReadBeta(ctx, "beta_1", &rule->beta_1));
  TF_RETURN_IF_ERROR(ReadBeta(ctx, "beta_2", &rule->beta_2));
  // The op of dense variables has neither: each push moves all of one, and none
  // is pushed to by several counters.
  if (ctx->HasAttr("lazy")) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("lazy", &rule->lazy));
    TF_RETURN_IF_ERROR(
        ctx->GetAttr("several_counters", &rule->several_counters));
  }
  return ReadPositive(ctx, "epsilon", &rule->epsilon);
}

absl::Status ReadRule(tensorflow::OpKernelConstruction* ctx, FtrlRule* rule) {
  TF_RETURN_IF_ERROR(
      ctx->GetAttr("learning_rate_power", &rule->learning_rate_power));
  TF_RETURN_IF_ERROR(Check(rule->learning_rate_power <= 0.0f &&
                               std::isfinite(rule->learning_rate_power),
                           "learning_rate_power", rule->learning_rate_power,
                           "at most 0"));
  TF_RETURN_IF_ERROR(ReadStrength(ctx, "l1", &rule->l1));
  TF_RETURN_IF_ERROR(ReadStrength(ctx, "l2", &rule->l2));
  return ReadStrength(ctx, "beta", &rule->beta);
}

}  // namespace recsync
