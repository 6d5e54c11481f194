"""What a training step computes, as units that a plan places, and what travels between them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tf_recsync._checks import check_at_least
from tf_recsync.synchronization.divided import How

# What stays on the trainers, whatever the loads are.
PINNED = ("input", "lookup", "operations", "loss")
KINDS = (*PINNED, "interaction", "layer")


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of a training step that is placed as one: mostly a layer, with its gradient ops.

    Args:
        name: The path of the layer, or another name that no other unit of the graph has.
        kind: "layer"; "interaction", which joins looked up vectors with others; or what a plan
            leaves on the trainers: "input", "lookup" (its tables are on the embedding PSs),
            "operations" (outside of any layer) and "loss" (with the metrics).
        flops: Floating-point operations of forward and backward pass for a batch, at least 0.
        parameter_bytes: Bytes of its weights, in their own dtype. 0 (the default) of a unit
            without parameters, and of lookups.
        slots: Accumulators that the optimizer keeps for each element of the weights, 1 by default.
        activation_bytes: Bytes of the outputs for a batch, which are kept until the backward pass
            has been here; 0 by default.
        features_in: Features that it takes of each example, where it can be divided among the
            servers of a group: it is then a product with a matrix of [features_in, features_out],
            and a bias. 0 (the default) for what stays whole.
        features_out: Features that it gives of each example, likewise.
        elementwise: Whether it acts on each element by itself; of a unit that can be divided,
            whether what follows the product does, its activation. False by default.
        why_whole: Why it can't be divided, in words that follow on its name; "" (the default)
            where it can, or where nobody knows.

    Raises:
        ValueError: If an argument is out of range; if an input, a lookup or the loss has
            parameters; or if only one of `features_in` and `features_out` is above 0, or they are
            of a unit without parameters.

    Example:
        >>> Unit("bottom", "layer", flops=3e6, parameter_bytes=4096).memory
        8192
    """

    name: str
    kind: str
    flops: float
    parameter_bytes: int = 0
    slots: int = 1
    activation_bytes: int = 0
    features_in: int = 0
    features_out: int = 0
    elementwise: bool = False
    why_whole: str = ""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={self.name!r}: must be a string that is not empty.")
        if self.kind not in KINDS:
            raise ValueError(f"unit {self.name!r}: kind={self.kind!r} must be one of {KINDS}.")
        check_amount(f"unit {self.name!r}: flops", self.flops)
        for argument in (
            *("parameter_bytes", "slots", "activation_bytes"),
            *("features_in", "features_out"),
        ):
            check_at_least(f"unit {self.name!r}: {argument}", getattr(self, argument), 0)
        for argument, kind in (("elementwise", bool), ("why_whole", str)):
            value = getattr(self, argument)
            if not isinstance(value, kind):
                raise ValueError(
                    f"unit {self.name!r}: {argument}={value!r} must be a {kind.__name__}."
                )
        if self.parameter_bytes and self.kind in ("input", "lookup", "loss"):
            raise ValueError(
                f"unit {self.name!r}: parameter_bytes={self.parameter_bytes} must be 0, as a plan "
                f"places no weights of an {self.kind!r}."
            )
        features = bool(self.features_in), bool(self.features_out)
        if any(features) and not (all(features) and self.parameter_bytes and not self.pinned):
            raise ValueError(
                f"unit {self.name!r}: features_in={self.features_in} and features_out="
                f"{self.features_out} must both be 0, or both above 0 of a layer with parameters."
            )

    @property
    def pinned(self) -> bool:
        """Whether it stays on the trainers, whatever the loads are."""
        return self.kind in PINNED

    @property
    def can_be_divided(self) -> bool:
        """Whether servers can each have some of its columns or rows, if there are enough."""
        return self.features_in > 0

    def features(self, how: How) -> int:
        """How many columns, or rows, there are to divide; 0 where it can't be divided."""
        return self.features_out if how == "columns" else self.features_in

    @property
    def memory(self) -> int:
        """Bytes of weights and accumulators: (1 + slots) times those of the weights."""
        return (1 + self.slots) * self.parameter_bytes


@dataclasses.dataclass(frozen=True)
class Edge:
    """What travels between two units in a step if they are not on the same device.

    Args:
        source: Name of the unit that computes the activations.
        target: Name of the unit that uses them.
        forward_bytes: Bytes of the activations for a batch, at least 0.
        backward_bytes: Bytes of their gradients for a batch, at least 0; 0 (the default) where
            there are none, as of inputs.

    Raises:
        ValueError: If a number is out of range, or both ends are one unit.

    Example:
        >>> Edge("bottom", "top", forward_bytes=2048, backward_bytes=2048).bytes
        4096
    """

    source: str
    target: str
    forward_bytes: int
    backward_bytes: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.source == self.target:
            raise ValueError(f"edge from {self.source!r} to itself: the ends must differ.")
        for argument in ("forward_bytes", "backward_bytes"):
            name = f"edge from {self.source!r} to {self.target!r}: {argument}"
            check_at_least(name, getattr(self, argument), 0)

    @property
    def bytes(self) -> int:
        """Bytes in both directions."""
        return self.forward_bytes + self.backward_bytes


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """The units of a training step, and the edges between them.

    `OperatorPlan.step_graph` makes one from a Keras model.

    Args:
        units: At least one, each under a name of its own.
        edges: Between these units, at most one from each unit to each other unit.

    Raises:
        ValueError: If there is no unit, a name stands for two, or an edge's end is no unit or the
            edge is there twice.

    Example:
        >>> graph = StepGraph(
        ...     units=[Unit("features", "input", 0), Unit("bottom", "layer", 3e6, 4096)],
        ...     edges=[Edge("features", "bottom", 1024)],
        ... )
        >>> graph.flops, graph.parameter_bytes
        (3000000.0, 4096)
    """

    units: tuple[Unit, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        """Checks that edges and units belong together, and copies them so that they stay so."""
        object.__setattr__(self, "units", tuple(self.units))
        object.__setattr__(self, "edges", tuple(self.edges))
        if not self.units:
            raise ValueError("units: there must be at least one.")
        names = set()
        for unit in self.units:
            if unit.name in names:
                raise ValueError(f"units: the name {unit.name!r} stands for more than one unit.")
            names.add(unit.name)
        ends = set()
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in names:
                    raise ValueError(f"edges: {end!r} is not among the units {sorted(names)}.")
            if (edge.source, edge.target) in ends:
                raise ValueError(
                    f"edges: there is more than one from {edge.source!r} to {edge.target!r}."
                )
            ends.add((edge.source, edge.target))

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return float(sum(unit.flops for unit in self.units))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights that a plan places."""
        return sum(unit.parameter_bytes for unit in self.units)

    def __getitem__(self, name: str) -> Unit:
        """Returns the unit of a name.

        Raises:
            ValueError: If there is none.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise ValueError(f"unit {name!r}: must be one of {[unit.name for unit in self.units]}.")


def check_amount(name: str, value: Any, above: bool = False) -> None:
    """Raises a ValueError if an argument is not a finite number of at least, or above, 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf or (above and value == 0):
        raise ValueError(
            f"{name}={value!r}: must be a finite number {'above' if above else 'of at least'} 0."
        )
