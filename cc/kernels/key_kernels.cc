// Kernels of tables whose ids are keys.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/engine/bfloat16.h"
#include "cc/engine/initial_rows.h"
#include "cc/engine/key_hash.h"
#include "cc/engine/key_mean.h"
#include "cc/engine/key_table.h"
#include "cc/engine/row_locks.h"
#include "cc/kernels/distribution.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/log_decays.h"
#include "cc/kernels/parallel_for.h"
#include "cc/kernels/update_op.h"
#include "cc/kernels/variable_access.h"
#include "cc/kernels/write_session.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"

namespace recsync {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

absl::Status ReadPlace(OpKernelConstruction* ctx, KeyOptions* options) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("partitions", &options->partitions));
  TF_RETURN_IF_ERROR(ctx->GetAttr("shard", &options->shard));
  TF_RETURN_IF_ERROR(ctx->GetAttr("shards", &options->shards));
  return ctx->GetAttr("min_count", &options->min_count);
}

// Ticks of a second, and when time begins: more than thirty years fit in.
constexpr int64_t kTicksOfSecond = 1024;
constexpr int64_t kFirstSecond = 1577836800;  // 2020

int64_t TickOfNow() {
  const int64_t micros = tensorflow::Env::Default()->NowMicros();
  const int64_t since = std::max<int64_t>(micros - kFirstSecond * 1000000, 0);
  return since / 1000000 * kTicksOfSecond +
         since % 1000000 * kTicksOfSecond / 1000000;
}

absl::Status CheckKeyTable(int64_t rows, const KeyOptions& options) {
  const Result checked = KeyTable::Check(rows, options);
  if (checked.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(checked.error());
}

class KeySizesOp : public OpKernel {
 public:
  explicit KeySizesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadPlace(ctx, &options_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rows", &rows_));
    OP_REQUIRES_OK(ctx, CheckKeyTable(rows_, options_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(
        ctx, WriteScalar(ctx, "index", KeyTable::IndexSize(rows_, options_)));
    OP_REQUIRES_OK(
        ctx, WriteScalar(ctx, "sketch", KeyTable::SketchSize(rows_, options_)));
  }

 private:
  int64_t rows_;
  KeyOptions options_;
};

class UsedRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> entries;
    OP_REQUIRES_OK(ctx, LookupVariables(ctx, "entries", &entries));
    const ReadSession session({entries[0].get()});
    OP_REQUIRES_OK(ctx,
                   CheckVariable(*entries[0], "entries", tensorflow::DT_INT64));
    const Tensor& value = *entries[0]->tensor();
    OP_REQUIRES(ctx, value.dims() == 2 && value.dim_size(1) == 2,
                absl::InvalidArgumentError(
                    absl::StrCat("entries must have shape [rows, 2], not ",
                                 value.shape().DebugString())));
    const int64_t* words = value.flat<int64_t>().data();
    int64_t used = 0;
    for (int64_t row = 0; row < value.dim_size(0); ++row) {
      used += __atomic_load_n(words + 2 * row + 1, __ATOMIC_RELAXED) != 0;
    }
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, "used", used));
  }
};

class FindRowsOp : public OpKernel {
 public:
  explicit FindRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadPlace(ctx, &options_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("inserts", &inserts_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("half_life", &options_.half_life));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_idle", &options_.max_idle));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keeps_time", &keeps_time_));
    float probability;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("probability", &probability));
    options_.probability = probability;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("trains_unknown", &trains_unknown_));
    std::string eviction;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("eviction", &eviction));
    OP_REQUIRES(ctx, eviction == "least_recent" || eviction == "least_frequent",
                absl::InvalidArgumentError(absl::StrCat(
                    "eviction must be least_recent or least_frequent, not ",
                    eviction)));
    options_.eviction = eviction == "least_recent"
                            ? KeyOptions::Eviction::kLeastRecent
                            : KeyOptions::Eviction::kLeastFrequent;
    std::string distribution;
    std::vector<float> parameters;
    int64_t seed;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution));
    OP_REQUIRES_OK(ctx, ReadList(ctx, "parameters", 2, &parameters));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed));
    OP_REQUIRES_OK(ctx, ParseDistribution(distribution, &first_.distribution));
    first_.rows = 1;
    first_.first = parameters[0];
    first_.second = parameters[1];
    first_.seed = static_cast<uint64_t>(seed);
    const Result checked = CheckInitialRows(first_);
    OP_REQUIRES(ctx, checked.ok(), absl::InvalidArgumentError(checked.error()));
    int beside, sketches, versions, decayed, means;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_beside", &beside));
    OP_REQUIRES_OK(ctx, ReadList(ctx, "beside_values", beside, &values_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_sketches", &sketches));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_versions", &versions));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_decayed", &decayed));
    OP_REQUIRES(ctx, sketches == (options_.min_count > 1 ? 1 : 0),
                absl::InvalidArgumentError(absl::StrCat(
                    "sketches must be one with min_count > 1, else none, not ",
                    sketches)));
    OP_REQUIRES(ctx, versions <= 1 && decayed <= 1,
                absl::InvalidArgumentError(
                    "there must be at most one of versions and log_decays"));
    if (decayed == 1) decayed_ = {0};
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_means", &means));
    OP_REQUIRES(ctx, means <= 1,
                absl::InvalidArgumentError(
                    absl::StrCat("means must be one or none, not ", means)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mean_rows", &mean_rows_));
    OP_REQUIRES(ctx, mean_rows_ >= 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "mean_rows must be 0 or more, not ", mean_rows_)));
  }

  void Compute(OpKernelContext* ctx) override {
    Held held;
    OP_REQUIRES_OK(ctx, LookUp(ctx, &held));
    const Tensor* keys;
    const Tensor* expected;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "keys", &keys));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "expected", &expected));
    const int64_t n = keys->NumElements();
    OP_REQUIRES(ctx,
                expected->NumElements() == 0 || expected->NumElements() == n,
                absl::InvalidArgumentError(absl::StrCat(
                    "expected must hold ", n, " versions or none, not ",
                    expected->NumElements())));
    Tensor* rows;
    Tensor* versions;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys->shape(), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, keys->shape(), &versions));
    if (n == 0 && held.mean == nullptr) return;
    const WriteSession session(ctx, held.All());
    OP_REQUIRES_OK(ctx, session.status());
    KeyView view;
    OP_REQUIRES_OK(ctx, ViewOf(held, &view));
    RowDecay decay;
    OP_REQUIRES_OK(ctx, RowDecayOf(held.log_decays, view.rows, &decay));
    OP_REQUIRES_OK(ctx, CheckBesides(held, view.rows));
    KeyTable table(options_, view);
    table.Prepare();
    const int64_t* ids = keys->flat<int64_t>().data();
    const int64_t* before = expected->NumElements() == 0
                                ? nullptr
                                : expected->flat<int64_t>().data();
    int64_t* to = rows->flat<int64_t>().data();
    int64_t* to_versions = versions->flat<int64_t>().data();
    const int64_t now = keeps_time_ ? TickOfNow() : 0;
    const int64_t tick =
        inserts_ && n > 0 ? table.NextTick(now) : table.Now(now);
    const auto give = [&](int64_t row, int64_t key) {
      Give(held, decay, row, key, tick, &table);
    };
    ParallelFor(ctx, n, /*cost=*/200, [&](int64_t begin, int64_t end) {
      if (inserts_) {
        table.FindOrInsert(ids + begin, end - begin, tick, to + begin,
                           to_versions + begin, give);
      } else {
        // A push finds again what was looked up before.
        table.Find(ids + begin, end - begin, to + begin, to_versions + begin,
                   now, /*counts=*/before == nullptr);
      }
    });
    if (held.mean != nullptr) {
      Advance(held, decay, table, std::max(n, mean_rows_), tick);
    }
    if (view.versions == nullptr) {
      std::fill_n(to_versions, n, int64_t{0});
      return;
    }
    const int64_t unknown = options_.partitions / options_.shards;
    for (int64_t i = 0; i < n; ++i) {
      if (trains_unknown_ && to[i] < unknown) {
        to_versions[i] =
            __atomic_load_n(view.versions + to[i], __ATOMIC_RELAXED);
      }
      if (before != nullptr && LifeOf(before[i]) != LifeOf(to_versions[i])) {
        // As a key without a row, which it was or is by now.
        to[i] = PartitionOfKey(ids[i], options_.partitions) / options_.shards;
        to_versions[i] = kNoLife;
      }
    }
  }

 private:
  struct Held {
    std::vector<VariablePtr> pointers;
    Var* table = nullptr;
    Var* entries = nullptr;
    Var* index = nullptr;
    Var* counts = nullptr;
    Var* sketch = nullptr;      // null without
    Var* versions = nullptr;    // null without
    Var* log_decays = nullptr;  // null without
    Var* mean = nullptr;        // null without
    std::vector<Var*> beside;

    std::vector<Var*> All() const {
      std::vector<Var*> all = {table, entries, index, counts};
      for (Var* one : {sketch, versions, log_decays, mean}) {
        if (one != nullptr) all.push_back(one);
      }
      all.insert(all.end(), beside.begin(), beside.end());
      return all;
    }
  };

  absl::Status LookUp(OpKernelContext* ctx, Held* held) const {
    const auto find = [&](const char* name, std::vector<Var*>* to) {
      std::vector<VariablePtr> found;
      TF_RETURN_IF_ERROR(LookupVariables(ctx, name, &found));
      for (VariablePtr& one : found) {
        to->push_back(one.get());
        held->pointers.push_back(std::move(one));
      }
      return absl::OkStatus();
    };
    std::vector<Var*> own, sketches, versions, means;
    for (const char* name : {"table", "entries", "index", "counts"}) {
      TF_RETURN_IF_ERROR(find(name, &own));
    }
    held->table = own[0];
    held->entries = own[1];
    held->index = own[2];
    held->counts = own[3];
    TF_RETURN_IF_ERROR(find("sketches", &sketches));
    if (!sketches.empty()) held->sketch = sketches[0];
    TF_RETURN_IF_ERROR(find("versions", &versions));
    if (!versions.empty()) held->versions = versions[0];
    TF_RETURN_IF_ERROR(find("beside", &held->beside));
    TF_RETURN_IF_ERROR(find("means", &means));
    if (!means.empty()) held->mean = means[0];
    std::vector<VariablePtr> log_decays;
    TF_RETURN_IF_ERROR(LookupLogDecays(ctx, decayed_, 1, &log_decays));
    if (log_decays[0] != nullptr) {
      held->log_decays = log_decays[0].get();
      held->pointers.push_back(std::move(log_decays[0]));
    }
    return CheckDistinct(held->All());
  }

  // Lock: the variables', by a session.
  absl::Status ViewOf(const Held& held, KeyView* view) const {
    int64_t width;
    TF_RETURN_IF_ERROR(RowWidth(*held.table, &width));
    const int64_t rows = held.table->tensor()->dim_size(0);
    TF_RETURN_IF_ERROR(CheckKeyTable(rows, options_));
    const auto check = [](const char* name, Var* variable,
                          tensorflow::DataType dtype,
                          const TensorShape& shape) {
      TF_RETURN_IF_ERROR(CheckVariable(*variable, name, dtype));
      return CheckShape(name, *variable, shape);
    };
    TF_RETURN_IF_ERROR(check("entries", held.entries, tensorflow::DT_INT64,
                             TensorShape({rows, 2})));
    TF_RETURN_IF_ERROR(
        check("index", held.index, tensorflow::DT_INT32,
              TensorShape({KeyTable::IndexSize(rows, options_)})));
    TF_RETURN_IF_ERROR(check("counts", held.counts, tensorflow::DT_INT64,
                             TensorShape({kKeyCounts})));
    view->rows = rows;
    view->entries = Data<int64_t>(held.entries);
    view->index = reinterpret_cast<uint32_t*>(Data<int32_t>(held.index));
    view->counts = Data<int64_t>(held.counts);
    if (held.sketch != nullptr) {
      TF_RETURN_IF_ERROR(
          check("sketches", held.sketch, tensorflow::DT_INT8,
                TensorShape({KeyTable::SketchSize(rows, options_)})));
      view->sketch = reinterpret_cast<uint8_t*>(Data<int8_t>(held.sketch));
    }
    if (held.versions != nullptr) {
      TF_RETURN_IF_ERROR(check("versions", held.versions, tensorflow::DT_INT64,
                               TensorShape({rows})));
      view->versions = Data<int64_t>(held.versions);
    }
    if (held.mean != nullptr) {
      TF_RETURN_IF_ERROR(check("means", held.mean, tensorflow::DT_DOUBLE,
                               TensorShape({KeyMean::StateSize(width)})));
    }
    return absl::OkStatus();
  }

  // Lock: the variables', by a session.
  static absl::Status CheckBesides(const Held& held, int64_t rows) {
    for (Var* variable : held.beside) {
      const Tensor& value = *variable->tensor();
      if ((value.dtype() != tensorflow::DT_FLOAT &&
           value.dtype() != tensorflow::DT_INT32) ||
          value.dims() < 1 || value.dim_size(0) != rows) {
        return absl::InvalidArgumentError(absl::StrCat(
            "beside must be float or int32 variables of ", rows, " rows, not ",
            tensorflow::DataTypeString(value.dtype()), " ",
            value.shape().DebugString()));
      }
    }
    return absl::OkStatus();
  }

  template <typename V>
  static void FillRow(Var* variable, int64_t row, float value) {
    const Tensor& all = *variable->tensor();
    const int64_t width = all.NumElements() / all.dim_size(0);
    V* values = static_cast<V*>(all.data());
    std::fill_n(values + row * width, width, static_cast<V>(value));
  }

  // Gives a row to a key, with first values. Lock: the key's partition.
  void Give(const Held& held, const RowDecay& decay, int64_t row, int64_t key,
            int64_t tick, KeyTable* table) const {
    const Tensor& values = *held.table->tensor();
    const int64_t width = values.NumElements() / values.dim_size(0);
    InitialRows first = first_;
    first.index = static_cast<int64_t>(KeyHash(key) >> 1);
    const RowLock lock(&RowLocks::Global().Of(values.data(), row));
    if (values.dtype() == tensorflow::DT_BFLOAT16) {
      FillRows(first, width, 0, 1,
               static_cast<BFloat16*>(values.data()) + row * width);
    } else {
      FillRows(first, width, 0, 1,
               static_cast<float*>(values.data()) + row * width);
    }
    for (size_t i = 0; i < held.beside.size(); ++i) {
      if (held.beside[i]->tensor()->dtype() == tensorflow::DT_FLOAT) {
        FillRow<float>(held.beside[i], row, values_[i]);
      } else {
        FillRow<int32_t>(held.beside[i], row, values_[i]);
      }
    }
    decay.BeginRow(row);
    table->Own(row, key, tick);
  }

  // Goes on with the mean of the rows that have keys.
  static void Advance(const Held& held, const RowDecay& decay,
                      const KeyTable& table, int64_t rows, int64_t tick) {
    const Tensor& values = *held.table->tensor();
    const KeyMean mean(Data<double>(held.mean),
                       values.NumElements() / values.dim_size(0));
    if (values.dtype() == tensorflow::DT_BFLOAT16) {
      mean.Advance(table, rows, tick, decay,
                   static_cast<BFloat16*>(values.data()));
    } else {
      mean.Advance(table, rows, tick, decay,
                   static_cast<float*>(values.data()));
    }
  }

  KeyOptions options_;
  bool inserts_;
  int64_t mean_rows_;
  bool trains_unknown_;
  bool keeps_time_;
  InitialRows first_;
  std::vector<float> values_;     // The first ones of what lies beside rows.
  std::vector<int64_t> decayed_;  // 0, if the table has log-decays
};

REGISTER_KERNEL_BUILDER(Name("RecsyncKeySizes").Device(tensorflow::DEVICE_CPU),
                        KeySizesOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncUsedRows").Device(tensorflow::DEVICE_CPU),
                        UsedRowsOp);
REGISTER_KERNEL_BUILDER(Name("RecsyncFindRows").Device(tensorflow::DEVICE_CPU),
                        FindRowsOp);

}  // namespace
}  // namespace recsync
