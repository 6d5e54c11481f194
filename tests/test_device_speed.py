"""Artificial speed of devices: the op that computing waits at, and limited trainers and servers.

What is reserved is counted, and does not depend on how busy the machine is; of times, only what
they are at least is known.
"""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import live_operations, quickest, taken, wait_until
from test_placement_of_operators import Nothing, assert_same, graph_of_step

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.optimizers import SGD
from tf_recsync.placement import OperatorPlan, flops

INVALID = tf.errors.InvalidArgumentError
WIDTH, HIDDEN, BATCH = 48, 64, 16


# The op.


def test_results_come_as_they_were_when_the_processor_has_had_the_time():
    results = [tf.constant([1.0, 2.0]), tf.constant([[3]], tf.int64)]
    computed = []

    def used():
        before = time.process_time()
        computed.clear()
        assert taken(lambda: computed.extend(ops.computed(results, 5e5, 1e6))) >= 0.5
        return time.process_time() - before

    assert quickest(used, 0.4) < 0.4  # Other threads of this process may have something to do.
    for before, after in zip(results, computed, strict=True):
        assert after.dtype == before.dtype and np.array_equal(before, after)


def test_what_several_threads_compute_takes_the_sum_of_the_times():
    step = tf.function(lambda x: ops.computed([x], 1e5, 1e6)[0])
    step(tf.ones([2]))
    threads = [threading.Thread(target=step, args=(tf.ones([2]),)) for _ in range(5)]

    def run():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = ops.reserved()
    assert taken(run) >= 0.5
    after = ops.reserved()
    assert (after.amounts - before.amounts).numpy().tolist() == [500_000, 0]
    assert (after.seconds - before.seconds).numpy() == pytest.approx([0.5, 0.0])


def test_a_device_computes_and_sends_side_by_side_and_counts_both():
    before = ops.reserved()
    ops.computed([1.0], 1e4, float("inf"))
    ops.transfer(tf.zeros([1000]), 1e6)
    after = ops.reserved()
    assert (after.amounts - before.amounts).numpy().tolist() == [10_000, 4000]
    assert (after.seconds - before.seconds).numpy() == pytest.approx([0.0, 0.004])


def test_computing_ends_when_its_step_is_cancelled():
    from tensorflow.python.eager import cancellation

    manager = cancellation.CancellationManager()
    step = tf.function(lambda x: ops.computed([x], 6e7, 1e6)[0]).get_concrete_function(
        tf.TensorSpec([], tf.float32)
    )
    before = int(ops.reserved().amounts[0])

    def cancel():
        if wait_until(lambda: int(ops.reserved().amounts[0]) > before, 60.0):  # It has begun.
            time.sleep(0.05)  # It is in the op's hands only a moment later.
            manager.start_cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(tf.errors.CancelledError, match="the computing was cancelled"):
        manager.get_cancelable_function(step)(tf.zeros([]))
    canceller.join()


def test_values_of_no_sense_are_refused():
    for flop in (-1.0, float("nan"), float("inf"), 1e19):
        with pytest.raises(INVALID, match="flop must be at least 0 and below"):
            ops.computed([1.0], flop, 1e6)
    for speed in (0.0, -1.0, float("nan")):
        with pytest.raises(INVALID, match="flops_per_second must be positive"):
            ops.computed([1.0], 1.0, speed)
    for arguments in (([1.0, 2.0], 1.0), (1.0, [1.0, 2.0])):
        with pytest.raises(INVALID, match="must be a scalar"):
            ops.computed([1.0], *arguments)
    with pytest.raises(ValueError, match="rank"):
        tf.function(lambda: ops.computed([1.0], 1.0, [1.0, 2.0]))()


# Counts.


def test_operations_are_those_of_each_example_and_those_of_weights():
    def step(x, w):
        return tf.matmul(x, w), tf.nn.l2_loss(w), tf.cond(x[0, 0] > 0.0, lambda: -x, lambda: x)

    def operations(examples):
        specs = tf.TensorSpec([examples, 6], tf.float32), tf.TensorSpec([6, 5], tf.float32)
        return tf.function(step).get_concrete_function(*specs).graph.get_operations()

    fixed, each = flops.per_example(operations(None))
    assert fixed == 6 * 5  # The loss.
    assert each == 2 * 6 * 5 + 6  # The product, and one branch.
    assert flops.per_example(operations(3)) == (fixed + 3 * each, 0.0)


# Servers.


@pytest.fixture
def cluster(clusters):
    """Two trainers, and the two servers of their group."""
    return clusters.get(workers=2, ps=2)


def make(cluster, placement, **options) -> recsync.HierarchicalStrategy:
    return recsync.HierarchicalStrategy(
        cluster,
        Nothing(),
        groups=1,
        trainers_per_group=2,
        ps_per_group=2,
        placement=placement,
        mode=recsync.Shadow(min_interval=1000.0),
        **options,
    )


def build() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(HIDDEN, "relu", name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(HIDDEN, name="second")(hidden))


# Forward, and the gradients of weights and inputs: 2 m k n each; nobody wants those of the data.
FIRST, SECOND = 4 * WIDTH * HIDDEN, 6 * HIDDEN * HIDDEN  # Of an example.


def make_model(strategy) -> keras.Model:
    with strategy.scope():
        model = build()
        model.compile(SGD(0.01), "mse")
    return model


def used(strategy, model, examples: int) -> dict[str, np.ndarray]:
    """What each server of a job was asked for by a pass, [servers, 4] as of `testing.Use`."""
    x = np.ones((examples, WIDTH), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * np.ones(HIDDEN, np.float32)))
    jobs = ("worker", "ps")
    before = {job: np.array(recsync.testing.device_use(strategy, job)) for job in jobs}
    model.fit(data.batch(BATCH), verbose=0)
    return {job: np.array(recsync.testing.device_use(strategy, job)) - before[job] for job in jobs}


def computing(model) -> list[tf.Operation]:
    """The operations of a step that wait for a processor."""
    graph = graph_of_step(model)
    ends = [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]
    return [op for op in live_operations(ends) if op.type == "RecsyncComputed"]


def test_layers_of_two_trainers_compete_for_a_server_and_not_for_two(cluster):
    examples, speed = 8 * BATCH, 2e7
    seconds = {}
    for second in (0, 1):
        strategy = make(cluster, {"first": 0, "second": second})
        recsync.testing.set_device_speed(strategy, speed, job="ps")
        model = make_model(strategy)
        started = time.monotonic()
        use = used(strategy, model, examples)
        seconds[second] = use["ps"][:, 1]
        # The pass does not end before the busiest server is done with all.
        assert time.monotonic() - started >= seconds[second].max()
        # Biases and activations are the rest.
        both = examples * np.array([FIRST, SECOND])
        expected = [both.sum(), 0.0] if second == 0 else both
        assert use["ps"][:, 0] == pytest.approx(expected, rel=0.03)
        assert not use["worker"].any()
    one, two = seconds[0], seconds[1]
    assert one.max() == pytest.approx(two.sum(), rel=1e-3)  # The sum of the times,
    assert two.max() < 0.8 * one.max()  # and the longer one.


def test_layers_are_computed_forward_and_backward_by_themselves(cluster):
    strategy = make(cluster, {"first": 0, "second": 1})
    recsync.testing.set_device_speed(strategy, 1e12, job="ps")
    model = make_model(strategy)
    examples = 3 * BATCH
    use = used(strategy, model, examples)["ps"]
    assert (use[:, 0] > examples).all()
    found = sorted(
        (tf.DeviceSpec.from_string(op.device).task, len(op.outputs)) for op in computing(model)
    )
    # Forward; gradients of kernel and bias; of the second one also that of its input.
    assert found == [(0, 1), (0, 2), (1, 1), (1, 1), (1, 2)]


def test_servers_compute_their_pieces_of_divided_layers(cluster):
    strategy = make(cluster, {"first": "columns", "second": "rows"})
    recsync.testing.set_device_speed(strategy, 1e12, job="ps")
    examples = 3 * BATCH
    use = used(strategy, make_model(strategy), examples)["ps"]
    assert use[:, 0] == pytest.approx(np.full(2, examples * (FIRST + SECOND) / 2), rel=0.03)


def test_a_smaller_batch_takes_less(cluster):
    strategy = make(cluster, {"first": 0, "second": 0})
    recsync.testing.set_device_speed(strategy, 1e12, servers=[0], job="ps")
    model = make_model(strategy)
    full = used(strategy, model, 4 * BATCH)["ps"][0, 0]
    half = used(strategy, model, 4 * BATCH + BATCH // 2)["ps"][0, 0]
    assert half - full == pytest.approx(full / 8, rel=0.01)


def test_trainers_compute_what_is_not_on_servers_as_plans_count_it(cluster):
    strategy = make(cluster, "trainers", nets_per_trainer=2)
    recsync.testing.set_device_speed(strategy, 1e12)
    model = make_model(strategy)
    use = used(strategy, model, 12 * BATCH)
    planned = 12 * OperatorPlan.step_graph(build(), BATCH).flops
    assert use["worker"][:, 0].sum() == pytest.approx(planned, rel=0.03)
    assert not use["ps"].any()
    before = recsync.testing.device_use(strategy, "worker")
    model.evaluate(np.ones((8, WIDTH)), np.ones((8, HIDDEN)), verbose=0)
    assert recsync.testing.device_use(strategy, "worker") == before  # Only training counts.


def test_of_the_trainers_only_those_named_are_limited(cluster):
    strategy = make(cluster, "trainers")
    recsync.testing.set_device_speed(strategy, 1e7, servers=[1])
    model = make_model(strategy)
    use = used(strategy, model, 20 * BATCH)["worker"]
    assert use[0, 1] == 0.0
    assert use[1, 1] == pytest.approx(use[1, 0] / 1e7)


def test_training_is_the_same_with_a_speed_and_after_it_is_taken_off(clusters):
    cluster = clusters.get(workers=2, ps=2)
    strategy = make(cluster, {"first": 0, "second": 1})
    for job in ("worker", "ps"):
        recsync.testing.set_device_speed(strategy, 1e10, job=job)
    model, local = make_model(strategy), build()
    local.compile(SGD(0.01), "mse")
    local.set_weights(model.get_weights())
    x = np.random.default_rng(3).normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = x[:, :1] * np.ones(HIDDEN, np.float32)
    for each in (model, local):
        each.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    assert_same(model, local)
    assert computing(model)
    for job in ("worker", "ps"):
        recsync.testing.set_device_speed(strategy, None, job=job)
    use = used(strategy, model, 2 * BATCH)
    assert not use["worker"].any() and not use["ps"].any()
    assert not computing(model)


def test_wrong_speeds_are_refused(cluster):
    strategy = make(cluster, "trainers")
    for wrong in (0, -1.0, float("inf"), float("nan"), "fast", True):
        with pytest.raises(ValueError, match="must be (finite, and )?positive or None, not"):
            recsync.testing.set_device_speed(strategy, wrong)
    for wrong in ([2], [-1], [0.5], [True]):
        with pytest.raises(ValueError, match="each of servers must be .* from 0 to 1, got"):
            recsync.testing.set_device_speed(strategy, 1e9, wrong)
    with pytest.raises(ValueError, match=r"job must be one of \('worker', 'ps'\) for Hier"):
        recsync.testing.set_device_speed(strategy, 1e9, job="chief")
    with pytest.raises(ValueError, match="job must be one of"):
        recsync.testing.device_use(strategy, "reader")
    assert strategy._settings.speeds == {}
    no_placement = recsync.AsyncStrategy(cluster)
    with pytest.raises(ValueError, match=r"one of \('worker',\) for AsyncStrategy, not 'ps'"):
        recsync.testing.set_device_speed(no_placement, 1e9, job="ps")
    hop = recsync.HopStrategy(cluster, recsync.topology.ring(2))
    with pytest.raises(ValueError, match=r"job must be one of \(\) for HopStrategy"):
        recsync.testing.set_device_speed(hop, 1e9)


# Links.

# Of an example: what goes out and its gradient; what comes in; what is in between.
OUT, IN, BETWEEN = 2 * 4 * HIDDEN, 4 * WIDTH, 2 * 4 * HIDDEN


def limit_links(strategy, bandwidth=1e9):
    for job in ("worker", "ps"):
        recsync.testing.set_bandwidth(strategy, bandwidth, job=job)


def test_activations_pass_the_links_of_both_ends(cluster):
    strategy = make(cluster, {"first": 0, "second": 1})
    limit_links(strategy)
    examples = 4 * BATCH
    use = used(strategy, make_model(strategy), examples)
    # With the learning rate, which is a number, there and back.
    assert use["worker"][:, 2].sum() == pytest.approx(examples * (IN + OUT), rel=0.02)
    servers = examples * np.array([IN + BETWEEN, BETWEEN + OUT])
    assert use["ps"][:, 2] == pytest.approx(servers, rel=0.02)
    assert use["ps"][:, 3] == pytest.approx(use["ps"][:, 2] / 1e9)
    assert not use["ps"][:, :2].any()


def test_compressed_activations_pass_links_in_fewer_bytes(cluster):
    compression = recsync.Compression(activations="bfloat16", gradients="bfloat16")
    strategy = make(cluster, {"first": 0, "second": 1}, compression=compression)
    limit_links(strategy)
    examples = 4 * BATCH
    use = used(strategy, make_model(strategy), examples)
    assert use["worker"][:, 2].sum() == pytest.approx(examples * (IN + OUT) / 2, rel=0.03)
    servers = examples * np.array([IN + BETWEEN, BETWEEN + OUT]) / 2
    assert use["ps"][:, 2] == pytest.approx(servers, rel=0.03)


def test_weights_pass_the_links_of_trainers_that_pull_them_until_these_are_taken_off(cluster):
    strategy = make(cluster, "trainers")
    limit_links(strategy)
    model = make_model(strategy)
    weights = 4 * sum(np.size(w) for w in model.get_weights())
    use = used(strategy, model, 5 * BATCH)
    # There and back; and pulls of trainers that find out meanwhile that there is no batch.
    for job in ("worker", "ps"):
        assert 10 * weights <= use[job][:, 2].sum() <= 18 * weights
    recsync.testing.set_bandwidth(strategy, None, servers=[0], job="worker")
    use = used(strategy, model, 20 * BATCH)
    assert use["worker"][0, 3] == 0.0 < use["worker"][1, 3]
    limit_links(strategy, None)
    use = used(strategy, model, BATCH)
    assert not use["worker"].any() and not use["ps"].any()
