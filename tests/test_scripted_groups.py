"""Groups whose trainers take steps one after the other, against numpy."""

import threading
import time

import numpy as np
import pytest
from groups import (
    ALPHA,
    BATCH,
    BETWEEN,
    INSIDE,
    RATE,
    ROUNDS,
    WORKERS,
    batches_of,
    datasets,
    hierarchical,
    line,
)
from helpers import wait_until

import tf_recsync as recsync
from tf_recsync.strategies.model_functions import Steps
from tf_recsync.synchronization import hop_groups
from tf_recsync.synchronization.hop_groups import GroupHopSynchronizer
from tf_recsync.synchronization.shadow import ShadowSynchronizer

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=6)


@pytest.fixture
def in_turn(monkeypatch):
    """Has workers take steps one after the other, each with the synchronization that follows.

    Returns:
        A list that gets, for each step, the iterations that Hop then has begun and completed.
    """
    changed, turn, there = threading.Condition(), [0], set()
    run_steps, trained = Steps._run_steps, ShadowSynchronizer.trained
    hop_trained, expected = GroupHopSynchronizer.trained, []

    def next_turn():
        with changed:
            turn[0] += 1
            changed.notify_all()

    def wait_for_turn(function, slot, n):
        with changed:
            there.add(slot.number)  # Before the first one may have to meet with all others.
            changed.notify_all()
            assert changed.wait_for(
                lambda: len(there) == WORKERS and turn[0] % WORKERS == slot.number, 300
            )
        return run_steps(function, slot, n)

    def note_trained(group, thread, steps):
        if group._is_central:  # Each group synchronizes by itself.
            trained(group, thread, steps)
            next_turn()
        else:  # All meet.
            next_turn()
            trained(group, thread, steps)

    def note_hop_trained(group, thread, steps):
        hop_trained(group, thread, steps)

        def counts():
            begun = [servers[0].iteration + 1 for servers in group.server_reports()]
            return begun, group.report().syncs

        # The last of a worker's steps finds no batch.
        due = expected[min(turn[0], len(expected) - 1)]
        assert wait_until(lambda: counts() == due, 300), f"{counts()} instead of {due}"
        next_turn()

    monkeypatch.setattr(hop_groups, "_LEAVE_SECONDS", 600.0)  # However slow the machine is.
    monkeypatch.setattr(Steps, "_run_steps", wait_for_turn)
    monkeypatch.setattr(ShadowSynchronizer, "trained", note_trained)
    monkeypatch.setattr(GroupHopSynchronizer, "trained", note_hop_trained)
    return expected


class Replay:
    """The same in numpy: two groups, each with a vector of weights and bias."""

    def __init__(self, aggregated: bool, name: str):
        start = np.array([0.5, 0.5, 0.5, 0.0])
        self.groups = [start.copy(), start.copy()]
        self.center, self.update = start.copy(), np.zeros(4)
        self._aggregated, self._name = aggregated, name
        self._pending = [[], []]
        # Of each group: the updates that it has applied and those when its iteration began, and
        # what it has sent in each iteration, by Hop.
        self._applied, self._began = [0, 0], [0, 0]
        self._sent, self._completed = [[], []], [0, 0]
        self.counts = []  # After each step: iterations begun and completed.

    def run(self) -> None:
        for number in range(ROUNDS):
            for worker in range(WORKERS):
                self._step(worker // 2, *batches_of(worker)[number])
                if self._name == "EASGD":
                    self._elastic(worker // 2)
                if self._name == "Hop":
                    while self._exchange(0) or self._exchange(1):
                        pass
                    self.counts.append(([len(s) for s in self._sent], list(self._completed)))
            if self._name in ("MA", "BMUF"):
                self._all_reduce()

    def _step(self, group: int, x: np.ndarray, y: np.ndarray) -> None:
        inputs = np.concatenate([x, np.ones((BATCH, 1))], 1)
        gradient = 2 / BATCH * inputs.T @ (inputs @ self.groups[group] - y[:, 0])
        self._pending[group].append(gradient)
        if len(self._pending[group]) == (2 if self._aggregated else 1):
            self.groups[group] -= RATE * np.mean(self._pending[group], 0)
            self._pending[group].clear()
            self._applied[group] += 1

    def _exchange(self, group: int) -> bool:
        """Hop with an update for each iteration; whether a group could go on."""
        own, theirs, done = self._sent[group], self._sent[1 - group], self._completed[group]
        if len(own) == done and self._applied[group] > self._began[group]:
            self._began[group] = self._applied[group]
            own.append(self.groups[group].copy())
            return True
        if len(own) > done and len(theirs) > done:
            # What was learned since it sent stays.
            self.groups[group] += ALPHA * (theirs[done] - own[done])
            self._completed[group] += 1
            return True
        return False

    def _elastic(self, group: int) -> None:
        self.center += ALPHA * (self.groups[group] - self.center)
        self.groups[group] += ALPHA * (self.center - self.groups[group])

    def _all_reduce(self) -> None:
        target = np.mean(self.groups, 0)
        if self._name == "BMUF":
            self.update = 0.5 * self.update + 0.8 * (target - self.center)
            self.center = self.center + self.update
            target = self.center
        for weights in self.groups:
            weights += ALPHA * (target - weights)


@pytest.mark.cases("hogwild-EASGD", "async-BMUF", "GBA-Hop", "sync-MA")
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_scripted_run_equals_numpy(cluster, in_turn, inside, name):
    check_scripted_run(cluster, in_turn, inside, name)


@pytest.mark.cases("async-BMUF", "GBA-Hop")
@pytest.mark.parametrize(
    ("inside", "name"),
    [("hogwild", "EASGD"), ("async", "BMUF"), ("GBA", "Hop"), ("sync", "MA")],
)
def test_a_scripted_run_of_placed_layers_equals_numpy(cluster, in_turn, inside, name):
    check_scripted_run(cluster, in_turn, inside, name, placement={"line/only": 0})


def test_updates_count_that_are_applied_before_a_loop_has_begun_by_hop(
    cluster, in_turn, monkeypatch
):
    run = GroupHopSynchronizer._iterate

    def run_late(synchronizer, loop):
        time.sleep(0.5)
        run(synchronizer, loop)

    monkeypatch.setattr(GroupHopSynchronizer, "_iterate", run_late)
    check_scripted_run(cluster, in_turn, "async", "Hop")


def check_scripted_run(cluster, in_turn, inside, name, placement="trainers"):
    strategy = hierarchical(
        cluster,
        BETWEEN[name],
        aggregation=INSIDE[inside],
        mode="shadow" if name == "Hop" else recsync.Foreground(gap=1),
        local_batch_size=None if INSIDE[inside] else BATCH,
        placement=placement,
    )
    model = line(strategy)
    replay = Replay(inside in ("GBA", "sync"), name)
    replay.run()
    in_turn.extend(replay.counts)
    model.fit(datasets(strategy), verbose=0)
    copies = [np.concatenate([np.ravel(v) for v in copy]) for copy in strategy.copies(model)]
    np.testing.assert_allclose(copies, replay.groups, rtol=1e-5, atol=1e-6)
    # What users see is the first group's.
    np.testing.assert_array_equal(
        np.concatenate([w.ravel() for w in model.get_weights()]), copies[0]
    )
