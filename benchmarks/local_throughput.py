"""Training speed in one process: this package, stock Keras, TensorFlow by hand, and PyTorch.

What is measured: examples per second of Wide & Deep (see click_models.py) without a cluster, for
batches of 512 and 2,048, two threads for each system. All train the same model with Adagrad on the
same batches:

- `recsync`: this package's layers and optimizer, `model.fit`;
- `keras`: keras.layers.Embedding and keras.optimizers.Adagrad, `model.fit`;
- `raw`: TensorFlow by hand: all tables merged into one, fused update ops
  (ResourceSparseApplyAdagradV2, ResourceApplyAdagradV2), a loop over the steps in the graph;

and, with `--torch`, where PyTorch is installed:

- `torch`: torch.nn.EmbeddingBag over merged tables with sparse gradients, torch.optim.Adagrad
  (fused for the dense layers), eager;
- `fbgemm`: the same with FBGEMM's table-batched embedding kernel, which updates the rows in the
  backward pass, by EXACT_ADAGRAD or, with `--rowwise`, EXACT_ROWWISE_ADAGRAD (one accumulator for a
  row, less work than the others do). It knows no dimension 1: the wide part's tables have 4
  columns, and the first is used.

PyTorch is no dependency of this project, and not installed for it. For these two:

    pip install torch==2.13.0 && pip install --no-deps fbgemm-gpu-cpu==1.8.0

(the CPU build of torch, where PyPI offers several; fbgemm-gpu-cpu 1.9.0 does not load with it).

How: see common.py. `fit` runs with eight steps per call. The summary's ratio is this package's
speed over that of stock Keras; `ratio_raw`, `ratio_torch` and `ratio_fbgemm` are those over the
others'.

    python benchmarks/local_throughput.py --batch_size=512 --json=local_throughput.json
"""

from __future__ import annotations

import common
from absl import app, flags

FLAGS = flags.FLAGS
common.define_flags()
flags.DEFINE_integer("threads", 2, "Threads of each system.", lower_bound=1)
flags.DEFINE_bool("torch", False, "Runs the PyTorch systems too.")
flags.DEFINE_bool("rowwise", False, "fbgemm: a single accumulator for each row.")

INSTALL = "pip install torch==2.13.0; pip install --no-deps fbgemm-gpu-cpu==1.8.0"


def limit_tensorflow() -> None:
    """Sets TensorFlow's number of threads; call it first."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
    tf.config.threading.set_inter_op_parallelism_threads(FLAGS.threads)


def serve_keras(rounds: common.Rounds, ours: bool) -> None:
    """Takes turns with `model.fit`."""
    limit_tensorflow()
    import click_models
    import keras

    import tf_recsync as recsync

    data = click_models.make_data(rounds.batch_size)
    model = (click_models.build_ours if ours else click_models.build_stock)(data.spec)
    module = recsync.optimizers if ours else keras.optimizers
    click_models.serve_local(rounds, model, module.Adagrad(click_models.LEARNING_RATE), data)


def run_ours(rounds: common.Rounds) -> None:
    """This package."""
    serve_keras(rounds, ours=True)


def run_keras(rounds: common.Rounds) -> None:
    """Stock Keras."""
    serve_keras(rounds, ours=False)


def run_raw(rounds: common.Rounds) -> None:
    """TensorFlow by hand."""
    limit_tensorflow()
    import click_models
    import tensorflow as tf

    data = click_models.make_data(rounds.batch_size)
    # Where nothing is sent, finding repeated ids costs more than it saves.
    model = click_models.MergedModel(data.spec, [None], unique=False)
    iterator = iter(click_models.in_memory(model.merge(data.train(rounds.batch_size))))

    @tf.function
    def train(steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            model.train_step(*next(iterator))

    rounds.serve(lambda steps: train(tf.constant(steps)))


def run_torch(rounds: common.Rounds) -> None:
    """PyTorch's EmbeddingBag."""
    serve_torch(rounds, fbgemm=False)


def run_fbgemm(rounds: common.Rounds) -> None:
    """FBGEMM's table-batched embeddings."""
    serve_torch(rounds, fbgemm=True)


def serve_torch(rounds: common.Rounds, fbgemm: bool) -> None:
    """Takes turns with a loop in eager PyTorch."""
    try:
        import torch

        if fbgemm:
            import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError) as error:
        raise common.Unavailable(f"{error}; needs PyTorch: {INSTALL}") from None
    import torch_models

    torch.set_num_threads(FLAGS.threads)
    model = torch_models.make_model(rounds.batch_size, fbgemm=fbgemm, rowwise=FLAGS.rowwise)
    rounds.serve(model.train)


SYSTEMS = {
    common.OURS: run_ours,
    "keras": run_keras,
    "raw": run_raw,
    "torch": run_torch,
    "fbgemm": run_fbgemm,
}
WITH_TORCH = ("torch", "fbgemm")


def main(argv: list[str]) -> None:
    common.check_arguments(argv, systems=SYSTEMS)
    if common.is_system():
        common.be_system(SYSTEMS)
    for batch_size in common.batch_sizes():
        optional = () if FLAGS.torch else WITH_TORCH
        results = common.compare(SYSTEMS, batch_size, optional=optional)
        for system in results.systems:
            common.report(results.line(system))
        summary = {"benchmark": "local_throughput", "batch_size": batch_size}
        if {common.OURS, "keras"} <= set(results.systems):
            summary |= common.summary_of_ratios(results.ratios(common.OURS, "keras"))
        for other in ("raw", *WITH_TORCH):
            if other == "raw" or other in results.systems:
                summary[f"ratio_{other}"] = results.median_ratio(common.OURS, other)
        common.report({**summary, "threads": FLAGS.threads, "rounds": FLAGS.rounds})


if __name__ == "__main__":
    app.run(main)
