"""HierarchicalStrategy with `model.fit`: two groups of two trainers, on servers of their own."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, UntilAllGoOn, compiled, mean_output, slope_model, wait_until

import tf_recsync as recsync
from tf_recsync.strategies import server_threads
from tf_recsync.strategies.model_functions import Steps
from tf_recsync.synchronization import hop_groups
from tf_recsync.synchronization.hop_groups import GroupHopSynchronizer
from tf_recsync.synchronization.shadow import ShadowSynchronizer

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

ALPHA, RATE = 0.3, 0.1
BATCH, ROUNDS, WORKERS = 4, 3, 4
GLOBAL = {"global_batch_size": 2 * BATCH, "local_batch_size": BATCH}
INSIDE = {
    "hogwild": None,
    "async": recsync.modes.Async(),
    "GBA": recsync.modes.GBA(**GLOBAL),
    "sync": recsync.modes.Sync(**GLOBAL),
}
BETWEEN = {
    "EASGD": recsync.EASGD(ALPHA),
    "MA": recsync.ModelAveraging(ALPHA),
    "BMUF": recsync.BMUF(ALPHA, eta=0.8, momentum=0.5),
    "Hop": recsync.Hop(recsync.topology.Topology([[1 - ALPHA, ALPHA], [ALPHA, 1 - ALPHA]])),
}
# With a backup worker groups go on without each other.
ALONE = recsync.Hop(recsync.topology.ring(2), backup_workers=1)
RING_OF_3 = recsync.Hop(recsync.topology.ring(3))


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=6)


def hierarchical(cluster, algorithm=BETWEEN["EASGD"], **options):
    settings = {"groups": 2, "trainers_per_group": 2, "ps_per_group": 1}
    return recsync.HierarchicalStrategy(cluster, algorithm, **{**settings, **options})


def batches_of(worker: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(worker)
    x = random.normal(size=(ROUNDS, BATCH, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32))[..., np.newaxis] + worker
    return list(zip(x, y, strict=True))


def line(strategy):
    """A model of two weights, one of them of three elements."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.set_weights([np.full((3, 1), 0.5, np.float32), np.zeros(1, np.float32)])
        model.compile(recsync.optimizers.SGD(RATE), "mse")
    return model


def datasets(strategy):
    """Each worker has its own batches."""

    def dataset_fn(context):
        x, y = zip(*batches_of(context.input_pipeline_id), strict=True)
        return tf.data.Dataset.from_tensor_slices((np.array(x), np.array(y)))

    return strategy.distribute_datasets_from_function(dataset_fn)


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
                lambda: len(there) == WORKERS and turn[0] % WORKERS == slot.number, 60
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
        assert wait_until(lambda: counts() == due, 60), f"{counts()} instead of {due}"
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


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_scripted_run_equals_numpy(cluster, in_turn, inside, name):
    check_scripted_run(cluster, in_turn, inside, name)


@pytest.mark.parametrize(
    ("inside", "name"),
    [("hogwild", "EASGD"), ("async", "BMUF"), ("GBA", "Hop"), ("sync", "MA")],
)
def test_a_scripted_run_of_placed_layers_equals_numpy(cluster, in_turn, inside, name):
    check_scripted_run(cluster, in_turn, inside, name, placement="auto")


def test_updates_count_that_are_applied_before_a_loop_has_begun_by_hop(
    cluster, in_turn, monkeypatch
):
    run = GroupHopSynchronizer._run

    def run_late(synchronizer, loop):
        time.sleep(0.5)
        run(synchronizer, loop)

    monkeypatch.setattr(GroupHopSynchronizer, "_run", run_late)
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


WIDE = 16


def click_model(strategy, metrics=(), steps_per_execution=1):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vector = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("table", 40, 8)],
            [recsync.layers.FeatureConfig("id", table="table")],
            concatenate=True,
        )({"id": ids})
        hidden = keras.layers.Dense(WIDE, "relu", name="hidden")(vector)
        normal = keras.layers.BatchNormalization(name="normal")(hidden)
        model = keras.Model({"id": ids}, keras.layers.Dense(1, "sigmoid", name="top")(normal))
        model.compile(
            recsync.optimizers.Adagrad(0.1),
            "binary_crossentropy",
            metrics=list(metrics),
            steps_per_execution=steps_per_execution,
        )
    return model


def clicks(batches: int) -> tf.data.Dataset:
    ids = np.random.default_rng(1).integers(0, 40, batches * BATCH)
    y = (ids % 2).astype(np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices(({"id": ids}, y)).batch(BATCH)


def shards_of(strategy, model) -> dict[str, list[str]]:
    """Where each group has its copy of each trainable variable that is copied."""
    copies = model.train_function.synchronizer.copies
    names = {id(v._value): v.path for v in model.trainable_variables}
    return {
        names[id(shown)]: [copies.of(group)[i].device.split("/")[-2] for group in copies.there]
        for i, shown in enumerate(copies.variables)
        if id(shown) in names
    }


@pytest.mark.parametrize("between", ["EASGD", "BMUF"])
def test_a_copy_is_divided_among_the_servers_of_its_group(cluster, between):
    strategy = hierarchical(cluster, BETWEEN[between], ps_per_group=2, output="mean")
    assert strategy.sync_ps == ((5,) if between == "EASGD" else ())
    assert strategy.embedding_ps == ((4,) if between == "EASGD" else (4, 5))
    model = click_model(strategy, metrics=["AUC"], steps_per_execution=2)
    losses = model.fit(clicks(40), epochs=2, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    places = shards_of(strategy, model)
    assert len(places) == 6  # Two dense layers and the normalization between; no table.
    # Of each group the same, and both servers have some.
    assert {tuple(devices) for devices in places.values()} == {
        ("task:0", "task:2"),
        ("task:1", "task:3"),
    }
    report = strategy.sync_report(model)
    sizes = sum(
        np.size(w)
        for v, w in zip(model.weights, model.get_weights(), strict=True)
        if v.path in places
    )
    assert report.elements == sizes
    assert report.steps == 2 * 40
    assert len(report.syncs) == 2 and all(report.syncs)
    assert strategy.average_sync_gap(model) > 0
    # What is seen is the mean, and what one assigns all groups take over.
    first, second = strategy.copies(model)
    shown = [v.numpy() for v in model.trainable_variables if v.path in places]
    for mean, a, b in zip(shown, first, second, strict=True):
        np.testing.assert_allclose(mean, (a + b) / 2, rtol=1e-5, atol=1e-6)
    moving = model.get_layer("normal").moving_mean.numpy()
    assert np.any(moving)
    model.get_layer("top").set_weights([np.full((WIDE, 1), 2.0), np.array([1.0])])
    recsync.testing.set_compute_time(strategy, 0.01)
    model.optimizer.learning_rate = 0.0
    model.fit(clicks(4), verbose=0)
    for copy in strategy.copies(model):
        np.testing.assert_allclose(copy[-1], [1.0], rtol=1e-6)


def test_groups_go_on_from_a_checkpoint_and_others_with_the_mean(cluster, tmp_path):
    strategy = hierarchical(cluster)
    model = click_model(strategy)
    model.fit(clicks(20), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, groups=strategy.worker_states(model))
    path = checkpoint.save(str(tmp_path / "clicks"))
    copies = strategy.copies(model)
    shown = model.predict(clicks(4), verbose=0)

    other = hierarchical(cluster)
    restored = click_model(other)
    states = other.worker_states(restored)
    tf.train.Checkpoint(model=restored, groups=states).restore(path).assert_consumed()
    for copy, saved in zip(other.copies(restored), copies, strict=True):
        for a, b in zip(copy, saved, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(restored.predict(clicks(4), verbose=0), shown, rtol=1e-5)

    # One group on two servers: its shards are others, and it begins with the mean.
    one = hierarchical(cluster, groups=1, trainers_per_group=4, ps_per_group=2)
    merged = click_model(one)
    states = one.worker_states(merged)
    tf.train.Checkpoint(model=merged, groups=states).restore(path).assert_consumed()
    (copy,) = one.copies(merged)
    for value, a, b in zip(copy, *copies, strict=True):
        np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5, atol=1e-6)
    merged.fit(clicks(8), verbose=0)


@pytest.mark.parametrize(("between", "placement"), [("EASGD", "auto"), ("Hop", "trainers")])
def test_nets_of_a_trainer_train_side_by_side(cluster, between, placement):
    options = {"nets_per_trainer": 2, "ps_per_group": 2, "placement": placement}
    strategy = hierarchical(cluster, BETWEEN[between], **options)
    recsync.testing.set_compute_time(strategy, 0.02)
    model = click_model(strategy)

    class UntilSynced(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            syncs = strategy.sync_report(model).syncs
            self.model.stop_training = batch >= 100 and min(syncs) > 0

    model.fit(clicks(50).repeat(200), callbacks=[UntilSynced()], verbose=0)
    threads = {slot.index: slot.number for slot in model.train_function._run.slots}
    assert threads == {0: 1, 1: 3, 2: 5, 3: 7}
    # Two trainers of two nets each share a copy: while one computes, the others update it.
    staleness = strategy.staleness(model).dense
    assert staleness.mean > 2 and staleness.max >= 4
    model.fit(clicks(40), verbose=0)
    assert sum(strategy.worker_steps(model)) == 40
    assert np.isfinite(model.evaluate(clicks(8), verbose=0))


@pytest.mark.parametrize(
    ("inside", "between", "placement"),
    [("hogwild", "EASGD", "trainers"), ("sync", "Hop", "trainers"), ("sync", "EASGD", "auto")],
)
def test_a_killed_trainer_leaves_its_group_running_and_comes_back(
    cluster, inside, between, placement
):
    strategy = hierarchical(
        cluster, BETWEEN[between], aggregation=INSIDE[inside], placement=placement
    )
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)
    steps = {}

    def note(name):
        steps[name] = strategy.worker_steps(model)

    class UntilBack(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done = strategy.worker_steps(model)
            if "back" in steps:
                self.model.stop_training = done[3] > steps["back"][3]
            # The other trainer of its group goes on, and so does the other group.
            elif "without" in steps and np.all(np.greater(done[:3], steps["without"][:3])):
                note("back")
                cluster.restart("worker", 3)

    model.fit(
        clicks(50).repeat(200),
        verbose=0,
        callbacks=[
            AtBatch(8, lambda: cluster.kill("worker", 3)),
            AtBatch(24, lambda: note("without")),
            UntilBack(),
        ],
    )
    assert strategy.losses(model).workers == 1
    assert strategy.worker_steps(model)[3] > steps["back"][3]
    assert None not in strategy.copies(model)


@pytest.mark.parametrize(
    ("inside", "between", "placement"),
    [
        ("hogwild", "EASGD", "trainers"),
        ("sync", "MA", "trainers"),
        ("hogwild", "Hop", "trainers"),
        ("hogwild", "EASGD", "auto"),
    ],
)
def test_a_lost_server_of_a_group_stops_that_group_alone_until_it_is_back(
    cluster, caplog, inside, between, placement
):
    algorithm = ALONE if between == "Hop" else BETWEEN[between]
    strategy = hierarchical(cluster, algorithm, aggregation=INSIDE[inside], placement=placement)
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)
    steps, syncs = {}, {}

    def note(name):
        steps[name] = strategy.worker_steps(model)
        syncs[name] = strategy.sync_report(model).syncs

    def come_back_when_others_have_gone_on():
        done, then = strategy.worker_steps(model), steps["without"]
        has_synced = strategy.sync_report(model).syncs[0] > syncs["without"][0]
        if done[0] > then[0] and done[1] > then[1] and (has_synced or between == "MA"):
            note("back")
            cluster.restart("ps", 1)

    class UntilBack(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if "back" not in steps:
                if "without" in steps:
                    come_back_when_others_have_gone_on()
                return
            done, then = strategy.worker_steps(model), steps["back"]
            has_synced = strategy.sync_report(model).syncs[1] > syncs["back"][1]
            if done[2] > then[2] + 2 and done[3] > then[3] + 2 and has_synced:
                self.model.stop_training = True

    model.fit(
        clicks(50).repeat(200),
        verbose=0,
        callbacks=[
            AtBatch(12, lambda: cluster.kill("ps", 1)),
            AtBatch(40, lambda: note("without")),
            UntilBack(),
        ],
    )
    assert steps["back"][2:] == steps["without"][2:]
    assert syncs["back"][1] == syncs["without"][1]
    # No worker was lost, only what two of them trained on.
    assert strategy.losses(model).workers == 0
    assert caplog.text.count("ps:1 was lost in the middle of a pass") == 1
    if between == "Hop":
        assert "Group 1 was lost; group 0 go on without it." in caplog.text
        assert "with the mean parameters of group 0." in caplog.text
    else:
        source = "sync PSs" if between == "EASGD" else "other trainers"
        assert f"Group 1 goes on with the parameters of the {source}." in caplog.text
    assert None not in strategy.copies(model)
    model.fit(clicks(20), verbose=0)
    assert np.isfinite(model.evaluate(clicks(20), verbose=0))


@pytest.mark.parametrize("between", ["EASGD", "Hop"])
def test_a_group_whose_server_stands_still_goes_on_where_it_was(cluster, caplog, between):
    algorithm = ALONE if between == "Hop" else BETWEEN[between]
    # Where workers wait for tokens, and for steps that others' pushes complete.
    strategy = hierarchical(cluster, algorithm, aggregation=INSIDE["sync"], silence_timeout=3.0)
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)
    given_up = "ps:1 has not answered for"
    then: list[list[int]] = []

    class Resume(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done = strategy.worker_steps(model)
            if given_up in caplog.text and not then:
                then.append(done)
                cluster.kill("worker", 3)  # The tokens that it has the other one waits for.
            elif then and len(then) == 1 and min(done[:2]) > max(then[0][:2]) + 10:
                then.append(done)
                cluster.resume("ps", 1)
            elif len(then) == 2 and "worker:3 was lost" in caplog.text and done[2] > then[1][2] + 4:
                then.append(done)
                cluster.restart("worker", 3)
            elif len(then) == 3 and done[3] > then[1][3] + 4:
                model.stop_training = True

    try:
        model.fit(
            clicks(50).repeat(400),
            verbose=0,
            callbacks=[AtBatch(12, lambda: cluster.pause("ps", 1)), Resume()],
        )
    finally:
        cluster.resume("ps", 1)
    assert then[0][2:] == then[1][2:]  # The group stood still, and the other did not.
    assert strategy.losses(model).workers == 1
    # It has its own.
    assert "goes on with the parameters of" not in caplog.text
    assert ("with its own parameters." in caplog.text) == (between == "Hop")
    assert caplog.text.count(given_up) <= 2


def test_a_group_whose_server_is_away_is_done_without_from_one_epoch_to_the_next(cluster):
    strategy = hierarchical(cluster, aggregation=INSIDE["GBA"])
    recsync.testing.set_compute_time(strategy, 0.02)
    model = click_model(strategy)
    model.fit(clicks(20), verbose=0)
    pushes = strategy.aggregation(model)[0].included
    assert pushes
    cluster.kill("ps", 0)
    report = recsync.callbacks.ShadowReport()
    model.fit(clicks(20), epochs=2, verbose=0, validation_data=clicks(4), callbacks=[report])
    assert strategy.worker_steps(model)[:2] == [0, 0]
    assert strategy.copies(model)[0] is None
    # What it had counted when it was last asked.
    assert strategy.aggregation(model)[0].included == pushes
    assert model.predict(clicks(4), verbose=0).shape == (4 * BATCH, 1)
    cluster.restart("ps", 0)
    back = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", min(strategy.worker_steps(model)) > 0
        )
    )
    model.fit(clicks(50).repeat(200), verbose=0, callbacks=[back])
    assert None not in strategy.copies(model)
    assert strategy.aggregation(model)[0].included > pushes


def test_a_server_that_is_readmitted_between_two_fits_has_its_group_go_on(cluster, caplog):
    strategy = hierarchical(cluster, aggregation=INSIDE["sync"])
    model = click_model(strategy)
    model.fit(clicks(8), verbose=0)
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    cluster.readmit()
    recsync.testing.set_compute_time(strategy, 0.05)
    model.fit(clicks(24), verbose=0)
    assert min(strategy.worker_steps(model)) > 0
    assert "Group 1 goes on with the parameters of the sync PSs." in caplog.text
    assert strategy.losses(model).workers == 0


def test_a_group_comes_back_that_has_lost_a_server_and_a_trainer_at_once(cluster):
    strategy = hierarchical(cluster, BETWEEN["BMUF"], aggregation=INSIDE["sync"])
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)

    def kill():
        cluster.kill("worker", 2)
        cluster.kill("ps", 1)

    def start():
        then.extend(strategy.worker_steps(model))
        cluster.restart("ps", 1)
        cluster.restart("worker", 2)

    then: list[int] = []

    model.fit(
        clicks(50).repeat(400),
        verbose=0,
        callbacks=[AtBatch(12, kill), AtBatch(40, start), UntilAllGoOn(then)],
    )
    assert None not in strategy.copies(model)


def test_all_shards_are_synchronized_while_nobody_trains(cluster):
    strategy = hierarchical(
        cluster, BETWEEN["MA"], ps_per_group=2, mode=recsync.Foreground(per_minute=300)
    )
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)
    model.fit(clicks(60), verbose=0)
    first, second = strategy.sync_report(model).syncs
    assert first == second > 0


def numbers(batches: int) -> tf.data.Dataset:
    """Batches for `line`."""
    x = np.random.default_rng(1).normal(size=(batches * BATCH, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)


def threads_of_hop() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("recsync_hop")]


def test_servers_exchange_their_shards_after_so_many_updates_by_hop(cluster, tmp_path):
    between = recsync.Hop(
        recsync.topology.ring(2), updates_per_iteration=3, check_invariants=True, staleness_bound=1
    )
    options = {"ps_per_group": 2, "output": "mean", "aggregation": INSIDE["GBA"]}
    strategy = hierarchical(cluster, between, **options)
    assert strategy.algorithm is between and strategy.sync_ps == ()
    model = line(strategy)
    assert strategy.hop_report(model) is None
    recsync.testing.set_compute_time(strategy, 0.01)
    history = model.fit(
        numbers(80), epochs=2, verbose=0, callbacks=[recsync.callbacks.ShadowReport()]
    ).history
    assert not threads_of_hop()
    first, second = strategy.copies(model)
    for value, a, b in zip(model.get_weights(), first, second, strict=True):
        np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5, atol=1e-6)
    report, servers = strategy.sync_report(model), strategy.hop_report(model)
    assert report.steps == 160 and report.elements == 4 and report.sync_ps_bytes == 0
    # Two pushes are an update, and three updates an iteration at least.
    assert sum(report.syncs) <= 160 / 6
    for group in range(2):
        assert report.syncs[group] > 4
        # A kernel and a bias, each on a server, are exchanged by themselves.
        assert len(servers[group]) == 2
        assert all(server.updates_used > 0 for server in servers[group])
        assert servers[group][0].iteration >= report.syncs[group] - 1
    assert strategy.average_sync_gap(model) == report.steps / sum(report.syncs)
    assert strategy.average_sync_gap(model, by="bytes") == float("inf")
    assert history["average_sync_gap"][1] >= 6 and history["syncs_per_second"][1] > 0
    with pytest.raises(ValueError, match="HopReport can't report on a HierarchicalStrategy; use"):
        model.fit(numbers(4), verbose=0, callbacks=[recsync.callbacks.HopReport()])

    # Groups go on from a checkpoint, with their iterations.
    latest = max(server.iteration for of_group in servers for server in of_group)
    checkpoint = tf.train.Checkpoint(model=model, groups=strategy.worker_states(model))
    path = checkpoint.save(str(tmp_path / "line"))
    other = hierarchical(cluster, between, **options)
    restored = line(other)
    states = other.worker_states(restored)
    tf.train.Checkpoint(model=restored, groups=states).restore(path).assert_consumed()
    for copy, saved in zip(other.copies(restored), (first, second), strict=True):
        for a, b in zip(copy, saved, strict=True):
            np.testing.assert_array_equal(a, b)
    restored.fit(numbers(40), verbose=0)
    assert other.hop_report(restored)[0][0].iteration > latest


def test_hop_goes_on_from_a_checkpoint_of_another_algorithm(cluster, tmp_path):
    easgd = hierarchical(cluster)
    model = line(easgd)
    model.fit(numbers(8), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, groups=easgd.worker_states(model))
    path = checkpoint.save(str(tmp_path / "line"))
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    restored = line(strategy)
    states = strategy.worker_states(restored)
    tf.train.Checkpoint(model=restored, groups=states).restore(path).assert_consumed()
    np.testing.assert_array_equal(strategy.copies(restored)[1][0], easgd.copies(model)[1][0])
    restored.fit(numbers(8), verbose=0)
    assert strategy.hop_report(restored)[1][0].iteration < 8  # They begin anew.


def test_trainers_wait_for_no_neighbor_by_hop(cluster):
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.03, recsync.testing.SlowWorkers(20.0, [2, 3]))
    model = line(strategy)
    model.fit(numbers(150), verbose=0)
    steps, syncs = strategy.worker_steps(model), strategy.sync_report(model).syncs
    assert min(steps[:2]) > 4 * max(steps[2:])
    assert 0 < syncs[0] <= syncs[1] + 1  # The fast group's servers do.


def test_copies_stand_still_while_they_are_read_within_an_epoch_by_hop(cluster):
    # An iteration for each update: without the pause, one of them is always under way.
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.005)
    model, seen = line(strategy), []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 40 == 20:
                before = strategy.copies(self.model)
                time.sleep(0.2)
                seen.append((before, strategy.copies(self.model)))

    model.fit(numbers(200), verbose=0, callbacks=[Reads()])
    assert len(seen) == 5
    for before, after in seen:
        for old, new in zip(before, after, strict=True):
            for one, other in zip(old, new, strict=True):
                np.testing.assert_array_equal(one, other)
    assert min(strategy.sync_report(model).syncs) > 3  # And they go on.


def test_an_optimizer_that_would_undo_the_average_is_refused_by_hop(cluster):
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    model = compiled(strategy, slope_model, lambda: recsync.optimizers.Ftrl(0.1), mean_output)
    with pytest.raises(ValueError, match="optimizer must not be Ftrl under Hop between groups"):
        model.fit(numbers(4), verbose=0)


def test_a_group_without_data_leaves_its_neighbor_going_on_by_hop(cluster, monkeypatch):
    monkeypatch.setattr(hop_groups, "_LEAVE_SECONDS", 0.1)
    strategy = hierarchical(cluster, recsync.Hop(recsync.topology.ring(2)))
    recsync.testing.set_compute_time(strategy, 0.02)
    model = line(strategy)

    def dataset_fn(context):
        return numbers(60 if context.input_pipeline_id < 2 else 3)

    model.fit(strategy.distribute_datasets_from_function(dataset_fn), verbose=0)
    first, second = strategy.sync_report(model).syncs
    assert second <= 6 and first > second + 5
    # All take part again in the next epoch.
    model.fit(numbers(40), verbose=0)
    assert strategy.sync_report(model).syncs[1] > second


def test_a_killed_server_of_a_group_ends_training_if_neighbors_wait_for_it_by_hop(cluster):
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy)
    message = "group 1 was lost, and group 0 can't go on without group 1: .* backup_workers=0"
    with pytest.raises(RuntimeError, match=message):
        model.fit(numbers(400), verbose=0, callbacks=[AtBatch(8, lambda: cluster.kill("ps", 1))])
    assert wait_until(lambda: not threads_of_hop(), 20), threads_of_hop()


@pytest.mark.parametrize("times", [2, 1000], ids=["twice", "always"])
def test_an_iteration_that_fails_is_made_anew_by_hop(cluster, monkeypatch, caplog, times):
    make, left = hop_groups._iteration, [times]

    def failing(parameters):
        if not left[0]:
            return make(parameters)
        left[0] -= 1
        raise tf.errors.InternalError(None, None, "garbled")

    monkeypatch.setattr(hop_groups, "_iteration", failing)
    monkeypatch.setattr(hop_groups, "_RETRY_SECONDS", 0.01)
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.02)
    model = line(strategy)
    if times > 2:
        with pytest.raises(tf.errors.InternalError, match="garbled"):
            model.fit(numbers(400), verbose=0)
    else:

        def end_when_all_have_exchanged(batch, logs):
            model.stop_training = min(strategy.sync_report(model).syncs) > 0

        ends = keras.callbacks.LambdaCallback(on_train_batch_end=end_when_all_have_exchanged)
        model.fit(numbers(4000), verbose=0, callbacks=[ends])
        assert min(strategy.sync_report(model).syncs) > 0
    assert "failed, and it takes part anew (1 of 4): garbled" in caplog.text
    assert wait_until(lambda: not threads_of_hop(), 20), threads_of_hop()


@pytest.mark.parametrize("ps", [2, 5], ids=["embedding PS", "sync PS"])
def test_a_killed_server_of_no_group_ends_training_with_an_error_that_names_it(cluster, ps):
    strategy = hierarchical(cluster)
    recsync.testing.set_compute_time(strategy, 0.05)
    model = click_model(strategy)
    with pytest.raises(RuntimeError, match=f"ps:{ps} was lost"):
        model.fit(
            clicks(50).repeat(200),
            verbose=0,
            callbacks=[AtBatch(8, lambda: cluster.kill("ps", ps))],
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 0}, "groups must be an integer of at least 1, got 0"),
        ({"ps_per_group": 0}, "ps_per_group must be an integer of at least 1, got 0"),
        ({"trainers_per_group": True}, "trainers_per_group must be .*got True"),
        ({"groups": 3}, "groups=3 with trainers_per_group=2 need 6 workers, .* workers=4"),
        ({"ps_per_group": 3}, "ps_per_group=3 and sync_ps=1 need 7 parameter servers, .* ps=6"),
        ({"sync_ps": 0}, "EASGD needs at least one sync PS"),
        ({"sync_ps": [5]}, r"sync_ps must be an integer of at least 0, got \[5\]"),
        ({"sync_ps": 7}, "sync_ps=7 needs as many parameter servers"),
        ({"algorithm": recsync.ModelAveraging(0.5), "sync_ps": 1}, "has no use for sync PSs"),
        ({"algorithm": 0.3}, "algorithm must be EASGD, .* Hop.* not 0.3"),
        (
            {"algorithm": RING_OF_3},
            "topology must have as many workers as there are groups, 2, not 3",
        ),
        ({"algorithm": ALONE, "sync_ps": 1}, "Hop .* has no use for sync PSs"),
        ({"algorithm": ALONE, "mode": recsync.Foreground(5)}, 'mode must be "shadow" with Hop'),
        ({"algorithm": ALONE, "mode": recsync.Shadow(0.5)}, 'mode must be "shadow" with Hop'),
        ({"nets_per_trainer": 0}, "nets_per_trainer must be an integer of at least 1, got 0"),
        (
            {"nets_per_trainer": 2, "aggregation": INSIDE["GBA"]},
            "nets_per_trainer=2 goes with an aggregation that applies each push at once, .* GBA",
        ),
        ({"aggregation": "gba"}, "aggregation must be one of tf_recsync.modes, not 'gba'"),
        ({"aggregation": INSIDE["GBA"], "local_batch_size": 8}, "local_batch_size=8 is not that"),
        ({"mode": "background"}, 'mode must be "shadow", a Shadow or a Foreground'),
        ({"output": "last"}, 'output must be "first", "mean" or from 0 to 1, not \'last\''),
        ({"local_batch_size": 0}, "local_batch_size must be an integer of at least 1"),
        ({"worker_timeout": 0}, "worker_timeout must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(cluster, wrong, message):
    with pytest.raises(ValueError, match=message):
        hierarchical(cluster, **wrong)


def test_servers_need_threads_for_what_may_wait_on_them_by_hop(cluster, monkeypatch):
    monkeypatch.setattr(server_threads.ops, "server_threads", lambda needed: 7)
    message = "parameter server 0 has 7 threads, and up to 8 calls may wait in it for neighbors"
    with pytest.raises(ValueError, match=message):
        hierarchical(cluster, BETWEEN["Hop"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"topology": 2}, "topology must be from tf_recsync.topology, not 2"),
        ({"updates_per_iteration": 0}, "updates_per_iteration must be an integer of at least 1"),
        ({"max_iteration_gap": 0}, "max_iteration_gap must be an integer of at least 1"),
        ({"backup_workers": 2}, "backup_workers must be less than the in-neighbors"),
        ({"staleness_bound": -1}, "staleness_bound must be an integer of at least 0"),
        ({"skip": 3}, "skip must be a Skip or None, not 3"),
        ({"protocol": "gossip"}, 'protocol must be "token_queue" or "notify_ack"'),
        ({"protocol": "notify_ack", "backup_workers": 1}, "notify_ack excludes backup workers"),
        ({"check_invariants": 1}, "check_invariants must be a bool, not 1"),
        ({"stall_seconds": 0}, "stall_seconds must be positive"),
    ],
)
def test_what_hop_does_not_know_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        recsync.Hop(**{"topology": recsync.topology.ring(2), **wrong})


def test_it_is_a_strategy_that_reports_nothing_before_it_trains(cluster):
    strategy = hierarchical(cluster, aggregation=INSIDE["GBA"])
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.mode.name == "GBA" and strategy.examples_per_step == 2 * BATCH
    model = click_model(strategy)
    assert strategy.sync_report(model).syncs == [0, 0]
    assert strategy.average_sync_gap(model) == float("inf")
    assert strategy.aggregation(model) is None
    assert len(strategy.copies(model)) == 2
    model.fit(clicks(4), verbose=0)
    reports = strategy.aggregation(model)
    # Each push goes to the group's server and to those of the table.
    tables = sum("/job:ps" in v._value.device for v in model.trainable_variables)
    assert sum(r.included + r.excluded for r in reports) == 4 * (1 + tables)
