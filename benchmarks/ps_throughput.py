"""Training speed on parameter servers: this package against three forms in stock TensorFlow.

What is measured: examples per second of Wide & Deep (see click_models.py) on 2 workers and 2
parameter servers, real processes on this machine's loopback, for batches of 512 and 2,048. All
systems train the same model with Adagrad on the same batches.

- `recsync`: `tf_recsync.AsyncStrategy` and plain `model.fit` with eight steps per call, versions
  and staleness weights on, and this package's transport between the servers. It is the only one
  that reports a loss while it trains, beside (b). As in the other forms, each worker has the data
  in its memory (`distribute_datasets_from_function`).
- `recsync_handed_out`: the same with a plain dataset, whose batches the coordinator hands out over
  the network, each to the worker that asks next. Runs only if `--systems` names it;
  `ratio_handed_out` is then in the summary: its speed over that of (c).
- `recsync_grpc`: `recsync` with TensorFlow's calls between the servers. Runs only if `--systems`
  names it; `ratio_grpc` is then in the summary: its speed over that of (c).
- `one_process`: the same model and optimizer without a cluster. What is missing to its speed is
  what distribution costs on a machine whose processors also are the network.
- `a`: what a Keras 3 user writes today: the same Keras model, keras.optimizers.Adagrad, and a
  custom loop with `tf.distribute.ParameterServerStrategy` and a `ClusterCoordinator`, one step per
  scheduled function.
- `b`: legacy Keras (tf_keras): `model.fit` with a `DatasetCreator` on ParameterServerStrategy, and
  of some values of `steps_per_execution` and both of its Adagrad optimizers the fastest.
- `c`: what an expert tunes by hand: the tables of many features merged into one with offsets (each
  server has one of dimension 16 and one of dimension 1 with half of the features), pulled rows
  looked up once a batch, fused update ops (ResourceSparseApplyAdagradV2, ResourceApplyAdagradV2)
  on the servers, ten steps per scheduled function.
- `c_packed`: (c) with the dense variables of each server merged into one as well. Runs only if
  `--systems` names it; `ratio_c_packed` is then in the summary.

How: see common.py. Each system has a cluster of its own and waits idle while the others run. A turn
starts and ends with idle workers.

The summary's ratios are this package's speed over that of (c), `ratio`, of (a) and (b), and of its
own in one process, `ratio_one_process`. (b) needs tf_keras, which `make bench` installs (the extra
`bench`).

    python benchmarks/ps_throughput.py --batch_size=512 --json=ps_throughput.json
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import common
from absl import app, flags

FLAGS = flags.FLAGS
common.define_flags()
flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=1)
flags.DEFINE_integer("ps", 2, "Parameter servers.", lower_bound=1)
flags.DEFINE_string(
    "legacy_choice",
    None,
    'For (b): "legacy:10" or "new:10", the optimizer and the steps per call '
    "to use. Default: tries which are the fastest.",
)

LEGACY_STEPS_PER_EXECUTION = (10, 25)
EXPERT_STEPS_PER_CALL = 10


def stock_strategy(cluster: Any) -> Any:
    """TensorFlow's own strategy on the cluster."""
    import tensorflow as tf

    from tf_recsync import _engine

    # TensorFlow's server in this process would listen on all network interfaces.
    _engine.confine_listeners("127.0.0.1")
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster.cluster_spec, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


def run_ours(rounds: common.Rounds, handed_out: bool = False, transport: str = "recsync") -> None:
    """AsyncStrategy and fit."""
    import click_models
    import tensorflow as tf

    import tf_recsync as recsync

    cluster = click_models.start_cluster(rounds, FLAGS.workers, FLAGS.ps, transport)
    strategy = recsync.AsyncStrategy(cluster)
    data = click_models.make_data(rounds.batch_size)
    with strategy.scope():
        model = click_models.build_ours(data.spec)
        weights = recsync.staleness.InversePower(k=2, baseline=FLAGS.workers)
        model.compile(
            recsync.optimizers.Adagrad(click_models.LEARNING_RATE, staleness=weights),
            "binary_crossentropy",
            steps_per_execution=click_models.STEPS_PER_EXECUTION,
        )
    multiple = click_models.STEPS_PER_EXECUTION * FLAGS.workers

    def make_batches(context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        del context  # As for the other forms, all data is everywhere.
        return click_models.in_memory(data.train(rounds.batch_size))

    batches = (
        make_batches() if handed_out else strategy.distribute_datasets_from_function(make_batches)
    )
    click_models.serve_fit(rounds, model, batches, multiple=multiple)


def run_one_process(rounds: common.Rounds) -> None:
    """This package without a cluster."""
    import click_models

    import tf_recsync as recsync

    data = click_models.make_data(rounds.batch_size)
    optimizer = recsync.optimizers.Adagrad(click_models.LEARNING_RATE)
    click_models.serve_local(rounds, click_models.build_ours(data.spec), optimizer, data)


def serve_coordinator(
    rounds: common.Rounds,
    strategy: Any,
    step: Callable[..., None],
    batches: Callable[[], Any],
    steps_per_call: int,
) -> None:
    """Takes turns with a custom loop: schedules all calls of a turn and waits for them."""
    import tensorflow as tf

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    per_worker = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(lambda context: batches())
    )
    iterator = iter(per_worker)

    def run(steps: int) -> None:
        for _ in range(steps // steps_per_call):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    rounds.serve(run, multiple=steps_per_call * FLAGS.workers)


def run_keras_3(rounds: common.Rounds) -> None:
    """Form (a)."""
    import click_models
    import keras
    import tensorflow as tf

    strategy = stock_strategy(click_models.start_cluster(rounds, FLAGS.workers, FLAGS.ps, "grpc"))
    data = click_models.make_data(rounds.batch_size)
    with strategy.scope():
        model = click_models.build_stock(data.spec)
        optimizer = keras.optimizers.Adagrad(click_models.LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    loss_function = keras.losses.BinaryCrossentropy()

    @tf.function
    def step(iterator: Any) -> None:
        def replica_step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(features, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica_step, args=next(iterator))

    def batches() -> tf.data.Dataset:
        return click_models.in_memory(data.train(rounds.batch_size))

    serve_coordinator(rounds, strategy, step, batches, 1)


def run_legacy_keras(rounds: common.Rounds) -> None:
    """Form (b)."""
    try:
        import tf_keras
    except ImportError:
        raise common.Unavailable(
            "needs tf_keras: pip install --no-deps 'tf_keras>=2.21,<2.22'"
        ) from None
    import click_models

    strategy = stock_strategy(click_models.start_cluster(rounds, FLAGS.workers, FLAGS.ps, "grpc"))
    data = click_models.make_data(rounds.batch_size)
    creator = tf_keras.utils.experimental.DatasetCreator(
        lambda context: click_models.in_memory(data.train(rounds.batch_size))
    )
    optimizers = {
        "legacy": tf_keras.optimizers.legacy.Adagrad,
        "new": tf_keras.optimizers.Adagrad,
    }

    def make_fit(optimizer: str, steps_per_execution: int) -> Callable[..., None]:
        with strategy.scope():
            model = click_models.build_legacy(data.spec, tf_keras)
            model.compile(
                optimizers[optimizer](click_models.LEARNING_RATE),
                "binary_crossentropy",
                steps_per_execution=steps_per_execution,
            )

        def fit(steps: int, epochs: int, callbacks: list[Any]) -> None:
            model.fit(creator, steps_per_epoch=steps, epochs=epochs, callbacks=callbacks, verbose=0)

        return fit

    def seconds_per_step(optimizer: str, steps_per_execution: int) -> float:
        tf_keras.backend.clear_session()
        return rounds.calibrate_fit(
            tf_keras.callbacks.Callback,
            make_fit(optimizer, steps_per_execution),
            multiple=steps_per_execution * FLAGS.workers,
        )

    if FLAGS.legacy_choice:
        optimizer, _, text = FLAGS.legacy_choice.partition(":")
        steps_per_execution = int(text)
    else:
        first = LEGACY_STEPS_PER_EXECUTION[0]
        seconds = {(name, first): seconds_per_step(name, first) for name in optimizers}
        optimizer = min(seconds, key=seconds.get)[0]
        for other in LEGACY_STEPS_PER_EXECUTION[1:]:
            seconds[optimizer, other] = seconds_per_step(optimizer, other)
        optimizer, steps_per_execution = min(seconds, key=seconds.get)
        tried = {f"{name}:{steps}": round(1e3 * s, 3) for (name, steps), s in seconds.items()}
        rounds.describe(tried_step_ms=tried)
    rounds.describe(choice=f"{optimizer}:{steps_per_execution}")
    tf_keras.backend.clear_session()
    rounds.serve_fit(
        tf_keras.callbacks.Callback,
        make_fit(optimizer, steps_per_execution),
        multiple=steps_per_execution * FLAGS.workers,
    )


def run_expert(rounds: common.Rounds, pack_dense: bool = False) -> None:
    """Form (c)."""
    import click_models
    import tensorflow as tf

    strategy = stock_strategy(click_models.start_cluster(rounds, FLAGS.workers, FLAGS.ps, "grpc"))
    data = click_models.make_data(rounds.batch_size)
    model = click_models.MergedModel(
        data.spec,
        [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(FLAGS.ps)],
        pack_dense=pack_dense,
    )

    @tf.function
    def step(iterator: Any) -> None:
        # Unrolled: a loop in the graph would run on all servers, and is slower.
        for _ in range(EXPERT_STEPS_PER_CALL):
            model.train_step(*next(iterator))

    def batches() -> tf.data.Dataset:
        return click_models.in_memory(model.merge(data.train(rounds.batch_size)))

    serve_coordinator(rounds, strategy, step, batches, EXPERT_STEPS_PER_CALL)


SYSTEMS = {
    common.OURS: run_ours,
    "recsync_handed_out": functools.partial(run_ours, handed_out=True),
    "recsync_grpc": functools.partial(run_ours, transport="grpc"),
    "one_process": run_one_process,
    "a": run_keras_3,
    "b": run_legacy_keras,
    "c": run_expert,
    "c_packed": functools.partial(run_expert, pack_dense=True),
}
OPTIONAL = ("recsync_handed_out", "recsync_grpc", "c_packed")


def main(argv: list[str]) -> None:
    common.check_arguments(argv, systems=SYSTEMS)
    if common.is_system():
        common.be_system(SYSTEMS)
    for batch_size in common.batch_sizes():
        results = common.compare(SYSTEMS, batch_size, optional=OPTIONAL)
        for system in results.systems:
            common.report(results.line(system))
        summary = {"benchmark": "ps_throughput", "batch_size": batch_size}
        if {common.OURS, "c"} <= set(results.systems):
            summary |= common.summary_of_ratios(results.ratios(common.OURS, "c"))
        for other in ("a", "b", "one_process"):
            summary[f"ratio_{other}"] = results.median_ratio(common.OURS, other)
        if "c_packed" in results.systems:
            summary["ratio_c_packed"] = results.median_ratio(common.OURS, "c_packed")
        for other in ("handed_out", "grpc"):
            if f"recsync_{other}" in results.systems:
                summary[f"ratio_{other}"] = results.median_ratio(f"recsync_{other}", "c")
        common.report({**summary, "rounds": FLAGS.rounds})


if __name__ == "__main__":
    app.run(main)
