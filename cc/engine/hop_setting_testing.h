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

#include "cc/engine/hop_options.h"

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

  // How far a receiver may be ahead of a sender that it waits for.
  int64_t Ahead() const { return std::max<int64_t>(staleness_bound, 0) + 1; }
  // How far a sender may be ahead of its receiver; 0: not bounded.
  int64_t Allowance() const { return notify_ack ? 2 : max_iteration_gap; }
  bool Sends(int64_t i, int64_t j) const {
    return std::find(graph[i].begin(), graph[i].end(), j) != graph[i].end();
  }

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

// Each worker sends to those that are 1, 2, 4 and so on after it.
inline Graph Exponential(int64_t n) {
  Graph graph(n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t far = 1; far < n; far *= 2) graph[i].push_back((i + far) % n);
  }
  return graph;
}

// For each pair of workers a number.
using Matrix = std::vector<std::vector<int64_t>>;

// The lengths of the shortest paths between all pairs.
inline Matrix ShortestPaths(Matrix lengths) {
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

// 0 from a worker to itself, infinite to all others.
inline Matrix NoPaths(int64_t n) {
  Matrix lengths(n, std::vector<int64_t>(n, kInfinity));
  for (int64_t i = 0; i < n; ++i) lengths[i][i] = 0;
  return lengths;
}

// 1 from a worker to each out-neighbor.
inline Matrix EdgesOf(const Setting& setting) {
  Matrix edges = NoPaths(setting.graph.size());
  for (size_t i = 0; i < setting.graph.size(); ++i) {
    for (const int64_t j : setting.graph[i]) edges[i][j] = 1;
  }
  return edges;
}

// How far each worker may be ahead of each neighbor.
inline Matrix StepsOf(const Setting& setting) {
  Matrix steps = NoPaths(setting.graph.size());
  for (size_t i = 0; i < setting.graph.size(); ++i) {
    for (const int64_t j : setting.graph[i]) {
      // The receiver waits for the sender, unless it may do without it.
      if (setting.backup_workers[j] == 0) {
        steps[j][i] = std::min(steps[j][i], setting.Ahead());
      }
      if (setting.Allowance() > 0) {
        steps[i][j] = std::min(steps[i][j], setting.Allowance());
      }
    }
  }
  return steps;
}

// And of each worker, by paths.
inline Matrix BoundsOf(const Setting& setting) {
  return ShortestPaths(StepsOf(setting));
}

// The options of a worker.
inline HopOptions OptionsOf(const Setting& setting, int64_t i) {
  const Matrix bounds = BoundsOf(setting);
  HopOptions options;
  const int64_t n = setting.graph.size();
  for (int64_t j = 0; j < n; ++j) {
    if (setting.Sends(j, i)) options.in_neighbors.push_back(j);
  }
  const int64_t in = options.in_neighbors.size();
  options.weights.assign(in, 1.0 / (1.0 + in));
  options.out_neighbors = setting.graph[i];
  options.max_iteration_gap = setting.max_iteration_gap;
  options.backup_workers = setting.backup_workers[i];
  options.staleness_bound = setting.staleness_bound;
  options.max_jump = setting.max_jump;
  options.jump_trigger = setting.jump_trigger;
  options.notify_ack = setting.notify_ack;
  // Section 4.1 without token queues, 4.2 with them.
  int64_t gap = setting.max_iteration_gap;
  for (const int64_t j : options.in_neighbors) {
    if (setting.max_iteration_gap == 0) gap = std::max(gap, bounds[j][i]);
    options.gap_bounds.push_back(bounds[j][i] < kInfinity ? bounds[j][i] : -1);
  }
  options.slots = gap + 1;
  options.capacity = (gap + 1) * (in + 1);
  return options;
}

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HOP_SETTING_TESTING_H_
