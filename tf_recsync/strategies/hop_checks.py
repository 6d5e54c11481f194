"""What `HopStrategy` and `Hop` refuse: arguments, clusters and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import keras
import numpy as np
from absl import logging

from tf_recsync._checks import check_bool, integer
from tf_recsync.layers import EmbeddingCollection
from tf_recsync.optimizers import base
from tf_recsync.strategies.checks import check_averaging, check_optimizers
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.model_variables import uses_servers
from tf_recsync.synchronization.hop_protocol import MOST, Protocol, Skip, checked_iterations
from tf_recsync.topology import Topology


def check_optimizer(model: keras.Model, strategy: CopiedStrategy) -> None:
    """Raises a ValueError if a model's optimizer can't train it, or is from elsewhere."""
    optimizer = getattr(model, "optimizer", None)
    check_averaging(_with_inner(optimizer), "HopStrategy")
    made_in = getattr(optimizer, "_distribution_strategy", strategy)
    if optimizer is not None and made_in is not strategy:
        raise ValueError(f"optimizer {optimizer.name} was not made inside this strategy's scope()")
    # It may not be built yet.
    layers = [v for v in model._flatten_layers() if isinstance(v, EmbeddingCollection)]
    servers = strategy.cluster.ps
    if optimizer is None or not servers or not (layers or uses_servers(model)):
        return
    for one in base.parts_of(optimizer):
        if not isinstance(one, base.Optimizer):
            tables = f"the tables of {layers[0].name}" if layers else "some of its variables"
            raise ValueError(
                "optimizer must be one of tf_recsync.optimizers (or a MultiOptimizer of "
                f"them) for model {model.name}, as {tables} lie on parameter servers, not "
                f"{type(one).__module__}.{type(one).__name__} ({one.name}). On a cluster with "
                f"ps=0, instead of ps={servers}, tables are parameters like any other, for any "
                "Keras optimizer but Ftrl"
            )
    check_optimizers(strategy, model)


def _with_inner(optimizer: keras.optimizers.Optimizer | None) -> Iterator[Any]:
    """An optimizer and those that it wraps."""
    if optimizer is None:
        return
    yield optimizer
    inner = getattr(optimizer, "optimizers", ())  # Of a MultiOptimizer.
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = (optimizer.inner_optimizer,)
    for one in inner:
        yield from _with_inner(one)


def check_topology(topology: Any, size: int | None = None, of: str = "") -> None:
    """Raises a ValueError if it is no topology, or not one of so many; `of` says of what."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology must be from tf_recsync.topology, not {topology!r}")
    if size not in (None, topology.size):
        raise ValueError(f"topology must have as many workers as {of}, {size}, not {topology.size}")


def checked_protocol(
    topology: Topology,
    max_iteration_gap: Any,
    backup_workers: Any,
    staleness_bound: Any,
    skip: Any,
    order: Any,
    protocol: Any,
    check_invariants: Any,
) -> Protocol:
    """The protocol, if arguments of `HopStrategy` or `Hop` go together; else a ValueError."""
    if order not in ("parallel", "serial"):
        raise ValueError(f'order must be "parallel" or "serial", not {order!r}')
    if protocol not in ("token_queue", "notify_ack"):
        raise ValueError(f'protocol must be "token_queue" or "notify_ack", not {protocol!r}')
    notify_ack = protocol == "notify_ack"
    if max_iteration_gap == "default":
        max_iteration_gap = None if notify_ack else 5
    if max_iteration_gap is not None:
        max_iteration_gap = checked_iterations("max_iteration_gap", max_iteration_gap, 1)
        if notify_ack:
            raise ValueError(
                f"max_iteration_gap is of token queues, not of notify_ack: {max_iteration_gap}"
            )
    if staleness_bound is not None:
        staleness_bound = checked_iterations("staleness_bound", staleness_bound, 0)
    backups = []
    for worker, given in enumerate(_each(topology.size, backup_workers)):
        backup = integer("backup_workers", given, 0)
        backups.append(backup)
        senders = len(topology.in_neighbors(worker)) + 1
        if backup >= senders:
            raise ValueError(
                f"backup_workers must be less than the in-neighbors, itself included: worker "
                f"{worker} has {senders}, and {backup} backup workers"
            )
    if any(backups) and notify_ack:
        raise ValueError(f"notify_ack excludes backup workers, got {backup_workers!r}")
    if any(backups) and max_iteration_gap is None:
        raise ValueError(
            "backup_workers needs token queues, which bound the iteration gap: max_iteration_gap "
            "must not be None"
        )
    if notify_ack and staleness_bound is not None and staleness_bound > 1:
        raise ValueError(f"notify_ack excludes a staleness_bound above 1, got {staleness_bound}")
    if skip is not None:
        if not isinstance(skip, Skip):
            raise ValueError(f"skip must be a Skip or None, not {skip!r}")
        if max_iteration_gap is None:
            raise ValueError("skip needs token queues: max_iteration_gap must not be None")
    check_bool("check_invariants", check_invariants)
    made = Protocol(
        topology=topology,
        max_iteration_gap=max_iteration_gap,
        backup_workers=tuple(backups),
        staleness_bound=staleness_bound,
        skip=skip,
        is_serial=order == "serial",
        notify_ack=notify_ack,
        check_invariants=check_invariants,
    )
    _check_queues(made)
    if skip is not None:
        _warn_if_nobody_skips(made)
    return made


def _check_queues(protocol: Protocol) -> None:
    """Raises a ValueError if a worker's queue would need more places than one can have."""
    gap = protocol.max_iteration_gap
    for worker in range(protocol.topology.size):
        senders = len(protocol.topology.in_neighbors(worker)) + 1
        places = senders * protocol.slots(worker)
        if places <= MOST:
            continue
        if gap is not None:
            raise ValueError(
                f"max_iteration_gap must be at most {MOST // senders - 1} where a worker has "
                f"{senders} in-neighbors, itself included, as worker {worker}, got {gap}"
            )
        raise ValueError(
            f"max_iteration_gap must not be None with staleness_bound={protocol.staleness_bound} "
            f"in this graph: the queue of worker {worker} would need {places} places, of which "
            f"there may be {MOST}"
        )


def _each(workers: int, backup_workers: Any) -> Sequence[Any]:
    """A number for each worker, of what may be one for all."""
    numbers = backup_workers
    if isinstance(numbers, Integral) and not isinstance(numbers, bool):
        numbers = [numbers] * workers
    are_many = isinstance(numbers, (Sequence, np.ndarray)) and not isinstance(numbers, (str, bytes))
    if not are_many or len(numbers) != workers:
        found = len(numbers) if are_many else repr(backup_workers)
        raise ValueError(
            f"backup_workers must be an int or one for each of the {workers} workers, not {found}"
        )
    return numbers


def _warn_if_nobody_skips(protocol: Protocol) -> None:
    """Logs a warning if no worker can get as far behind as `skip` asks for."""
    topology, bounds = protocol.topology, protocol.bounds()
    behind = [
        min((bounds[j, worker] for j in topology.out_neighbors(worker)), default=0.0)
        for worker in range(topology.size)
    ]
    needed = max(2, protocol.skip.trigger + 1)
    if max(behind) < needed:
        logging.warning(
            "%r has no effect: to skip iterations a worker has to be %d behind all its "
            "out-neighbors, and in this mode none can be more than %g. Backup workers or a "
            "staleness bound let others go ahead.",
            protocol.skip,
            needed,
            max(behind),
        )
