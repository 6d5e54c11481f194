// Routes the ids of a batch to the rows of tables, for benchmarks/routing.py.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/engine/id_router.h"

// Routes a batch so often that the ids of `features` features, each of a table
// of its own of so many rows, divided into `shards`, are looked up; `ids` are
// those of feature 0, then of feature 1, and so on. Writes how many rows are
// listed of each shard, and returns the seconds of a batch, or -1 if an id is
// out of range.
extern "C" double Route(const int64_t* ids, int64_t features, int64_t batch,
                        int64_t rows, int64_t shards, int64_t times,
                        int64_t* listed) {
  std::vector<recsync::RoutedFeature> routed;
  std::vector<recsync::RoutedInput<int64_t>> inputs;
  for (int64_t f = 0; f < features; ++f) {
    const std::string name = std::to_string(f);
    std::vector<recsync::ShardPlace> places;
    for (int64_t s = 0; s < shards; ++s) {
      places.push_back({static_cast<int>(s), f * rows});
    }
    routed.push_back({name, name, rows, 1, false, recsync::Combiner::kSum,
                      recsync::OutOfRange::kError, places});
    inputs.push_back({ids + f * batch, batch, nullptr, nullptr});
  }
  const recsync::IdRouter router(routed, std::vector<bool>(shards, false));
  std::vector<recsync::RoutedTable> tables;
  const auto began = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < times; ++i) {
    if (!router.Route(inputs, batch, &tables).ok()) return -1.0;
  }
  const std::chrono::duration<double> taken =
      std::chrono::steady_clock::now() - began;
  for (int64_t s = 0; s < shards; ++s) {
    listed[s] = static_cast<int64_t>(tables[s].rows.size());
  }
  return taken.count() / static_cast<double>(times);
}
