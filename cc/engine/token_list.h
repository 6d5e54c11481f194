// Hands out tokens to workers, one for every batch that they have got.
//
// Token i (i = 0, 1, ...) has value floor(i / repeats), the global step that
// its gradient is meant for. Tokens are handed out in ascending order, each
// once. When a worker gets one depends on the gate:
//   kNone   at once;
//   kStep   when the next token's value is not above the smallest step that
//           all servers have reached. Tokens whose value is below that step
//           are useless, and skipped;
//   kClock  when the worker's clock, the number of tokens that it has taken, is
//           at most clock_bound ahead of the slowest live worker's.
//
//   TokenList list({4, TokenList::Gate::kStep, 0, 1, 4});
//   list.Take(0, [](TokenList::Answer answer, TokenList::Token token) { ... });
//   list.ReportStep(0, 1);  // token 4 and later ones may be taken now
//
// All workers are live at the start, with clock 0. A worker that was lost or
// has left is live again from its next Take, with the clock of the slowest live
// worker, so that nobody waits for its past; alone, it goes on with its own.
//
// A worker holds a token from the moment that it is handed out until
//   kStep         the smallest step is above the token's value. That the worker
//                 takes another token does not end it: its push has been sent
//                 then, perhaps, but may not have got to every server, and each
//                 server waits for the token. This holds for any number of
//                 steps per call, however far a worker reads ahead. A worker
//                 can't hold more than `repeats` tokens.
//   kNone, kClock the worker calls Take again. No server waits for one token
//                 there, so this decides only what counts as lost.
// What a worker holds when it is lost is withheld in kStep, until Reissue puts
// it to the front: whoever asks has made sure that no server has it, as nobody
// else's push would count there. Otherwise it is gone.
//
// Thread safe, and never blocks for long: a call takes logarithmic time in the
// workers and in those that wait, for each that it answers; GetState, Seek and
// the report that completes a step look at all of them. Callbacks are called
// without a lock, by the thread whose call opened the gate; they may call the
// list, but must not block. The destructor closes the list.

#ifndef TF_RECSYNC_CC_ENGINE_TOKEN_LIST_H_
#define TF_RECSYNC_CC_ENGINE_TOKEN_LIST_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/engine/mutex.h"

namespace recsync {

class TokenList {
 public:
  enum class Gate { kNone, kStep, kClock };

  struct Options {
    int64_t repeats;  // at least 1
    Gate gate;
    int64_t clock_bound;  // of kClock, at least 0
    int servers;          // that report their steps, at least 1
    int workers;          // at least 1
  };

  struct Token {
    int64_t index;
    int64_t value;
    // Of the Take that got it: one that is handed out again has another.
    int64_t ticket;
  };

  // What became of a Take. Without a token, its Token is all -1.
  enum class Answer {
    kToken,
    kGone,    // The worker was lost or left while it waited.
    kClosed,  // The list was closed.
  };

  using Callback = std::function<void(Answer, Token)>;
  using Ticket = int64_t;

  // Tokens that went with a worker, and those that may be handed out again.
  struct Loss {
    int64_t lost = 0;
    std::vector<int64_t> withheld;  // their indices, rising
    std::vector<int64_t> tickets;   // of either, by their indices
  };

  struct Worker {
    bool live = true;
    int64_t clock = 0;
    std::map<int64_t, Ticket> held;  // by index
    // What it held when it was lost, until it takes another; not with kStep.
    std::map<int64_t, Ticket> lost;
  };

  struct Waiting {
    int worker;
    double seconds;  // since its Take
  };

  struct Counts {
    int64_t taken = 0;     // handed out, the reissued ones each time
    int64_t reissued = 0;  // put back to the front
    int64_t lost = 0;      // gone with a lost worker
    int64_t skipped = 0;   // never handed out (again), as useless
  };

  struct State {
    int64_t position;               // the first index never handed out
    int64_t smallest_step;          // of `steps`
    std::vector<int64_t> steps;     // by server
    std::vector<Worker> workers;    // by worker
    std::vector<int64_t> reissues;  // indices to be handed out again
    std::vector<int64_t> withheld;  // indices that may be
    std::vector<Waiting> waiting;   // in the order they came
    Counts counts;
  };

  using Time = std::chrono::steady_clock::time_point;

  // `now` tells for how long calls have waited; a simulation has its own time.
  explicit TokenList(
      const Options& options,
      std::function<Time()> now = &std::chrono::steady_clock::now);
  ~TokenList();
  TokenList(const TokenList&) = delete;
  TokenList& operator=(const TokenList&) = delete;

  const Options& options() const { return options_; }

  // The largest step that servers may report and Seek may go to: no index
  // overflows.
  int64_t max_step() const;

  // Calls `done` once, with a token when the gate opens, perhaps before Take
  // returns. Of those whose gate is open, who came first is served first.
  // `worker` is in [0, options().workers).
  Ticket Take(int worker, Callback done) ABSL_LOCKS_EXCLUDED(mu_);

  // Takes a waiting Take back: true if its callback was not called and never
  // will be. False when it has been called or is about to be.
  bool Cancel(Ticket ticket) ABSL_LOCKS_EXCLUDED(mu_);

  // The worker is gone: its waiting Takes are answered with kGone, nobody waits
  // for its clock, and what it holds is withheld or lost. Returns what that
  // is. Can be repeated, as its answer may not arrive: tokens are in it until
  // they are reissued or useless, lost ones until the worker takes another.
  Loss Lose(int worker) ABSL_LOCKS_EXCLUDED(mu_);

  // Those of the indices that are withheld are the next to be handed out, in
  // their order. Returns how many that are.
  int64_t Reissue(const std::vector<int64_t>& indices) ABSL_LOCKS_EXCLUDED(mu_);

  // The worker has come to the end of its data, and all its pushes have
  // arrived: as Lose, but it holds nothing.
  void Leave(int worker) ABSL_LOCKS_EXCLUDED(mu_);

  // A server, in [0, options().servers), has finished `step` applications, in
  // [0, max_step()]. Steps only rise: an earlier report that comes late is
  // ignored.
  void ReportStep(int server, int64_t step) ABSL_LOCKS_EXCLUDED(mu_);

  // Goes on as a new list whose servers are all at `step`, in [0, max_step()],
  // and whose next token is the first one of that value; only the counts stay.
  // False, and nothing happens, while somebody waits.
  bool Seek(int64_t step) ABSL_LOCKS_EXCLUDED(mu_);

  State GetState() ABSL_LOCKS_EXCLUDED(mu_);

  // Answers all that wait, and every later Take, with kClosed.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Call {
    int worker;
    Time since;
    Callback done;
  };

  struct Withheld {
    int worker;  // that it went with
    Ticket ticket;
  };

  // A worker that waits, and the first of its calls: who came first is first.
  using Waiter = std::pair<Ticket, int>;

  // A callback to be called when the lock is gone.
  struct Reply {
    Callback done;
    Answer answer;
    Token token;
  };
  using Replies = std::vector<Reply>;

  static void Send(const Replies& replies);

  int64_t SlowestClock() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t NextIndex() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Token HandOut(int worker, Ticket ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Answers whose gates are open, in the order they came.
  void Serve(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ServeClocks(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Answers one with a token.
  void Answered(Ticket ticket, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A worker's calls, or its clock, change between these two.
  void TakeOut(int worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutBack(int worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The part that Lose and Leave share; what the worker holds stays.
  void Remove(int worker, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Drops the tokens below the smallest step.
  void SkipUseless() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const std::function<Time()> now_;
  Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Ticket next_ticket_ ABSL_GUARDED_BY(mu_) = 1;
  int64_t position_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<int64_t> reissues_ ABSL_GUARDED_BY(mu_);  // all below position_
  // By index: of those not in it.
  std::map<int64_t, Withheld> withheld_ ABSL_GUARDED_BY(mu_);
  std::vector<int64_t> steps_ ABSL_GUARDED_BY(mu_);  // by server
  int64_t smallest_step_ ABSL_GUARDED_BY(mu_) = 0;   // of steps_
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mu_);
  // Tickets rise, so this is the order in which they came.
  std::map<Ticket, Call> calls_ ABSL_GUARDED_BY(mu_);
  // Of calls_, by worker.
  std::vector<std::set<Ticket>> tickets_ ABSL_GUARDED_BY(mu_);
  // How many live workers have a clock.
  std::map<int64_t, int> live_clocks_ ABSL_GUARDED_BY(mu_);
  // Those that wait, by their clocks; with kClock.
  std::map<int64_t, std::set<Waiter>> waiters_ ABSL_GUARDED_BY(mu_);
  Counts counts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_TOKEN_LIST_H_
