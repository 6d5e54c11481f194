"""Groups of trainers in virtual time: against the real algorithms, closed forms, the papers."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.placement import Edge, OperatorPlan, Resources, StepGraph, Unit
from tf_recsync.simulation._compute import ComputeTime
from tf_recsync.simulation._groups import run_groups
from tf_recsync.simulation._hierarchical import GroupStep, simulate_hierarchical
from tf_recsync.simulation._learning import LogisticRegression
from tf_recsync.simulation._shadow import simulate_shadow
from tf_recsync.synchronization import shadow_trainers
from tf_recsync.synchronization.shadow_algorithms import Center, Trainer

_READ, _UPDATE, _SYNC_READ, _EXCHANGE, _MOVE = range(5)  # GroupCluster::Entry::Kind.


def constant(seconds):
    return lambda trainer, step, now: seconds


class Replay:
    """What a log of a simulation comes to with the product's algorithms, on real variables."""

    def __init__(self, algorithm, model, groups, shards, sync_ps):
        self.problem = model.problem()
        self.rate = np.float32(model.learning_rate)
        size = model.features + 1
        self.algorithm = algorithm
        bounds = [size * s // shards for s in range(shards + 1)]
        self.ranges = list(zip(bounds, bounds[1:], strict=False))
        self.copies, self.trainers = [], []
        for _ in range(groups):
            self.copies.append([tf.Variable(np.zeros(b - a, np.float32)) for a, b in self.ranges])
            self.trainers.append([self.trainer(variable) for variable in self.copies[-1]])
        self.centers = []
        for first, last in self.ranges:
            ends = [(last - first) * p // sync_ps for p in range(sync_ps + 1)] if sync_ps else [0]
            self.centers.append([self.part(b - a) for a, b in zip(ends, ends[1:], strict=False)])
        self.snapshots, self.gradients, self.read, self.answers = {}, {}, {}, {}

    def trainer(self, variable):
        start = variable.numpy()
        self.states = getattr(self, "states", [])
        states = {name: tf.Variable(v) for name, v in self.algorithm.states(start).items()}
        self.states.append(states)
        handles = {name: variable.handle for name, variable in states.items()}
        return Trainer("", [variable.handle], [start.size], handles)

    @staticmethod
    def part(size):
        return tf.Variable(np.zeros(size, np.float32)), tf.Variable(np.int64(0))

    def run(self, log):
        moved = 0
        for kind, group, shard, thread, step in log:
            first, last = self.ranges[shard]
            own, number = self.copies[group][shard], step  # Of the step, or of the synchronization.
            if kind == _READ:
                size = self.ranges[-1][1]
                snapshot = self.snapshots.setdefault((thread, step), np.zeros(size, np.float32))
                snapshot[first:last] = own.numpy()
            elif kind == _UPDATE:
                key = thread, step
                if key not in self.gradients:
                    self.gradients[key] = self.problem.gradient(self.snapshots[key], thread, step)
                own.assign_sub(self.rate * self.gradients[key][first:last])
            elif kind == _SYNC_READ:
                self.read[group, shard, number] = self.trainers[group][shard].read()
            elif kind == _EXCHANGE:
                parts = self.centers[shard]
                pieces = tf.split(
                    self.read[group, shard, number], [part.shape[0] for part, _ in parts]
                )
                part, traffic = parts[thread]  # It stands in the place of the thread.
                answer = Center([part], [traffic]).exchange(pieces[thread], self.algorithm.alpha)
                self.answers.setdefault((group, shard, number), {})[thread] = answer
            elif kind == _MOVE and self.algorithm.is_central:
                answers = self.answers.pop((group, shard, number))
                whole = tf.concat([answers[p] for p in sorted(answers)], 0)
                self.trainers[group][shard].move(whole, self.algorithm.alpha)
            elif kind == _MOVE:
                moved += 1
                if moved % len(self.trainers) == 0:  # Nobody trains between the first and these.
                    self.algorithm.sync([trainers[shard] for trainers in self.trainers], None)


def logged(algorithm, mode, model, servers=0, sync_ps=None, compute=None):
    step = GroupStep(
        trainer_flop=1e6, ps_flop=(2e6,) * max(servers, 1), ps_bytes=(4000,) * max(servers, 1)
    )
    times = np.random.default_rng(5).uniform(0.5, 2.0, 10_000)
    return run_groups(
        algorithm,
        mode,
        lambda trainer, begun, now: times[trainer * 1000 + begun] * 1e-3,
        groups=3,
        trainers=2 if servers else 1,
        threads=2,
        servers=servers,
        stages=step.stages() if servers else [],
        trainer_per_second=1e9,
        server_per_second=1e9,
        trainer_bytes_per_second=1e7,
        server_bytes_per_second=1e7,
        sync_ps_bytes_per_second=1e7,
        duplex=True,
        latency=1e-4,
        sync_ps=sync_ps,
        parameter_bytes=20_000,
        limits_given=(120, None),
        model=model,
        loss_seconds=0.01,
        keeps_log=True,
    )


@pytest.mark.parametrize(
    ("algorithm", "mode", "servers", "sync_ps"),
    [
        (recsync.EASGD(0.3), "shadow", 0, 2),
        (recsync.EASGD(0.4), recsync.Foreground(gap=4), 0, 1),
        (recsync.EASGD(0.3), "shadow", 2, 2),
        (recsync.ModelAveraging(0.6), recsync.Foreground(gap=5), 0, None),
        (recsync.ModelAveraging(0.6), recsync.Foreground(per_minute=6000), 2, None),
        (recsync.BMUF(0.5, eta=0.7), recsync.Foreground(gap=5), 0, None),
        (recsync.BMUF(0.5, 0.7, momentum=0.4, nesterov=True), recsync.Foreground(gap=3), 2, None),
    ],
    ids=["easgd", "easgd_fg", "easgd_groups", "ma", "ma_groups", "bmuf", "bmuf_groups"],
)
def test_copies_become_what_the_algorithms_of_the_product_make_of_them(
    algorithm, mode, servers, sync_ps
):
    model = LogisticRegression(features=10, examples=128, batch_size=8, learning_rate=0.3)
    told = logged(algorithm, mode, model, servers, sync_ps)
    kinds = [kind for kind, *_ in told["log"]]
    assert kinds.count(_MOVE) >= 6
    replay = Replay(algorithm, model, 3, max(servers, 1), sync_ps or 0)
    replay.run(told["log"])
    for mine, theirs in zip(told["copies"], replay.copies, strict=True):
        whole = np.concatenate([part.numpy() for part in theirs])
        assert np.abs(whole).max() > 0.05
        np.testing.assert_allclose(mine, whole, rtol=2e-5, atol=1e-6)
    if algorithm.is_central:
        center = [part.numpy() for parts in replay.centers for part, _ in parts]
        np.testing.assert_allclose(told["center"], np.concatenate(center), rtol=2e-5, atol=1e-6)


def test_sync_ps_saturate_in_the_foreground_as_in_figure_5():
    # FR-EASGD-5 with two sync PSs: its speed stops to grow at 14 trainers.
    def speed(trainers, mode):
        return simulate_shadow(
            recsync.EASGD(alpha=0.5),
            mode,
            constant(0.05),
            trainers=trainers,
            threads_per_trainer=24,
            sync_ps=2,
            parameter_bytes=1_860_000,
            sync_ps_bandwidth=1.25e9,
            steps=trainers * 24 * 60,
            batch_size=200,
        ).examples_per_second

    alone = 24 * 200 / 0.05
    most = 200 * 5 * 2 * 1.25e9 / 1_860_000  # What two network cards let pass.
    assert most / alone == pytest.approx(14.0, rel=0.01)
    five, thirty = recsync.Foreground(gap=5), recsync.Foreground(gap=30)
    assert speed(10, five) == pytest.approx(10 * alone, rel=0.08)
    assert speed(16, five) == pytest.approx(most, rel=0.06)
    assert speed(20, five) == pytest.approx(most, rel=0.06)
    assert speed(20, thirty) > 0.9 * 20 * alone
    assert speed(20, "shadow") == pytest.approx(20 * alone)


def test_the_average_sync_gap_is_that_of_both_ways_to_count():
    # Table 2: 11 trainers and a sync PS, as fast as its network card lets them.
    result = simulate_shadow(
        recsync.EASGD(alpha=0.5),
        "shadow",
        constant(0.05),
        trainers=11,
        threads_per_trainer=24,
        parameter_bytes=10_000_000,
        sync_ps_bandwidth=1.25e9,
        seconds=20.0,
        batch_size=200,
    )
    report = result.sync_report
    assert sum(report.syncs) == pytest.approx(20 * 1.25e9 / 1e7, rel=0.02)
    assert result.average_sync_gap == pytest.approx(11 * 24 / 0.05 / 125, rel=0.02)
    by_bytes = report.steps / (report.sync_ps_bytes / (8 * report.elements))
    assert by_bytes == pytest.approx(result.average_sync_gap, rel=0.02)
    assert f"{result.average_sync_gap:.2f} steps" in str(result)


def test_the_memory_of_a_trainer_is_the_limit_of_its_threads_as_in_figure_8():
    def speed(threads):
        return simulate_shadow(
            None,
            "shadow",
            constant(0.046),
            trainers=5,
            threads_per_trainer=threads,
            parameter_bytes=0,
            memory_seconds=0.002,
            seconds=20.0,
        ).steps_per_second

    assert speed(1) == pytest.approx(5 / 0.048, rel=0.01)
    assert speed(12) == pytest.approx(5 * 12 / 0.048, rel=0.02)
    assert speed(32) == pytest.approx(5 / 0.002, rel=0.02)
    assert speed(64) == pytest.approx(5 / 0.002, rel=0.02)


def test_a_trainer_rests_between_two_synchronizations_though_the_network_takes_no_time():
    result = simulate_shadow(
        recsync.EASGD(0.5),
        "shadow",
        constant(0.1),
        trainers=3,
        parameter_bytes=1000,
        bandwidth=math.inf,
        seconds=20.0,
    )
    rate = result.sync_report.syncs_per_second / 3
    assert rate == pytest.approx(1 / shadow_trainers._REST_SECONDS, rel=0.01)


def test_groups_are_as_fast_as_their_busiest_device_and_as_stale_as_their_nets():
    step = GroupStep(trainer_flop=6e8, ps_flop=(6e8, 9e8), ps_bytes=(80_000, 40_000))

    between = recsync.EASGD(alpha=0.5), recsync.Shadow(min_interval=0.5)

    def run(groups, trainers, nets, algorithm=between[0], mode=between[1], **arguments):
        return simulate_hierarchical(
            algorithm,
            mode,
            step,
            groups=groups,
            trainers_per_group=trainers,
            nets_per_trainer=nets,
            trainer_flops=2e10,
            ps_flops=2e11,
            parameter_bytes=1_000_000,
            sync_ps_bandwidth=1e9,
            seconds=4.0,
            batch_size=100,
            **arguments,
        )

    # A trainer alone is its own limit, 30 ms a step; eight of them are that of the second PS.
    assert run(1, 1, 4).steps_per_second == pytest.approx(1 / 0.03, rel=0.03)
    eight = run(5, 8, 4)
    assert eight.examples_per_second == pytest.approx(5 * 100 / 0.0045, rel=0.03)
    assert eight.servers_busy[1] == pytest.approx(1.0, abs=0.02)
    assert eight.servers_busy[0] == pytest.approx(2 / 3, abs=0.02)
    # A net overtakes another now and then; but no more than all of them are on their way.
    assert 1 < eight.staleness.dense.mean <= 8 * 4
    assert eight.sync_report.syncs == [8] * 5
    assert eight.average_sync_gap == pytest.approx(0.5 / 0.0045, rel=0.05)
    # Figure 10: groups of their own double the speed.
    twice = run(10, 8, 4).steps_per_second / eight.steps_per_second
    assert twice == pytest.approx(2.0, rel=0.01)
    # A thin network card of the first PS takes its place: half of its bytes in each direction.
    thin = run(1, 8, 4, None, "shadow", ps_bandwidth=4e6).steps_per_second
    assert thin == pytest.approx(4e6 / 40_000, rel=0.1)


def test_an_operator_plan_says_what_a_step_has_devices_do():
    graph = StepGraph(
        units=[
            Unit("features", "input", flops=0),
            Unit("bottom", "layer", flops=6e6, parameter_bytes=4096),
            Unit("top", "layer", flops=4e6, parameter_bytes=8192),
            Unit("loss", "loss", flops=3e6),
        ],
        edges=[
            Edge("features", "bottom", 1000),
            Edge("bottom", "top", 2000, 2000),
            Edge("top", "loss", 100, 100),
        ],
    )
    resources = Resources(trainers=2, servers=2, nets_per_trainer=3, bytes_per_second=1e8)
    operators = {"features": None, "bottom": 0, "top": 1, "loss": None}
    step = GroupStep.of(OperatorPlan(graph, resources, operators))
    assert step.ps_flop == pytest.approx((6e6, 4e6))
    assert step.trainer_flop == pytest.approx(3e6)
    assert step.ps_bytes == (5000, 4200)
    result = simulate_hierarchical(
        None,
        "shadow",
        step,
        groups=1,
        trainers_per_group=2,
        nets_per_trainer=3,
        trainer_flops=resources.trainer_flops_per_second,
        ps_flops=resources.server_flops_per_second,
        parameter_bytes=graph.parameter_bytes,
        steps=600,
    )
    # What the plan calls the highest load: of all nets of the group, of the first PS.
    assert result.steps_per_second == pytest.approx(5e10 / 6e6, rel=0.02)


def test_compute_times_have_slowdowns_and_noise():
    slow = recsync.testing.SlowWorkers(3.0, [1]) * recsync.testing.RandomSlowdown(2.0, 0.25, seed=3)
    compute = ComputeTime([0.1, 0.2], workers=2, slowdown=slow)
    seconds = np.array([[compute(w, k, 0.0) for k in range(2000)] for w in range(2)])
    assert set(seconds[0].round(6)) == {0.1, 0.2}
    assert set(seconds[1].round(6)) == {0.6, 1.2}
    assert (seconds[0] > 0.15).mean() == pytest.approx(0.25, abs=0.05)
    changing = recsync.testing.ChangingSlowdown([(0.0, 1.0), (10.0, 3.0)])
    assert ComputeTime(0.1, 1, changing)(0, 0, 5.0) == pytest.approx(0.2)
    noisy = ComputeTime(1.0, 2, noise=0.3, seed=1)
    drawn = np.array([noisy(0, k, 0.0) for k in range(4000)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.03)
    assert np.log(drawn).std() == pytest.approx(0.3, abs=0.02)
    again = ComputeTime(1.0, 2, noise=0.3, seed=1)
    assert [again(0, k, 0.0) for k in range(10)] == drawn[:10].tolist()
    with pytest.raises(ValueError, match="one for each of 2 workers"):
        ComputeTime([0.1], 2)
    with pytest.raises(ValueError, match="compute_seconds\\[1\\]"):
        ComputeTime([0.1, -1.0], 2)
    with pytest.raises(ValueError, match="noise"):
        ComputeTime(0.1, 2, noise=-1.0)


def test_learning_is_told_over_time_and_the_same_each_time():
    model = LogisticRegression(features=8, examples=512, batch_size=32, learning_rate=0.1)

    def run(seed):
        return simulate_shadow(
            recsync.EASGD(alpha=0.4),
            "shadow",
            ComputeTime(0.01, 4, noise=0.5, seed=seed),
            trainers=4,
            threads_per_trainer=3,
            parameter_bytes=100_000,
            sync_ps_bandwidth=1e8,
            steps=1500,
            model=model,
            loss_seconds=0.1,
        )

    result = run(0)
    assert result.losses[0].loss == pytest.approx(math.log(2.0))
    assert result.losses[-1].loss < 0.58
    assert 0 < result.seconds_to(0.62) < result.seconds
    assert result.examples_per_second == pytest.approx(32 * result.steps_per_second)
    assert run(0).losses == result.losses
    assert run(1).losses != result.losses


class OwnEASGD(recsync.EASGD):
    """One that the simulation does not know."""

    def sync(self, trainers, center):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainers": 0}, "trainers"),
        ({"threads_per_trainer": 0}, "threads_per_trainer"),
        ({"sync_ps": 0}, "sync_ps must be at least 1 with EASGD, not 0"),
        ({"algorithm": recsync.ModelAveraging(0.5), "sync_ps": 1}, "0 without EASGD"),
        ({"algorithm": "easgd"}, "algorithm must be EASGD"),
        ({"algorithm": None, "mode": recsync.Foreground(gap=1)}, "without an algorithm"),
        ({"mode": "background"}, "mode must be"),
        ({"parameter_bytes": -1}, "parameter_bytes"),
        ({"parameter_bytes": 2**63}, "parameter_bytes must be at most"),
        ({"steps": None}, "steps or seconds"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"sync_ps_bandwidth": -1.0}, "sync_ps_bandwidth"),
        ({"duplex": None}, "duplex"),
        ({"latency": -0.1}, "latency"),
        ({"memory_seconds": math.nan}, "memory_seconds"),
        ({"model": LogisticRegression(momentum=0.5)}, "momentum must be 0"),
        ({"model": "clicks"}, "model must be a recsync.simulation.LogisticRegression or None"),
        ({"algorithm": OwnEASGD(0.5)}, "algorithm must be EASGD, .* or None, not OwnEASGD"),
        # In the background, and all machines without limits.
        ({"algorithm": recsync.ModelAveraging(0.5), "bandwidth": math.inf}, "must take time"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    given = {
        "algorithm": recsync.EASGD(0.5),
        "mode": "shadow",
        "trainers": 2,
        "parameter_bytes": 1000,
        "bandwidth": 1e6,
        "steps": 10,
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        simulate_shadow(given.pop("algorithm"), given.pop("mode"), constant(0.1), **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainer_flop": -1.0}, "trainer_flop"),
        ({"ps_flop": ()}, "at least one"),
        ({"ps_bytes": (1, 2)}, "not of 1 and 2"),
        ({"ps_flop": (1e300,)}, "ps_flop must be at most"),
        ({"ps_bytes": (1.5,)}, "ps_bytes"),
        ({"forward_share": 1.5}, "forward_share"),
    ],
)
def test_a_wrong_step_of_a_group_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupStep(**{"trainer_flop": 1.0, "ps_flop": (1.0,), "ps_bytes": (1,), **arguments})


def test_a_simulation_of_groups_needs_a_step():
    with pytest.raises(ValueError, match="step must be a GroupStep"):
        simulate_hierarchical(
            None,
            "shadow",
            None,
            groups=1,
            trainers_per_group=1,
            trainer_flops=1.0,
            ps_flops=1.0,
            parameter_bytes=0,
            steps=1,
        )
