"""Decentralized training in virtual time: times against recurrences, bounds, learning."""

import json
import math

import numpy as np
import pytest

from tf_recsync import topology
from tf_recsync.simulation._hop import simulate_hop
from tf_recsync.simulation._learning import LogisticRegression
from tf_recsync.strategies.hop_checks import checked_protocol
from tf_recsync.synchronization.hop_protocol import Skip
from tf_recsync.synchronization.hop_reports import WorkerReport

_COMPUTE, _UPDATES = 0, 1  # Indices of ACTIVITIES.


def protocol_of(
    graph, gap=5, backups=0, staleness=None, skip=None, order="parallel", kind="token_queue"
):
    return checked_protocol(graph, gap, backups, staleness, skip, order, kind, True)


def random_times(workers, steps, seed, slow=6.0, probability=1 / 8):
    """[workers, steps]: some steps take several times as long."""
    random = np.random.default_rng(seed)
    return random.uniform(0.5, 1.5, (workers, steps)) * np.where(
        random.random((workers, steps)) < probability, slow, 1.0
    )


def entered_and_averaged(protocol, times):
    """When each worker enters each iteration, and has averaged, by the rules of the paper.

    Messages take no time. Nobody skips iterations.
    """
    graph, (workers, iterations) = protocol.topology, times.shape
    enter, computed, averaged = (np.zeros((workers, iterations)) for _ in range(3))
    sent = computed if protocol.is_serial else enter
    gap, bound = protocol.max_iteration_gap, protocol.staleness_bound
    for k in range(iterations):
        for i in range(workers):
            waits = [averaged[i, k - 1]] if k else [0.0]
            if gap is not None and k >= gap:
                waits += [enter[j, k - gap] for j in graph.out_neighbors(i)]
            enter[i, k] = max(waits)
        computed[:, k] = enter[:, k] + times[:, k]
        for i in range(workers):
            newest = k - (bound or 0)
            come = sorted(sent[j, newest] if newest >= 0 else 0.0 for j in graph.in_neighbors(i))
            needed = len(come) - protocol.backup_workers[i]
            averaged[i, k] = max([computed[i, k], *come[:needed]])
    return enter, averaged


@pytest.mark.parametrize(
    "protocol",
    [
        protocol_of(topology.ring(6)),
        protocol_of(topology.ring_based(6), gap=None, order="serial"),
        protocol_of(topology.ring_based(8), gap=3, backups=1),
        protocol_of(topology.exponential(5), gap=2, backups=1, order="serial"),
        protocol_of(topology.ring(6), gap=4, staleness=2),
        protocol_of(topology.ring_based(6), gap=4, staleness=2, backups=[0, 1, 2, 0, 1, 2]),
    ],
    ids=["standard", "serial", "backup", "directed", "staleness", "hybrid"],
)
def test_times_are_those_of_the_papers_rules(protocol):
    workers = protocol.topology.size
    times = random_times(workers, 200, seed=4)
    result = simulate_hop(
        protocol, lambda i, k, now: times[i, k], steps=60 * workers, record_events=True
    )
    enter, averaged = entered_and_averaged(protocol, times)
    checked = 0
    for worker, what, begin, end, iteration, *_ in result.events:
        if what == _COMPUTE:
            assert begin == pytest.approx(1e6 * enter[worker, iteration], abs=3)
        # Who stopped at the end of the data is waited for no more.
        elif what == _UPDATES and iteration < min(result.steps):
            assert end == pytest.approx(1e6 * averaged[worker, iteration], abs=3)
            checked += 1
    assert checked == workers * min(result.steps)
    assert sum(result.steps) == 60 * workers
    assert (result.largest_gaps <= result.bounds).all()


@pytest.mark.parametrize("order", ["parallel", "serial"])
def test_acknowledgements_keep_workers_two_iterations_apart(order):
    protocol = protocol_of(topology.ring(6), gap="default", order=order, kind="notify_ack")
    times = random_times(6, 200, seed=1)
    result = simulate_hop(
        protocol, lambda i, k, now: times[i, k], steps=300, latency=0.05, update_bytes=4
    )
    assert sum(result.steps) == 300
    assert (result.largest_gaps <= result.bounds).all()
    assert sum(report.waited_for_tokens for report in result.hop_report) > 0


def test_reports_are_those_of_a_strategy():
    result = simulate_hop(
        protocol_of(topology.ring(4)),
        lambda i, k, now: 0.25,
        steps=80,
        bandwidth=1e6,
        update_bytes=50_000,
        batch_size=32,
    )
    # Each worker computes 20 times, and needs the links for less.
    assert result.seconds == pytest.approx(5.0)
    assert result.steps == (20,) * 4
    assert result.steps_per_second == pytest.approx(16.0)
    assert result.seconds_per_iteration == pytest.approx(0.25)
    for report in result.hop_report:
        assert isinstance(report, WorkerReport)
        assert report.iteration == 19
        assert report.updates_used == 40
        assert report.updates_sent == 40
        assert report.waited_for_updates == pytest.approx(0.0, abs=1e-5)
    sync = result.sync_report
    assert sync.syncs == [20] * 4
    assert sync.examples_per_second == pytest.approx(80 * 32 / 5.0)
    assert sync.elements == 12_500
    assert [link.sent_bytes for link in result.links] == [40 * 50_000] * 4
    assert result.links[0].seconds == pytest.approx(2 * 2.0)
    assert "16.00" in str(result)


def test_a_slow_network_card_is_shared_by_the_workers_of_a_machine():
    def seconds(machines, bandwidth):
        return simulate_hop(
            protocol_of(topology.hierarchical([3, 3])),
            lambda i, k, now: 0.1,
            steps=6 * 50,
            machines=machines,
            bandwidth=bandwidth,
            update_bytes=100_000,
        ).seconds

    # Only neighbors on other machines cost time: here two of the edges.
    assert seconds([0, 0, 0, 1, 1, 1], 1e6) < seconds(None, 1e6)
    assert seconds([0, 0, 0, 1, 1, 1], [1e6, 1e5]) > seconds([0, 0, 0, 1, 1, 1], 1e6)
    assert seconds([0] * 6, 1.0) == pytest.approx(5.0)


def test_a_card_that_does_not_send_and_receive_at_once_takes_as_long_as_both():
    # As the links of set_bandwidth: three updates out and three in, after computing.
    result = simulate_hop(
        protocol_of(topology.ring_based(6), order="serial"),
        lambda i, k, now: 0.1,
        steps=6 * 40,
        bandwidth=4e6,
        duplex=False,
        update_bytes=240_000,
    )
    assert result.seconds_per_iteration == pytest.approx(0.1 + 6 * 0.06, rel=0.02)


def test_skipping_brings_a_slow_worker_to_the_pace_of_the_others():
    def run(**arguments):
        return simulate_hop(
            protocol_of(topology.ring_based(16), **arguments),
            lambda i, k, now: 0.4 if i == 3 else 0.1,
            steps=16 * 60,
        )

    standard, skipping = run(), run(backups=1, skip=Skip(max_jump=10))
    assert standard.seconds > 3 * skipping.seconds
    assert skipping.hop_report[3].iterations_skipped > 30
    assert skipping.hop_report[3].jumps > 0
    assert standard.hop_report[3].iterations_skipped == 0


@pytest.mark.parametrize("staleness", [None, 2])
def test_a_worker_does_not_jump_further_than_those_can_get_whose_updates_it_needs(staleness):
    # They wait for its tokens, and those that it is behind of do not.
    graph = topology.exponential(7)
    assert not set(graph.in_neighbors(0)) & set(graph.out_neighbors(0))
    result = simulate_hop(
        protocol_of(graph, backups=2, staleness=staleness, skip=Skip(max_jump=50)),
        lambda i, k, now: 50.0 if i == 0 else 1.0,
        steps=3000,
    )
    assert sum(result.steps) == 3000
    slow = result.hop_report[0]
    jump = 1 + slow.iterations_skipped / slow.jumps
    assert jump == pytest.approx(5 + 1 + (staleness or 0), abs=0.5)
    assert (result.largest_gaps <= result.bounds).all()


def test_the_loss_is_told_over_virtual_time_and_training_ends_at_its_target():
    model = LogisticRegression(
        features=8, examples=512, batch_size=32, learning_rate=0.1, weight_decay=0.01
    )
    protocol, times = protocol_of(topology.ring_based(6), backups=1), random_times(6, 500, 3)

    def run(**arguments):
        return simulate_hop(
            protocol,
            lambda i, k, now: times[i, k],
            model=model,
            loss_seconds=2.0,
            record_events=False,
            **arguments,
        )

    whole = run(steps=600)
    assert whole.losses[0].loss == pytest.approx(math.log(2.0))
    assert [look.seconds for look in whole.losses[:-1]] == [
        2.0 * n for n in range(len(whole.losses) - 1)
    ]
    assert whole.losses[-1].steps == 600
    reached = whole.seconds_to(0.6)
    assert reached is not None and whole.seconds_to(0.01) is None
    early = run(steps=600, target_loss=0.6)
    assert early.seconds == reached
    assert sum(early.steps) < 600
    assert early.sync_report.local_batch_size == 32
    assert run(seconds=7.0).seconds == 7.0
    assert run(steps=600).losses == whole.losses
    other = LogisticRegression(features=8, examples=512, batch_size=32, seed=1)
    assert (
        simulate_hop(protocol, lambda i, k, now: times[i, k], model=other, steps=60).losses
        != run(steps=60).losses
    )


def test_a_timeline_opens_in_a_viewer(tmp_path):
    result = simulate_hop(
        protocol_of(topology.ring(3)), lambda i, k, now: 1.0, steps=9, record_events=True
    )
    result.write_timeline(tmp_path / "hop.json")
    trace = json.loads((tmp_path / "hop.json").read_text())["traceEvents"]
    computed = [event for event in trace if event["name"] == "compute"]
    assert sorted((event["pid"], event["ts"]) for event in computed) == [
        (worker, 1e6 * k) for worker in range(3) for k in range(3)
    ]


def test_what_computing_raises_ends_the_simulation():
    def compute(worker, step, now):
        raise ZeroDivisionError(f"step {step}")

    with pytest.raises(ZeroDivisionError, match="step 0"):
        simulate_hop(protocol_of(topology.ring(3)), compute, steps=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps or seconds"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"seconds": -1.0}, "seconds must be a finite number, positive"),
        ({"steps": 1, "machines": [0, 1]}, "each of the 3 workers, not 2"),
        ({"steps": 1, "machines": [0, 2, 0]}, "without gaps"),
        ({"steps": 1, "bandwidth": 0}, "bandwidth must be a finite number, positive"),
        ({"steps": 1, "bandwidth": [1.0]}, "one for all, or 3, not 1"),
        ({"steps": 1, "latency": math.inf}, "latency"),
        ({"steps": 1, "duplex": 1}, "duplex"),
        ({"steps": 1, "record_events": "no"}, "record_events must be a bool, not 'no'"),
        ({"steps": 1, "model": "clicks"}, "model must be a recsync.simulation.LogisticRegressi"),
        ({"steps": 1, "update_bytes": -1}, "update_bytes"),
        ({"steps": 1, "target_loss": 0.5}, "needs a model"),
        ({"steps": 1, "batch_size": 0}, "batch_size"),
        ({"steps": 1, "loss_seconds": 0.0}, "loss_seconds"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate_hop(protocol_of(topology.ring(3)), lambda i, k, now: 1.0, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 0}, "features"),
        ({"examples": 2**20, "features": 2}, "features \\* examples"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"momentum": 1.0}, "momentum must be less than 1"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_problem_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LogisticRegression(**arguments)
