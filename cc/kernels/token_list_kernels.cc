// Kernels of the token list.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/engine/limits.h"
#include "cc/engine/mutex.h"
#include "cc/engine/token_list.h"
#include "cc/kernels/cancellable.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/resource_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace recsync {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

using TokenListPtr = std::shared_ptr<TokenList>;

const char* GateName(TokenList::Gate gate) {
  switch (gate) {
    case TokenList::Gate::kNone:
      return "none";
    case TokenList::Gate::kStep:
      return "step";
    case TokenList::Gate::kClock:
      return "clock";
  }
  return "";
}

std::string Describe(const TokenList::Options& options) {
  return absl::StrCat(
      "repeats=", options.repeats, ", gate=", GateName(options.gate),
      ", clock_bound=", options.clock_bound, ", servers=", options.servers,
      ", workers=", options.workers);
}

// What the device's resource manager holds. Ops that wait share the list but
// not this, so that destroying the resource ends them.
class TokenListResource : public tensorflow::ResourceBase {
 public:
  explicit TokenListResource(const TokenList::Options& options)
      : list_(std::make_shared<TokenList>(options)) {}
  ~TokenListResource() override { list_->Close(); }

  const TokenListPtr& list() const { return list_; }

  std::string DebugString() const override {
    return absl::StrCat("token list with ", Describe(list_->options()));
  }

 private:
  const TokenListPtr list_;
};

using ResourcePtr = tensorflow::core::RefCountPtr<TokenListResource>;

absl::Status ReadWorker(OpKernelContext* ctx, const TokenList& list,
                        int* worker) {
  int64_t value;
  TF_RETURN_IF_ERROR(
      ReadInteger(ctx, "worker", 0, &value, list.options().workers - 1));
  *worker = static_cast<int>(value);
  return absl::OkStatus();
}

class TokenListOp : public ResourceOp<TokenListResource> {
 public:
  explicit TokenListOp(OpKernelConstruction* ctx) : ResourceOp(ctx) {
    std::string gate;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("repeats", &options_.repeats));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gate", &gate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clock_bound", &options_.clock_bound));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("servers", &options_.servers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("workers", &options_.workers));
    OP_REQUIRES(ctx, !shared_name_.empty(),
                absl::InvalidArgumentError("shared_name must not be empty"));
    for (const auto& [name, value] : {std::pair("servers", options_.servers),
                                      std::pair("workers", options_.workers)}) {
      OP_REQUIRES(
          ctx, value >= 1 && value <= kMostEntries,
          absl::InvalidArgumentError(absl::StrCat(
              name, " must be from 1 to ", kMostEntries, ", not ", value)));
    }
    options_.gate = gate == "step"    ? TokenList::Gate::kStep
                    : gate == "clock" ? TokenList::Gate::kClock
                                      : TokenList::Gate::kNone;
    OP_REQUIRES(
        ctx,
        options_.gate == TokenList::Gate::kClock || options_.clock_bound == 0,
        absl::InvalidArgumentError(
            absl::StrCat("clock_bound must be 0 with gate=", gate, ", not ",
                         options_.clock_bound)));
  }

 protected:
  ResourcePtr Make() const override {
    return ResourcePtr(new TokenListResource(options_));
  }

  absl::Status CheckSame(const TokenListResource& resource) const override {
    const std::string found = Describe(resource.list()->options());
    const std::string wanted = Describe(options_);
    if (found == wanted) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("shared_name ", shared_name_,
                                                   " is a token list with ",
                                                   found, ", not ", wanted));
  }

 private:
  TokenList::Options options_;
};

class TakeTokenOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    TokenListPtr list;
    int worker;
    {
      // Let go before the wait: the resource must be destructible.
      ResourcePtr resource;
      OP_REQUIRES_OK_ASYNC(ctx, LookupInput(ctx, "list", &resource), done);
      list = resource->list();
    }
    OP_REQUIRES_OK_ASYNC(ctx, ReadWorker(ctx, *list, &worker), done);
    // The op is ended by whoever the list decides for: the one that Cancel
    // returns true to, or the callback of Take. The other must not touch `ctx`.
    const auto cancel = [ctx, done, list](TokenList::Ticket ticket) {
      if (!list->Cancel(ticket)) return;
      ctx->SetStatus(absl::CancelledError("taking a token was cancelled"));
      done();
    };
    auto wait = std::make_shared<WaitState>();
    Cancellable cancellable;
    const bool registered = cancellable.Register(ctx, [wait, cancel] {
      const TokenList::Ticket ticket = wait->Cancelled();
      if (ticket != 0) cancel(ticket);
    });
    OP_REQUIRES_ASYNC(ctx, registered,
                      absl::CancelledError("taking a token was cancelled"),
                      done);
    const TokenList::Ticket ticket = list->Take(
        worker, [ctx, done, cancellable, worker](TokenList::Answer answer,
                                                 TokenList::Token taken) {
          cancellable.Deregister();
          ctx->SetStatus(Output(ctx, worker, answer, taken));
          done();
        });
    if (wait->Started(ticket)) cancel(ticket);
  }

 private:
  // Brings the ticket and the cancellation together, whichever comes first.
  class WaitState {
   public:
    // Returns whether the op has been cancelled already.
    bool Started(TokenList::Ticket ticket) ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      ticket_ = ticket;
      return cancelled_;
    }
    // Returns the ticket, or 0 if there is none yet.
    TokenList::Ticket Cancelled() ABSL_LOCKS_EXCLUDED(mu_) {
      MutexLock lock(&mu_);
      cancelled_ = true;
      return ticket_;
    }

   private:
    Mutex mu_;
    TokenList::Ticket ticket_ ABSL_GUARDED_BY(mu_) = 0;
    bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  };

  static absl::Status Output(OpKernelContext* ctx, int worker,
                             TokenList::Answer answer, TokenList::Token taken) {
    switch (answer) {
      case TokenList::Answer::kToken:
        TF_RETURN_IF_ERROR(WriteScalar<int64_t>(ctx, 0, taken.index));
        TF_RETURN_IF_ERROR(WriteScalar<int64_t>(ctx, 1, taken.value));
        return WriteScalar<int64_t>(ctx, 2, taken.ticket);
      case TokenList::Answer::kGone:
        return absl::CancelledError(
            absl::StrCat("worker ", worker,
                         " was lost or left while it waited for a token"));
      case TokenList::Answer::kClosed:
        return absl::CancelledError("the token list was destroyed");
    }
    return absl::InternalError("unknown answer of a token list");
  }
};

class LoseWorkerOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int worker;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    OP_REQUIRES_OK(ctx, ReadWorker(ctx, *resource->list(), &worker));
    const TokenList::Loss loss = resource->list()->Lose(worker);
    OP_REQUIRES_OK(ctx, WriteScalar<int64_t>(ctx, 0, loss.lost));
    OP_REQUIRES_OK(ctx, WriteVector(ctx, "withheld", loss.withheld));
    OP_REQUIRES_OK(ctx, WriteVector(ctx, "tickets", loss.tickets));
  }
};

class ReissueTokensOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    const Tensor* indices;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "indices", &indices));
    const auto values = indices->vec<int64_t>();
    const int64_t reissued = resource->list()->Reissue(
        {values.data(), values.data() + values.size()});
    OP_REQUIRES_OK(ctx, WriteScalar<int64_t>(ctx, 0, reissued));
  }
};

class LeaveTokensOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int worker;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    OP_REQUIRES_OK(ctx, ReadWorker(ctx, *resource->list(), &worker));
    resource->list()->Leave(worker);
  }
};

class ReportStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int64_t server;
    int64_t step;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    TokenList& list = *resource->list();
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "server", 0, &server,
                                    list.options().servers - 1));
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "step", 0, &step, list.max_step()));
    list.ReportStep(static_cast<int>(server), step);
  }
};

class SeekTokensOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    int64_t step;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    TokenList& list = *resource->list();
    OP_REQUIRES_OK(ctx, ReadInteger(ctx, "step", 0, &step, list.max_step()));
    OP_REQUIRES(ctx, list.Seek(step),
                absl::FailedPreconditionError(absl::StrCat(
                    "a token list can't go to step ", step,
                    " while workers wait for a token; lose them first")));
  }
};

class TokenListStateOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ResourcePtr resource;
    OP_REQUIRES_OK(ctx, LookupInput(ctx, "list", &resource));
    const TokenList::State state = resource->list()->GetState();
    int64_t held = 0;
    for (const auto& worker : state.workers) held += worker.held.size();
    const int64_t servers = state.steps.size();
    const int64_t workers = state.workers.size();
    const int64_t reissues = state.reissues.size();
    const int64_t waiting = state.waiting.size();
    const int64_t withheld = state.withheld.size();
    const TensorShape shapes[] = {{},        {servers},  {workers}, {workers},
                                  {held, 2}, {reissues}, {waiting}, {waiting},
                                  {4},       {withheld}};
    Tensor* outputs[10];
    for (int i = 0; i < 10; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shapes[i], &outputs[i]));
    }
    outputs[0]->scalar<int64_t>()() = state.position;
    std::copy(state.steps.begin(), state.steps.end(),
              outputs[1]->flat<int64_t>().data());
    auto pairs = outputs[4]->matrix<int64_t>();
    int64_t row = 0;
    for (int64_t w = 0; w < workers; ++w) {
      outputs[2]->flat<int64_t>()(w) = state.workers[w].clock;
      outputs[3]->flat<bool>()(w) = state.workers[w].live;
      for (const auto& [index, ticket] : state.workers[w].held) {
        pairs(row, 0) = w;
        pairs(row++, 1) = index;
      }
    }
    std::copy(state.reissues.begin(), state.reissues.end(),
              outputs[5]->flat<int64_t>().data());
    for (int64_t i = 0; i < waiting; ++i) {
      outputs[6]->flat<int64_t>()(i) = state.waiting[i].worker;
      outputs[7]->flat<double>()(i) = state.waiting[i].seconds;
    }
    auto counts = outputs[8]->flat<int64_t>();
    counts(0) = state.counts.taken;
    counts(1) = state.counts.reissued;
    counts(2) = state.counts.lost;
    counts(3) = state.counts.skipped;
    std::copy(state.withheld.begin(), state.withheld.end(),
              outputs[9]->flat<int64_t>().data());
  }
};

#define REGISTER_TOKENS(name) \
  REGISTER_KERNEL_BUILDER(    \
      Name("Recsync" #name).Device(tensorflow::DEVICE_CPU), name##Op)
REGISTER_TOKENS(TokenList);
REGISTER_TOKENS(TakeToken);
REGISTER_TOKENS(LoseWorker);
REGISTER_TOKENS(ReissueTokens);
REGISTER_TOKENS(LeaveTokens);
REGISTER_TOKENS(ReportStep);
REGISTER_TOKENS(SeekTokens);
REGISTER_TOKENS(TokenListState);
#undef REGISTER_TOKENS

}  // namespace
}  // namespace recsync
