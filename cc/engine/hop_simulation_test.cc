// Random interleavings of the whole protocol against the paper's bounds (Hop,
// table 1), for each setting.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "cc/engine/hop_setting_testing.h"
#include "cc/engine/hop_simulation_testing.h"
#include "cc/engine/simulation_length_testing.h"

namespace recsync {
namespace {

class HopSimulationTest : public testing::TestWithParam<Setting> {};

TEST_P(HopSimulationTest, EveryInterleavingKeepsTheBoundsAndComesToItsEnd) {
  const Setting& setting = GetParam();
  int64_t jumps = 0;
  int64_t declined = 0;
  int64_t largest_gap = 0;
  int64_t lost = 0;
  int64_t returned = 0;
  int64_t left = 0;
  int64_t repeated = 0;
  const int64_t interleavings = SimulationLength(10000);
  for (uint32_t seed = 0; seed < interleavings && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << setting << ", seed " << seed);
    HopSimulation simulation(setting, seed);
    simulation.Run(/*iterations=*/9);
    jumps += simulation.jumps();
    declined += simulation.declined();
    largest_gap = std::max(largest_gap, simulation.largest_gap());
    lost += simulation.lost();
    returned += simulation.returned();
    left += simulation.left();
    repeated += simulation.repeated();
  }
  // The simulation is worth something only if it gets where it should. A few
  // interleavings need not.
  if (interleavings < 300) return;
  EXPECT_EQ(jumps > 0, setting.max_jump > 1);
  EXPECT_EQ(lost > 0, setting.losses > 0);
  EXPECT_EQ(returned > 0, setting.losses > 0);
  EXPECT_EQ(left > 0, setting.leaves > 0);
  EXPECT_EQ(repeated > 0, setting.failing_calls > 0);
  if (*std::max_element(setting.backup_workers.begin(),
                        setting.backup_workers.end()) > 0) {
    EXPECT_GT(declined, 0);
    EXPECT_GT(largest_gap, 1);
  }
}

constexpr auto kName = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(
    Settings, HopSimulationTest,
    testing::Values(
        Setting("standard_without_tokens", Ring(5)),
        Setting("standard", RingBased(4)).Gap(3),
        Setting("standard_serial", Ring(4)).Gap(2).Serial(),
        Setting("standard_one_way", OneWay(5)).Gap(2),
        Setting("backup", RingBased(6)).Gap(3).Backups(1).Slow(2),
        Setting("backup_serial", Ring(4)).Gap(4).Backups(1).Serial(),
        Setting("backup_two", OneWay(5)).Gap(2).Backups(2),
        Setting("backup_mixed", RingBased(6))
            .Gap(3)
            .Backups({0, 2, 1, 0, 1, 2}),
        Setting("backup_of_one_worker", Ring(5))
            .Gap(4)
            .Backups({0, 0, 1, 0, 0}),
        Setting("backup_mixed_one_way", OneWay(5))
            .Gap(3)
            .Backups({2, 0, 1, 0, 1}),
        Setting("staleness", Ring(5)).Gap(4).Staleness(2).Slow(1),
        Setting("staleness_without_tokens", Ring(4)).Staleness(3),
        Setting("hybrid", RingBased(6)).Gap(4).Backups(1).Staleness(2).Slow(0),
        Setting("hybrid_mixed", Ring(5))
            .Gap(5)
            .Backups({1, 0, 1, 0, 0})
            .Staleness(2),
        Setting("skip_backup", RingBased(6)).Gap(3).Backups(1).Skip(10).Slow(3),
        Setting("skip_two", Ring(4)).Gap(4).Backups(1).Skip(2).Slow(0),
        Setting("skip_trigger", Ring(4)).Gap(5).Backups(1).Skip(10, 2).Slow(0),
        Setting("skip_mixed", Ring(5))
            .Gap(4)
            .Backups({1, 1, 0, 1, 1})
            .Skip(10)
            .Slow(0),
        Setting("skip_staleness", Ring(5)).Gap(5).Staleness(3).Skip(10).Slow(4),
        Setting("skip_hybrid", OneWay(5))
            .Gap(4)
            .Backups(1)
            .Staleness(1)
            .Skip(3)
            .Slow(2),
        // Out-neighbors are further ahead than in-neighbors can get.
        Setting("skip_one_way", Exponential(7))
            .Gap(2)
            .Backups(2)
            .Skip(10)
            .Slow(0),
        Setting("skip_one_way_hybrid", Exponential(7))
            .Gap(1)
            .Backups(2)
            .Staleness(1)
            .Skip(10)
            .Slow(0),
        Setting("notify_ack", Ring(5)).NotifyAck(),
        Setting("notify_ack_serial", Ring(4)).NotifyAck().Serial(),
        Setting("notify_ack_stale", Ring(4)).NotifyAck().Staleness(1)),
    kName);

INSTANTIATE_TEST_SUITE_P(
    Departures, HopSimulationTest,
    testing::Values(
        Setting("leave_without_tokens", Ring(5)).Departures(0, 3),
        Setting("leave_one_way_without_tokens", OneWay(5)).Departures(0, 3),
        Setting("leave_one_way", OneWay(5)).Gap(4).Departures(0, 3),
        Setting("leave_serial", Ring(4)).Gap(2).Serial().Departures(0, 2),
        Setting("leave_staleness", Ring(5))
            .Gap(3)
            .Staleness(2)
            .Departures(0, 3),
        Setting("leave_notify_ack", Ring(5)).NotifyAck().Departures(0, 3),
        Setting("lose_backup", RingBased(6)).Gap(3).Backups(1).Departures(3, 1),
        Setting("lose_backup_serial", Ring(4))
            .Gap(2)
            .Backups(1)
            .Serial()
            .Departures(3, 0),
        Setting("lose_backup_gap_one", Ring(4))
            .Gap(1)
            .Backups(1)
            .Departures(3, 0),
        // Only the even workers may be lost, who have no backups themselves.
        Setting("lose_backup_mixed", RingBased(6))
            .Gap(3)
            .Backups({0, 2, 0, 2, 0, 2})
            .Departures(3, 1),
        Setting("lose_backup_one_way", OneWay(5))
            .Gap(3)
            .Backups(1)
            .Departures(3, 1),
        Setting("lose_hybrid", RingBased(6))
            .Gap(4)
            .Backups(1)
            .Staleness(2)
            .Departures(3, 1),
        Setting("lose_skip", RingBased(6))
            .Gap(3)
            .Backups(1)
            .Skip(10)
            .Slow(3)
            .Departures(3, 1),
        Setting("lose_skip_hybrid", Ring(5))
            .Gap(4)
            .Backups(1)
            .Staleness(1)
            .Skip(3)
            .Slow(1)
            .Departures(3, 1)),
    kName);

INSTANTIATE_TEST_SUITE_P(
    FailingCalls, HopSimulationTest,
    testing::Values(
        Setting("fail_without_tokens", Ring(5)).FailingCalls(20),
        Setting("fail_one_way", OneWay(5)).Gap(2).FailingCalls(20),
        Setting("fail_backup", RingBased(6))
            .Gap(3)
            .Backups(1)
            .Slow(2)
            .FailingCalls(20),
        Setting("fail_skip_hybrid", RingBased(6))
            .Gap(4)
            .Backups(1)
            .Staleness(2)
            .Skip(3)
            .Slow(0)
            .FailingCalls(20),
        Setting("fail_notify_ack", Ring(5)).NotifyAck().FailingCalls(20),
        Setting("fail_lose_backup", RingBased(6))
            .Gap(3)
            .Backups(1)
            .Departures(3, 1)
            .FailingCalls(20)),
    kName);

}  // namespace
}  // namespace recsync
