"""Parameter servers that die while a model trains with a Checkpoint: training goes on."""

import json
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from groups import BETWEEN, hierarchical
from helpers import AtBatch, compute_time, events, held_back, wait_for_file, wait_until
from test_checkpoint_callback import NAME, check_rows, dataset, make_model
from test_retried_batches import check_all_are_done

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint, Status, WorkerEvents
from tf_recsync.run_status import RunStatus
from tf_recsync.strategies import train_function

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

ROWS, STEPS = 6, 300
NEVER = recsync.Foreground(gap=1_000_000)
MODES = {
    "async": lambda c: recsync.AsyncStrategy(c),
    "GBA": lambda c: recsync.GBAStrategy(c, 4, 2, staleness_tolerance=100),
    "sync": lambda c: recsync.SyncStrategy(c, global_batch_size=4, local_batch_size=2),
    "EASGD": lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3), sync_ps=[3]),
}


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


class KillInTurn(keras.callbacks.Callback):
    """Kills servers, each some steps after the one before is back, and starts them again."""

    def __init__(self, cluster, checkpoint, servers, steps=12, seconds=0.2):
        super().__init__()
        self.left = list(servers)
        self._cluster, self._checkpoint, self._seconds = cluster, checkpoint, seconds
        self._steps = self._wait = steps
        self._killed = 0

    def on_train_batch_end(self, batch, logs=None):
        if not self.left or self._checkpoint.recoveries < self._killed:
            return
        self._wait -= 1
        if self._wait <= 0:
            self._wait = self._steps
            self._killed += 1
            server = self.left.pop(0)
            self._cluster.kill("ps", server)
            restart = threading.Timer(self._seconds, self._cluster.restart, ["ps", server])
            restart.start()


def paced(data, steps, callback, times):
    """Data whose steps don't all end before a server has died as often as it shall.

    Args:
        data: of one pass.
        steps: how many batches it has.
        callback: the `Checkpoint`.
        times: how often training recovers; after each recovery there are as many steps left.
    """

    def wait(number):
        before = int(number) * (times + 1) // steps  # So many recoveries come before this batch.
        # Not for long, as what it waits for may wait for workers that wait for it.
        wait_until(lambda: callback.recoveries >= before, 0.2)

    def later(number, batch):
        with tf.control_dependencies([tf.py_function(wait, [number], [])]):
            return tf.nest.map_structure(tf.identity, batch)

    return data.enumerate().map(later)


def slowly(strategy):
    recsync.testing.set_compute_time(strategy, 0.01)
    return strategy


def every_server(mode):
    """Each of a strategy's servers, twice."""
    return pytest.param(mode, 2, marks=pytest.mark.soak, id=f"{mode}, twice")


@pytest.mark.parametrize(
    ("mode", "times"),
    [*((mode, 1) for mode in MODES if mode != "GBA"), *map(every_server, MODES)],
)
def test_servers_may_die_in_turn(cluster, tmp_path, mode, times, caplog):
    strategy = slowly(MODES[mode](cluster))
    # Each step of a global batch changes each row; the others one.
    rows = ROWS if mode in ("async", "EASGD") else 1
    model = make_model(strategy, rows, shards=min(rows, 2), units=4)
    callback = Checkpoint(tmp_path, every_steps=10, keep=None)
    servers = servers_of(model) + [3] * (mode == "EASGD")
    few = -2 if mode == "async" else -1
    servers = servers[few:] if times == 1 else servers * times
    kills = KillInTurn(cluster, callback, servers)
    steps = STEPS * times
    data = paced(dataset(steps, rows), steps, callback, len(servers))
    epochs = model.fit(data, epochs=2, verbose=0, callbacks=[callback, kills])
    assert epochs.epoch == [0, 1]
    assert np.isfinite(epochs.history["loss"]).all()
    assert callback.recoveries == len(servers) > 0
    assert not kills.left
    for server in servers:
        assert f"Training pauses, as ps:{server} was lost; the last checkpoint is" in caplog.text
        assert f"Training goes on: ps:{server} is back after" in caplog.text
    for saved in callback.saved:
        if rows > 1:
            check_rows(saved.path)
        else:  # A global batch may have been applied with a push of a worker missing.
            checkpoint.open(saved.path).verify()
    x = {"ids": np.zeros((2, 1), np.int64)}
    assert np.isfinite(model.predict(x, verbose=0)).all()
    # Another call of fit is as any other.
    assert model.fit(dataset(8), verbose=0, callbacks=[callback]).epoch == [0]


def servers_of(model):
    """Those that have variables of a model or its optimizer."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    devices = {v._value.device for v in [*model.variables, *model.optimizer.variables]}
    specs = map(tf.DeviceSpec.from_string, devices)
    return sorted(spec.task for spec in specs if spec.job == "ps")


def shards_of(model):
    """The servers of the table's shards, in their order."""
    (layer,) = (own for own in model.layers if own.name == NAME)
    places = {}
    for variable in layer.variables:
        for piece in variable.physical_table.pieces:
            places[piece.index] = tf.DeviceSpec.from_string(variable._value.device).task
    return [places[index] for index in sorted(places)]


@pytest.mark.parametrize("recovery", ["partial", "all"])
def test_what_goes_back_is_what_was_lost_or_everything(cluster, tmp_path, recovery):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, ROWS, shards=2)
    kept, lost = shards_of(model)
    # The one that training begins with, and the last one.
    callback = Checkpoint(tmp_path, every_seconds=1e9, keep=None, recovery=recovery)
    kills = KillInTurn(cluster, callback, [lost], steps=60)
    data = held_back(dataset(STEPS, ROWS).repeat(), STEPS - 100, lambda: callback.recoveries)
    timeline = recsync.callbacks.Timeline(tmp_path / "timeline.json")
    report = recsync.callbacks.TrainingReport(str(tmp_path / "logs"), update_freq=20)
    model.fit(
        data,
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[callback, kills, timeline, report],
    )
    assert callback.recoveries == 1
    # What is recorded goes on: 200 steps at least come after it.
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event["name"] == "compute" for event in trace) >= STEPS - 100
    speeds = events(tmp_path / "logs")["scalars", "batches_per_second/worker_0"]
    assert speeds[-1] > 0
    assert [saved.global_step for saved in callback.saved][0] == 0
    check_rows(callback.saved[-1].path)
    updates = checkpoint.open(callback.saved[-1].path).rows(f"{NAME}/ones/version")
    # Each step names one row, three of six on each server. All steps were done; those whose push
    # had reached one server only count as well.
    assert sum(strategy.worker_steps(model)) == STEPS
    named = np.array([np.sum(updates[index::2]) for index in (0, 1)])
    if recovery == "partial":
        assert abs(named[0] - STEPS / 2) < STEPS / 6
        assert named[1] < STEPS / 2 - 10
    else:  # The data, too.
        assert named.sum() == STEPS
        assert abs(named[0] - named[1]) < STEPS / 3
    del kept


def test_workers_that_wait_for_data_when_a_server_dies_get_them_when_it_is_back(cluster, tmp_path):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, ROWS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path, every_seconds=1e9, recovery="partial")

    def kill():
        time.sleep(1.0)  # Workers have done all that there are data for, and wait for more.
        cluster.kill("ps", lost)
        threading.Timer(0.2, cluster.restart, ["ps", lost]).start()

    data = held_back(dataset(100, ROWS).repeat(), 40, lambda: callback.recoveries)
    options = {"callbacks": [callback, AtBatch(30, kill)], "verbose": 0}
    model.fit(data, steps_per_epoch=100, **options)
    assert callback.recoveries == 1
    assert sum(strategy.worker_steps(model)) == 100


@pytest.mark.parametrize("second", ["the same", "another"])
def test_one_that_dies_while_another_is_restored_is_restored_as_well(
    cluster, tmp_path, monkeypatch, caplog, second
):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, ROWS, shards=2)
    kept, lost = shards_of(model)
    then = lost if second == "the same" else kept
    callback = Checkpoint(tmp_path, every_steps=10, keep=None)
    make_anew, times = train_function.make_anew, []

    def and_die(model, servers):
        made = make_anew(model, servers)
        times.append(servers)
        if len(times) == 1:
            cluster.kill("ps", then)
            threading.Timer(0.3, cluster.restart, ["ps", then]).start()
        return made

    monkeypatch.setattr(train_function, "make_anew", and_die)
    kills = KillInTurn(cluster, callback, [lost])
    data = paced(dataset(STEPS, ROWS), STEPS, callback, 1)
    model.fit(data, verbose=0, callbacks=[callback, kills])
    assert callback.recoveries == 1
    assert times == [{("ps", lost)}, {("ps", lost), ("ps", then)}]
    assert "Recovery begins again" in caplog.text
    for saved in callback.saved:  # And none has zeros.
        check_rows(saved.path)


def test_servers_that_die_at_once_are_restored_together(cluster, tmp_path):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    both = shards_of(model)
    callback = Checkpoint(tmp_path, every_steps=10, keep=None)

    def kill():
        for server in both:
            cluster.kill("ps", server)
            threading.Timer(0.3, cluster.restart, ["ps", server]).start()

    data = paced(dataset(STEPS, ROWS), STEPS, callback, 1)
    model.fit(data, verbose=0, callbacks=[callback, AtBatch(12, kill)])
    assert callback.recoveries == 1
    for saved in callback.saved:
        check_rows(saved.path)


def test_one_is_restored_that_is_back_before_anybody_has_missed_it(cluster, tmp_path, caplog):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path, every_steps=10, keep=None)

    def readmit():
        model.optimizer.iterations.numpy()  # Until the next batch workers stand still.
        cluster.kill("ps", lost)
        cluster.restart("ps", lost)
        cluster.readmit()  # As who takes in another one does.

    data = paced(dataset(STEPS, ROWS), STEPS, callback, 1)
    model.fit(data, verbose=0, callbacks=[callback, AtBatch(12, readmit)])
    assert callback.recoveries == 1
    assert f"Training pauses, as ps:{lost} was lost" in caplog.text
    for saved in callback.saved:
        check_rows(saved.path)


def test_copies_and_metrics_are_those_of_the_checkpoint_and_of_all_steps(cluster, tmp_path):
    strategy = slowly(recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), mode=NEVER))
    with strategy.scope():
        ids = keras.Input((1,))
        table = keras.layers.Embedding(4, 2)(keras.layers.Lambda(lambda x: x % 4)(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table)))
        mean = keras.metrics.MeanMetricWrapper(lambda y, p: tf.ones_like(y), name="one")
        model.compile(recsync.optimizers.Adagrad(0.1), "mse", metrics=[mean])
    data = tf.data.Dataset.from_tensors((np.ones((2, 1)), np.ones((2, 1))))
    callback = Checkpoint(tmp_path, every_seconds=1e9)
    model.fit(data.repeat(40), verbose=0)
    model.optimizer.learning_rate = 0.0
    saved, then = strategy.copies(model), []

    class Compare(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if callback.recoveries and not then:
                then.append(strategy.copies(model))
            elif batch == 15:
                model.optimizer.learning_rate = 0.1  # That goes back, too.

    server = [tf.DeviceSpec.from_string(v._value.device).task for v in model.variables[:1]]
    kills = KillInTurn(cluster, callback, server, steps=30)
    steps = held_back(data.repeat(200), 100, lambda: callback.recoveries)
    logs = model.fit(steps, verbose=0, callbacks=[callback, kills, Compare()])
    assert callback.recoveries == 1
    assert len({copy[0].tobytes() for copy in saved}) > 1
    for copy, before in zip(then[0], saved, strict=True):
        np.testing.assert_array_equal(copy[0], before[0])
    assert float(model.optimizer.learning_rate.numpy()) == 0.0
    # A step that ended with the server may have counted in one of the metric's two variables.
    assert logs.history["one"] == [pytest.approx(1.0, abs=4 / 200)]
    # Those of both calls, but for what was in flight.
    assert strategy.sync_report(model).steps > 200


def test_what_became_of_pushes_is_known_while_a_server_is_away_and_counted_on(
    cluster, tmp_path, caplog
):
    # It takes all pushes, however old; and one global batch is more than the data.
    strategy = slowly(recsync.BSPStrategy(cluster, 2 * STEPS, 2))
    model = make_model(strategy, ROWS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path, every_seconds=1e9, recovery="partial")
    before, away = [], []

    def kill():
        before.append(strategy.aggregation(model))
        cluster.kill("ps", lost)

    class Look(WorkerEvents):
        def tell(self):
            if not away and f"Training waits for ps:{lost}" in caplog.text:
                away.append(strategy.aggregation(model))
                cluster.restart("ps", lost)

    data = held_back(dataset(100, ROWS), 70, lambda: callback.recoveries)
    model.fit(data, verbose=0, callbacks=[callback, AtBatch(60, kill), Look()])
    assert callback.recoveries == 1
    assert away[0].included == before[0].included > 60
    # Those since are fewer than those before: what was trained on is not trained on again.
    assert strategy.aggregation(model).included > before[0].included
    assert strategy.staleness(model).dense.count > before[0].staleness.count


def test_a_loss_between_epochs_does_not_set_the_data_back(cluster, tmp_path):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, STEPS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path, every_seconds=1e9, recovery="partial")

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                cluster.kill("ps", lost)
                cluster.restart("ps", lost)

    # Each row once: what is named in the second epoch was not in the first one.
    ids = np.arange(STEPS).repeat(2)[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices(({"ids": ids}, np.zeros((2 * STEPS, 1)))).batch(2)
    model.fit(
        data.repeat(),
        steps_per_epoch=STEPS // 3,
        epochs=2,
        verbose=0,
        callbacks=[Kill(), callback],
    )
    assert callback.recoveries == 1
    updates = checkpoint.open(callback.saved[-1].path).rows(f"{NAME}/ones/version")
    kept = updates[::2]
    assert kept.max() == 1
    # A push of a step that is done again may have reached this server.
    assert abs(kept.sum() - 2 * STEPS // 6) <= 20


def test_reports_leave_an_epoch_out_at_whose_end_a_server_is_gone(cluster, tmp_path, caplog):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    lost = shards_of(model)[1]

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                cluster.kill("ps", lost)
                threading.Timer(0.5, cluster.restart, ["ps", lost]).start()

    saver = Checkpoint(tmp_path, every_seconds=1e9)
    metrics = recsync.callbacks.Prometheus(path=tmp_path / "metrics.prom")
    history = model.fit(
        dataset(20, ROWS).repeat(),
        steps_per_epoch=20,
        epochs=4,
        verbose=0,
        callbacks=[Kill(), recsync.callbacks.TrainingReport(), metrics, saver],
    )
    assert saver.recoveries == 1
    # The next one may begin before the server is missed.
    assert len(history.history["staleness"]) in (2, 3)
    assert len(history.history["loss"]) == 4
    assert "TrainingReport: figures of epoch 1 are left out" in caplog.text


@pytest.mark.parametrize("publishes", [False, True], ids=["", "publishes"])
def test_a_loss_after_the_last_step_does_not_cost_the_last_checkpoint(cluster, tmp_path, publishes):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path / "saved", every_seconds=1e9)
    publish = recsync.callbacks.Publish(tmp_path / "published", every_seconds=1e9)

    class Kill(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            cluster.kill("ps", lost)
            threading.Timer(0.3, cluster.restart, ["ps", lost]).start()

    others = [publish] if publishes else []
    model.fit(dataset(40, ROWS), verbose=0, callbacks=[Kill(), *others, callback])
    assert callback.recoveries == 1
    assert len(callback.saved) == 2
    assert [one.version for one in publish.publications] == [1] * publishes
    check_rows(callback.saved[-1].path)


def test_what_was_not_restored_is_not_saved_and_restored_by_the_next_call(
    cluster, tmp_path, monkeypatch
):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    lost = shards_of(model)[1]

    def interrupt(callback, lost, *, is_partial):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_recover", interrupt)
        callback = Checkpoint(tmp_path, every_steps=10, keep=1)
        kills = KillInTurn(cluster, callback, [lost])
        with pytest.raises(KeyboardInterrupt):
            model.fit(dataset(STEPS, ROWS), verbose=0, callbacks=[callback, kills])
    saved = checkpoint.latest(tmp_path)
    with pytest.raises(RuntimeError, match=f"ps:{lost} was lost, .* could not be restored"):
        checkpoint.save(tmp_path / "by hand", model)
    # Here, too, only the last one is kept.
    callback = Checkpoint(tmp_path, every_seconds=1e9, keep=1)
    model.fit(dataset(20, ROWS), verbose=0, callbacks=[callback])
    assert callback.recoveries == 1
    check_rows(callback.saved[-1].path)
    assert checkpoint.latest(tmp_path) == callback.saved[-1].path != saved


def test_who_trains_without_the_callback_is_told_of_a_loss(cluster, tmp_path):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    lost = shards_of(model)[1]
    model.fit(dataset(8, ROWS), verbose=0, callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(RuntimeError, match=f"server ps:{lost} was lost, and its parameters"):
        model.fit(
            dataset(10_000, ROWS),
            verbose=0,
            callbacks=[AtBatch(20, lambda: cluster.kill("ps", lost))],
        )


def test_no_batch_is_left_out_or_counted_twice_when_a_server_dies_in_long_calls(cluster, tmp_path):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, ROWS, shards=2)
    callback = Checkpoint(tmp_path, every_seconds=1e9, recovery="partial")
    kills = KillInTurn(cluster, callback, shards_of(model)[-1:], steps=500)
    with compute_time(strategy, 0.002):
        model.fit(dataset(4000, ROWS), verbose=0, callbacks=[callback, kills])
    assert callback.recoveries == 1
    check_all_are_done(model, 4000)


def test_workers_that_make_their_data_go_on_where_they_were(cluster, tmp_path):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, 0.03)
    model = make_model(strategy, ROWS, shards=2)
    callback = Checkpoint(tmp_path / "saved", every_steps=10)
    kills = KillInTurn(cluster, callback, shards_of(model))
    killed = [tmp_path / f"killed {i}" for i in range(len(kills.left))]

    def make(context):
        """Of its batches, some are left at each kill, however late it is."""

        def late(i, batch):
            first = tf.cond(i >= 50, lambda: wait_for_file(str(killed[0])), tf.no_op)
            second = tf.cond(i >= 100, lambda: wait_for_file(str(killed[1])), tf.no_op)
            with tf.control_dependencies([first, second]):
                return tf.nest.map_structure(tf.identity, batch)

        return dataset(200, ROWS).enumerate().map(late)

    def tell(batch, logs):
        for path in killed[: len(killed) - len(kills.left)]:
            path.touch()

    made = strategy.distribute_datasets_from_function(make)
    told = keras.callbacks.LambdaCallback(on_train_batch_end=tell)
    model.fit(made, verbose=0, callbacks=[callback, kills, told])
    assert callback.recoveries == 2
    # Nothing twice; what was in their hands is lost.
    assert 4 * 200 - 2 * 4 * 12 <= sum(strategy.worker_steps(model)) <= 4 * 200


def test_nobody_waits_after_a_recovery_for_one_whose_data_had_ended(cluster, tmp_path):
    strategy = slowly(
        recsync.HopStrategy(
            cluster, recsync.topology.ring(4), max_iteration_gap=2, on_batch_lost="drop"
        )
    )
    model = make_model(strategy, ROWS, shards=2, units=4)
    few = [1, 60, 60, 60]
    made = strategy.distribute_datasets_from_function(
        lambda context: dataset(few[context.input_pipeline_id], ROWS)
    )
    callback = Checkpoint(tmp_path, every_seconds=1e9)
    lost = shards_of(model)[1]

    class Kill(keras.callbacks.Callback):
        epochs = []

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append(epoch)

        def on_train_batch_end(self, batch, logs=None):
            if self.epochs == [0, 1] and batch >= 20:  # The others are far ahead of the first one.
                self.epochs.append("killed")
                cluster.kill("ps", lost)
                cluster.restart("ps", lost)

    kill = Kill()
    model.fit(made, epochs=3, verbose=0, callbacks=[callback, kill])
    assert kill.epochs == [0, 1, "killed", 2]
    assert callback.recoveries == 1
    assert strategy.worker_steps(model) == few


def test_one_that_does_not_come_back_ends_training_with_the_last_checkpoint(cluster, tmp_path):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    callback = Checkpoint(tmp_path, every_steps=10, ps_timeout=1.0)
    with pytest.raises(
        RuntimeError, match=r"ps:1 was lost, and is not back after ps_timeout=1 s; the last check"
    ):
        model.fit(
            dataset(10_000, ROWS),
            verbose=0,
            callbacks=[callback, AtBatch(20, lambda: cluster.kill("ps", 1))],
        )
    check_rows(checkpoint.latest(tmp_path))
    cluster.restart("ps", 1)
    # As the program would that is started again.
    again = make_model(recsync.AsyncStrategy(cluster), ROWS, shards=2)
    callback = Checkpoint(tmp_path)
    again.fit(dataset(8, ROWS), epochs=2, verbose=0, callbacks=[callback])
    assert callback.restored


def test_callbacks_are_told_while_a_server_is_waited_for_and_may_end_fit(cluster, tmp_path, caplog):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    path, waits = tmp_path / "run.json", []

    class Ends(WorkerEvents):
        def tell(self):
            if "Training waits for ps:1" in caplog.text:
                written = RunStatus.read(path)
                waits.append(written.time)
                if written.time > waits[0]:  # Meanwhile.
                    (server,) = (server for server in written.servers if server.name == "ps:1")
                    raise ArithmeticError(f"ps:1 is {server.state}")

    checkpoints = Checkpoint(tmp_path / "saved", every_steps=10)
    kills = AtBatch(20, lambda: cluster.kill("ps", 1))
    callbacks = [checkpoints, Status(path, every_seconds=0.01), Ends(), kills]
    with pytest.raises(ArithmeticError, match="ps:1 is lost"):
        model.fit(dataset(10_000, ROWS), verbose=0, callbacks=callbacks)
    assert RunStatus.read(path).doing == "failed"


@pytest.mark.parametrize("placement", ["whole", "divided"])
def test_layers_that_run_on_servers_go_on_when_a_table_is_back(cluster, tmp_path, placement):
    options = {"placement": {"dense": 0}}
    if placement == "divided":
        options = {"placement": {"dense": "columns"}, "groups": 1, "trainers_per_group": 4}
        options["ps_per_group"] = 2
    strategy = hierarchical(cluster, BETWEEN["EASGD"], **options)
    with slowly(strategy).scope():
        table = make_model(strategy, ROWS)
        dense = keras.layers.Dense(8, name="dense", kernel_initializer="zeros")
        vectors = keras.layers.Lambda(tf.stop_gradient)(table.get_layer(NAME).output)
        outputs = [table.output, keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1))(dense(vectors))]
        model = keras.Model(table.input, outputs)
        model.compile(recsync.optimizers.Adagrad(0.1), loss=[lambda y, p: p] * 2)
    (server,) = set(shards_of(model))
    callback = Checkpoint(tmp_path, every_steps=10)
    kills = KillInTurn(cluster, callback, [server] * 2)
    data = dataset(STEPS, ROWS).map(lambda x, y: (x, (y, y)))
    data = paced(data, STEPS, callback, 2)
    kernels = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if callback.recoveries and not kernels:
                kernels.append(dense.kernel.numpy())

    model.fit(data, verbose=0, callbacks=[callback, kills, Look()])
    assert callback.recoveries == 2
    check_rows(callback.saved[-1].path)
    # Its gradients are the sums of vectors, which are positive to begin with.
    for kernel in (*kernels, dense.kernel.numpy()):
        assert np.all(kernel < 0)


def test_training_ends_where_it_shall_not_go_on(cluster, tmp_path):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    server = shards_of(model)[-1]
    with pytest.raises(RuntimeError, match=f"server ps:{server} was lost, and its parameters"):
        model.fit(
            dataset(10_000, ROWS),
            verbose=0,
            callbacks=[
                Checkpoint(tmp_path, on_ps_lost="raise"),
                AtBatch(20, lambda: cluster.kill("ps", server)),
            ],
        )


def test_wrong_arguments_are_refused(cluster, tmp_path):
    for wrong, message in (
        ({"on_ps_lost": "wait"}, 'on_ps_lost must be "recover" or "raise", not \'wait\''),
        ({"recovery": "half"}, 'recovery must be "all", "partial" or None, not \'half\''),
        ({"ps_timeout": 0}, "ps_timeout must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path, **wrong)
    model = make_model(recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)))
    with pytest.raises(ValueError, match='recovery="partial" can\'t be under a ShadowSyncStrat'):
        model.fit(dataset(1), verbose=0, callbacks=[Checkpoint(tmp_path, recovery="partial")])
