"""The layers of a model that can run where their weights are, and which server each is for.

A unit is a layer that has dense weights and stands in the model itself, or in a model within it:
whatever it is made of inside stays together. Layers without weights, and operations, run where
their inputs are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
from absl import logging

from tf_recsync.optimizers import base
from tf_recsync.synchronization.divided import How, why_whole

# The number of a server in its group; or each server has a piece; or None: on the trainer.
Where = int | How | None

Plan = Mapping[str, Where]  # By the layer's name, as of `names_of`.


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A layer with dense weights, which is placed as a whole.

    Attributes:
        layer: the layer.
        variables: its variables, but for the states of random generators.
        path: by which plans name it: that of its layer, see `names_of`.
    """

    layer: keras.layers.Layer
    variables: tuple[keras.Variable, ...]
    path: str

    @property
    def elements(self) -> int:
        """How many numbers its variables have."""
        return sum(math.prod(variable.shape) for variable in self.variables)


def units_of(model: keras.Model, apart: Sequence[keras.Variable]) -> list[Unit]:
    """The units of a built model, in the order of its layers.

    Args:
        model: the model.
        apart: variables that no unit has, as embedding tables, which trainers look up.
    """
    return [part for part in _parts(model, {id(v) for v in apart}) if isinstance(part, Unit)]


def followers_of(model: keras.Model, apart: Sequence[keras.Variable]) -> list[keras.Operation]:
    """What has no weights, and runs where its inputs are; see `units_of`."""
    return [part for part in _parts(model, {id(v) for v in apart}) if not isinstance(part, Unit)]


def _parts(model: keras.Model, apart: set[int]) -> Iterator[Unit | keras.Operation]:
    """Units and followers, each once."""
    names = names_of(model)
    for part in parts_of_model(model, lambda part: any(id(v) in apart for v in _weights(part))):
        if _weights(part):
            yield Unit(part, tuple(_weights(part)), names[id(part)])
        else:
            yield part


def _weights(operation: keras.Operation) -> list[keras.Variable]:
    return operation.weights if isinstance(operation, keras.layers.Layer) else []


def parts_of_model(
    model: keras.layers.Layer, has_tables: Callable[[keras.Operation], bool]
) -> Iterator[keras.Operation]:
    """Layers, and operations of functional models, that run as one each: each once, in their order.

    Args:
        model: a model, or a layer that is taken apart as one. So are models within it.
        has_tables: whether a layer has embedding tables inside, so that it is taken apart, too.
    """
    seen = {id(model)}

    def inside(operation: keras.Operation) -> Iterator[keras.Operation]:
        layers = operation._flatten_layers(include_self=False, recursive=False)
        for part in [*layers, *getattr(operation, "operations", [])]:
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, keras.Model) or has_tables(part):
                yield from inside(part)
            else:
                yield part

    yield from inside(model)


def names_of(model: keras.Model) -> dict[int, str]:
    """The names of a model's layers in plans, by the layers' ids: their paths.

    Of several that have one path, as in two models within it that were built alike, the second one
    has "#2" after it, and so on in their order. What is inside of layers comes last.
    """
    found: dict[int, str] = {}
    used: set[str] = set()
    outer: list[keras.layers.Layer] = [model]
    while outer:
        parts = [part for layer in outer for part in parts_of_model(layer, lambda _: False)]
        outer = []
        for part in parts:
            is_input = isinstance(part, keras.layers.InputLayer)
            if isinstance(part, keras.layers.Layer) and not is_input and id(part) not in found:
                found[id(part)] = numbered(part.path or part.name, used)
                outer.append(part)
    return found


def numbered(name: str, used: set[str]) -> str:
    """A name that is not used yet, and is from now on: with a number after it if it must be."""
    found, number = name, 1
    while found in used:
        number += 1
        found = f"{name}#{number}"
    used.add(found)
    return found


def by_weights(
    units: Sequence[Unit], servers: int, splits: bool, optimizers: Sequence[base.Optimizer]
) -> list[tuple[Unit, int | How]]:
    """All units on servers, so that these have about as many weights each.

    Args:
        units: of a model.
        servers: of a group.
        splits: whether units are divided that have more than one server's part of all weights.
        optimizers: that train them.

    Returns:
        The units, each with the number of its server, or how it is divided.
    """
    divided = _large(units, servers, optimizers) if splits and servers > 1 else {}
    whole = [unit for unit in units if unit not in divided]
    return [*divided.items(), *_evenly(whole, servers)]


def planned(
    units: Sequence[Unit], plan: Plan, servers: int, optimizers: Sequence[base.Optimizer]
) -> list[tuple[Unit, int | How]]:
    """The units that run on servers, each with the number of its server, or how it is divided.

    Args:
        units: of a model.
        plan: where each layer runs, by its path; others run on the trainer.
        servers: of a group.
        optimizers: that train them.

    Raises:
        ValueError: if the plan names a layer that has no dense weights, or is not there; or puts
            layers that share a variable on two servers, or divides one that can't be divided.
    """
    unknown = sorted(set(plan) - {unit.path for unit in units})
    if unknown:
        raise ValueError(
            f"placement names {unknown}, which the model has not as layers with dense weights; it "
            f"has {[unit.path for unit in units]}"
        )
    found = [(unit, plan.get(unit.path)) for unit in units]
    for component in _sharing(units):
        places = {number for unit, number in found if unit in component}
        if len(places) > 1:
            raise ValueError(
                f"placement must put {[unit.path for unit in component]} on one server, as they "
                f"share variables, not on {sorted(places, key=str)}"
            )
    for unit, how in found:
        if isinstance(how, str):
            _check_divided(unit, how, units, servers, optimizers)
    return [(unit, number) for unit, number in found if number is not None]


def _why_whole(unit: Unit, units: Sequence[Unit], optimizers: Sequence[base.Optimizer]) -> str:
    """Why a unit can't be divided; "" if it can."""
    reason = why_whole(unit.layer, optimizers)
    own = {id(variable) for variable in unit.variables}
    others = [v for other in units if other is not unit for v in other.variables]
    if not reason and any(id(variable) in own for variable in others):
        reason = "shares variables with another layer"
    return reason


def _check_divided(
    unit: Unit, how: How, units: Sequence[Unit], servers: int, optimizers: Sequence[base.Optimizer]
) -> None:
    """Raises a ValueError if a unit can't be divided as a plan has it."""
    reason = _why_whole(unit, units, optimizers)
    if not reason:
        features = unit.layer.kernel.shape[1 if how == "columns" else 0]
        if features < servers:
            reason = f"has {features} {how} for {servers} servers"
    if reason:
        raise ValueError(f"placement can't divide {unit.path} by {how}: it {reason}")


def _large(
    units: Sequence[Unit], servers: int, optimizers: Sequence[base.Optimizer]
) -> dict[Unit, How]:
    """How units are divided that have more than their server's part of all elements.

    One that gives more features than it takes is divided by columns, so that what is added up or
    put together is the smaller part. Two in a row that go up and down again fit together.
    """
    total = sum(unit.elements for unit in units)
    found: dict[Unit, How] = {}
    for unit in units:
        if unit.elements * servers <= total:
            continue
        reason = _why_whole(unit, units, optimizers)
        if reason:
            logging.info("%s stays whole on a server of its group: it %s.", unit.path, reason)
            continue
        features_in, features_out = unit.layer.kernel.shape
        how: How = "columns" if features_out > features_in else "rows"
        if max(features_in, features_out) >= servers:
            found[unit] = how
    return found


def _evenly(units: Sequence[Unit], servers: int) -> list[tuple[Unit, int]]:
    """Divides units, in their order, so that servers have about as many elements each.

    So neighbours, which exchange what they compute, are on one server, but for one pair for each
    server.
    """
    total, before, found = sum(unit.elements for unit in units), 0, []
    for together in _sharing(units):
        size = sum(unit.elements for unit in together)
        number = min(int(servers * (before + size / 2) / max(total, 1)), servers - 1)
        found += [(unit, number) for unit in together]
        before += size
    return found


def _sharing(units: Sequence[Unit]) -> list[list[Unit]]:
    """Groups of units that share variables with each other; most are alone."""
    groups: list[list[Unit]] = []
    for unit in units:
        own = {id(variable) for variable in unit.variables}
        met = [g for g in groups if any(id(v) in own for other in g for v in other.variables)]
        groups = [g for g in groups if g not in met]
        groups.append([*(other for group in met for other in group), unit])
    return groups


def place_variables(
    placed: Sequence[tuple[Unit, int]], states: Sequence[base.VariableState]
) -> None:
    """Has groups keep a unit's variables, and what belongs to them, on the unit's server.

    It is called before groups make their copies.

    Args:
        placed: units, and the numbers of their servers.
        states: of all trained variables.
    """
    beside = {id(state.variable): state.beside for state in states}
    for unit, number in placed:
        for variable in unit.variables:
            for each in [variable, *beside.get(id(variable), [])]:
                each._value.shard = number
