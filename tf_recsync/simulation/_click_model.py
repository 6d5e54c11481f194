"""What simulated workers learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tf_recsync import optimizers
from tf_recsync._checks import check_seed
from tf_recsync.layers import MeanNormalization
from tf_recsync.optimizers import Optimizer
from tf_recsync.simulation._settings import check_count, check_number

_BATCH_SIZE = 64  # Where nothing else is said.
_MOST = 2**24  # Of what there are many of; the engine says which of them may be as many together.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModel:
    """A click model, and made data whose best possible model is known.

    An example has ids of categorical features and numbers. Whether it is clicked is drawn from a
    probability that a model of the same kind gives, so that the best AUC is known. Workers learn
    a logistic regression of these features or, with a `dimension`, a factorization machine. The
    rows of its table are spread over the servers, and have versions of their own; the weights of
    numbers and the bias are one dense variable on server 0. They are updated by the
    C++ code that updates them on real servers, each with the staleness that it has in the
    simulation.

    With `hidden_units`, workers learn a wide and deep model: the logit of a logistic regression
    plus that of dense layers with ReLU, whose inputs are the factors of all features and the
    numbers. Only such a model can learn `number_pairs`.

    With a `drift`, clicks change from day to day, and a model is tested on the clicks of the day
    after that of the last batch on which it was trained, also in the course of a day.

    References: Rendle 2010, "Factorization Machines"; Cheng et al. 2016, "Wide & Deep Learning
    for Recommender Systems".

    Args:
        features: how many categorical features there are, an int of at least 1. Defaults to 10.
        vocabulary: the ids of each, an int of at least 1. Small ids are more frequent than large
            ones. Defaults to 1000.
        numbers: how many numbers an example has, an int of at least 0. Defaults to 8.
        dimension: of the factors of each id, an int of at least 0. Defaults to 0: a logistic
            regression.
        hidden_units: of each hidden layer, ints of at least 1, from the inputs up. They are
            variables of server 0, with those of numbers. Defaults to (): no hidden layers.
        mean_normalization: a `recsync.layers.MeanNormalization`, whose momentum and epsilon those
            between hidden layers and their ReLU get. Defaults to None: there are none.
        signal: how far the true logits deviate, about, at least 0; the more, the higher is the
            best AUC. Defaults to 1.0.
        number_mean: of numbers, which deviate by 1; at least 0. The logits of clicks are made of
            numbers without it. Defaults to 0.0.
        number_pairs: how far products of two numbers each, with weights of their own, make the
            true logits deviate besides, at least 0. Defaults to 0.0: there are none.
        drift: by which angle the true weights turn from day to day towards others, at least 0, in
            radians: of two days that are n days apart, they have a correlation of cos(n * drift).
            Defaults to 0.0: they stay.
        day_batches: the batches of a day, of all workers together, an int of at least 1. Defaults
            to 1000. Without a drift, days do not differ.
        batch_size: examples of a worker's batch, an int of at least 1. Defaults to None: the
            mode's `local_batch_size` or, if that is None, 64.
        optimizer: an `SGD`, `Adagrad` or `SwapAdagrad` of `recsync.optimizers`, with its
            `staleness` and `swap`. Defaults to None: `Adagrad(0.05)`.
        table_optimizer: the table's, if it has one of its own. Defaults to None: `optimizer`.
        test_examples: on which the AUC is computed, an int of at least 1. Defaults to 20,000.
        evaluations: how often it is computed in the course of the run, at equal numbers of steps;
            an int of at least 0. Defaults to 10.
        seed: of the data and of the first factors, an int of 64 bits. Defaults to 0.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> result = recsync.simulation.run(
    ...     recsync.modes.Async(),
    ...     workers=4,
    ...     compute_seconds=0.1,
    ...     steps=3000,
    ...     model=recsync.simulation.ClickModel(vocabulary=20),
    ... )
    >>> 0.65 < result.bayes_auc < 0.85  # Of the true probabilities.
    True
    >>> result.auc > result.bayes_auc - 0.02
    True
    """

    features: int = 10
    vocabulary: int = 1000
    numbers: int = 8
    dimension: int = 0
    hidden_units: Sequence[int] = ()
    mean_normalization: MeanNormalization | None = None
    signal: float = 1.0
    number_mean: float = 0.0
    number_pairs: float = 0.0
    drift: float = 0.0
    day_batches: int = 1000
    batch_size: int | None = None
    optimizer: Optimizer | None = None
    table_optimizer: Optimizer | None = None
    test_examples: int = 20_000
    evaluations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("features", "vocabulary", "test_examples"):
            check_count(name, getattr(self, name), 1, _MOST)
        for name in ("numbers", "dimension"):
            check_count(name, getattr(self, name), most=_MOST)
        check_count("day_batches", self.day_batches, 1)
        check_count("evaluations", self.evaluations)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, 1, _MOST)
        if isinstance(self.hidden_units, str) or not isinstance(self.hidden_units, Sequence):
            raise ValueError(f"hidden_units must be a sequence of ints, not {self.hidden_units!r}")
        for i, units in enumerate(self.hidden_units):
            check_count(f"hidden_units[{i}]", units, 1, _MOST)
        if self.hidden_units and self.dimension == self.numbers == 0:
            raise ValueError("hidden_units need inputs: dimension or numbers must be positive")
        self._check_normalization()
        check_number("signal", self.signal)
        check_number("number_mean", self.number_mean)
        check_number("number_pairs", self.number_pairs)
        check_number("drift", self.drift)
        check_seed(self.seed)
        for name in ("optimizer", "table_optimizer"):
            if getattr(self, name) is not None:
                _check_optimizer(name, getattr(self, name))

    def _check_normalization(self) -> None:
        layer = self.mean_normalization
        if layer is None:
            return
        if not isinstance(layer, MeanNormalization):
            raise ValueError(
                "mean_normalization must be a recsync.layers.MeanNormalization or None, not "
                f"{layer!r}"
            )
        if not self.hidden_units:
            raise ValueError("mean_normalization needs hidden_units, between which it is")

    def attributes(self, local_batch_size: int | None) -> dict[str, Any]:
        """What the engine is told.

        Args:
            local_batch_size: the mode's.

        Raises:
            ValueError: if that is another one.
        """
        if None not in (local_batch_size, self.batch_size) and local_batch_size != self.batch_size:
            raise ValueError(
                f"the model's batch_size must be None or the mode's local_batch_size="
                f"{local_batch_size}, not {self.batch_size}"
            )
        batch_size = self.batch_size or local_batch_size or _BATCH_SIZE
        check_count("local_batch_size", batch_size, 1, _MOST)
        dense = self.optimizer or optimizers.Adagrad(0.05)
        names = ("features", "vocabulary", "numbers", "dimension", "signal", "drift")
        names += ("number_mean", "number_pairs")
        normalization = self.mean_normalization or MeanNormalization()
        return {
            **{name: getattr(self, name) for name in (*names, "day_batches", "test_examples")},
            "seed": self.seed,
            "hidden_units": list(self.hidden_units),
            "mean_normalization": self.mean_normalization is not None,
            "momentum": normalization.momentum,
            "epsilon": normalization.epsilon,
            "batch_size": batch_size,
            "dense": _of_optimizer(dense, is_table=False),
            "rows": _of_optimizer(self.table_optimizer or dense, is_table=True),
        }


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raises a ValueError if a simulation can't update by an optimizer."""
    if type(optimizer) not in (optimizers.SGD, optimizers.Adagrad, optimizers.SwapAdagrad):
        raise ValueError(
            f"{name} must be an SGD, Adagrad or SwapAdagrad of recsync.optimizers, not "
            f"{optimizer!r}"
        )
    if not isinstance(optimizer._learning_rate, keras.Variable):
        raise ValueError(f"{name} must have a constant learning rate")
    for option in (
        *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
        *("gradient_accumulation_steps", "loss_scale_factor"),
    ):
        if getattr(optimizer, option):
            raise ValueError(
                f"{name} must be without {option}, which a simulation does not have, not "
                f"{getattr(optimizer, option)!r}"
            )
    if optimizer.swap:
        check_count(f"period of the swap of {name}", optimizer.swap.period, 1)
    if optimizer.nonfinite == "error":
        raise ValueError(f"{name} must have nonfinite='apply' or 'skip', not 'error'")


def _of_optimizer(optimizer: Optimizer, is_table: bool) -> dict[str, Any]:
    """An optimizer's rule and its options."""
    rule = "sgd"
    if isinstance(optimizer, optimizers.Adagrad):
        rule = "rowwise_adagrad" if optimizer.rowwise and is_table else "adagrad"
    return {
        "rule": rule,
        "learning_rate": float(optimizer.learning_rate),
        "epsilon": getattr(optimizer, "epsilon", 0.0),
        "initial_accumulator_value": getattr(optimizer, "initial_accumulator_value", 0.0),
        "swap_period": optimizer.swap.period if optimizer.swap else 0,
        "swap_decay": optimizer.swap.decay if optimizer.swap else 1.0,
        "staleness": optimizer.staleness.short_attributes(),
        "nonfinite": optimizer.nonfinite,
    }
