"""What keeps the copies of several groups together, as a strategy's arguments say it.

The one of the two independent choices of a strategy. The other, what happens inside a group, is a
mode (`tf_recsync.modes`), which is only checked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import keras

from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Cluster
from tf_recsync.modes import Hogwild, ModeConfig
from tf_recsync.strategies.checks import check_averaging
from tf_recsync.strategies.hop_between_groups import Hop
from tf_recsync.strategies.hop_checks import check_topology
from tf_recsync.strategies.model_functions import Settings
from tf_recsync.strategies.model_variables import optimizers_of
from tf_recsync.strategies.server_threads import check_threads
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import Copies, is_copied
from tf_recsync.synchronization.hop import threads_needed
from tf_recsync.synchronization.hop_groups import GroupHopSynchronizer
from tf_recsync.synchronization.shadow import ShadowSynchronizer
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.synchronization.synchronizer import Synchronizer


class Between:
    """What keeps groups' copies together, and what that needs; as it is here, nothing does.

    Attributes:
        algorithm: what users gave for it.
    """

    algorithm: Algorithm | Hop

    def check_servers(self, cluster: Cluster, arrangement: Arrangement, threads: int) -> None:
        """Raises a ValueError if servers of groups have not threads enough for it.

        Args:
            cluster: a connected cluster.
            arrangement: its groups.
            threads: that train for each trainer.
        """

    def synchronizer(
        self, model: keras.Model, copies: Copies, settings: Settings, threads: int
    ) -> Synchronizer:
        """What keeps these copies of a model together.

        Raises:
            ValueError: if it can't.
        """
        return Synchronizer(settings.arrangement, copies, threads)


@dataclasses.dataclass(frozen=True)
class ByAlgorithm(Between):
    """An algorithm on vectors, at the times of a schedule."""

    algorithm: Algorithm
    schedule: Shadow | Foreground

    def synchronizer(
        self, model: keras.Model, copies: Copies, settings: Settings, threads: int
    ) -> Synchronizer:
        """See `Between`."""
        return ShadowSynchronizer(
            self.algorithm,
            self.schedule,
            settings.cluster,
            settings.arrangement,
            copies,
            _parameters_among(copies, model, type(self.algorithm).__name__),
            _counters_among(copies, model),
            threads,
            settings.bandwidths.copy,
        )


@dataclasses.dataclass(frozen=True)
class ByHop(Between):
    """Exchanges with neighbors, after so many updates."""

    algorithm: Hop

    def check_servers(self, cluster: Cluster, arrangement: Arrangement, threads: int) -> None:
        """See `Between`."""
        groups = arrangement.groups
        # An exchange, and the steps of the group's trainers.
        nets = len(groups[0].trainers) * threads
        waiting = [threads_needed(self.algorithm.topology, i) + nets for i in range(len(groups))]
        needed = [count for count in waiting for _ in groups[0].servers]
        check_threads(cluster, needed, "for neighbors", job="ps")

    def synchronizer(
        self, model: keras.Model, copies: Copies, settings: Settings, threads: int
    ) -> Synchronizer:
        """See `Between`."""
        parameters = _parameters_among(copies, model, "Hop between groups")
        if not parameters:
            raise ValueError("the model has no dense parameters that groups could exchange by Hop")
        # Each push counts in it: not that of a part that trains nothing.
        trained = next(optimizer for optimizer in optimizers_of(model) if optimizer.states)
        return GroupHopSynchronizer(
            self.algorithm.exchange,
            self.algorithm.updates_per_iteration,
            settings.cluster,
            settings.arrangement,
            copies,
            parameters,
            _counters_among(copies, model),
            copies.places(trained._iterations._value)[0],
            float(self.algorithm.stall_seconds),
            settings.bandwidths.copy,
            threads,
        )


def checked_between_groups(algorithm: Any, mode: Any, groups: Any) -> ByAlgorithm | ByHop:
    """What keeps groups together, as arguments of `HierarchicalStrategy` say it.

    Raises:
        ValueError: if they don't.
    """
    schedule = _checked_schedule(mode)
    if isinstance(algorithm, Hop):
        if schedule != Shadow():
            raise ValueError(
                f'mode must be "shadow" with Hop, which begins an exchange after '
                f"updates_per_iteration updates, not {mode!r}"
            )
        check_at_least("groups", groups, 1)
        check_topology(algorithm.topology, groups, "there are groups")
        return ByHop(algorithm)
    return ByAlgorithm(_checked_algorithm(algorithm, ", BMUF, another Algorithm or Hop"), schedule)


def checked_between_trainers(algorithm: Any, mode: Any) -> ByAlgorithm:
    """What keeps trainers together, as arguments of `ShadowSyncStrategy` say it."""
    if isinstance(algorithm, Hop):
        raise ValueError(
            "algorithm must not be Hop under a ShadowSyncStrategy: use a HopStrategy, or Hop "
            "between the groups of a HierarchicalStrategy"
        )
    algorithm = _checked_algorithm(algorithm, ", BMUF or another Algorithm")
    return ByAlgorithm(algorithm, _checked_schedule(mode))


def checked_inside_group(
    aggregation: Any, local_batch_size: int | None, trainers: int, nets: int
) -> ModeConfig:
    """The mode inside a group, as arguments of `HierarchicalStrategy` say it.

    Args:
        aggregation: a mode, or None for `Hogwild`.
        local_batch_size: that of the mode, or None if it says it itself.
        trainers: of a group.
        nets: of a trainer.

    Raises:
        ValueError: if an argument is wrong, or they don't go together.
    """
    config = Hogwild(local_batch_size=local_batch_size) if aggregation is None else aggregation
    if not isinstance(config, ModeConfig):
        raise ValueError(f"aggregation must be one of tf_recsync.modes, not {aggregation!r}")
    if local_batch_size not in (None, config.local_batch_size):
        raise ValueError(
            f"local_batch_size={local_batch_size} is not that of aggregation={aggregation!r}; "
            "give it there"
        )
    if config.on(trainers * nets).uses_tokens and nets > 1:
        raise ValueError(
            f"nets_per_trainer={nets} goes with an aggregation that applies each push at once, "
            f"modes.Hogwild or modes.Async, not with {aggregation!r}"
        )
    return config


def _checked_algorithm(algorithm: Any, others: str) -> Algorithm:
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm must be EASGD, ModelAveraging{others}, not {algorithm!r}")
    return algorithm


def _checked_schedule(schedule: Any) -> Shadow | Foreground:
    """When copies are synchronized; raises a ValueError if an argument does not say it."""
    if schedule == "shadow":
        return Shadow()
    if not isinstance(schedule, (Shadow, Foreground)):
        raise ValueError(f'mode must be "shadow", a Shadow or a Foreground, not {schedule!r}')
    return schedule


def checked_sync_ps(sync_ps: Any, algorithm: Algorithm | Hop, servers: int) -> list[int]:
    """The task indices of the sync PSs, if there are as many as the algorithm needs."""

    def is_integer(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool)

    name = type(algorithm).__name__
    if sync_ps is None:
        sync_ps = 1 if algorithm.is_central else 0
    if is_integer(sync_ps):
        check_at_least("sync_ps", int(sync_ps), 0)
        if sync_ps > servers:
            raise ValueError(
                f"sync_ps={sync_ps} needs as many parameter servers, the cluster has ps={servers}"
            )
        indices = list(range(servers - int(sync_ps), servers))
    else:
        is_list = isinstance(sync_ps, Sequence) and not isinstance(sync_ps, (str, bytes))
        if not is_list or not all(map(is_integer, sync_ps)):
            raise ValueError(f"sync_ps must be a number or task indices, not {sync_ps!r}")
        indices = list(sync_ps)
        for index in indices:
            if not 0 <= index < servers:
                raise ValueError(f"sync_ps names ps:{index}, the cluster has ps={servers}")
        if len(set(indices)) < len(indices):
            raise ValueError(f"sync_ps must name each server once, not {sync_ps!r}")
    if algorithm.is_central and not indices:
        raise ValueError(
            f"{name} needs at least one sync PS: sync_ps={sync_ps!r}, the cluster has ps={servers}"
        )
    if not algorithm.is_central and indices:
        raise ValueError(
            f"{name} synchronizes trainers directly and has no use for sync PSs: sync_ps must be "
            f"0, not {sync_ps!r}"
        )
    return [int(index) for index in indices]


def _parameters_among(copies: Copies, model: keras.Model, what: str) -> int:
    """How many of the copied variables are parameters: the first ones.

    Args:
        copies: of the model's variables.
        model: the model.
        what: keeps the copies together, in words.

    Raises:
        ValueError: if it can't keep the model's parameters together.
    """
    copied = [variable for variable in model.trainable_variables if is_copied(variable)]
    for variable in copied:
        if variable.dtype != "float32":
            raise ValueError(
                f"trainable variables that groups have copies of must be float32 under {what}; "
                f"{variable.path} is {variable.dtype}"
            )

    def is_averaged(optimizer: keras.optimizers.Optimizer) -> bool:
        return any(is_copied(state.variable) for state in optimizer.states)

    check_averaging(filter(is_averaged, optimizers_of(model)), what)
    return sum(len(copies.places(variable._value)) for variable in copied)


def _counters_among(copies: Copies, model: keras.Model) -> list[int]:
    """Which of the copied variables count the staleness of updates.

    All pieces of a variable are pushed together: the first one's stand for it.
    """
    states = [s for o in optimizers_of(model) for s in o.states if is_copied(s.variable)]
    return [copies.places(state.counters._value)[0] for state in states]
