"""Staleness: the weight that a late gradient gets, and what was measured.

The staleness tau of a push is the version of its variable (or row) now, minus
the version that was pulled, plus 1: exactly 1 in sequential training, on
average n with n equal workers (Liu and Zhao 2021, "Asynchronous Stochastic
Gradient Descent for Extreme-Scale Recommender Systems").
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from tf_recsync import _engine
from tf_recsync._checks import check_bool, integer, number, plain_values

__all__ = [
    "Constant",
    "InversePower",
    "Policy",
    "Report",
    "Rescale",
    "Statistics",
    "Threshold",
]


@keras.saving.register_keras_serializable(package="tf_recsync.staleness")
@dataclasses.dataclass(frozen=True)
class Rescale:
    """Rescales tau to a smaller baseline cluster: `tau' = (deviation / delta) tau`.

    delta, the deviation of tau on the cluster in use, is measured for each
    variable while training goes on, by the server that holds the variable. With
    `mean`, the full linear map `deviation (tau - mu) / delta + mean` is used,
    mu being the measured mean. While the measured deviation is not above the
    baseline's, tau is kept.

    Both are measured in a window of the last pushes to the variable: so what a
    checkpoint brings from another cluster is forgotten, and so is what was
    before the cluster changed.

    Reference: Liu and Zhao 2021, section "Staleness Normalization".

    Args:
        deviation: delta', a positive float in updates: the deviation of tau on
            the baseline cluster (`strategy.staleness().dense.deviation` there).
        mean: mu', a positive float in updates, or None (the default).
        window: a positive int in pushes. At least so many of the last pushes are
            measured, less than twice as many, and all of them at first: the
            window moves on by `window` pushes at a time. Take at least some tens
            for each worker. Defaults to 1000, from which the deviation of a dense
            variable is known to a few percent.

    Raises:
        ValueError: for a value out of range.

    Example:

    >>> import tf_recsync as recsync
    >>> rescale = recsync.staleness.Rescale(deviation=1.0)
    >>> policy = recsync.staleness.InversePower(k=1, baseline=1, rescale=rescale)
    >>> policy(4), policy(4, deviation=2.0)  # On a cluster that deviates twice as much.
    (0.25, 0.5)
    """

    deviation: float
    mean: float | None = None
    window: int = 1000

    def __post_init__(self) -> None:
        plain_values(self)
        number("deviation", self.deviation, above=0)
        if self.mean is not None:
            number("mean", self.mean, above=0)
        integer("window", self.window, 1, 2**63 - 1)

    def get_config(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict) -> Rescale:
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """A weight rho(tau) for gradients of staleness tau: g_hat = rho(tau) g.

    Use one of the subclasses. Calling a policy gives the weight as the update
    ops compute it:

    >>> InversePower(k=2, baseline=4)(8)
    0.25
    """

    @abc.abstractmethod
    def attributes(self) -> dict:
        """The policy as attributes of the update ops."""

    def short_attributes(self) -> dict:
        """The same, by the names that the C++ class has."""
        return {k.removeprefix("staleness_"): v for k, v in self.attributes().items()}

    def __call__(
        self, tau: float, *, last_update: float = 0.0, deviation: float = 0.0, mean: float = 0.0
    ) -> float:
        """The weight, in [0, 1].

        Args:
            tau: the staleness, in updates; 1 is fresh.
            last_update: |dw|, the length of the last update applied.
            deviation: the deviation of tau measured so far; 0: none yet.
            mean: the mean of tau measured so far.
        """
        arguments = self.short_attributes()
        del arguments["deviation_window"]
        return _engine.staleness_weight(
            tau, last_update=last_update, deviation=deviation, mean=mean, **arguments
        )

    @property
    def uses_last_update(self) -> bool:
        """Whether the length of the last update has to be kept."""
        return self.attributes()["update_sensitivity"] >= 0

    def get_config(self) -> dict:
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(config.get("rescale"), Rescale):
            config["rescale"] = keras.saving.serialize_keras_object(config["rescale"])
        return config

    @classmethod
    def from_config(cls, config: dict) -> Policy:
        config = dict(config)
        if isinstance(config.get("rescale"), dict):
            config["rescale"] = keras.saving.deserialize_keras_object(config["rescale"])
        return cls(**config)


def _attributes(decay: str, **changes) -> dict:
    attributes = {
        "staleness_decay": decay,
        "staleness_power": 2.0,
        "staleness_baseline": 1.0,
        "staleness_normalized": True,
        "staleness_iota": 0.0,
        "update_sensitivity": -1.0,
        "target_deviation": 0.0,
        "target_mean": 0.0,
        "deviation_window": 1000,
    }
    attributes.update(changes)
    return attributes


@keras.saving.register_keras_serializable(package="tf_recsync.staleness")
@dataclasses.dataclass(frozen=True)
class Constant(Policy):
    """Every gradient counts in full: plain asynchronous SGD.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.staleness.Constant()(100)
    1.0
    """

    def attributes(self) -> dict:
        return _attributes("constant")


@keras.saving.register_keras_serializable(package="tf_recsync.staleness")
@dataclasses.dataclass(frozen=True)
class InversePower(Policy):
    """1 up to `baseline`, then falling with the k-th power of tau.

    With `normalized`, the weight is `(baseline / tau) ** k` beyond the baseline
    and has no step there; without, it is `tau ** -k`, the paper's Eq. 7 to the
    letter. `InversePower(k=1, baseline=1)` is classic staleness-aware
    asynchronous SGD (Zhang et al. 2016).

    Reference: Liu and Zhao 2021, Eq. 3 to 8.

    Args:
        k: the power, a positive float. Defaults to 2, the paper's choice.
        baseline: mu', the staleness of the cluster that the learning rate was
            tuned on: its number of workers. A float of at least 1, the default.
        normalized: a bool, True by default.
        update_sensitivity: lambda of Eq. 6: the weight is taken at
            `tau * sigmoid(lambda * |dw|)`, dw being the last update of the
            variable or row (its Euclidean length), so that a stale gradient
            harms less once the model has settled. A float of at least 0, or
            None (the default) to leave it out.
        rescale: a `Rescale` towards the baseline cluster, or None (the default).

    Raises:
        ValueError: for a value out of range.

    Example:

    >>> policy = InversePower(k=2, baseline=10)
    >>> policy(10), policy(20)
    (1.0, 0.25)
    >>> round(InversePower(k=2, baseline=10, normalized=False)(20), 6)
    0.0025
    """

    k: float = 2.0
    baseline: float = 1.0
    normalized: bool = True
    update_sensitivity: float | None = None
    rescale: Rescale | None = None

    def __post_init__(self) -> None:
        plain_values(self)
        number("k", self.k, above=0)
        number("baseline", self.baseline, least=1)
        check_bool("normalized", self.normalized)
        if self.update_sensitivity is not None:
            number("update_sensitivity", self.update_sensitivity, least=0)
        if self.rescale is not None and not isinstance(self.rescale, Rescale):
            raise ValueError(f"rescale must be a Rescale or None, not {self.rescale!r}")

    def attributes(self) -> dict:
        sensitivity = -1.0 if self.update_sensitivity is None else float(self.update_sensitivity)
        return _attributes(
            "inverse_power",
            staleness_power=float(self.k),
            staleness_baseline=float(self.baseline),
            staleness_normalized=self.normalized,
            update_sensitivity=sensitivity,
            target_deviation=float(self.rescale.deviation) if self.rescale else 0.0,
            target_mean=float(self.rescale.mean or 0.0) if self.rescale else 0.0,
            **({"deviation_window": self.rescale.window} if self.rescale else {}),
        )


@keras.saving.register_keras_serializable(package="tf_recsync.staleness")
@dataclasses.dataclass(frozen=True)
class Threshold(Policy):
    """1 up to an age of `iota`, 0 beyond it, as GBA excludes old gradients.

    The age is tau - 1: 0 for a fresh gradient. A gradient of weight 0 is no update: the version
    stays, so that it makes no other gradient older.

    Args:
        iota: the largest age that counts, a float of at least 0, in updates.

    Raises:
        ValueError: if `iota` is below 0.

    Example:

    >>> [Threshold(iota=2)(tau) for tau in (1, 3, 4)]
    [1.0, 1.0, 0.0]
    """

    iota: float

    def __post_init__(self) -> None:
        plain_values(self)
        number("iota", self.iota, least=0, infinite=True)

    def attributes(self) -> dict:
        return _attributes("threshold", staleness_iota=float(self.iota))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was measured of the staleness of some variables.

    Attributes:
        count: updates counted (of a table: rows updated).
        mean: the mean staleness; 0.0 before the first update.
        deviation: the standard deviation of the population.
        max: the largest staleness.
        histogram: `(largest staleness of the bucket, updates)` for each bucket
            in use: exact below 32, within 12.5 % beyond.
        skipped: updates left out because their gradient was not finite (see
            the optimizers' `nonfinite`); they count in nothing else.
    """

    count: int
    mean: float
    deviation: float
    max: int
    histogram: tuple[tuple[int, int], ...]
    skipped: int
    _counters: np.ndarray = dataclasses.field(repr=False, compare=False)

    @classmethod
    def from_counters(cls, counters: Iterable[np.ndarray]) -> Statistics:
        """Sums up the counters of several variables.

        Args:
            counters: int64 arrays of shape [`COUNTERS`], as the servers keep them.
        """
        total = sum_counters(counters)
        summary = _engine.staleness_summary(total)
        return cls(
            count=summary["count"],
            mean=summary["mean"],
            deviation=float(np.sqrt(summary["variance"])),
            max=summary["max"],
            histogram=tuple(_engine.staleness_histogram(total)),
            skipped=summary["skipped"],
            _counters=total,
        )

    @classmethod
    def sum(cls, statistics: Iterable[Statistics]) -> Statistics:
        """Those of several parts together."""
        return cls.from_counters([part._counters for part in statistics])

    def since(self, before: Statistics) -> Statistics:
        """What was measured after `before`, an earlier reading of the same variables.

        The maximum of the time between is known as precisely as the histogram. If the variables
        went back to a checkpoint meanwhile, it is what exceeds the earlier reading.
        """
        counters = np.maximum(self._counters - before._counters, 0)
        first = _engine.STALENESS_FIRST_BUCKET
        used = np.flatnonzero(counters[first : first + _engine.STALENESS_BUCKETS])
        counters[3] = self.max
        if used.size:
            highest = _engine.staleness_histogram(counters)[-1][0]
            counters[3] = min(self.max, highest)
        return Statistics.from_counters([counters])

    def quantile(self, quantile: float) -> int:
        """The staleness that `quantile`, in [0, 1], of the updates did not exceed."""
        quantile = number("quantile", quantile, least=0, most=1)
        return _engine.staleness_quantile(self._counters, quantile)


def sum_counters(counters: Iterable[np.ndarray]) -> np.ndarray:
    """The counters of several variables as those of one: int64 [`COUNTERS`]."""
    total = np.zeros([COUNTERS], np.int64)
    for one in counters:
        largest = max(total[MAXIMUM], one[MAXIMUM])
        total = total + np.asarray(one, np.int64)
        total[MAXIMUM] = largest
    return total


@dataclasses.dataclass(frozen=True)
class Report:
    """Staleness of a model: dense variables and rows of embedding tables apart.

    Attributes:
        dense: `Statistics` over all dense variables.
        rows: `Statistics` over all rows of embedding tables.
        variables: `Statistics` of each variable, by its path; of those that have the same path,
            the sum.
    """

    dense: Statistics
    rows: Statistics
    variables: Mapping[str, Statistics]


# The length of a variable's staleness counters.
COUNTERS: int = _engine.STALENESS_COUNTERS
# Which of the counters is a maximum; the others are sums.
MAXIMUM = 3
# Which of them counts what was left out; what follows is of the window of `Rescale`.
SKIPPED: int = _engine.STALENESS_FIRST_BUCKET + _engine.STALENESS_BUCKETS
