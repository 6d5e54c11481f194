"""How trainers with copies of their own synchronize them: EASGD, MA, BMUF, and yours.

Reference: Zheng et al. 2021, "ShadowSync", section 3.3.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync._checks import check_bool, number
from tf_recsync.synchronization import links


class Trainer:
    """A trainer's copy of the parameters, while a synchronization is traced.

    All its parameters are one float32 vector here, [elements].

    Args:
        device: the trainer's; "" where the synchronization runs.
        parameters: the handles of its parameters.
        sizes: their elements.
        states: the handles of the vectors of `Algorithm.states`, by name.
    """

    def __init__(
        self,
        device: str,
        parameters: Sequence[tf.Tensor],
        sizes: Sequence[int],
        states: Mapping[str, tf.Tensor],
    ):
        self._device = device
        self._parameters = list(parameters)
        self._states = dict(states)
        self.elements = sum(sizes)

    def on(self) -> contextlib.AbstractContextManager:
        """A scope in which ops run on the trainer."""
        return tf.device(self._device)

    def read(self) -> tf.Tensor:
        """A copy of the parameters, [elements]; training goes on meanwhile."""
        with self.on():
            return tf.ensure_shape(ops.snapshot(self._parameters), [self.elements])

    def move(self, target: tf.Tensor, alpha: float) -> None:
        """Moves the parameters towards a target: w <- (1 - alpha) w + alpha target.

        That is done in place, and what was learned since the target was computed is kept,
        times 1 - alpha.

        Args:
            target: float32 [elements].
            alpha: from 0 to 1.
        """
        with self.on():
            ops.interpolate(self._parameters, target, alpha, hogwild=True, answer=False)

    def get(self, message: tf.Tensor, sender: Trainer) -> tf.Tensor:
        """What another trainer sends to this one; passes links that are limited."""
        if sender is not self:
            message = links.passed(message)
            if links.is_limited(self._device):
                with self.on():
                    message = links.received(message)
        return message

    def state(self, name: str) -> tf.Tensor:
        """One of the trainer's vectors of `Algorithm.states`, float32 [elements]."""
        with self.on():
            value = tf.raw_ops.ReadVariableOp(resource=self._states[name], dtype=tf.float32)
            return tf.ensure_shape(value, [self.elements])

    def set_state(self, name: str, value: tf.Tensor) -> None:
        """Replaces one of these vectors."""
        with self.on():
            tf.raw_ops.AssignVariableOp(resource=self._states[name], value=value)


class Center:
    """The sync PSs' copy of the parameters, while a synchronization is traced.

    Args:
        parts: what each of them holds, float32 vectors that one after the other are the
            parameters.
        traffic: of each of them, int64: the bytes that it has received and sent, which it counts
            itself when it has them.
    """

    def __init__(self, parts: Sequence[tf.Variable], traffic: Sequence[tf.Variable]):
        self._parts = list(parts)
        self._traffic = list(traffic)

    def exchange(self, parameters: tf.Tensor, alpha: float) -> tf.Tensor:
        """Moves the copy towards a trainer's: w_ps <- (1 - alpha) w_ps + alpha parameters.

        Args:
            parameters: float32 [elements], on the trainer.
            alpha: from 0 to 1.

        Returns:
            The copy after that, float32 [elements].
        """
        sizes = [part.shape.num_elements() for part in self._parts]
        sent = tf.split(parameters, sizes) if len(sizes) > 1 else [parameters]
        answers = []
        for part, piece, traffic in zip(self._parts, sent, self._traffic, strict=True):
            with tf.device(part.device):
                arrived = links.received(piece)
                after = ops.interpolate([part.handle], arrived, alpha, hogwild=False, answer=True)
                moved = 4 * (tf.size(arrived, tf.int64) + tf.size(after, tf.int64))
                traffic.assign_add(moved, read_value=False)
                answers.append(links.passed(after))
        return tf.concat(answers, 0) if len(answers) > 1 else tf.identity(answers[0])


def all_reduce_mean(trainers: Sequence[Trainer], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The mean of a vector of each trainer, on each trainer.

    Trainers send each other pieces directly: each averages one piece of all vectors, and sends
    it to the others. So each sends and receives a vector of the same size twice at most,
    however many they are.

    Args:
        trainers: who takes part.
        values: of each of them, float32 [elements].

    Returns:
        The mean, once for each trainer.
    """
    count, elements = len(trainers), trainers[0].elements
    if count == 1:
        return list(values)
    bounds = [elements * i // count for i in range(count + 1)]
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    pieces = []
    for trainer, value in zip(trainers, values, strict=True):
        with trainer.on():
            pieces.append(tf.split(value, sizes))
    means = []
    for i, trainer in enumerate(trainers):
        arrived = [trainer.get(pieces[j][i], trainers[j]) for j in range(count)]
        with trainer.on():
            means.append(tf.add_n(arrived) / count)
    gathered = []
    for trainer in trainers:
        arrived = [trainer.get(means[j], trainers[j]) for j in range(count)]
        with trainer.on():
            gathered.append(tf.concat(arrived, 0))
    return gathered


class Algorithm(abc.ABC):
    """How copies are synchronized; the base of your own.

    `sync` is traced as a TensorFlow function and runs beside training, which it knows nothing
    of. Algorithms whose trainers all take part at once, by `all_reduce_mean`, need no servers;
    one with `is_central` has a copy on sync PSs with which each trainer synchronizes by itself.

    Attributes:
        is_central: whether `sync` is called for one trainer at a time, with a center.

    Example:

    >>> import tf_recsync as recsync
    >>> class HalfWay(recsync.Algorithm):
    ...     def sync(self, trainers, center):
    ...         means = recsync.all_reduce_mean(trainers, [t.read() for t in trainers])
    ...         for trainer, mean in zip(trainers, means):
    ...             trainer.move(mean, 0.5)
    >>> HalfWay().is_central
    False

    Then `recsync.ShadowSyncStrategy(cluster, HalfWay())` trains with it.
    """

    is_central = False

    def states(self, start: np.ndarray) -> dict[str, np.ndarray]:
        """Vectors that each trainer keeps for the algorithm, by name.

        Checkpoints hold those of each trainer. One that has lost its own begins with the mean of
        the others', and all do so on another number of trainers.

        Args:
            start: the parameters that training begins with, float32 [elements].

        Returns:
            Their first values, float32 [elements] each; none by default.
        """
        del start
        return {}

    @abc.abstractmethod
    def sync(self, trainers: Sequence[Trainer], center: Center | None) -> None:
        """Synchronizes once.

        Args:
            trainers: one of them, if the algorithm is central; else all that are there.
            center: the sync PSs' copy, if the algorithm is central; else None.
        """


def _check_fraction(name: str, value: float) -> None:
    number(name, value, above=0, most=1, allowed="in (0, 1]")


@dataclasses.dataclass(frozen=True)
class EASGD(Algorithm):
    """Elastic averaging SGD, through sync PSs: algorithm 2 of the paper.

    w_ps <- (1 - alpha) w_ps + alpha w_i, then w_i <- (1 - alpha) w_i + alpha w_ps.

    Args:
        alpha: the elastic parameter, in (0, 1].

    Raises:
        ValueError: if `alpha` is anything else.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.EASGD(alpha=0.3).is_central  # It needs sync PSs.
    True
    """

    alpha: float
    is_central = True

    def __post_init__(self):
        _check_fraction("alpha", self.alpha)

    def sync(self, trainers, center):
        for trainer in trainers:
            trainer.move(center.exchange(trainer.read(), self.alpha), self.alpha)


@dataclasses.dataclass(frozen=True)
class ModelAveraging(Algorithm):
    """Model averaging (MA), by all-reduce: algorithm 3 of the paper.

    g <- the mean of all w_i, then w_i <- (1 - alpha) w_i + alpha g.

    Args:
        alpha: the elastic parameter, in (0, 1].

    Raises:
        ValueError: if `alpha` is anything else.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.ModelAveraging(alpha=0.5).is_central
    False
    """

    alpha: float

    def __post_init__(self):
        _check_fraction("alpha", self.alpha)

    def sync(self, trainers, center):
        means = all_reduce_mean(trainers, [trainer.read() for trainer in trainers])
        for trainer, mean in zip(trainers, means, strict=True):
            trainer.move(mean, self.alpha)


@dataclasses.dataclass(frozen=True)
class BMUF(Algorithm):
    """Blockwise model-update filtering, by all-reduce: algorithm 4 of the paper.

    d <- the mean of all w_i, less g; u <- momentum u + eta d; g <- g + u; then
    w_i <- (1 - alpha) w_i + alpha g. With Nesterov's acceleration copies move towards
    g + momentum u instead.

    Args:
        alpha: the elastic parameter, in (0, 1].
        eta: the step size, positive.
        momentum: of the global parameters, in [0, 1). Default 0: none.
        nesterov: whether copies move to where the momentum leads. Default False.

    Raises:
        ValueError: if an argument is anything else, or Nesterov's acceleration is wanted
            without momentum.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.BMUF(alpha=0.5, eta=1.0, momentum=0.9, nesterov=True).is_central
    False
    """

    alpha: float
    eta: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        _check_fraction("alpha", self.alpha)
        number("eta", self.eta, above=0)
        number("momentum", self.momentum, least=0, below=1)
        check_bool("nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")

    def states(self, start):
        states = {"global": start}
        if self.momentum:
            states["update"] = np.zeros_like(start)
        return states

    def sync(self, trainers, center):
        means = all_reduce_mean(trainers, [trainer.read() for trainer in trainers])
        for trainer, mean in zip(trainers, means, strict=True):
            with trainer.on():
                before = trainer.state("global")
                update = self.eta * (mean - before)
                if self.momentum:
                    update += self.momentum * trainer.state("update")
                    trainer.set_state("update", update)
                after = before + update
                trainer.set_state("global", after)
                target = after + self.momentum * update if self.nesterov else after
            trainer.move(target, self.alpha)
