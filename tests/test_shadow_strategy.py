"""ShadowSync with `model.fit`: three trainers, two embedding PSs, one or two sync PSs."""

import collections
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Gossip, check_group_auc, events, fits_until, wait_until

import tf_recsync as recsync
from tf_recsync.strategies.model_functions import Steps
from tf_recsync.synchronization.shadow_trainers import Trainers

ROWS, WIDTH, EXAMPLES, BATCH = 20, 4, 1500, 12
STEPS = EXAMPLES // BATCH  # Of an epoch.
SECONDS = 0.02  # Of a step. With others than before, a model's steps are traced anew.


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=3, ps=4)


def clicks():
    random = np.random.default_rng(0)
    ids = random.integers(0, ROWS, [EXAMPLES])
    x = random.normal(size=[EXAMPLES, WIDTH]).astype(np.float32)
    logit = 3 * random.normal(size=ROWS)[ids] + x[:, 0]
    y = (random.random(EXAMPLES) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return {"id": ids, "x": x}, y[:, np.newaxis]


def dataset(steps=STEPS):
    return tf.data.Dataset.from_tensor_slices(clicks()).batch(BATCH).take(steps)


def parts(strategy, steps):
    """So many steps for each trainer, of data of its own: all of them train."""

    def dataset_fn(context):
        return dataset().skip(steps * context.input_pipeline_id).take(steps)

    return strategy.distribute_datasets_from_function(dataset_fn)


def adagrad():
    return recsync.optimizers.Adagrad(0.2)


def dense_of(model):
    """The trainable variables of which there is a copy on each trainer."""
    return [v for v in model.trainable_variables if "/job:ps" not in v._value.device]


def click_model(strategy, optimizer=adagrad, steps_per_execution=1, collection=False, metrics=()):
    keras.utils.set_random_seed(1)  # Of two models in a test, too.
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        x = keras.Input((WIDTH,), name="x")
        if collection:
            vector = recsync.layers.EmbeddingCollection(
                [recsync.layers.TableConfig("table", ROWS, 8)],
                [recsync.layers.FeatureConfig("id", table="table")],
                concatenate=True,
            )({"id": ids})
        else:
            vector = keras.layers.Embedding(ROWS, 8)(ids)
        hidden = keras.layers.Dense(16, "relu")(keras.layers.Concatenate()([vector, x]))
        model = keras.Model({"id": ids, "x": x}, keras.layers.Dense(1, "sigmoid")(hidden))
        model.compile(
            optimizer(),
            "binary_crossentropy",
            metrics=list(metrics),
            steps_per_execution=steps_per_execution,
        )
    return model


def dense_model(strategy, optimizer=adagrad):
    """One of "x" alone, without a table: its first step takes less processor time."""
    with strategy.scope():
        ids, x = keras.Input((), dtype="int64", name="id"), keras.Input((WIDTH,), name="x")
        model = keras.Model({"id": ids, "x": x}, keras.layers.Dense(1, "sigmoid")(x))
        model.compile(optimizer(), "binary_crossentropy")
    return model


def fit_until_all_have_synchronized(strategy, model):
    """Trains, epoch after epoch, until each trainer has done so since the call."""
    before = strategy.sync_report(model).syncs
    recsync.testing.set_compute_time(strategy, SECONDS)  # All of them train.

    def have_synchronized():
        model.fit(dataset(24), verbose=0)
        now = strategy.sync_report(model).syncs
        return all(after > then for then, after in zip(before, now, strict=True))

    assert wait_until(have_synchronized, 120)


class Follow(recsync.Algorithm):
    """Another one: trainers follow the steps of the central copy, which they remember."""

    is_central = True

    def states(self, start):
        return {"seen": start}

    def sync(self, trainers, center):
        (trainer,) = trainers
        after = center.exchange(trainer.read(), 0.3)
        with trainer.on():
            target = 0.5 * (after + trainer.state("seen"))
            trainer.set_state("seen", after)
        trainer.move(target, 0.3)


class Summing(recsync.EASGD):
    """With a vector that is another one for each trainer: the sum of what it has sent."""

    def states(self, start):
        return {"sum": np.zeros_like(start)}

    def sync(self, trainers, center):
        for trainer in trainers:
            trainer.set_state("sum", trainer.state("sum") + trainer.read())
        super().sync(trainers, center)


MODES = {
    "a user's": (Gossip(), "shadow"),
    "a user's, central": (Follow(), recsync.Foreground(gap=5)),
    "S-EASGD": (recsync.EASGD(0.3), "shadow"),
    "S-MA": (recsync.ModelAveraging(0.3), "shadow"),
    "S-BMUF": (recsync.BMUF(0.3, 1.0, momentum=0.2), "shadow"),
    "FR-EASGD-5": (recsync.EASGD(0.3), recsync.Foreground(gap=5)),
    "FR-EASGD by time": (recsync.EASGD(0.3), recsync.Foreground(per_minute=600)),
    "FR-MA-5": (recsync.ModelAveraging(0.3), recsync.Foreground(gap=5)),
    "FR-BMUF by time": (recsync.BMUF(0.3, 1.0), recsync.Foreground(per_minute=600)),
}


# Those that train several steps in a call, and those that are evaluated on servers, too.
SEVERAL = ("S-EASGD", "FR-EASGD-5", "FR-MA-5")
EVALUATED = ("S-EASGD", "FR-BMUF by time")


def loss_and_auc(predicted):
    """The mean loss, and how often one who clicked is placed before one who did not."""
    y = clicks()[1]
    loss = -np.mean(y * np.log(predicted) + (1 - y) * np.log(1 - predicted))
    return loss, np.mean(predicted[y == 1][:, np.newaxis] > predicted[y == 0])


def begin_together(monkeypatch, threads):
    """Has so many threads be there, for which others wait, before one of them takes a step."""
    changed, there, run_steps = (
        threading.Condition(),
        collections.defaultdict(set),
        Steps._run_steps,
    )

    def when_all_are_there(function, slot, n):
        with changed:
            of_pass = there[slot.pass_began]
            of_pass.add(slot.number)
            changed.notify_all()
            assert changed.wait_for(lambda: len(of_pass) == threads, 100)
        return run_steps(function, slot, n)

    monkeypatch.setattr(Steps, "_run_steps", when_all_are_there)


@pytest.mark.cases("a user's, central", "S-BMUF", "FR-EASGD-5")
@pytest.mark.parametrize("name", MODES)
def test_every_algorithm_trains_and_keeps_the_copies_together(cluster, monkeypatch, name):
    algorithm, mode = MODES[name]
    if name == "FR-MA-5":
        begin_together(monkeypatch, 6)
    strategy = recsync.ShadowSyncStrategy(
        cluster,
        algorithm,
        mode=mode,
        threads_per_trainer=2,
        sync_ps=2 if algorithm.is_central else 0,
    )
    recsync.testing.set_compute_time(strategy, 0.02)
    model = click_model(
        strategy,
        steps_per_execution=2 if name in SEVERAL else 1,
        collection=name in EVALUATED,
        metrics=["AUC"] if name in EVALUATED else [],
    )
    start = model.trainable_variables[-1].numpy()
    losses = model.fit(dataset(), epochs=2, verbose=0).history["loss"]
    epochs = 2
    # On a busy machine the first synchronization may take longer than that, or a trainer hardly
    # take part.
    while not (
        all(strategy.sync_report(model).syncs) and min(strategy.worker_steps(model)) >= STEPS // 6
    ):
        losses += model.fit(dataset(), verbose=0).history["loss"]
        epochs += 1
    assert losses[-1] < losses[0]
    steps = epochs * STEPS
    report = strategy.sync_report(model)
    assert report.elements == 12 * 16 + 16 + 16 + 1
    assert all(syncs > 0 for syncs in report.syncs)
    if name in ("FR-EASGD-5", "a user's, central"):
        # Each thread for itself, every five of its own iterations, of which some are left.
        assert (steps - 6 * 4) / 5 <= sum(report.syncs) <= steps / 5
    elif name == "FR-MA-5":
        # All six threads after five iterations of each, and in an epoch's last, half round those
        # that have iterations left.
        least = epochs * (STEPS // 30)
        assert set(report.syncs) <= set(range(least, least + 2 * epochs + 1))
    elif not algorithm.is_central:
        assert len(set(report.syncs)) == 1  # All together.
    # The server counts what it sends and receives, the coordinator what it has it do.
    expected = sum(report.syncs) * 8 * report.elements if algorithm.is_central else 0
    assert report.sync_ps_bytes == expected
    copies = strategy.copies(model)
    assert len(copies) == 3
    # All threads of all trainers have counted, and every update is in some trainer's version.
    staleness = strategy.staleness(model)
    assert staleness.dense.count == steps * 4
    assert staleness.dense.max >= 2  # Two threads on a copy.
    # What users see is the first trainer's copy.
    for variable, copy in zip(dense_of(model), copies[0], strict=True):
        np.testing.assert_array_equal(variable.numpy(), copy)
    assert not np.array_equal(model.trainable_variables[-1].numpy(), start)
    inputs = {name: tf.constant(values) for name, values in clicks()[0].items()}
    shown = model(inputs).numpy()
    expected, auc = loss_and_auc(shown)
    assert auc > 0.75
    if name in EVALUATED:
        loss, auc = model.evaluate(dataset(), verbose=0)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        assert auc > 0.75
        np.testing.assert_allclose(model.predict(dataset(), verbose=0), shown, atol=1e-5)


@pytest.mark.cases("FR-EASGD-5", "FR-BMUF by time")
@pytest.mark.parametrize("name", ["S-EASGD", "FR-EASGD-5", "FR-EASGD by time", "FR-BMUF by time"])
def test_synchronizations_in_flight_are_done_when_fit_shows_what_was_trained(
    cluster, monkeypatch, name
):
    sync = Trainers.sync

    def slow(trainers, members, shard, turns=None):
        time.sleep(0.2)
        return sync(trainers, members, shard, turns)

    monkeypatch.setattr(Trainers, "sync", slow)
    algorithm, mode = MODES[name]
    strategy = recsync.ShadowSyncStrategy(
        cluster,
        algorithm,
        mode=mode,
        threads_per_trainer=2,
        sync_ps=2 if algorithm.is_central else 0,
    )
    model = dense_model(strategy)
    model.fit(dataset(40), verbose=0)
    shown = [variable.numpy() for variable in dense_of(model)]
    time.sleep(0.5)
    for variable, copy in zip(shown, strategy.copies(model)[0], strict=True):
        np.testing.assert_array_equal(variable, copy)


def test_the_group_auc_of_each_epoch_is_that_of_its_predictions(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.3))
    check_group_auc(strategy, adagrad)


def test_tables_are_on_embedding_servers_and_the_rest_is_copied(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=[0, 2])
    assert strategy.sync_ps == (0, 2)
    assert strategy.embedding_ps == (1, 3)
    for collection in (True, False):
        model = click_model(strategy, collection=collection)
        model.fit(dataset(12), verbose=0)
        assert [v.path.split("/")[-1] for v in dense_of(model)] == ["kernel", "bias"] * 2
        tables = [state for state in model.optimizer.states if state.is_table]
        places = [state.variable._value.device for state in tables]
        # The collection's table is sharded; a layer's is whole.
        assert {place.split("task:")[1][0] for place in places} <= {"1", "3"}
        assert len(places) == (2 if collection else 1)
        for state, place in zip(tables, places, strict=True):
            beside = [*state.accumulators, state.versions, state.counters]
            assert {v._value.device for v in beside} == {place}
        assert strategy.staleness(model).rows.count > 0


@pytest.mark.parametrize(
    "make",
    [lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3)), recsync.AsyncStrategy],
    ids=["ShadowSync", "async"],
)
def test_tables_of_a_model_that_keras_builds_as_it_is_called_are_where_they_are_placed(
    cluster, make
):
    class Clicks(keras.Model):
        def __init__(self):
            super().__init__()
            tables = [recsync.layers.TableConfig(f"of_{size}", ROWS, size) for size in (8, 4)]
            features = [recsync.layers.FeatureConfig(t.name, table=t.name) for t in tables]
            self.tables = recsync.layers.EmbeddingCollection(tables, features)

        def call(self, inputs):
            return self.tables(inputs)["of_8"]

    strategy = make(cluster)
    with strategy.scope():
        model = Clicks()
        model({name: np.zeros((1, 2), np.int64) for name in ("of_8", "of_4")})
    assert len(model.tables.variables) > 2
    for variable in model.tables.variables:
        ps = strategy.embedding_ps[variable.physical_table.ps]
        assert variable._value.device == f"/job:ps/replica:0/task:{ps}/device:CPU:0"


def test_tables_are_placed_as_planned_by_what_they_cost(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=[0, 2])
    tables = [recsync.layers.TableConfig(name, ROWS, 8) for name in ("one", "other")]
    features = [recsync.layers.FeatureConfig("id", table=table.name) for table in tables[:1]]
    features.append(recsync.layers.FeatureConfig("again", table="other"))
    data = dataset(24).map(lambda inputs, y: ({"id": inputs["id"], "again": inputs["id"]}, y))
    costs = recsync.profile_costs(tables, features, data, steps=3)
    plan = recsync.plan_placement(tables, ps=len(strategy.embedding_ps), costs=costs)
    inputs = {f.name: keras.Input((), dtype="int64", name=f.name) for f in features}
    with strategy.scope():
        vectors = recsync.layers.EmbeddingCollection(
            tables, features, placement=plan, concatenate=True
        )(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(vectors))
        model.compile(adagrad(), "binary_crossentropy")
    recsync.testing.set_compute_time(strategy, 0.02)
    fits_until(lambda: min(strategy.sync_report(model).syncs) > 0, model, data)
    places = {s.variable._value.device for s in model.optimizer.states if s.is_table}
    assert {int(place.split("task:")[1][0]) for place in places} == {1, 3}


def test_the_output_is_the_mean_on_request(cluster):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.01), mode=recsync.Foreground(gap=8), output="mean"
    )
    model = dense_model(strategy)
    model.fit(parts(strategy, 15), verbose=0)
    copies = strategy.copies(model)
    assert not np.array_equal(copies[0][0], copies[1][0])
    for i, variable in enumerate(dense_of(model)):
        mean = np.mean([copy[i] for copy in copies], axis=0)
        np.testing.assert_allclose(variable.numpy(), mean, atol=1e-6)


@pytest.mark.parametrize("is_restored", [False, True], ids=["trained", "restored"])
def test_assigned_parameters_are_taken_over_by_all_copies_and_the_center(cluster, is_restored):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.5))
    model = dense_model(strategy, lambda: recsync.optimizers.SGD(0.0))
    recsync.testing.set_compute_time(strategy, 0.02)
    model.fit(dataset(24), verbose=0)
    kernel, states = model.layers[-1].kernel, strategy.worker_states(model)
    if is_restored:
        states.deserialize(states.serialize())
    synchronizer = model.train_function.synchronizer
    bias = synchronizer.extras()["center"][WIDTH:]
    kernel.assign(np.full(kernel.shape, 7.0))
    np.testing.assert_array_equal(synchronizer.extras()["center"], [*[7.0] * WIDTH, *bias])
    fit_until_all_have_synchronized(strategy, model)
    # Nothing is learned: a center or a copy that was elsewhere would have moved the others.
    for copy in strategy.copies(model):
        np.testing.assert_allclose(copy[-2], 7.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("easgd",), "algorithm must be EASGD"),
        ((recsync.Hop(recsync.topology.ring(2)),), "algorithm must not be Hop under a ShadowSync"),
        ((recsync.EASGD(0.3), "sometimes"), 'mode must be "shadow"'),
        ((recsync.EASGD(0.3), "shadow", {"threads_per_trainer": 0}), "threads_per_trainer must"),
        ((recsync.EASGD(0.3), "shadow", {"sync_ps": 0}), "EASGD needs at least one sync PS"),
        ((recsync.EASGD(0.3), "shadow", {"sync_ps": 5}), "sync_ps=5 needs as many"),
        ((recsync.EASGD(0.3), "shadow", {"sync_ps": [4]}), "sync_ps names ps:4"),
        ((recsync.EASGD(0.3), "shadow", {"sync_ps": [1, 1]}), "each server once"),
        ((recsync.EASGD(0.3), "shadow", {"sync_ps": "1"}), "a number or task indices"),
        ((recsync.ModelAveraging(0.3), "shadow", {"sync_ps": 1}), "has no use for sync PSs"),
        (
            (recsync.EASGD(0.3), "shadow", {"output": "last"}),
            'output must be "first", "mean" or from 0 to 2, not',
        ),
        ((recsync.EASGD(0.3), "shadow", {"worker_timeout": 0}), "worker_timeout must be positive"),
        ((recsync.EASGD(0.3), "shadow", {"local_batch_size": 0}), "local_batch_size must"),
    ],
)
def test_wrong_arguments_are_named(cluster, arguments, message):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        recsync.ShadowSyncStrategy(cluster, *positional, **options)


def test_a_collection_without_an_embedding_server_is_an_error(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=4)
    with pytest.raises(ValueError, match="needs an embedding PS for its tables"):
        click_model(strategy, collection=True)


def test_stock_optimizers_are_refused(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    model = click_model(strategy, lambda: keras.optimizers.SGD(0.1))
    with pytest.raises(
        ValueError,
        match=r"optimizer must be one of tf_recsync.optimizers .*; use tf_recsync.optimizers.SGD",
    ):
        model.fit(dataset(12), verbose=0)


def ftrl():
    return recsync.optimizers.Ftrl(0.1)


@pytest.mark.parametrize("algorithm", [recsync.EASGD(0.3), recsync.BMUF(0.3, 1.0)])
def test_an_optimizer_that_would_undo_each_synchronization_is_refused(cluster, algorithm):
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm)
    model = click_model(strategy, lambda: recsync.optimizers.per_table(ftrl()))
    name = type(algorithm).__name__
    with pytest.raises(ValueError, match=f"optimizer must not be Ftrl under {name}, .* Ftrl"):
        model.fit(dataset(12), verbose=0)


def test_an_optimizer_that_would_undo_synchronizations_may_train_tables_on_servers(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vector = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("table", ROWS, 8, optimizer=ftrl())],
            [recsync.layers.FeatureConfig("id", table="table")],
            concatenate=True,
        )({"id": ids})
        model = keras.Model({"id": ids}, keras.layers.Dense(1, "sigmoid")(vector))
        model.compile(recsync.optimizers.per_table(adagrad()), "binary_crossentropy")
    assert len(strategy.copies(model)) == 3  # What trains it is made.


def test_copied_parameters_that_are_no_float32_are_refused(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=4)
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vector = keras.layers.Embedding(ROWS, 8, dtype="bfloat16", name="narrow")(ids)
        model = keras.Model({"id": ids}, keras.layers.Dense(1, "sigmoid")(vector))
        model.compile(adagrad(), "binary_crossentropy")
    message = "must be float32 under EASGD; narrow/embeddings is bfloat16"
    with pytest.raises(ValueError, match=message):
        model.fit(dataset(12), verbose=0)


def test_reports_of_an_epoch_are_in_the_history_and_in_tensorboard(cluster, tmp_path):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), mode=recsync.Foreground(gap=4)
    )
    model = click_model(strategy, steps_per_execution=3)
    report = recsync.callbacks.ShadowReport(str(tmp_path))
    assert strategy.average_sync_gap(model) == float("inf")
    steps = 60
    history = model.fit(dataset(steps), epochs=2, verbose=0, callbacks=[report]).history
    done = strategy.sync_report(model)
    assert done.steps == 2 * steps
    assert sum(strategy.worker_steps(model)) == steps
    gaps = history["average_sync_gap"]
    # Every four steps of each of the three threads, whose last ones may be of the next epoch.
    assert (2 * steps - 3 * 3) / 4 <= sum(done.syncs) <= 2 * steps / 4
    assert all((steps - 3 * 3) / 4 <= steps / gap <= (steps + 3 * 3) / 4 for gap in gaps)
    assert sum(history["sync_ps_bytes"]) == done.sync_ps_bytes == sum(done.syncs) * 8 * 225
    for by in ("counters", "bytes"):
        assert min(gaps) <= strategy.average_sync_gap(model, by=by) <= max(gaps)
    with pytest.raises(ValueError, match='by must be "counters" or "bytes"'):
        strategy.average_sync_gap(model, by="time")
    names = {tag for _, tag in events(tmp_path)}
    assert {"recsync/average_sync_gap", "recsync/syncs_per_second"} <= names


def test_more_threads_than_a_server_can_run_are_an_error_and_no_hang(cluster):
    with pytest.raises(ValueError, match="up to 1002 calls may wait in it for other servers"):
        recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), threads_per_trainer=1000)


def test_a_checkpoint_has_all_trainers_and_the_center_go_on_as_they_were(cluster, tmp_path):
    """Also on another number of sync PSs."""
    before = None
    # The first one trains; its number of sync PSs, and another one, go on.
    for servers in (1, 1, 2):
        strategy = recsync.ShadowSyncStrategy(
            cluster,
            Summing(0.3),
            mode=recsync.Foreground(gap=1000 if before else 5),
            sync_ps=servers,
        )
        model = click_model(strategy, lambda: recsync.optimizers.SGD(0.05), collection=True)
        checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
        start = np.concatenate([np.ravel(variable) for variable in dense_of(model)])
        if before is None:
            model.fit(parts(strategy, 14), verbose=0)
            checkpoint.save(str(tmp_path / "clicks"))
        else:
            checkpoint.restore(tf.train.latest_checkpoint(str(tmp_path))).assert_consumed()
            model.optimizer.learning_rate = 0.0
            model.fit(dataset(24), verbose=0)  # It learns nothing, and never synchronizes.
        copies = strategy.copies(model)
        extras = model.train_function.synchronizer.extras()
        center, sums = extras["center"], extras["state_sum"]
        if before is None:
            assert not np.array_equal(copies[0][0], copies[1][0])
            assert not np.array_equal(center, start)
            assert not np.array_equal(sums[0], sums[1])
            before = copies, center, sums
            continue
        for trainer, (old, new) in enumerate(zip(before[0], copies, strict=True)):
            for a, b in zip(old, new, strict=True):
                message = f"trainer {trainer}, with sync_ps={servers}"
                np.testing.assert_allclose(b, a, rtol=1e-6, err_msg=message)
        np.testing.assert_array_equal(center, before[1], err_msg=f"with sync_ps={servers}")
        np.testing.assert_array_equal(sums, before[2], err_msg=f"with sync_ps={servers}")


def test_vectors_of_a_checkpoint_are_those_of_each_trainer_or_their_mean(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, Summing(0.3))
    model = dense_model(strategy)
    strategy.worker_states(model).serialize()  # Nobody has trained, and nobody will.
    synchronizer = model.train_function.ensure_synchronizer()
    parameters = synchronizer.copies.current()

    def restored(values, extras):
        synchronizer.restore({group: parameters for group in values}, extras)
        found = synchronizer.extras()
        synchronizer.begin()
        for name, value in synchronizer.extras().items():
            np.testing.assert_array_equal(value, found[name], name)
        return found["state_sum"][:, 0].tolist()

    ones = np.ones(WIDTH + 1, np.float32)
    all_there = {"state_sum": np.outer([1, 2, 6], ones), "groups_with_states": np.arange(3)}
    assert restored(range(3), {"groups": 3, **all_there}) == [1, 2, 6]
    assert restored(range(4), {"groups": 4, **all_there}) == [3, 3, 3]
    lacking = {"state_sum": np.outer([1, 6], ones), "groups_with_states": np.array([0, 2])}
    assert restored([0, 2], {"groups": 3, **lacking}) == [1, 3.5, 6]
    # As earlier versions wrote it.
    assert restored(range(3), {"state_sum": 5 * ones}) == [5, 5, 5]
    assert restored(range(3), {}) == [0, 0, 0]


def test_a_gap_may_be_longer_than_an_epoch(cluster):
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), mode=recsync.Foreground(gap=40)
    )
    model = dense_model(strategy)
    # 60 of each trainer, if they are equally fast; 40 of one of them in any case.
    model.fit(dataset().repeat(), epochs=6, steps_per_epoch=30, verbose=0)
    report = strategy.sync_report(model)
    assert report.steps == 180
    assert (180 - 3 * 39) / 40 <= sum(report.syncs) <= 180 / 40
    # What has been counted stays when another synchronizer takes its place.
    model.train_function.leave_pass(None)  # As after the loss of a parameter server.
    model.fit(dataset().repeat(), epochs=1, steps_per_epoch=120, verbose=0)
    after = strategy.sync_report(model)
    assert sum(after.syncs) > sum(report.syncs) > 0
    assert after.sync_ps_bytes == sum(after.syncs) * 8 * after.elements


def test_a_model_of_tables_alone_has_nothing_to_synchronize(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    with strategy.scope():
        ids = [keras.Input((), dtype="int64", name=name) for name in ("user", "item")]
        vectors = [keras.layers.Embedding(10, 4)(i) for i in ids]
        model = keras.Model(ids, keras.layers.Dot(1)(vectors))
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    numbers = np.arange(40) % 10
    data = tf.data.Dataset.from_tensor_slices(((numbers, numbers), np.ones((40, 1)))).batch(4)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert strategy.average_sync_gap(model) == float("inf")


class Wrong(recsync.Algorithm):
    """One with a mistake."""

    def __init__(self, states):
        self._states = states

    def states(self, start):
        return self._states(start)

    def sync(self, trainers, center):
        raise KeyError("my own mistake")


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (lambda start: {}, KeyError, "my own mistake"),
        (lambda start: {"g": start.astype(np.float64)}, ValueError, "'g' has the shape .* float64"),
        (lambda start: {"g": start[1:]}, ValueError, "float32 arrays of 225 elements"),
        (lambda start: {"a/b": start}, ValueError, "names without a slash, not 'a/b'"),
    ],
)
def test_a_mistake_in_an_algorithm_ends_training(cluster, states, error, message):
    strategy = recsync.ShadowSyncStrategy(cluster, Wrong(states))
    recsync.testing.set_compute_time(strategy, 0.02)
    model = click_model(strategy)
    with pytest.raises(error, match=message):
        model.fit(dataset().repeat(100), verbose=0)


def test_nothing_is_synchronized_after_a_callback_has_ended_training_with_an_error(cluster):
    class Mistake(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 10:
                raise KeyError("in a callback")

    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    recsync.testing.set_compute_time(strategy, SECONDS)
    model = dense_model(strategy)
    with pytest.raises(KeyError, match="in a callback"):
        model.fit(dataset(60), verbose=0, callbacks=[Mistake()])

    def loops():
        return [t for t in threading.enumerate() if t.name.startswith("recsync_shadow")]

    assert wait_until(lambda: not loops(), 60)
    fit_until_all_have_synchronized(strategy, model)  # And is again.


def test_a_checkpoint_of_a_model_that_has_not_trained_can_be_restored(cluster, tmp_path):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    model = dense_model(strategy, lambda: recsync.optimizers.SGD(0.0))
    start = model.trainable_variables[-2].numpy()
    checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
    path = checkpoint.save(str(tmp_path / "clicks"))
    model.trainable_variables[-2].assign(np.ones(start.shape))
    checkpoint.restore(path).assert_consumed()
    model.fit(dataset(12), verbose=0)
    np.testing.assert_allclose(strategy.copies(model)[2][-2], start, rtol=1e-6)


@pytest.mark.cases("BMUF")
@pytest.mark.parametrize(
    "algorithm",
    [recsync.EASGD(0.3), recsync.BMUF(0.3, 1.0, momentum=0.5)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_checkpoint_has_what_was_assigned_since_the_last_training(cluster, tmp_path, algorithm):
    strategy = recsync.ShadowSyncStrategy(cluster, algorithm, mode=recsync.Foreground(gap=4))
    model = click_model(strategy, lambda: recsync.optimizers.SGD(0.1))
    model.fit(dataset(24), verbose=0)
    assigned = [np.full(v.shape, 0.25, np.float32) for v in dense_of(model)]
    for variable, value in zip(dense_of(model), assigned, strict=True):
        variable.assign(value)
    model.optimizer.learning_rate = 0.0
    path = str(tmp_path / "clicks")
    recsync.checkpoint.save(path, model)

    model.optimizer.learning_rate = 0.1
    model.fit(dataset(24), verbose=0)
    recsync.checkpoint.restore(path, model)
    assert float(model.optimizer.learning_rate.numpy()) == 0.0
    model.fit(dataset(24), verbose=0)  # It learns nothing; all synchronize.
    copies = strategy.copies(model)
    for copy in copies:
        for value, expected in zip(copy, assigned, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
    vectors = model.train_function.synchronizer.extras()
    vectors.pop("groups_with_states", None)
    for name, vector in vectors.items():
        expected = 0.0 if name == "state_update" else 0.25
        np.testing.assert_allclose(vector, expected, rtol=1e-6, err_msg=name)


def test_what_was_restored_can_be_saved_again_before_training(cluster, tmp_path):
    found = []
    for _ in range(2):
        # One of three trainers does eight of 24 steps.
        strategy = recsync.ShadowSyncStrategy(
            cluster, recsync.EASGD(0.3), mode=recsync.Foreground(gap=8)
        )
        model = click_model(strategy)
        checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
        if not found:
            model.fit(dataset(24), verbose=0)
            path = checkpoint.save(str(tmp_path / "first"))
        else:
            checkpoint.restore(path)
            path = checkpoint.save(str(tmp_path / "second"))
        found.append(model.train_function.synchronizer.extras()["center"])
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    model = click_model(strategy)
    tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model)).restore(path)
    found.append(model.train_function.synchronizer.extras()["center"])
    assert not np.array_equal(found[0], np.concatenate([np.ravel(v) for v in dense_of(model)]))
    for center in found[1:]:
        np.testing.assert_array_equal(center, found[0])


def test_bmufs_global_parameters_are_in_the_checkpoint(cluster, tmp_path):
    found = []
    for trains in (True, False):
        strategy = recsync.ShadowSyncStrategy(cluster, recsync.BMUF(0.3, 0.5, momentum=0.5))
        model = dense_model(strategy)
        checkpoint = tf.train.Checkpoint(model=model, trainers=strategy.worker_states(model))
        if trains:
            fit_until_all_have_synchronized(strategy, model)
            checkpoint.save(str(tmp_path / "clicks"))
        else:
            checkpoint.restore(tf.train.latest_checkpoint(str(tmp_path))).assert_consumed()
            model.train_function.synchronizer.begin()
        extras = model.train_function.synchronizer.extras()
        found.append([extras["state_global"], extras["state_update"]])
    assert np.any(found[0][1])
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_trainer_that_is_behind_moves_rows_as_far_as_one_that_is_ahead(cluster):
    # The same row; each trainer has its steps in a fit of its own, and pushes the other way.
    turns, steps = ([40, 0, 0], [0, 10, 0]), {}

    def dataset_fn(context):
        one = {"id": tf.zeros([1], tf.int64)}, [[1.0 if context.input_pipeline_id else -1.0]]
        return tf.data.Dataset.from_tensors(one).repeat(steps[context.input_pipeline_id])

    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))
    rate = 0.01
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        table = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("table", ROWS, 1, initializer="zeros")],
            [recsync.layers.FeatureConfig("id", table="table")],
            concatenate=True,
        )
        model = keras.Model({"id": ids}, table({"id": ids}))
        model.compile(recsync.optimizers.Adam(rate), lambda y, output: -y * output)
    w, m, v = 0.0, 0.0, 0.0
    for turn in turns:
        steps.update(enumerate(turn))
        model.fit(strategy.distribute_datasets_from_function(dataset_fn), verbose=0)
        gradient = 1.0 if turn[0] else -1.0
        for t in range(1, sum(turn) + 1):
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001
            w -= rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / np.sqrt(v)
    found = model.predict({"id": np.zeros(1, np.int64)}, verbose=0)
    np.testing.assert_allclose(found, [[w]], 1e-3)
