// What the tests of the token list share.

#ifndef TF_RECSYNC_CC_ENGINE_TOKEN_LIST_TESTING_H_
#define TF_RECSYNC_CC_ENGINE_TOKEN_LIST_TESTING_H_

#include <cstdint>
#include <memory>

#include "cc/engine/token_list.h"

namespace recsync {

// What became of a Take: nothing yet, a token's index, or one of the below.
constexpr int64_t kWaits = -1;
constexpr int64_t kGone = -2;
constexpr int64_t kClosed = -3;
constexpr int64_t kCancelled = -4;

// A Take whose callback counts its calls and keeps the answer.
struct Taking {
  TokenList::Ticket ticket = 0;
  int calls = 0;
  int64_t outcome = kWaits;
  int64_t value = -1;
};

inline std::shared_ptr<Taking> Take(TokenList* list, int worker) {
  auto taking = std::make_shared<Taking>();
  taking->ticket = list->Take(
      worker, [taking](TokenList::Answer answer, TokenList::Token token) {
        ++taking->calls;
        taking->value = token.value;
        taking->outcome = answer == TokenList::Answer::kToken  ? token.index
                          : answer == TokenList::Answer::kGone ? kGone
                                                               : kClosed;
      });
  return taking;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_TOKEN_LIST_TESTING_H_
