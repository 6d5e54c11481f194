"""Groups of trainers that tests train, and what they train."""

import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync

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


# Mode inside, algorithm between, placement. What the mark "cases" does not name is for
# `make test FULL=1`.
CELLS = [
    *((inside, between, "trainers") for inside in INSIDE for between in BETWEEN),
    *((inside, "EASGD", "servers") for inside in ("hogwild", "sync")),
]
# With a backup worker groups go on without each other.
ALONE = recsync.Hop(recsync.topology.ring(2), backup_workers=1)
RING_OF_3 = recsync.Hop(recsync.topology.ring(3))


def hierarchical(cluster, algorithm=BETWEEN["EASGD"], **options):
    """With the placement "servers" all dense layers of `click_model` run on the group's servers."""
    options = {"groups": 2, "trainers_per_group": 2, "ps_per_group": 1, **options}
    if options.get("placement") == "servers":
        options["placement"] = {"hidden": 0, "normal": 0, "top": options["ps_per_group"] - 1}
    return recsync.HierarchicalStrategy(cluster, algorithm, **options)


def batches_of(worker: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(worker)
    x = random.normal(size=(ROUNDS, BATCH, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32))[..., np.newaxis] + worker
    return list(zip(x, y, strict=True))


def line(strategy, make=lambda: recsync.optimizers.SGD(RATE)):
    """A model of two weights, one of them of three elements.

    Its first step takes a third of the processor time of that of `click_model`.
    """
    with strategy.scope():
        layers = [keras.Input((3,)), keras.layers.Dense(1, name="only")]
        model = keras.Sequential(layers, name="line")
        model.set_weights([np.full((3, 1), 0.5, np.float32), np.zeros(1, np.float32)])
        model.compile(make(), "mse")
    return model


def with_slots():
    """An optimizer that keeps something for each weight."""
    return recsync.optimizers.Adagrad(RATE)


def datasets(strategy):
    """Each worker has its own batches."""

    def dataset_fn(context):
        x, y = zip(*batches_of(context.input_pipeline_id), strict=True)
        return tf.data.Dataset.from_tensor_slices((np.array(x), np.array(y)))

    return strategy.distribute_datasets_from_function(dataset_fn)


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


def numbers(batches: int) -> tf.data.Dataset:
    """Batches for `line`."""
    x = np.random.default_rng(1).normal(size=(batches * BATCH, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)
