// Kernels of the embedding collections' ops: routing ids, assembling vectors.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/engine/id_router.h"
#include "cc/engine/limits.h"
#include "cc/kernels/checked_shape.h"
#include "cc/kernels/inputs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"

namespace recsync {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

template <typename E>
absl::Status Parse(const char* attribute, const std::string& value,
                   const std::vector<std::pair<const char*, E>>& names,
                   E* parsed) {
  for (const auto& [name, meaning] : names) {
    if (value == name) {
      *parsed = meaning;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat(attribute, " can't be '", value, "'"));
}

absl::Status ReadFeatures(OpKernelConstruction* ctx, int tables,
                          std::vector<RoutedFeature>* features) {
  int f;
  TF_RETURN_IF_ERROR(ctx->GetAttr("F", &f));
  std::vector<std::string> names, table_names, combiners, out_of_range;
  std::vector<int64_t> rows, lengths, counts, shard_tables, shard_offsets;
  std::vector<int64_t> partitions;
  std::vector<bool> weighted;
  TF_RETURN_IF_ERROR(ReadList(ctx, "features", f, &names));
  TF_RETURN_IF_ERROR(ReadList(ctx, "tables", f, &table_names));
  TF_RETURN_IF_ERROR(ReadList(ctx, "table_rows", f, &rows));
  TF_RETURN_IF_ERROR(ReadList(ctx, "lengths", f, &lengths));
  TF_RETURN_IF_ERROR(ReadList(ctx, "weighted", f, &weighted));
  TF_RETURN_IF_ERROR(ReadList(ctx, "combiners", f, &combiners));
  TF_RETURN_IF_ERROR(ReadList(ctx, "out_of_range", f, &out_of_range));
  TF_RETURN_IF_ERROR(ReadList(ctx, "partitions", f, &partitions));
  TF_RETURN_IF_ERROR(ReadList(ctx, "shard_counts", f, &counts));
  int64_t shards = 0;
  for (int i = 0; i < f; ++i) {
    // Bounded before they are added up, which may overflow.
    if (counts[i] < 1 || counts[i] > kMostEntries) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard_counts must be from 1 to ", kMostEntries,
                       ", not ", counts[i], " for feature ", names[i]));
    }
    shards += counts[i];
  }
  TF_RETURN_IF_ERROR(ReadList(ctx, "shard_tables", shards, &shard_tables));
  TF_RETURN_IF_ERROR(ReadList(ctx, "shard_offsets", shards, &shard_offsets));
  size_t next = 0;
  for (int i = 0; i < f; ++i) {
    RoutedFeature feature = {names[i], table_names[i], rows[i], lengths[i],
                             weighted[i]};
    TF_RETURN_IF_ERROR(Parse<Combiner>("combiners", combiners[i],
                                       {{"sum", Combiner::kSum},
                                        {"mean", Combiner::kMean},
                                        {"sqrtn", Combiner::kSqrtN}},
                                       &feature.combiner));
    TF_RETURN_IF_ERROR(Parse<OutOfRange>("out_of_range", out_of_range[i],
                                         {{"error", OutOfRange::kError},
                                          {"clip", OutOfRange::kClip},
                                          {"hash", OutOfRange::kHash}},
                                         &feature.out_of_range));
    if (rows[i] < 1 || lengths[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "table_rows must be at least 1 and lengths at least 0, not ", rows[i],
          " and ", lengths[i], " for feature ", names[i]));
    }
    feature.partitions = partitions[i];
    if (partitions[i] < 0 || (partitions[i] & (partitions[i] - 1)) != 0 ||
        (partitions[i] > 0 && partitions[i] % counts[i] != 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "partitions must be 0 or a power of two that the ", counts[i],
          " shards divide, not ", partitions[i], " for feature ", names[i]));
    }
    for (int64_t s = 0; s < counts[i]; ++s, ++next) {
      if (shard_tables[next] < 0 || shard_tables[next] >= tables ||
          shard_offsets[next] < 0 ||
          shard_offsets[next] > std::numeric_limits<int64_t>::max() - rows[i]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "shard ", s, " of feature ", names[i], " can't be at row ",
            shard_offsets[next], " of physical table ", shard_tables[next]));
      }
      feature.shards.push_back(
          {static_cast<int>(shard_tables[next]), shard_offsets[next]});
    }
    features->push_back(std::move(feature));
  }
  return absl::OkStatus();
}

template <typename Index>
class RouteIdsOp : public OpKernel {
 public:
  explicit RouteIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("P", &tables_));
    OP_REQUIRES_OK(ctx, ReadList(ctx, "has_bags", tables_, &has_bags_));
    OP_REQUIRES_OK(ctx, ReadList(ctx, "has_scales", tables_, &has_scales_));
    std::vector<RoutedFeature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, tables_, &features));
    for (const RoutedFeature& feature : features) {
      for (const ShardPlace& shard : feature.shards) {
        OP_REQUIRES(ctx, has_bags_[shard.table] || feature.is_single(),
                    absl::InvalidArgumentError(absl::StrCat(
                        "has_bags must be true for the table of feature ",
                        feature.name, ", which has bags")));
        const bool scaled =
            feature.weighted ||
            (feature.length != 1 && feature.combiner != Combiner::kSum);
        OP_REQUIRES(ctx, has_scales_[shard.table] || !scaled,
                    absl::InvalidArgumentError(absl::StrCat(
                        "has_scales must be true for the table of feature ",
                        feature.name, ", whose bags are weighted sums")));
      }
    }
    router_ = std::make_unique<IdRouter>(std::move(features), has_bags_);
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<RoutedInput<Index>> inputs;
    int64_t batch = 0;
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, &inputs, &batch));
    std::vector<RoutedTable> routed_tables;
    const Result routed = router_->Route(inputs, batch, &routed_tables);
    OP_REQUIRES(ctx, routed.ok(), absl::InvalidArgumentError(routed.error()));
    Tensor* examples;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &examples));
    examples->scalar<int64_t>()() = batch;
    const std::vector<float> no_scales;
    for (int t = 0; t < tables_; ++t) {
      const RoutedTable& table = routed_tables[t];
      OP_REQUIRES_OK(ctx, Output(ctx, "rows", t, table.rows));
      OP_REQUIRES_OK(ctx, Output(ctx, "bags", t, table.bags));
      OP_REQUIRES_OK(ctx, Output(ctx, "scales", t,
                                 has_scales_[t] ? table.scales : no_scales));
      OP_REQUIRES_OK(ctx, Output(ctx, "slots", t, table.slots));
      OP_REQUIRES_OK(ctx, Output(ctx, "sources", t, table.sources));
    }
  }

 private:
  template <typename V>
  static absl::Status Output(OpKernelContext* ctx, const char* name, int t,
                             const std::vector<V>& values) {
    OpOutputList outputs;
    TF_RETURN_IF_ERROR(ctx->output_list(name, &outputs));
    Tensor* output;
    TF_RETURN_IF_ERROR(outputs.allocate(
        t, TensorShape({static_cast<int64_t>(values.size())}), &output));
    std::copy(values.begin(), values.end(), output->flat<V>().data());
    return absl::OkStatus();
  }

  absl::Status ReadInputs(OpKernelContext* ctx,
                          std::vector<RoutedInput<Index>>* inputs,
                          int64_t* batch) {
    OpInputList ids, splits, weights;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(ctx->input_list("splits", &splits));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (!TensorShapeUtils::IsVector(ctx->input(i).shape())) {
        return absl::InvalidArgumentError(
            absl::StrCat("ids, splits and weights must be vectors, not ",
                         ctx->input(i).shape().DebugString()));
      }
    }
    int ragged = 0, weighted = 0;
    *batch = -1;
    const std::vector<RoutedFeature>& features = router_->features();
    for (size_t f = 0; f < features.size(); ++f) {
      const RoutedFeature& feature = features[f];
      RoutedInput<Index> input = {ids[f].template flat<Index>().data(),
                                  ids[f].NumElements(), nullptr, nullptr};
      int64_t examples;
      if (feature.length == 0) {
        if (ragged >= splits.size() || splits[ragged].NumElements() < 1) {
          return absl::InvalidArgumentError(absl::StrCat(
              "the row splits of feature ", feature.name, " are missing"));
        }
        input.splits = splits[ragged].template flat<int64_t>().data();
        examples = splits[ragged].NumElements() - 1;
        ++ragged;
      } else {
        examples = input.n / feature.length;
      }
      if (*batch < 0) *batch = examples;
      if (examples != *batch) {
        return absl::InvalidArgumentError(
            absl::StrCat("feature ", feature.name, " of table ", feature.table,
                         " has ", examples, " examples, feature ",
                         features[0].name, " has ", *batch));
      }
      if (feature.weighted) {
        if (weighted >= weights.size() ||
            weights[weighted].NumElements() != input.n) {
          return absl::InvalidArgumentError(absl::StrCat(
              "feature ", feature.name, " of table ", feature.table, " has ",
              input.n, " ids, but ",
              weighted < weights.size() ? weights[weighted].NumElements() : 0,
              " weights"));
        }
        input.weights = weights[weighted].template flat<float>().data();
        ++weighted;
      }
      inputs->push_back(input);
    }
    if (ragged != splits.size() || weighted != weights.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("there are ", splits.size(), " splits for ", ragged,
                       " ragged features, and ", weights.size(),
                       " weights for ", weighted, " weighted ones"));
    }
    return absl::OkStatus();
  }

  int tables_;
  std::vector<bool> has_bags_;
  std::vector<bool> has_scales_;
  std::unique_ptr<const IdRouter> router_;
};

// The columns of the features in the assembled vectors.
class Columns {
 public:
  explicit Columns(const std::vector<int64_t>& dimensions) {
    for (int64_t dimension : dimensions) {
      begins_.push_back(width_);
      width_ += dimension;  // at most kMostElements, as ReadDimensions checks
    }
    dimensions_ = dimensions;
  }

  int64_t width() const { return width_; }

  // Calls visit(vector, offset into the assembled vectors) for all slots that
  // take one of a physical table's `vectors` of `dimension`.
  template <typename Visitor>
  absl::Status Visit(const Tensor& slots, const Tensor& sources,
                     int64_t vectors, int64_t dimension, int64_t batch,
                     const Visitor& visit) const {
    const int32_t* slot = slots.flat<int32_t>().data();
    const int64_t n = slots.NumElements();
    const bool shared = sources.NumElements() > 0;
    if (shared ? sources.NumElements() != n : n != vectors) {
      return absl::InvalidArgumentError(
          absl::StrCat("slots holds ", n, " slots for ", vectors,
                       " vectors and ", sources.NumElements(), " sources"));
    }
    const int32_t* source = sources.flat<int32_t>().data();
    // Slots come feature by feature: a division for each feature, not slot.
    int64_t first = 0, end = 0, begin = 0;  // of the last slot's feature
    for (int64_t i = 0; i < n; ++i) {
      const int64_t vector = shared ? source[i] : i;
      if (vector < 0 || vector >= vectors) {
        return absl::InvalidArgumentError(absl::StrCat(
            "sources holds ", vector, ", there are ", vectors, " vectors"));
      }
      if (slot[i] < first || slot[i] >= end) {
        const int64_t feature = batch == 0 ? -1 : slot[i] / batch;
        if (slot[i] < 0 || feature < 0 ||
            feature >= static_cast<int64_t>(begins_.size()) ||
            dimensions_[feature] != dimension) {
          return absl::InvalidArgumentError(absl::StrCat(
              "slots holds ", slot[i], ", which is not a slot of a feature of ",
              "dimension ", dimension, " in a batch of ", batch));
        }
        first = feature * batch;
        end = first + batch;
        begin = begins_[feature];
      }
      visit(vector, (slot[i] - first) * width_ + begin);
    }
    return absl::OkStatus();
  }

 private:
  std::vector<int64_t> dimensions_;
  std::vector<int64_t> begins_;
  int64_t width_ = 0;
};

absl::Status ReadDimensions(OpKernelConstruction* ctx, const char* name,
                            std::vector<int64_t>* dimensions) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, dimensions));
  int64_t left = kMostElements;
  for (int64_t dimension : *dimensions) {
    if (dimension < 1 || dimension > left) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " must be positive and at most ", kMostElements,
                       " together, not ", absl::StrJoin(*dimensions, ", ")));
    }
    left -= dimension;
  }
  return absl::OkStatus();
}

// Adds a vector to another one. Common widths are compiled in.
inline void AddVector(const float* __restrict from, int64_t n,
                      float* __restrict to) {
  const auto add = [from, to](int64_t width) {
    for (int64_t j = 0; j < width; ++j) to[j] += from[j];
  };
  switch (n) {
    case 1:
      return add(1);
    case 8:
      return add(8);
    case 16:
      return add(16);
    case 32:
      return add(32);
    case 64:
      return add(64);
    default:
      return add(n);
  }
}

class AssembleOp : public OpKernel {
 public:
  explicit AssembleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadDimensions(ctx, "dimensions", &dimensions_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList pooled, slots, sources;
    OP_REQUIRES_OK(ctx, ctx->input_list("pooled", &pooled));
    OP_REQUIRES_OK(ctx, ctx->input_list("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input_list("sources", &sources));
    const Tensor& examples = ctx->input(0);
    OP_REQUIRES(
        ctx, TensorShapeUtils::IsScalar(examples.shape()),
        absl::InvalidArgumentError(absl::StrCat(
            "batch must be a scalar, not ", examples.shape().DebugString())));
    const int64_t batch = examples.scalar<int64_t>()();
    const Columns columns(dimensions_);
    TensorShape shape;
    OP_REQUIRES_OK(
        ctx,
        MakeShape({{"batch", batch}, {"dimensions", columns.width()}}, &shape));
    Tensor* assembled;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &assembled));
    float* out = assembled->flat<float>().data();
    std::fill_n(out, assembled->NumElements(), 0.0f);
    for (int t = 0; t < pooled.size(); ++t) {
      OP_REQUIRES(ctx,
                  TensorShapeUtils::IsMatrix(pooled[t].shape()) &&
                      TensorShapeUtils::IsVector(slots[t].shape()) &&
                      TensorShapeUtils::IsVector(sources[t].shape()),
                  absl::InvalidArgumentError(absl::StrCat(
                      "pooled must be [vectors, dimension], slots and sources "
                      "vectors, not ",
                      pooled[t].shape().DebugString(), ", ",
                      slots[t].shape().DebugString(), " and ",
                      sources[t].shape().DebugString())));
      const int64_t dimension = pooled[t].dim_size(1);
      const float* from = pooled[t].flat<float>().data();
      OP_REQUIRES_OK(ctx, columns.Visit(slots[t], sources[t],
                                        pooled[t].dim_size(0), dimension, batch,
                                        [&](int64_t vector, int64_t offset) {
                                          AddVector(from + vector * dimension,
                                                    dimension, out + offset);
                                        }));
    }
  }

 private:
  std::vector<int64_t> dimensions_;
};

class AssembleGradOp : public OpKernel {
 public:
  explicit AssembleGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadDimensions(ctx, "dimensions", &dimensions_));
    OP_REQUIRES_OK(ctx,
                   ReadDimensions(ctx, "table_dimensions", &table_dimensions_));
    int p;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("P", &p));
    OP_REQUIRES(ctx, static_cast<int>(table_dimensions_.size()) == p,
                absl::InvalidArgumentError(
                    "table_dimensions must have a number for each table"));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList slots, sources;
    OpOutputList pooled;
    OP_REQUIRES_OK(ctx, ctx->input_list("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input_list("sources", &sources));
    OP_REQUIRES_OK(ctx, ctx->output_list("pooled", &pooled));
    const Tensor& gradient = ctx->input(0);
    const Tensor& vectors = ctx->input(1);
    const Columns columns(dimensions_);
    OP_REQUIRES(ctx,
                TensorShapeUtils::IsMatrix(gradient.shape()) &&
                    gradient.dim_size(1) == columns.width(),
                absl::InvalidArgumentError(
                    absl::StrCat("gradient must be [batch, ", columns.width(),
                                 "], not ", gradient.shape().DebugString())));
    OP_REQUIRES(ctx, vectors.shape() == TensorShape({slots.size()}),
                absl::InvalidArgumentError(
                    absl::StrCat("vectors must have shape [", slots.size(),
                                 "], not ", vectors.shape().DebugString())));
    const float* from = gradient.flat<float>().data();
    for (int t = 0; t < slots.size(); ++t) {
      const int64_t n = vectors.flat<int32_t>()(t);
      OP_REQUIRES(ctx,
                  TensorShapeUtils::IsVector(slots[t].shape()) &&
                      TensorShapeUtils::IsVector(sources[t].shape()),
                  absl::InvalidArgumentError(
                      absl::StrCat("slots and sources must be vectors, not ",
                                   slots[t].shape().DebugString(), " and ",
                                   sources[t].shape().DebugString())));
      const int64_t dimension = table_dimensions_[t];
      TensorShape shape;
      OP_REQUIRES_OK(
          ctx,
          MakeShape({{"vectors", n}, {"table_dimensions", dimension}}, &shape));
      Tensor* part;
      OP_REQUIRES_OK(ctx, pooled.allocate(t, shape, &part));
      float* to = part->flat<float>().data();
      std::fill_n(to, part->NumElements(), 0.0f);
      OP_REQUIRES_OK(ctx, columns.Visit(slots[t], sources[t], n, dimension,
                                        gradient.dim_size(0),
                                        [&](int64_t vector, int64_t offset) {
                                          AddVector(from + offset, dimension,
                                                    to + vector * dimension);
                                        }));
    }
  }

 private:
  std::vector<int64_t> dimensions_;
  std::vector<int64_t> table_dimensions_;
};

REGISTER_KERNEL_BUILDER(Name("RecsyncRouteIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tindices"),
                        RouteIdsOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("RecsyncRouteIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tindices"),
                        RouteIdsOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("RecsyncAssemble").Device(tensorflow::DEVICE_CPU),
                        AssembleOp);
REGISTER_KERNEL_BUILDER(
    Name("RecsyncAssembleGrad").Device(tensorflow::DEVICE_CPU), AssembleGradOp);

}  // namespace
}  // namespace recsync
