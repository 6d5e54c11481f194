"""Trains a DLRM click model, on this machine or on a cluster.

    python examples/dlrm_ctr.py --dataset=synthetic --strategy=local
    python examples/dlrm_ctr.py --dataset=adult --data_location=DIR --strategy=shadow_easgd \
        --workers=4 --ps=2 --sync_ps=1 --threads=2 --alpha=0.3

Data, strategies and all other flags are those of wide_deep_ctr.py, but for the wide part's.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import click_training
import keras
from absl import app, flags
from dlrm_model import build_dlrm

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(click_training)  # So that --help has them.
flags.DEFINE_integer("dimension", 16, "Of the features' vectors.", lower_bound=1)


def make_model(spec: recsync.data.FeatureSpec) -> keras.Model:
    """Builds and compiles the model; under a strategy, call it in its scope."""
    model = build_dlrm(spec, embedding_dimension=FLAGS.dimension)
    click_training.compile_model(model, click_training.make_optimizer(FLAGS.deep_learning_rate))
    return model


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    click_training.check_flags()
    click_training.run("DLRM", make_model)


if __name__ == "__main__":
    click_training.start(main)
