// What an update does with a gradient that holds an infinity or no number.

#ifndef TF_RECSYNC_CC_ENGINE_NONFINITE_H_
#define TF_RECSYNC_CC_ENGINE_NONFINITE_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace recsync {

enum class Nonfinite {
  kApply,  // applies it like any other
  kSkip,   // leaves the variable or row as it is, and counts that
  kError,  // refuses the whole push
};

// Parses "apply", "skip" or "error"; false for anything else.
inline bool ParseNonfinite(const std::string& name, Nonfinite* nonfinite) {
  if (name == "apply") {
    *nonfinite = Nonfinite::kApply;
  } else if (name == "skip") {
    *nonfinite = Nonfinite::kSkip;
  } else if (name == "error") {
    *nonfinite = Nonfinite::kError;
  } else {
    return false;
  }
  return true;
}

// Whether all of `n` values are finite. No early exit, so that it vectorizes.
template <typename V>
inline bool AllFinite(const V* values, int64_t n) {
  int bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(static_cast<float>(values[i]));
    bad |= !(size <= std::numeric_limits<float>::max());
  }
  return bad == 0;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_NONFINITE_H_
