"""Where the layers of a model run in a group, and what of it a strategy's arguments say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tf_recsync.compression import Compression
from tf_recsync.placement import OperatorPlan, Resources
from tf_recsync.synchronization.units import Plan

# A search tries so many placements, times units and edges, times devices, which takes seconds for
# large models. It is no limit of time, so that the same model has the same plan wherever it begins
# to train.
_SEARCHED = 100_000_000


@dataclasses.dataclass(frozen=True)
class Batches:
    """What is known of the batches that a model trains on.

    Attributes:
        element_spec: of the data; None where only the model says what it is called with.
        size: examples of a batch, or None.
    """

    element_spec: Any = None
    size: int | None = None

    @property
    def inputs(self) -> Any:
        """What of a batch the model is called with."""
        is_pair = isinstance(self.element_spec, (tuple, list))
        return self.element_spec[0] if is_pair else self.element_spec

    @property
    def examples(self) -> int | None:
        """Examples of a batch: `size`, or what shapes of the data say; None if neither does."""
        if self.size is not None:
            return self.size
        shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(self.element_spec)]
        first = [shape[0] for shape in shapes if shape is not None and shape.rank]
        return next((size for size in first if size is not None), None)


@dataclasses.dataclass(frozen=True)
class Operators:
    """Where layers run, and what becomes of that which travels to them.

    Attributes:
        placement: "trainers"; or "auto", a search says it; or a plan does, or a mapping from paths
            of layers, as of `units.planned`.
        splits: whether the placement "auto" divides large layers.
        compression: of what travels to layers on servers and from them; None for none.
        resources: of a group, for the placement "auto".
    """

    placement: OperatorPlan | Plan | str = "trainers"
    splits: bool = True
    compression: Compression | None = None
    resources: Resources | None = None

    def searched(self, model: keras.Model, batches: Batches) -> OperatorPlan:
        """Counts a step of a model, and searches where its layers run.

        Args:
            model: a built model.
            batches: that it trains on.

        Raises:
            ValueError: if it can't be counted; or what the model's own code raises.
        """
        if batches.examples is None:
            raise ValueError(
                "the number of examples of a batch is not known; give the strategy local_batch_size"
            )
        if not model.trainable_variables:
            raise ValueError(f"model {model.name!r} has no weights yet; call it on a batch")
        graph = OperatorPlan.step_graph(model, batches.examples, inputs=batches.inputs)
        parts = len(graph.units) + len(graph.edges)
        return OperatorPlan.search(
            graph,
            self.resources,
            search_seconds=None,
            splits=self.splits,
            search_placements=_SEARCHED // max(1, parts * (self.resources.servers + 1)),
        )


def layers_of(plan: OperatorPlan) -> Plan:
    """Where a plan has layers run, by their paths.

    Those without dense weights are among them, but not what a plan leaves on the trainers anyway.
    """
    return {unit.name: plan.operators[unit.name] for unit in plan.graph.units if not unit.pinned}


def checked_operators(
    placement: Any, splits: Any, compression: Any, trainers: int, servers: int, nets: int
) -> Operators:
    """Raises a ValueError if an argument of `HierarchicalStrategy` is wrong.

    Args:
        placement: its argument, like the next two.
        splits: see there.
        compression: see there.
        trainers: of a group.
        servers: of a group.
        nets: of a trainer.
    """
    if isinstance(placement, OperatorPlan):
        _check_size(placement, trainers, servers, nets)
    else:
        placement = _checked_placement(placement, servers)
    if splits not in ("auto", "off"):
        raise ValueError(f'splits must be "auto" or "off", not {splits!r}')
    compression = _checked_compression(compression, placement, nets)
    ratios = {}
    if compression is not None:
        ratios = {
            "activation_ratio": compression.activation_ratio,
            "gradient_ratio": compression.gradient_ratio,
            "compression_seconds_per_byte": compression.seconds_per_byte,
        }
    resources = Resources(trainers, servers, nets, **ratios)
    return Operators(placement, splits == "auto", compression, resources)


def _checked_placement(placement: Any, servers: int) -> Plan | str:
    """Which layers run on servers, by their paths; raises a ValueError if an argument is wrong.

    Args:
        placement: "trainers", "auto" or a mapping.
        servers: of a group.
    """
    if isinstance(placement, str) and placement in ("trainers", "auto"):
        return placement
    if not isinstance(placement, Mapping):
        raise ValueError(
            'placement must be "trainers", "auto", an OperatorPlan, or a mapping from paths of '
            f"layers to numbers of servers, not {placement!r}"
        )
    for path, number in placement.items():
        is_number = isinstance(number, Integral) and not isinstance(number, bool)
        is_word = number is None or isinstance(number, str) and number in ("columns", "rows")
        if not isinstance(path, str) or not (is_word or is_number and 0 <= number < servers):
            raise ValueError(
                f"placement must give the path of a layer, a str, the number of a server of its "
                f'group, from 0 to {servers - 1} with ps_per_group={servers}, "columns", "rows" '
                f"or None; not {path!r}: {number!r}"
            )
    return {path: int(n) if isinstance(n, Integral) else n for path, n in placement.items()}


def _checked_compression(
    compression: Any, placement: OperatorPlan | Plan | str, nets_per_trainer: int
) -> Compression | None:
    """How activations are compressed; raises a ValueError if an argument is wrong.

    Args:
        compression: a Compression or None.
        placement: one that is right.
        nets_per_trainer: as the strategy has it.
    """
    if compression is None:
        return None
    if not isinstance(compression, Compression):
        raise ValueError(f"compression must be None or a Compression, not {compression!r}")
    if placement == "trainers":
        raise ValueError(
            f'compression={compression} would do nothing with placement="trainers": it is of '
            "activations that travel to layers on servers"
        )
    if nets_per_trainer > 1 and compression.sparsify > 0 and compression.error_feedback:
        raise ValueError(
            f"compression={compression} has error feedback, which goes only with "
            f"nets_per_trainer=1, not {nets_per_trainer}: nets of a trainer can't keep apart yet "
            "what they have not sent; set error_feedback=False or sparsify=0"
        )
    return compression


def _check_size(plan: OperatorPlan, trainers: int, servers: int, nets: int) -> None:
    """Raises a ValueError if a plan is for groups of another size."""
    of = plan.resources
    if (of.trainers, of.servers, of.nets_per_trainer) != (trainers, servers, nets):
        raise ValueError(
            f"placement is a plan for trainers={of.trainers}, servers={of.servers} and "
            f"nets_per_trainer={of.nets_per_trainer}, but trainers_per_group={trainers}, "
            f"ps_per_group={servers} and nets_per_trainer={nets}"
        )
