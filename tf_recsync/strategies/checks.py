"""Checks of what strategies are given."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Literal

import keras
import tensorflow as tf
from absl import logging

from tf_recsync import optimizers
from tf_recsync._checks import check_seconds
from tf_recsync.cluster import Cluster
from tf_recsync.staleness import Constant
from tf_recsync.strategies.model_variables import optimizers_of

OnBatchLost = Literal["retry", "drop"]  # What becomes of batches that are lost with a worker.


def check_is_cluster(cluster: Cluster) -> None:
    """Raises a ValueError if an argument is no cluster."""
    if not isinstance(cluster, Cluster):
        raise ValueError(
            f"cluster must be a LocalCluster or from cluster_from_tf_config, not {cluster!r}"
        )


def check_cluster(strategy: str, cluster: Cluster) -> None:
    """Raises a ValueError if a strategy can't run on a cluster."""
    check_is_cluster(cluster)
    if cluster.workers < 1 or cluster.ps < 1:
        raise ValueError(
            f"{strategy} needs at least one worker and one ps, the cluster has "
            f"workers={cluster.workers} and ps={cluster.ps}"
        )


def check_timeouts(worker_timeout: float, silence_timeout: float | None) -> None:
    """Raises a ValueError if a limit that all strategies have is wrong."""
    check_seconds("worker_timeout", worker_timeout)
    if silence_timeout is not None:
        check_seconds("silence_timeout", silence_timeout)


def checked_output(output: str | int, groups: int) -> str | int:
    """What users see of the groups' copies: "mean", or the number of a group.

    Raises:
        ValueError: if an argument does not say it.
    """
    if output == "first":
        return 0
    is_number = isinstance(output, Integral) and not isinstance(output, bool)
    if output != "mean" and not (is_number and output in range(groups)):
        raise ValueError(
            f'output must be "first", "mean" or from 0 to {groups - 1}, not {output!r}'
        )
    return int(output) if is_number else output


def check_made_in_scope(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises a ValueError if a model, or a trained variable of its, was not made in the scope."""
    if model._distribute_strategy is not strategy:
        raise ValueError(
            f"model {model.name} was not made inside this strategy's scope(): build and "
            "compile it there"
        )
    for variable in model.trainable_variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                f"variable {variable.path} of model {model.name} was not made inside this "
                "strategy's scope(): make the layers there, too"
            )


def check_is_batched(dataset: tf.data.Dataset) -> None:
    """Raises a ValueError if the elements of a dataset are plainly single examples."""
    for part in tf.nest.flatten(dataset.element_spec):
        if isinstance(part, tf.TensorSpec) and part.shape.rank == 0:
            raise ValueError(
                f"the dataset must have batches, but a part of its elements is a {part}: call "
                "dataset.batch(n), with the number of examples of one worker's step"
            )


def check_optimizers(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises a ValueError if an optimizer is none of this package, or was not made in the scope."""
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy:
            raise ValueError(
                f"optimizer {optimizer.name} was not made inside this strategy's scope()"
            )
        if optimizer.gradient_accumulation_steps and strategy.arrangement.has_copies:
            raise ValueError(
                "gradient_accumulation_steps of the optimizer can't be used under this strategy, "
                "whose groups have copies of their own: "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}; leave it "
                "unset, or use a strategy of one group, such as AsyncStrategy"
            )
        is_weighted = optimizer.staleness != Constant() and not strategy.mode.uses_buffers
        if optimizer.gradient_accumulation_steps and is_weighted:
            raise ValueError(
                "gradient_accumulation_steps and staleness of the optimizer can't be used together "
                "under this strategy, as servers weigh no push that they add to others: "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, "
                f"staleness={optimizer.staleness!r}; leave one of them unset, or use GBAStrategy, "
                "whose decay weighs pushes"
            )


def warn_of_moving_averages(model: keras.Model, steps: int) -> None:
    """Warns of moving averages, as of `BatchNormalization`, that so many steps at once may upset.

    Each step adds its change to what all share, so that together they move it so many times as far
    as one does. If that is further than to what they have measured, it swings, and with twice as
    far it diverges.

    Args:
        model: the model.
        steps: how many workers, or their threads, share its moving averages.
    """
    for layer in model._flatten_layers():
        momentum = getattr(layer, "momentum", None)
        is_moved = layer.trainable and layer.non_trainable_variables
        is_number = isinstance(momentum, (int, float))
        if not is_number or not is_moved or (1 - momentum) * steps <= 0.5:
            continue
        logging.warning(
            "Layer %s has momentum=%g, but each of %d workers moves its moving averages: together "
            "they move them by %.0f %% of the difference to a batch. With momentum=%.6g they move "
            "as in one process.",
            layer.name,
            momentum,
            steps,
            100 * (1 - momentum) * steps,
            1 - (1 - momentum) / steps,
        )


def check_averaging(averaged: Iterable[keras.optimizers.Optimizer], what: str) -> None:
    """Raises a ValueError if an optimizer undoes what keeps copies of parameters together.

    Args:
        averaged: the optimizers that train parameters of which there are copies.
        what: keeps them together, in words.
    """
    for one in averaged:
        if isinstance(one, (keras.optimizers.Ftrl, optimizers.Ftrl)):
            raise ValueError(
                f"optimizer must not be Ftrl under {what}, which moves copies of parameters "
                "towards each other: Ftrl computes parameters from its own state alone and so "
                "undoes that; use another one, as SGD, Adagrad or Adam, not "
                f"{type(one).__module__}.{type(one).__name__} ({one.name})"
            )
