// How many random runs a simulation does, for tests: all of them where they are
// cheap, a share where a sanitizer makes each many times as slow and finds what
// it looks for in the first ones.

#ifndef TF_RECSYNC_CC_ENGINE_SIMULATION_LENGTH_TESTING_H_
#define TF_RECSYNC_CC_ENGINE_SIMULATION_LENGTH_TESTING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>

namespace recsync {

// The percentage of `full` that the environment's RECSYNC_SIMULATION_PERCENT
// says (above 0, at most 100, by default 100), but at least 1. Anything else
// ends the program: a test whose length is unknown proves nothing.
inline int64_t SimulationLength(int64_t full) {
  const char* const text = std::getenv("RECSYNC_SIMULATION_PERCENT");
  if (text == nullptr || *text == '\0') return full;
  char* end = nullptr;
  const double percent = std::strtod(text, &end);
  if (*end != '\0' || !(percent > 0.0 && percent <= 100.0)) {
    std::cerr << "RECSYNC_SIMULATION_PERCENT is '" << text
              << "'; it must be above 0 and at most 100\n";
    std::exit(1);
  }
  const double runs = static_cast<double>(full) * percent / 100.0;
  return std::max<int64_t>(1, std::llround(runs));
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_SIMULATION_LENGTH_TESTING_H_
