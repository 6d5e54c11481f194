"""The public functions that simulate workers and groups with copies of the parameters."""

import pytest

import tf_recsync as recsync
from tf_recsync import simulation, topology

SLOW = recsync.testing.SlowWorkers(4.0, [1])


def test_a_ring_is_as_fast_as_its_slowest_worker_and_backup_workers_change_that():
    def speed(**options):
        result = simulation.run_hop(
            topology.ring_based(8), compute_seconds=0.5, steps=800, slowdown=SLOW, **options
        )
        return result.steps_per_second

    assert speed() == pytest.approx(8 / 2.0, rel=0.03)
    skips = recsync.Skip(max_jump=10)
    assert speed(backup_workers=1, skip=skips) > 2 * speed()


def test_messages_pass_the_links_of_machines():
    def seconds(**network):
        return simulation.run_hop(
            topology.ring(4),
            compute_seconds=0.0,
            steps=400,
            update_bytes=1_000_000,
            order="serial",
            network=simulation.Network(bandwidth=1e6, **network),
        ).seconds

    # A worker sends to two neighbors, a second each; the last of it then passes the receiver's
    # link. On one machine nothing passes a link.
    assert seconds() == pytest.approx(100 * 3.0, rel=0.05)
    assert seconds(workers_per_machine=4) < 0.1 * seconds()


def test_sync_ps_are_the_bottleneck_of_synchronization_and_not_of_training():
    def run(trainers, **options):
        return simulation.run_shadow_sync(
            recsync.EASGD(alpha=0.5),
            trainers=trainers,
            compute_seconds=0.1,
            parameter_bytes=1_000_000,
            steps=300 * trainers,
            network=simulation.Network(bandwidth=1e7, server_bandwidth=1e7),
            **options,
        )

    one, four, eight = (run(n) for n in (1, 4, 8))
    assert eight.steps_per_second == pytest.approx(8 * one.steps_per_second, rel=0.01)
    # An exchange takes the sync PS's links 0.1 s in each direction.
    assert eight.average_sync_gap == pytest.approx(2 * four.average_sync_gap, rel=0.1)
    halved = run(8, sync_ps=2)
    assert halved.average_sync_gap == pytest.approx(eight.average_sync_gap / 2, rel=0.15)


def test_a_group_is_as_fast_as_its_busiest_device():
    step = simulation.GroupStep(trainer_flop=1e9, ps_flop=(3e9, 1e9), ps_bytes=(0, 0))
    result = simulation.run_hierarchical(
        None,
        step,
        groups=2,
        trainers_per_group=4,
        trainer_flops=1e10,
        ps_flops=1e10,
        parameter_bytes=0,
        steps=800,
    )
    assert result.steps_per_second == pytest.approx(2 * 1e10 / 3e9, rel=0.02)
    assert max(result.servers_busy) == pytest.approx(1.0, abs=0.02)


def shadow(**options):
    given = {"trainers": 2, "compute_seconds": 0.1, "parameter_bytes": 8, "steps": 10}
    return simulation.run_shadow_sync(recsync.EASGD(alpha=0.5), **{**given, **options})


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: simulation.run_hop(4, compute_seconds=1.0, steps=4), "topology must be one of"),
        (lambda: shadow(network=3), "network must be a recsync.simulation.Network or None, not 3"),
        (
            lambda: shadow(network=simulation.Network(workers_per_machine=2)),
            "workers_per_machine of the network must be 1",
        ),
        (lambda: shadow(trainers=0), "trainers must be an integer of at least 1"),
        (lambda: shadow(compute_seconds=[0.1]), "one for each of 2 workers, not 1 numbers"),
        (lambda: shadow(mode="sometimes"), "mode"),
        (
            lambda: simulation.run_hop(
                topology.ring(4), compute_seconds=1.0, steps=4, max_iteration_gap=0
            ),
            "max_iteration_gap must be an integer of at least 1",
        ),
        (lambda: simulation.run_hop(topology.ring(4), compute_seconds=1.0), "steps"),
    ],
)
def test_wrong_arguments_are_named(run, match):
    with pytest.raises(ValueError, match=match):
        run()
