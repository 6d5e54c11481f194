"""HierarchicalStrategy with `model.fit`: two groups of two trainers, on servers of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from groups import (
    ALONE,
    BATCH,
    BETWEEN,
    CELLS,
    INSIDE,
    RATE,
    RING_OF_3,
    WIDE,
    WORKERS,
    click_model,
    clicks,
    hierarchical,
    line,
    numbers,
    shards_of,
    with_slots,
)
from helpers import (
    AtBatch,
    UntilAllGoOn,
    compiled,
    fits_until,
    mean_output,
    only_stopped_ones_are_silent,
    slope_model,
    told_losses,
)

import tf_recsync as recsync
from tf_recsync.cluster import processor_of
from tf_recsync.synchronization.copies import Copies

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=6)


class StandStill:
    """Whether workers have found that they can't go on, and what they had done has been counted.

    To be asked after each batch.
    """

    def __init__(self, model, workers):
        self._model = model
        self._workers = workers
        self._batches = 0

    def __call__(self) -> bool:
        slots = self._model.train_function._run.slots
        stand = all(slot.lost for slot in slots if slot.index in self._workers)
        self._batches = self._batches + 1 if stand else 0
        return self._batches > 10


@pytest.mark.full
@pytest.mark.parametrize("between", ["EASGD", "BMUF"])
def test_a_copy_is_divided_among_the_servers_of_its_group(cluster, between):
    strategy = hierarchical(cluster, BETWEEN[between], ps_per_group=2, output="mean")
    assert strategy.sync_ps == ((5,) if between == "EASGD" else ())
    assert strategy.embedding_ps == ((4,) if between == "EASGD" else (4, 5))
    recsync.testing.set_compute_time(strategy, 0.01)
    # With others, too, but once, as their first step takes twice the processor time.
    more = {"metrics": ["AUC"], "steps_per_execution": 2} if between == "EASGD" else {}
    model = click_model(strategy, **more)
    losses = model.fit(clicks(40), epochs=2, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    fits = 0
    if not all(strategy.sync_report(model).syncs):
        fits = fits_until(lambda: all(strategy.sync_report(model).syncs), model, clicks(40))
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
    assert report.steps == (2 + fits) * 40
    assert len(report.syncs) == 2
    assert strategy.average_sync_gap(model) > 0
    # What is seen is the mean, and what one assigns all groups take over.
    first, second = strategy.copies(model)
    shown = [v.numpy() for v in model.trainable_variables if v.path in places]
    for mean, a, b in zip(shown, first, second, strict=True):
        np.testing.assert_allclose(mean, (a + b) / 2, rtol=1e-5, atol=1e-6)
    moving = model.get_layer("normal").moving_mean.numpy()
    assert np.any(moving)
    model.get_layer("top").set_weights([np.full((WIDE, 1), 2.0), np.array([1.0])])
    model.optimizer.learning_rate = 0.0
    model.fit(clicks(4), verbose=0)
    for copy in strategy.copies(model):
        np.testing.assert_allclose(copy[-1], [1.0], rtol=1e-6)


def test_groups_go_on_from_a_checkpoint_and_others_with_the_mean(cluster, tmp_path):
    strategy = hierarchical(cluster)
    model = click_model(strategy)
    with strategy.scope():  # As some programs do, where variables are made in this process.
        model.fit(clicks(20), verbose=0)
    made = model.train_function.synchronizer.copies
    for group in made.groups:
        devices = {copy.device for copy in made.of(group.index)}
        assert devices == {processor_of(*holder) for holder in group.holders}
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
    never = recsync.Foreground(gap=1_000_000)  # The center would pull at it.
    one = hierarchical(cluster, groups=1, trainers_per_group=4, ps_per_group=2, mode=never)
    merged = click_model(one)
    states = one.worker_states(merged)
    tf.train.Checkpoint(model=merged, groups=states).restore(path).assert_consumed()
    merged.optimizer.learning_rate = 0.0
    for trains in (False, True):  # Before and after a pass that learns nothing.
        if trains:
            merged.fit(clicks(8), verbose=0)
        (copy,) = one.copies(merged)
        for value, a, b in zip(copy, *copies, strict=True):
            np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.cases("EASGD-servers")
@pytest.mark.parametrize(("between", "placement"), [("EASGD", "servers"), ("Hop", "trainers")])
def test_nets_of_a_trainer_train_side_by_side(cluster, between, placement):
    options = {"nets_per_trainer": 2, "ps_per_group": 2, "placement": placement}
    strategy = hierarchical(cluster, BETWEEN[between], **options)
    recsync.testing.set_compute_time(strategy, 0.02)
    model = click_model(strategy)

    class UntilSynced(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Two trainers of two nets each share a copy: while one computes, the three others
            # update it, and a busy machine has them do so one after the other now and then.
            if batch >= 100 and batch % 20 == 0:
                syncs = strategy.sync_report(model).syncs
                stale = strategy.staleness(model).dense.max
                self.model.stop_training = min(syncs) > 0 and stale >= 4

    model.fit(clicks(50).repeat(200), callbacks=[UntilSynced()], verbose=0)
    assert model.stop_training  # Both have happened.
    threads = {slot.index: slot.number for slot in model.train_function._run.slots}
    assert threads == {0: 1, 1: 3, 2: 5, 3: 7}
    model.fit(clicks(40), verbose=0)
    assert sum(strategy.worker_steps(model)) == 40
    assert np.isfinite(model.evaluate(clicks(8), verbose=0))


@pytest.mark.cases("sync-EASGD-servers")
@pytest.mark.parametrize(("inside", "between", "placement"), CELLS)
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


@pytest.mark.cases("hogwild-Hop-trainers")
@pytest.mark.parametrize(("inside", "between", "placement"), CELLS)
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

    stand_still = StandStill(model, (2, 3))

    class UntilBack(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if "back" not in steps:
                if "without" in steps:
                    come_back_when_others_have_gone_on()
                elif stand_still():
                    note("without")
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
            UntilBack(),
        ],
    )
    assert steps["back"][2:] == steps["without"][2:]
    assert syncs["back"][1] == syncs["without"][1]
    # No worker was lost, only what two of them trained on.
    assert strategy.losses(model).workers == 0
    assert caplog.text.count("ps:1 was lost in the middle of a pass") == 1
    if between == "Hop":
        assert "Group 1 was lost; group 0 goes on without it." in caplog.text
        assert "with the mean parameters of group 0." in caplog.text
    else:
        source = "sync PSs" if between == "EASGD" else "others"
        assert f"Group 1 goes on with the parameters of the {source}, and the slots" in caplog.text
    assert None not in strategy.copies(model)
    model.fit(clicks(20), verbose=0)
    assert np.isfinite(model.evaluate(clicks(20), verbose=0))


@pytest.mark.cases("EASGD")
@pytest.mark.parametrize("between", ["EASGD", "Hop"])
def test_a_group_whose_server_stands_still_goes_on_where_it_was(
    cluster, caplog, monkeypatch, between
):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    algorithm = ALONE if between == "Hop" else BETWEEN[between]
    # Where workers wait for tokens, and for steps that others' pushes complete.
    strategy = hierarchical(cluster, algorithm, aggregation=INSIDE["sync"], silence_timeout=3.0)
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy, with_slots)
    given_up = "ps:1 has not answered for"
    then: list[list[int]] = []
    stand_still = StandStill(model, (2, 3))

    class Resume(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done = strategy.worker_steps(model)
            if given_up in caplog.text and not then and stand_still():
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
            numbers(50).repeat(400),
            verbose=0,
            callbacks=[AtBatch(12, lambda: cluster.pause("ps", 1)), Resume()],
        )
    finally:
        cluster.resume("ps", 1)
    assert then[0][2:] == then[1][2:]  # The group stood still, and the other did not.
    assert 1 <= strategy.losses(model).workers <= told_losses(caplog.text)
    # It has its own.
    assert "goes on with the parameters of" not in caplog.text
    assert ("with its own parameters." in caplog.text) == (between == "Hop")
    assert caplog.text.count(given_up) <= 2


def test_a_group_whose_server_is_away_is_done_without_from_one_epoch_to_the_next(cluster):
    strategy = hierarchical(cluster, aggregation=INSIDE["GBA"])
    recsync.testing.set_compute_time(strategy, 0.02)
    model = line(strategy, with_slots)
    fits_until(lambda: strategy.aggregation(model)[0].included, model, numbers(20))
    pushes = strategy.aggregation(model)[0].included
    cluster.kill("ps", 0)
    report = recsync.callbacks.ShadowReport()
    model.fit(numbers(20), epochs=2, verbose=0, validation_data=numbers(4), callbacks=[report])
    assert strategy.worker_steps(model)[:2] == [0, 0]
    assert strategy.copies(model)[0] is None
    # What it had counted when it was last asked.
    assert strategy.aggregation(model)[0].included == pushes
    assert model.predict(numbers(4), verbose=0).shape == (4 * BATCH, 1)
    cluster.restart("ps", 0)
    back = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", min(strategy.worker_steps(model)) > 0
        )
    )
    model.fit(numbers(50).repeat(200), verbose=0, callbacks=[back])
    assert None not in strategy.copies(model)
    assert strategy.aggregation(model)[0].included > pushes


def test_a_group_whose_server_dies_before_a_model_first_trains_joins_with_the_central_copy(
    cluster, monkeypatch
):
    make, began_with = Copies.make, []

    def noted(copies, group, values):
        if group == 1:
            began_with.append(values[0].item())
        make(copies, group, values)

    monkeypatch.setattr(Copies, "make", noted)
    strategy = hierarchical(cluster, aggregation=INSIDE["sync"])
    recsync.testing.set_compute_time(strategy, 0.02)
    # Each step takes as much off the slope, which begins at 0; the central copy follows.
    model = compiled(strategy, slope_model, lambda: recsync.optimizers.SGD(RATE), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([BATCH, 1]), tf.ones([BATCH, 1])))
    cluster.kill("ps", 1)
    centers = []

    class UntilItHasJoined(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps = strategy.worker_steps(model)
            if not centers and steps[0] > 8 and strategy.sync_report(model).syncs[0] > 3:
                assert steps[2:] == [0, 0]
                centers.append(model.train_function.synchronizer.extras()["center"].item())
                cluster.restart("ps", 1)
            self.model.stop_training = bool(centers) and min(steps) > 0

    model.fit(ones.repeat(10_000), verbose=0, callbacks=[UntilItHasJoined()])
    assert began_with[0] <= centers[0] < 0
    assert all(report.included for report in strategy.aggregation(model))


@pytest.mark.full
def test_a_server_that_is_readmitted_between_two_fits_has_its_group_go_on(cluster, caplog):
    strategy = hierarchical(cluster, aggregation=INSIDE["sync"])
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy, with_slots)
    model.fit(numbers(8), verbose=0)
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    cluster.readmit()
    fits_until(lambda: min(strategy.worker_steps(model)) > 0, model, numbers(24))
    assert "Group 1 goes on with the parameters of the sync PSs, and the slots" in caplog.text
    assert strategy.losses(model).workers == 0


@pytest.mark.full
def test_a_group_comes_back_that_has_lost_a_server_and_a_trainer_at_once(cluster):
    strategy = hierarchical(cluster, BETWEEN["BMUF"], aggregation=INSIDE["sync"])
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy, with_slots)

    def kill():
        cluster.kill("worker", 2)
        cluster.kill("ps", 1)

    def start():
        then.extend(strategy.worker_steps(model))
        cluster.restart("ps", 1)
        cluster.restart("worker", 2)

    then: list[int] = []

    model.fit(
        numbers(50).repeat(400),
        verbose=0,
        callbacks=[AtBatch(12, kill), AtBatch(40, start), UntilAllGoOn(then)],
    )
    assert None not in strategy.copies(model)


def test_the_staleness_of_rows_is_that_of_the_tables_of_all_groups(cluster):
    # Without a server for tables, each group has a copy of them.
    strategy = hierarchical(cluster, ps_per_group=2, sync_ps=2)
    assert strategy.embedding_ps == ()
    with strategy.scope():
        layers = keras.layers
        table = [keras.Input((), dtype="int64"), layers.Embedding(BATCH, 2), layers.Dense(1)]
        model = keras.Sequential(table)
        model.compile(with_slots(), "mse")
    ids = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensors(
            (np.arange(BATCH), np.ones([BATCH, 1]))
        ).repeat(5)
    )
    model.fit(ids, verbose=0)
    report = strategy.staleness(model)
    # Each step of each of the trainers updates two dense variables and all rows.
    assert (report.dense.count, report.rows.count) == (WORKERS * 5 * 2, WORKERS * 5 * BATCH)


def test_all_shards_are_synchronized_while_nobody_trains(cluster):
    strategy = hierarchical(
        cluster, BETWEEN["MA"], ps_per_group=2, mode=recsync.Foreground(per_minute=300)
    )
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy, with_slots)
    fits_until(lambda: min(strategy.sync_report(model).syncs) > 0, model, numbers(60))
    first, second = strategy.sync_report(model).syncs
    assert first == second


@pytest.mark.parametrize(
    ("ps", "make", "data"),
    [(2, click_model, clicks), (5, line, numbers)],
    ids=["embedding PS", "sync PS"],
)
def test_a_killed_server_of_no_group_ends_training_with_an_error_that_names_it(
    cluster, ps, make, data
):
    strategy = hierarchical(cluster)
    recsync.testing.set_compute_time(strategy, 0.05)
    model = make(strategy)
    with pytest.raises(RuntimeError, match=f"ps:{ps} was lost"):
        model.fit(
            data(50).repeat(200),
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
