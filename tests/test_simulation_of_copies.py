"""The public functions that simulate workers and groups with copies of the parameters."""

import _thread
import math
import signal
import threading

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


def test_what_slows_trainers_slows_all_that_they_do():
    def hierarchical(slowdown=None, **options):
        return simulation.run_hierarchical(
            None,
            simulation.GroupStep(trainer_flop=1e9, ps_flop=(1e6,), ps_bytes=(0,)),
            groups=2,
            trainers_per_group=2,
            trainer_flops=1e10,
            ps_flops=1e10,
            parameter_bytes=0,
            slowdown=slowdown,
            seconds=50.0,
            **options,
        )

    def by_memory(slowdown=None, **options):
        return simulation.run_shadow_sync(
            None,
            trainers=4,
            compute_seconds=0.0,
            memory_seconds=0.1,
            parameter_bytes=0,
            slowdown=slowdown,
            seconds=50.0,
            **options,
        )

    growing = recsync.testing.ChangingSlowdown([(0.0, 1.0), (1.0, 2.0), (2.0, 2.0)])
    for run in (hierarchical, by_memory):
        usual = run().steps
        assert run(SLOW).steps == pytest.approx(
            [n / (4 if i == 1 else 1) for i, n in enumerate(usual)], rel=0.02
        )
        random = run(recsync.testing.RandomSlowdown(3.0, 0.5, seed=1)).steps
        assert random == pytest.approx([n / 2 for n in usual], rel=0.1)
        assert run(growing).steps == pytest.approx([n / 2 for n in usual], rel=0.03)
        noisy = run(noise=0.5).steps
        assert noisy == pytest.approx(usual, rel=0.1) and len(set(noisy)) > 1
    # What is looked up before takes as many times as long.
    usual, slow = (hierarchical(slowdown, lookup_seconds=0.3) for slowdown in (None, SLOW))
    assert slow.steps[1] == pytest.approx(usual.steps[1] / 4, rel=0.03)


def timeless(run, **options):
    if run is simulation.run_hop:
        return run(topology.ring(4), compute_seconds=0.0, **options)
    given = {"algorithm": None, "parameter_bytes": 0, **options}
    if run is simulation.run_shadow_sync:
        return run(trainers=2, compute_seconds=0.0, **given)
    return groups(**{"steps": None, **given})


@pytest.mark.parametrize(
    "run", [simulation.run_hop, simulation.run_shadow_sync, simulation.run_hierarchical]
)
def test_steps_that_take_no_time_end_by_their_number_only(run):
    result = timeless(run, steps=10_000, batch_size=8)
    assert result.seconds == 0.0
    assert result.steps_per_second == result.sync_report.examples_per_second == math.inf
    found = result.as_dict()
    assert found["steps_per_second"] is found["examples_per_second"] is None
    with pytest.raises(ValueError, match="seconds=5 would never come, as steps take no time from"):
        timeless(run, seconds=5.0)


def test_a_slowdown_that_gives_no_factor_is_named():
    class Negative(recsync.testing.Slowdown):
        def factor(self, worker, step, seconds):
            return -1.0

    with pytest.raises(ValueError, match="factor must be finite and at least 0, not -1.0 of work"):
        shadow(slowdown=Negative())


def groups(**options):
    step = simulation.GroupStep(trainer_flop=0, ps_flop=(0,), ps_bytes=(0,))
    group = {"groups": 1, "trainers_per_group": 2, "trainer_flops": 1.0, "ps_flops": 1.0}
    given = {"algorithm": None, "parameter_bytes": 0, "steps": 10}
    return simulation.run_hierarchical(step=step, **{**group, **given, **options})


def shadow(**options):
    given = {"trainers": 2, "compute_seconds": 0.1, "parameter_bytes": 8, "steps": 10}
    return simulation.run_shadow_sync(recsync.EASGD(alpha=0.5), **{**given, **options})


def long_hop():
    # A look at the loss every microsecond, and nothing else for days. Each takes long enough that
    # what is kept of them fills no memory, however late the interrupt comes.
    model = simulation.LogisticRegression(features=20, examples=200, batch_size=1)
    simulation.run_hop(
        topology.ring(3), compute_seconds=1e6, steps=300, model=model, loss_seconds=1e-6
    )


@pytest.mark.parametrize(
    "run", [long_hop, lambda: shadow(compute_seconds=1e6, steps=1000)], ids=["hop", "shadow"]
)
def test_a_simulation_ends_at_an_interrupt_though_no_step_ends(run):
    # Another thread gets the interpreter meanwhile, too.
    other = threading.Timer(0.1, _thread.interrupt_main)
    # Programs that are started in the background ignore interrupts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            other.start()
            run()
    finally:
        other.cancel()
        other.join()
        signal.signal(signal.SIGINT, handler)


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
        (lambda: shadow(trainers=10**10), "trainers must be at most 16384, not 10000000000"),
        (lambda: groups(groups=10**10), "groups must be at most 16384, not 10000000000"),
        (lambda: groups(trainers_per_group=10**10), "trainers_per_group must be at most 16384"),
        (
            lambda: groups(groups=2**14, trainers_per_group=2**14),
            r"groups \* trainers_per_group must be at most 1048576, not 268435456",
        ),
        (lambda: groups(nets_per_trainer=10**20), "nets_per_trainer must be at most 16384"),
        (
            lambda: shadow(compute_seconds=2e6),
            "compute_seconds must be .* from 0 to 1e.06, not 20000",
        ),
        (
            lambda: shadow(memory_seconds=2e6),
            "memory_seconds must be .* from 0 to 1e.06, not 2000000",
        ),
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
