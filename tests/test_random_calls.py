"""Random calls of fit, evaluate and predict, one after the other: each takes exactly its batches.

`make soak` runs it, `make test` does not: a minute of real time for each strategy.
"""

import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from groups import hierarchical
from helpers import LabelSum
from test_soak import Storm

import tf_recsync as recsync

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

SECONDS = 60.0
WORKERS, PS, BATCH = 4, 3, 2
SHADOW = recsync.EASGD(0.3)


RING = recsync.topology.ring_based(WORKERS)
COMPLETE = recsync.topology.complete(WORKERS)
MAKERS = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
    "BSP": lambda cluster: recsync.BSPStrategy(cluster, WORKERS * BATCH, BATCH),
    "GBA": lambda cluster: recsync.GBAStrategy(
        cluster, 3 * BATCH, BATCH, staleness_tolerance=1_000_000
    ),
    "bounded staleness": lambda cluster: recsync.BoundedStalenessStrategy(
        cluster, staleness_bound=2
    ),
    "Hop": lambda cluster: recsync.HopStrategy(cluster, RING),
    "Hop, serial": lambda cluster: recsync.HopStrategy(
        cluster, RING, order="serial", max_iteration_gap=2
    ),
    "Hop, notify_ack": lambda cluster: recsync.HopStrategy(cluster, RING, protocol="notify_ack"),
    "Hop, backup workers": lambda cluster: recsync.HopStrategy(
        cluster, COMPLETE, max_iteration_gap=5, backup_workers=1
    ),
    "Hop, all backup workers": lambda cluster: recsync.HopStrategy(
        cluster, COMPLETE, max_iteration_gap=100_000, backup_workers=3, staleness_bound=4
    ),
    "Hop, staleness": lambda cluster: recsync.HopStrategy(
        cluster, COMPLETE, max_iteration_gap=8, staleness_bound=4
    ),
    "shadow": lambda cluster: recsync.ShadowSyncStrategy(cluster, SHADOW),
    "foreground": lambda cluster: recsync.ShadowSyncStrategy(
        cluster, recsync.ModelAveraging(0.3), mode=recsync.Foreground(gap=2)
    ),
    "BMUF": lambda cluster: recsync.ShadowSyncStrategy(
        cluster, recsync.BMUF(0.3, 0.5, momentum=0.5), threads_per_trainer=2
    ),
    "groups, Hogwild": lambda cluster: hierarchical(cluster, SHADOW, nets_per_trainer=2),
    "groups, sync": lambda cluster: hierarchical(
        cluster, recsync.ModelAveraging(0.3), aggregation=recsync.modes.Sync()
    ),
    "groups, Hop": lambda cluster: hierarchical(
        cluster,
        recsync.Hop(recsync.topology.ring(2)),
        aggregation=recsync.modes.Async(),
        sync_ps=0,
    ),
}


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose labels tell which ones were taken."""
    x = np.arange(1, count + 1, dtype=np.float32)[:, np.newaxis]
    return x / 100.0, x


def sum_of(counts) -> float:
    return float(sum(n * (n + 1) // 2 for n in counts))


class Caller:
    """Makes random calls.

    Args:
        strategy: trains.
        source: what is random.
        note: is told what is about to be called.
        has_losses: whether workers may be lost, and batches with them, which are accounted for.
    """

    def __init__(self, strategy, source: random.Random, note, has_losses: bool = False):
        self._strategy = strategy
        self._has_losses = has_losses
        self._random = source
        self._note = note
        with strategy.scope():
            self._model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.compile()

    def compile(self) -> None:
        steps = self._steps_per_execution = self._random.choice([1, 1, 2, 3, 8])
        self._note(f"compile(steps_per_execution={steps})")
        with self._strategy.scope():
            optimizer = recsync.optimizers.SGD(1e-4)
            if isinstance(self._strategy, recsync.HopStrategy):
                optimizer = keras.optimizers.SGD(1e-4)
            self._model.compile(optimizer, "mse", metrics=[LabelSum()], steps_per_execution=steps)

    def fit(self) -> None:
        count, epochs = self._random.randint(1, 14), self._random.randint(1, 3)
        x, y = rows(count * BATCH)
        options, totals = {}, [sum_of([count * BATCH])] * epochs
        kind = self._random.choice(["arrays", "dataset", "steps", "long", "own"])
        if self._random.random() < 0.3:
            options["validation_data"] = rows(self._random.randint(1, 3 * BATCH))
            options["validation_batch_size"] = BATCH
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        done = count  # Of the last pass.
        if kind == "arrays":
            given = {"x": x, "y": y, "batch_size": BATCH}
        elif kind == "dataset":
            given = {"x": data}
        elif kind == "steps":  # All of them take as many steps as they may, again and again.
            given, done = {"x": data.repeat(), "steps_per_epoch": count}, count * epochs
        elif kind == "long":  # Each epoch has a part of the data.
            steps = self._random.randint(1, count)
            # Keras counts whole calls, and begins anew when it takes the data to be over.
            counted = -(-steps // self._steps_per_execution) * self._steps_per_execution
            epochs = max(1, min(epochs, count // counted))
            given = {"x": data, "steps_per_epoch": steps}
            done, totals = steps * epochs, None
        else:
            own = self._strategy.distribute_datasets_from_function(
                lambda _: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
            )
            given, done, totals = {"x": own, "steps_per_epoch": count}, count * epochs, None
        self._note(f"fit({kind}, batches={count}, epochs={epochs}, done={done}, {list(options)})")
        before = self._strategy.losses(self._model)
        history = self._model.fit(**given, epochs=epochs, shuffle=False, verbose=0, **options)
        found = history.history
        losses = self._strategy.losses(self._model)
        lost = losses.batches - before.batches  # No step that counts was done on them.
        twice = losses.repeated - before.repeated  # Others have done them once more.
        assert (lost, twice) == (0, 0) or self._has_losses
        steps = self._strategy.worker_steps(self._model)
        # Those of passes before the last one count in `twice` alone, and of copies that are gone.
        assert done <= sum(steps) + lost <= done + twice, (steps, losses)
        assert len(found["loss"]) == epochs and np.isfinite(found["loss"]).all()
        # Workers take batches as they come: with steps, of any part of the data.
        if totals is not None and kind != "steps" and not self._has_losses:
            assert found["label_sum"] == totals
        if "validation_data" in options:
            expected = sum_of([len(options["validation_data"][0])])
            assert found["val_label_sum"] == [expected] * epochs

    def evaluate(self) -> None:
        count = self._random.randint(1, 12)
        self._note(f"evaluate({count} rows)")
        x, y = rows(count)
        found = self._model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        assert found["label_sum"] == sum_of([count])

    def predict(self) -> None:
        count = self._random.randint(1, 12)
        self._note(f"predict({count} rows)")
        x, _ = rows(count)
        found = self._model.predict(x, batch_size=BATCH, verbose=0)
        kernel, bias = self._model.get_weights()
        np.testing.assert_allclose(found, x @ kernel + bias, rtol=1e-4, atol=1e-5)

    def assign(self) -> None:
        self._note("assign")
        self._model.set_weights([w * 0.5 for w in self._model.get_weights()])
        self._model.optimizer.learning_rate = self._random.choice([1e-4, 2e-4])

    def call(self) -> None:
        """Makes any of these calls; half of them train."""
        actions = [self.fit] * 5 + [self.evaluate, self.evaluate, self.predict, self.assign]
        self._random.choice([*actions, self.compile])()


def make_random_calls(cluster, kind: str, has_losses: bool = False) -> None:
    """Makes random calls of a strategy for `SECONDS`; workers may be lost if `has_losses`."""
    seed = random.SystemRandom().randrange(1 << 32)
    source, calls = random.Random(seed), []
    logging.warning("%s: the seed is %d.", kind, seed)  # Shown if the test fails.

    def note(text: str) -> None:
        calls.append(text)
        logging.warning("%s: %s", kind, text)

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        strategy = MAKERS[kind](cluster)
        recsync.testing.set_compute_time(strategy, source.choice([0.0, 0.002, 0.02]))
        caller = Caller(strategy, source, note, has_losses)
        for _ in range(8):
            caller.call()
    assert len(calls) >= 8


@pytest.mark.parametrize("kind", MAKERS)
def test_random_calls_take_exactly_their_batches(clusters, kind):
    make_random_calls(clusters.get(WORKERS, PS), kind)


ALONE = [kind for kind in MAKERS if not kind.startswith("Hop") or kind == "Hop, all backup workers"]


@pytest.mark.parametrize("kind", ALONE)
def test_random_calls_in_a_storm_of_kills_account_for_all_batches(clusters, kind):
    cluster = clusters.get(WORKERS, PS)
    seed = random.SystemRandom().randrange(1 << 32)
    storm = Storm(cluster, [("worker", worker) for worker in range(WORKERS)], seed)
    storm.start()
    try:
        make_random_calls(cluster, kind, has_losses=True)
    finally:
        storm.end()
    assert storm.kills > 5
