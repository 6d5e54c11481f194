// Settings of decentralized training (Hop), and graphs, for tests.

#ifndef TF_RECSYNC_CC_ENGINE_HOP_SETTING_TESTING_H_
#define TF_RECSYNC_CC_ENGINE_HOP_SETTING_TESTING_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace recsync {

constexpr int64_t kInfinity = std::numeric_limits<int64_t>::max() / 4;
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

using Graph = std::vector<std::vector<int64_t>>;  // out-neighbors by worker

struct Setting {
  std::string name;
  Graph graph;
  int64_t max_iteration_gap = 0;
  std::vector<int64_t> backup_workers;  // by worker
  int64_t staleness_bound = -1;
  int64_t max_jump = 1;
  int64_t jump_trigger = 0;
  bool notify_ack = false;
  bool serial = false;
  int64_t slow = -1;          // a worker that computes for long
  int64_t losses = 0;         // how many workers are lost at most; some return
  int64_t leaves = 0;         // how many leave at most
  int64_t failing_calls = 0;  // of 100 that carry parcels, about

  Setting(std::string name, Graph graph)
      : name(std::move(name)),
        graph(std::move(graph)),
        backup_workers(this->graph.size(), 0) {}
  Setting Gap(int64_t gap) && {
    max_iteration_gap = gap;
    return std::move(*this);
  }
  Setting Backups(int64_t of_each) && {
    backup_workers.assign(graph.size(), of_each);
    return std::move(*this);
  }
  Setting Backups(std::vector<int64_t> by_worker) && {
    backup_workers = std::move(by_worker);
    return std::move(*this);
  }
  Setting Staleness(int64_t bound) && {
    staleness_bound = bound;
    return std::move(*this);
  }
  Setting Skip(int64_t most, int64_t trigger = 0) && {
    max_jump = most;
    jump_trigger = trigger;
    return std::move(*this);
  }
  Setting NotifyAck() && {
    notify_ack = true;
    return std::move(*this);
  }
  Setting Serial() && {
    serial = true;
    return std::move(*this);
  }
  Setting Slow(int64_t worker) && {
    slow = worker;
    return std::move(*this);
  }
  Setting FailingCalls(int64_t percent) && {
    failing_calls = percent;
    return std::move(*this);
  }
  Setting Departures(int64_t lost, int64_t left) && {
    losses = lost;
    leaves = left;
    return std::move(*this);
  }
};

inline std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.name;
}

inline Graph Ring(int64_t n) {
  Graph graph(n);
  for (int64_t i = 0; i < n; ++i) {
    graph[i] = {(i + 1) % n, (i + n - 1) % n};
    std::sort(graph[i].begin(), graph[i].end());
  }
  return graph;
}

inline Graph RingBased(int64_t n) {
  Graph graph = Ring(n);
  for (int64_t i = 0; i < n; ++i) graph[i].push_back((i + n / 2) % n);
  return graph;
}

// Each worker sends to the next one and to the one after that, only.
inline Graph OneWay(int64_t n) {
  Graph graph(n);
  for (int64_t i = 0; i < n; ++i) graph[i] = {(i + 1) % n, (i + 2) % n};
  return graph;
}

// The lengths of the shortest paths between all pairs.
inline std::vector<std::vector<int64_t>> ShortestPaths(
    std::vector<std::vector<int64_t>> lengths) {
  const size_t n = lengths.size();
  for (size_t k = 0; k < n; ++k) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) {
        lengths[i][j] =
            std::min({lengths[i][j], lengths[i][k] + lengths[k][j], kInfinity});
      }
    }
  }
  return lengths;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_SETTING_TESTING_H_
