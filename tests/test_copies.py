"""Workers' copies of variables, and what users see of them."""

import concurrent.futures
import contextlib
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, compute_time, mean_output, slope_model

import tf_recsync as recsync
from tf_recsync.synchronization import copies as copies_of_groups
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import CopiedVariable, Copies
from tf_recsync.synchronization.remote_values import at

# What `Group.holders` is in each case: the workers, or the servers of their groups.
STRATEGIES = {
    "Hop": ("worker", lambda c: recsync.HopStrategy(c, recsync.topology.ring(3))),
    "ShadowSync": ("worker", lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3))),
    "groups": (
        "ps",
        lambda c: recsync.HierarchicalStrategy(
            c, recsync.EASGD(0.3), groups=3, trainers_per_group=1, ps_per_group=1
        ),
    ),
}


@pytest.mark.cases("Hop", "groups")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_copies_are_on_the_processors_of_those_who_hold_them(clusters, kind):
    """Where a server has an accelerator, too: the ops that exchange them run nowhere else."""
    cluster = clusters.get(workers=3, ps=4)
    job, make = STRATEGIES[kind]
    strategy = make(cluster)
    model = compiled(strategy, slope_model, lambda: recsync.optimizers.SGD(0.1), mean_output)
    ones = np.ones((6, 1), np.float32)
    model.fit(ones, ones, 1, verbose=0)
    copies = model.train_function.synchronizer.copies
    for group in range(3):
        device = f"/job:{job}/replica:0/task:{group}/device:CPU:0"
        assert {handle.device for handle in copies.handles(group)} == {device}
    # A server without an accelerator puts all on its processor: what is asked for is this.
    with tf.Graph().as_default(), at(cluster, 2, job):
        assert tf.no_op().device == f"/job:{job}/replica:0/task:2/device:CPU:0"


def test_what_is_no_number_is_not_taken_for_an_assignment():
    values = [[np.nan, 1.0], [np.nan, 2.0], [3, 4]]
    dtypes = [tf.float32, tf.bfloat16, tf.int32]
    variables = [CopiedVariable(v, dtype=d) for v, d in zip(values, dtypes, strict=True)]
    copies = Copies(variables, cluster=None, groups=[Group(0, trainers=(0,))])
    copies.load({0: [variable.numpy() for variable in variables]})
    copies.begin()
    assert copies.assigned == [False, False, False]
    variables[0].assign([np.nan, 5.0])
    variables[1].assign(tf.constant([6.0, 2.0], tf.bfloat16))
    copies.begin()
    assert copies.assigned == [True, True, False]


def test_another_model_that_has_a_variable_is_told_of_reads_when_copies_are_let_go():
    ours, shared = CopiedVariable([1.0]), CopiedVariable([2.0])
    copies = Copies([ours, shared], cluster=None, groups=[Group(0, trainers=(0,))])
    copies.touched()
    told = []
    shared.before_read = lambda: told.append("read")
    copies.let_go()
    assert ours.numpy() == 1.0 and shared.numpy() == 2.0
    assert told == ["read"]


@pytest.mark.parametrize("end", [Copies.settled, Copies.let_go])
def test_a_learning_rate_is_no_longer_read_from_groups_that_are_trained_no_more(rates, end):
    end(rates)
    rates.of(0)[0].assign(0.7)
    (rate,) = rates.seen
    tf.raw_ops.AssignVariableOp(resource=rate.handle, value=0.3)  # As TensorFlow restores it.
    np.testing.assert_allclose(rate.numpy(), 0.3)
    rates.begin()
    np.testing.assert_allclose([rate.numpy(), *rates_of(rates)], 0.3)


def test_a_server_that_does_not_answer_a_reading_holds_up_nobody_else(monkeypatch):
    """As when a callback looks at the learning rate within an epoch, and a worker stands still."""
    variable = CopiedVariable([1.0, 2.0])
    copies = Copies([variable], cluster=None, groups=[Group(0, trainers=(0,))], peeked=[variable])
    copies._copies[0] = [variable]
    asked, answered = threading.Event(), threading.Event()

    def values(group, numbers):
        asked.set()
        assert answered.wait(60)
        return [np.array([3.0, 4.0], np.float32)]

    monkeypatch.setattr(copies, "values", values)
    copies.touched()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(variable.numpy)
        assert asked.wait(60)
        # What a worker needs for its next call.
        handles = pool.submit(copies.handles, 0).result(timeout=60)
        assert len(handles) == 1 and not reading.done()
        answered.set()
        np.testing.assert_array_equal(reading.result(timeout=60), [3.0, 4.0])


def test_what_is_assigned_while_copies_are_trained_stays_and_they_take_it_over(monkeypatch):
    variables = [CopiedVariable([1.0, 2.0]) for _ in range(2)]
    copies = Copies(variables, cluster=None, groups=[Group(0, trainers=(0,))])
    copies.load({0: [variable.numpy() for variable in variables]})
    copies.begin()
    trained = [np.array([3.0, 4.0], np.float32)] * 2
    monkeypatch.setattr(copies, "_combined", lambda numbers: trained)
    copies.touched()
    variables[0].assign([4.0, 4.0])
    variables[0].assign_add([1.0, 2.0])
    np.testing.assert_array_equal(variables[0].numpy(), [5.0, 6.0])
    copies.settled()
    np.testing.assert_array_equal(variables[0].numpy(), [5.0, 6.0])
    np.testing.assert_array_equal(variables[1].numpy(), [3.0, 4.0])
    copies.begin()
    assert copies.assigned == [True, False]
    copies.touched()
    copies.settled()
    np.testing.assert_array_equal(variables[0].numpy(), [3.0, 4.0])
    # What is added is added to what copies are by now, not to what users saw of them last.
    now = [np.array([7.0, 8.0], np.float32)] * 2
    monkeypatch.setattr(copies, "_combined", lambda numbers: now)
    copies.touched()
    variables[0].assign_add([1.0, 1.0])
    variables[1].assign_sub([1.0, 1.0])
    np.testing.assert_array_equal(variables[0].numpy(), [8.0, 9.0])
    np.testing.assert_array_equal(variables[1].numpy(), [6.0, 7.0])


def test_what_is_assigned_all_copies_take_over_though_it_is_what_users_see():
    """As with `model.set_weights(model.get_weights())`, of copies that are not the same."""
    variables = [CopiedVariable([1.0, 2.0]) for _ in range(2)]
    groups = [Group(number, trainers=(number,)) for number in range(2)]
    copies = Copies(variables, cluster=None, groups=groups)
    copies.load({0: [np.float32([0, 1])] * 2, 1: [np.float32([2, 3])] * 2})
    for is_assigned in (True, False):
        if is_assigned:
            variables[1].assign(variables[1].numpy())
            np.testing.assert_array_equal(copies.assigned_since()[1], [1.0, 2.0])
        copies.begin()
        assert copies.assigned == [False, is_assigned]
        found = copies.all_values()
        np.testing.assert_array_equal([found[0][0], found[1][0]], [[0, 1], [2, 3]])
        np.testing.assert_array_equal([found[0][1], found[1][1]], [[1, 2], [1, 2]])


def with_scaled_loss():
    """As Keras makes it with the policy mixed_float16."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.cases("Hop with loss scaling", "ShadowSync")
@pytest.mark.parametrize("kind", [*STRATEGIES, "Hop with loss scaling"])
def test_a_learning_rate_that_a_callback_sets_within_an_epoch_acts_on_its_steps(clusters, kind):
    name, _, is_scaled = kind.partition(" with ")
    strategy = STRATEGIES[name][1](clusters.get(workers=3, ps=4))
    make = with_scaled_loss if is_scaled else lambda: recsync.optimizers.SGD(0.1)
    model = compiled(strategy, slope_model, make, mean_output)

    class Assigning(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not self.rates:
                model.optimizer.learning_rate.assign(0.5)

        def on_epoch_end(self, epoch, logs=None):
            copies = model.train_function.synchronizer.copies
            (place,) = copies.places(model.optimizer.learning_rate._value)
            copied = copies.values(0)[place]
            self.rates.append((float(model.optimizer.learning_rate.numpy()), float(copied)))

    assigning = Assigning()
    assigning.rates = []
    ones = np.ones((6, 1), np.float32)
    model.fit(ones, ones, 1, epochs=2, verbose=0, callbacks=[assigning])
    np.testing.assert_allclose(assigning.rates, [[0.5, 0.5], [0.5, 0.5]])


@pytest.fixture
def make_copies(monkeypatch):
    """Makes copies of variables for two groups, all in this process; the first trains its own."""
    monkeypatch.setattr(copies_of_groups, "at", lambda *server: contextlib.nullcontext())
    monkeypatch.setattr(copies_of_groups, "on_worker", tf.constant)
    monkeypatch.setattr(Copies, "_lives_of", lambda copies, group: [])

    def make(variables, **options):
        cluster = types.SimpleNamespace(dispatch_scope=contextlib.nullcontext)
        groups = [Group(number, trainers=(number,)) for number in range(2)]
        copies = Copies(variables, cluster, groups, **options)
        copies.begin()
        copies.ensure(0)
        copies.touched()
        return copies

    return make


@pytest.fixture
def rates(make_copies):
    """Copies of a learning rate."""
    rate = CopiedVariable(0.1)
    return make_copies([rate], peeked=[rate])


def set_rate(copies, rate):
    """As a callback does within an epoch."""
    copies.seen[0].assign(rate)
    copies.carried_on()


def rates_of(copies):
    return [copies.of(group)[0].numpy() for group in copies.there]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_group_whose_copies_are_being_made_gets_what_is_assigned_meanwhile(
    rates, monkeypatch, is_lost
):
    make, pending = copies_of_groups.ResourceVariable, [0.5]

    def late(*arguments, **options):
        made = make(*arguments, **options)
        while pending:
            set_rate(rates, pending.pop())
        return made

    set_rate(rates, 0.2)
    if is_lost:  # It begins with what others have.
        rates.will_make(1)
        read = [np.float32(0.2)]
        set_rate(rates, 0.3)
    monkeypatch.setattr(copies_of_groups, "ResourceVariable", late)
    if is_lost:
        rates.make(1, read)
    else:
        rates.ensure(1)
    np.testing.assert_allclose(rates_of(rates), [0.5, 0.5])
    # What was assigned before it was read it does not get.
    monkeypatch.setattr(copies_of_groups, "ResourceVariable", make)
    rates.drop(1)
    rates.make(1, [np.float32(0.6)])
    np.testing.assert_allclose(rates_of(rates), [0.5, 0.6])


def test_a_group_that_can_not_be_reached_when_a_rate_is_set_gets_it_later(rates, monkeypatch):
    rates.ensure(1)
    write = Copies._write

    def broken(copies, group, *arguments):
        if group == 1:
            raise tf.errors.UnavailableError(None, None, "the connection broke")
        write(copies, group, *arguments)

    for again in (rates.carried_on, rates.begin):  # After the next hold, or in the next epoch.
        rate = 0.5 if again == rates.begin else 0.3
        monkeypatch.setattr(Copies, "_write", broken)
        set_rate(rates, rate)
        np.testing.assert_allclose(rates_of(rates)[0], rate)
        assert rates_of(rates)[1] != np.float32(rate)
        monkeypatch.setattr(Copies, "_write", write)
        again()
        np.testing.assert_allclose(rates_of(rates), [rate, rate])


@pytest.mark.parametrize("read", [0, "mean"])
def test_who_looks_at_the_learning_rate_reads_nothing_else(make_copies, monkeypatch, read):
    fetched = []

    class Reader:
        def __init__(self, like):
            self._like = like

        def __call__(self, handles):
            fetched.append([variable.shape.num_elements() for variable in self._like])
            return [
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype).numpy()
                for handle, variable in zip(handles, self._like, strict=True)
            ]

    monkeypatch.setattr(copies_of_groups, "PackedReader", Reader)
    weights, rate = CopiedVariable(np.zeros([1000], np.float32)), CopiedVariable(0.1)
    copies = make_copies([weights, rate], read=read, peeked=[rate])
    copies.ensure(1)
    for group, value in ((0, 0.5), (1, 0.7)):
        for copy in copies.of(group):
            copy.assign(np.full(copy.shape, value, np.float32))
    groups, expected = (1, 0.5) if read == 0 else (2, 0.6)
    np.testing.assert_allclose(rate.numpy(), expected)
    assert fetched == [[1]] * groups
    np.testing.assert_allclose(weights.numpy(), np.full([1000], expected))
    assert fetched[groups:] == [[1000, 1]] * groups
    # Nobody has assigned what was read.
    copies.begin()
    assert copies.assigned == [False, False]


def test_the_steps_in_flight_of_a_fit_that_was_stopped_end_before_a_model_compiled_again_trains(
    clusters,
):
    strategy = recsync.HopStrategy(clusters.get(workers=3, ps=4), recsync.topology.ring(3))
    model = compiled(strategy, slope_model, lambda: recsync.optimizers.SGD(1.0), mean_output)

    def stop():
        model.stop_training = True

    ones = np.ones((60, 1), np.float32)
    with compute_time(strategy, 3.0):
        model.fit(ones, ones, 1, verbose=0, callbacks=[AtBatch(0, stop)])
    before = model.train_function
    with strategy.scope():
        model.compile(recsync.optimizers.SGD(1.0), mean_output)
    strategy.attach(model)
    assert not before.run.is_open
    # Whatever comes to an end later, users see the new copies.
    model.fit(ones, ones, 1, verbose=0)
    trained = model.get_weights()[0]
    before._all_done(before.run)
    np.testing.assert_array_equal(model.get_weights()[0], trained)
