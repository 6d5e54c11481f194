"""What `HopStrategy` refuses before training starts, and what it warns of."""

import keras
import numpy as np
import pytest

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, BATCH, WIDTH = 4, 4, 3


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


def classifier(optimizer):
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(optimizer, "binary_crossentropy")
    return model


def labelled(examples):
    random = np.random.default_rng(1)
    x = random.normal(size=(examples, WIDTH)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": topology.ring(8)}, "as many workers as the cluster, 4, not 8"),
        ({"topology": "ring"}, "topology must be from tf_recsync.topology, not 'ring'"),
        ({"max_iteration_gap": 0}, "max_iteration_gap must be an integer of at least 1, got 0"),
        ({"backup_workers": 3}, "less than the in-neighbors.*worker 0 has 3, and 3 backup"),
        ({"backup_workers": [1] * 3}, "one for each of the 4 workers, not 3"),
        ({"backup_workers": -1}, "backup_workers must be an integer of at least 0, got -1"),
        ({"backup_workers": None}, "must be an int or one for each of the 4 workers, not None"),
        ({"backup_workers": 1.0}, "must be an int or one for each of the 4 workers, not 1.0"),
        ({"backup_workers": True}, "must be an int or one for each of the 4 workers, not True"),
        ({"backup_workers": "1111"}, "must be an int or one for each of the 4 workers, not '1"),
        ({"backup_workers": [1] * 3 + [0.5]}, "must be an integer of at least 0, got 0.5"),
        ({"backup_workers": [1] * 3 + [True]}, "must be an integer of at least 0, got True"),
        (
            {"backup_workers": 1, "max_iteration_gap": None},
            "backup_workers needs token queues",
        ),
        ({"backup_workers": 1, "protocol": "notify_ack"}, "notify_ack excludes backup workers"),
        (
            {"staleness_bound": 2, "protocol": "notify_ack"},
            "notify_ack excludes a staleness_bound above 1, got 2",
        ),
        ({"max_iteration_gap": 3, "protocol": "notify_ack"}, "of token queues, not of notify"),
        ({"staleness_bound": -1}, "staleness_bound must be an integer of at least 0, got -1"),
        (
            {"max_iteration_gap": 600_000},
            "max_iteration_gap must be at most 349524 where a worker has 3 in-neighbors, itself "
            "included, as worker 0, got 600000",
        ),
        (
            {"max_iteration_gap": 349_525, "staleness_bound": 2},
            "max_iteration_gap must be at most 349524 .* got 349525",
        ),
        ({"max_iteration_gap": 2**70}, "max_iteration_gap must be at most 1048576, got 118059"),
        ({"staleness_bound": 2**70}, "staleness_bound must be at most 1048576, got 118059"),
        (
            {"staleness_bound": 600_000, "max_iteration_gap": None},
            "max_iteration_gap must not be None with staleness_bound=600000 in this graph: the "
            "queue of worker 0 would need 1800006 places, of which there may be 1048576",
        ),
        ({"skip": recsync.Skip(2), "max_iteration_gap": None}, "skip needs token queues"),
        ({"skip": 3}, "skip must be a Skip or None, not 3"),
        ({"order": "random"}, 'order must be "parallel" or "serial", not \'random\''),
        ({"protocol": "gossip"}, "protocol must be .* not 'gossip'"),
        ({"output": 3.0}, 'output must be "first", "mean" or from 0 to 3, not 3.0'),
        ({"output": 4}, 'output must be "first", "mean" or from 0 to 3, not 4'),
        ({"stall_seconds": 0}, "stall_seconds must be positive"),
        ({"check_invariants": 1}, "check_invariants must be a bool, not 1"),
    ],
)
def test_wrong_arguments_are_refused(cluster, arguments, message):
    arguments = {"topology": topology.ring(WORKERS), **arguments}
    with pytest.raises(ValueError, match=message):
        recsync.HopStrategy(cluster, **arguments)


def test_integers_of_numpy_are_as_good(cluster):
    ring = topology.ring(WORKERS)
    for backups in (np.int64(1), np.ones(WORKERS, np.int32), [np.int8(1)] * WORKERS):
        strategy = recsync.HopStrategy(cluster, ring, backup_workers=backups, output=np.int64(3))
        assert strategy._protocol.backup_workers == (1,) * WORKERS
        assert strategy._read == 3 and isinstance(strategy._read, int)


@pytest.mark.parametrize(
    "options",
    [{"max_iteration_gap": 349_524}, {"max_iteration_gap": None, "staleness_bound": 349_523}],
    ids=["a gap", "a staleness bound"],
)
def test_the_largest_queues_that_are_not_refused_can_be_trained_with(cluster, options):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), **options)
    with strategy.scope():
        model = classifier("sgd")
    x, y = labelled(WORKERS * BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert sum(strategy.worker_steps(model)) == WORKERS


def test_a_skip_that_nobody_can_make_is_warned_of(cluster, caplog):
    def warned(skip, **options):
        caplog.clear()
        recsync.HopStrategy(cluster, topology.ring(WORKERS), skip=skip, **options)
        return "has no effect" in caplog.text

    assert warned(recsync.Skip(10))
    assert (
        "Skip(max_jump=10, trigger=0) has no effect: to skip iterations a worker has to be 2 "
        "behind all its out-neighbors, and in this mode none can be more than 1." in caplog.text
    )
    assert not warned(recsync.Skip(10), max_iteration_gap=5, backup_workers=1)
    assert not warned(recsync.Skip(10, trigger=4), max_iteration_gap=5, backup_workers=1)
    assert warned(recsync.Skip(10, trigger=5), max_iteration_gap=5, backup_workers=1)
    assert not warned(recsync.Skip(2), staleness_bound=1)
    assert warned(recsync.Skip(2), staleness_bound=0)


def test_wrong_skips_are_refused():
    with pytest.raises(ValueError, match="max_jump must be an integer of at least 2, got 1"):
        recsync.Skip(1)
    with pytest.raises(ValueError, match="trigger must be an integer of at least 0, got -1"):
        recsync.Skip(2, trigger=-1)
    with pytest.raises(ValueError, match="max_jump must be at most 1048576, got 2000000"):
        recsync.Skip(2_000_000)
    with pytest.raises(ValueError, match="trigger must be at most 1048576, got 118059"):
        recsync.Skip(2, trigger=2**70)


def test_parameters_that_can_not_be_averaged_are_refused(cluster):
    x, y = labelled(32)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, dtype="float16")])
        model.compile("sgd", "mse")
        model.build((None, WIDTH))
    with pytest.raises(ValueError, match="float32 or float64 to be averaged.*kernel is float16"):
        model.fit(x, y, verbose=0)


def test_trainable_integers_are_refused_before_a_step(cluster):
    class Counted(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(WIDTH, 1), name="kernel")
            self.count = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=True, name="count"
            )

        def call(self, inputs):
            return inputs @ self.kernel

    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), Counted()])
        model.compile("sgd", "mse")
    x, y = labelled(32)
    with pytest.raises(ValueError, match="float32 or float64 to be averaged.*count is int32"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert strategy._synchronizer(model) is None
    assert strategy.worker_steps(model) == [0] * WORKERS


def test_an_optimizer_from_elsewhere_is_refused(cluster):
    x, y = labelled(32)
    elsewhere = keras.optimizers.SGD(0.1)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = classifier("sgd")
    model.compile(elsewhere, "binary_crossentropy")
    with pytest.raises(ValueError, match="not made inside this strategy's scope"):
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Ftrl(0.1),
        lambda: recsync.optimizers.Ftrl(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Ftrl(0.1)),
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(0.1), {".*bias": recsync.optimizers.Ftrl(0.1)}
            )
        ),
    ],
    ids=["of Keras", "of this package", "inside of another", "of some variables"],
)
def test_an_optimizer_that_undoes_the_average_is_refused(cluster, make):
    x, y = labelled(32)
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    with strategy.scope():
        model = classifier(make())
    with pytest.raises(ValueError, match="must not be Ftrl under HopStrategy.* not .*Ftrl"):
        model.fit(x, y, verbose=0)
    assert strategy._synchronizer(model) is None  # Nobody has begun.
