"""Which device of a group runs which operator of the model."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from tf_recsync._checks import check_at_least
from tf_recsync.placement import model_graph, pieces, profile, report
from tf_recsync.placement.graph import Edge, StepGraph, Unit, check_amount
from tf_recsync.placement.loads import DeviceLoads, LoadModel
from tf_recsync.placement.refinement import refine
from tf_recsync.placement.resources import Resources
from tf_recsync.placement.tagging import tag
from tf_recsync.synchronization.divided import How

_VERSION = 2
_READABLE = (1, 2)  # Before version 2 all units were whole.


@dataclasses.dataclass(frozen=True)
class OperatorPlan:
    """The device of each unit of a training step, the same for all groups.

    `search` makes a plan. A unit's operator is on one of the parameter servers of a group, with its
    weights beside it, or on the trainers. In that case its weights, if it has any, are on one of
    the servers, and travel in every step.

    The load of a device is the seconds that a step takes of its processor or its network,
    whichever is more. With t trainers of r nets each, a step of one net takes F / C of a trainer's
    processor and t r F / C of a server's, for the operations F of its units; C of a trainer is what
    each of its nets has. Networks are those of devices: r b / W of a trainer's and t r b / W of a
    server's. b are the bytes on edges to other devices, in both
    directions, and `8 w` for `w` weights whose operator is on the trainers. Memory is a limit:
    `4 (1 + slots) w` bytes of weights and accumulators, and the activations of all nets in flight.

    An activation that units on one other device use twice counts twice.

    A unit may be in pieces: "columns" or "rows" of its weights are on each of p servers, with
    1 / p of its operations and of its memory. In columns each server takes the whole input and
    gives 1 / p of the output; in rows each takes 1 / p of the input and gives a sum as large as the
    whole output. Trainers divide and put together. Where a unit in rows follows on one in columns,
    with at most operations on each element between them, nothing travels between the two.

    Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on
    Large CPU Clusters", section 3.2.1, and section 4.1 for pieces.

    Args:
        graph: The units and what travels between them.
        resources: The devices of a group.
        operators: For the name of each unit the index of a server within its group, from 0;
            "columns" or "rows" for a piece on each server; or None for the trainers. What follows
            on a unit in columns and acts on each element can be in columns, too.
        weights: For the name of each unit with parameters the index of the server that holds
            them; that of the operator where it is on a server; none of a unit in pieces. May be
            left out (the default) for plans with all such operators on servers.

    Raises:
        ValueError: If units are missing or unknown, an index is out of range, inputs, lookups,
            operations outside of layers or the loss are on a server, weights are not beside
            their operator, a unit is in pieces that can't be divided so, or a device would hold
            more than its memory limit.

    Example:
        >>> graph = StepGraph(
        ...     units=[
        ...         Unit("features", "input", flops=0),
        ...         Unit("bottom", "layer", flops=6e6, parameter_bytes=4096),
        ...         Unit("top", "layer", flops=4e6, parameter_bytes=8192),
        ...         Unit("loss", "loss", flops=0),
        ...     ],
        ...     edges=[Edge("features", "bottom", 1000), Edge("bottom", "top", 2000, 2000),
        ...            Edge("top", "loss", 100, 100)],
        ... )
        >>> resources = Resources(trainers=2, servers=2, bytes_per_second=1e8)
        >>> plan = OperatorPlan(
        ...     graph, resources, {"features": None, "bottom": 0, "top": 1, "loss": None}
        ... )
        >>> print(plan)
        4 units on 2 group PSs and 2 trainers with 1 net each
        highest load 0.24 ms a step, of the processor of PS 0, 1.75 times the mean
          unit      device         FLOP      bytes      share
          features  trainers          0     1000 B       0.0%
          bottom    PS 0          6e+06    4.9 KiB     100.0%
          top       PS 1          4e+06    4.1 KiB     100.0%
          loss      trainers          0      200 B       0.0%
                    device    processor    network     memory
                    PS 0        0.24 ms     0.1 ms    8.0 KiB
                    PS 1        0.16 ms   0.084 ms   16.0 KiB
                    trainers       0 ms   0.012 ms        0 B
    """

    graph: StepGraph
    resources: Resources
    operators: Mapping[str, int | How | None]
    weights: Mapping[str, int] = dataclasses.field(default_factory=dict)

    # Mappings can't be hashed.
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Checks the plan, and copies the mappings so that they stay as they are."""
        names = {unit.name for unit in self.graph.units}
        for argument in ("operators", "weights"):
            given = getattr(self, argument)
            unknown = sorted(set(given) - names)
            if unknown:
                raise ValueError(f"{argument}: {unknown} are not among the units {sorted(names)}.")
        operators, weights = {}, {}
        followers = pieces.followers(self.graph, self.divided)
        for unit in self.graph.units:
            operators[unit.name], home = self._checked(unit, followers)
            if home is not None:
                weights[unit.name] = home
        object.__setattr__(self, "operators", operators)
        object.__setattr__(self, "weights", weights)
        model = LoadModel(self.graph, self.resources)
        memory = model.loads(self.positions).memory
        for device, (used, limit) in enumerate(zip(memory, model.limits, strict=True)):
            if used > limit:
                raise ValueError(
                    f"{report.label(self, device)} would hold {used} bytes of weights, "
                    f"accumulators and activations, more than its memory limit of {limit} bytes."
                )

    @property
    def divided(self) -> dict[str, How]:
        """How units are divided that are in pieces, by their names."""
        return {name: how for name, how in self.operators.items() if isinstance(how, str)}

    def _checked(
        self, unit: Unit, followers: Mapping[str, How]
    ) -> tuple[int | How | None, int | None]:
        """The server of a unit's operator, and that of its weights."""
        if unit.name not in self.operators:
            raise ValueError(f"operators: the unit {unit.name!r} is missing.")
        server = self.operators[unit.name]
        if server is not None:
            self._check_server(f"operators[{unit.name!r}]", server)
            if unit.pinned:
                raise ValueError(
                    f"operators[{unit.name!r}]={server!r}: must be None, as an "
                    f"{unit.kind!r} unit is on the trainers."
                )
        home = self.weights.get(unit.name)
        if isinstance(server, str):
            self._check_divided(unit, server, followers)
            if home is not None:
                raise ValueError(
                    f"weights[{unit.name!r}]={home}: must not be there, as the unit is in {server}."
                )
            return server, None
        if not unit.parameter_bytes:
            if home is not None:
                raise ValueError(f"weights[{unit.name!r}]={home}: the unit has no parameters.")
            return server, None
        if home is None:
            if server is None:
                raise ValueError(
                    f"weights: {unit.name!r} is missing, whose operator is on the trainers."
                )
            return server, server
        self._check_server(f"weights[{unit.name!r}]", home, may_be_pieces=False)
        if server not in (None, home):
            raise ValueError(
                f"weights[{unit.name!r}]={home}: must be {server}, where their operator is."
            )
        return server, home

    def _check_server(self, name: str, server: Any, may_be_pieces: bool = True) -> None:
        whole = isinstance(server, (int, np.integer)) and not isinstance(server, bool)
        is_pieces = may_be_pieces and server in ("columns", "rows")
        if not is_pieces and not (whole and 0 <= server < self.resources.servers):
            raise ValueError(
                f"{name}={server!r}: must be from 0 to {self.resources.servers - 1}, or None for "
                'an operator on the trainers, or "columns" or "rows" for one in pieces.'
            )

    def _check_divided(self, unit: Unit, how: How, followers: Mapping[str, How]) -> None:
        """Raises a ValueError if a unit can't be divided as the plan has it."""
        if followers.get(unit.name) == how:
            return
        if not unit.parameter_bytes:
            reason = "it has no parameters, and does not follow on columns, element by element"
        elif not unit.can_be_divided:
            reason = f"it {unit.why_whole or 'has no features_in and features_out'}"
        elif unit.features(how) < self.resources.servers:
            reason = f"it has {unit.features(how)} {how} for {self.resources.servers} servers"
        else:
            return
        raise ValueError(f"operators[{unit.name!r}]={how!r}: it can't be divided so: {reason}.")

    @classmethod
    def search(
        cls,
        graph: StepGraph,
        resources: Resources,
        search_seconds: float | None = 10.0,
        splits: bool = True,
        search_placements: int | None = None,
    ) -> OperatorPlan:
        """Finds a plan whose highest load is low.

        The first plan follows rules: weights are on group PSs and their operators beside them;
        inputs, lookups, interactions, units without parameters that are not between units with
        parameters, and the loss are on the trainers; connected components of the others are whole
        on one group PS each, so that these have about the same bytes of weights. Then `refined`.

        Before that units are divided that have more than one server's part of all weights, or fit
        no device whole: by columns if they give more features than they take, else by rows.

        Args:
            graph: As from `step_graph` or `profile`.
            resources: The devices of a group.
            search_seconds: As of `refined`; with 0, the plan is that of the rules alone.
            splits: Whether units are divided that can be. True by default.
            search_placements: As of `refined`.

        Returns:
            The plan.

        Raises:
            ValueError: If a unit fits no device, neither whole nor in pieces, the units do not
                fit together, or an argument is out of range.

        Example:
            >>> top = Unit("top", "layer", flops=4e6, parameter_bytes=8192)
            >>> plan = OperatorPlan.search(StepGraph([top]), Resources(trainers=1, servers=2))
            >>> plan.operators
            {'top': 0}
        """
        if not isinstance(splits, bool):
            raise ValueError(f"splits={splits!r}: must be True or False.")
        model = LoadModel(graph, resources, pieces.large_units(graph, resources) if splits else {})
        return cls._of(model, tag(model)).refined(search_seconds, search_placements)

    def refined(
        self, search_seconds: float | None = 10.0, search_placements: int | None = None
    ) -> OperatorPlan:
        """Returns a plan whose highest load is lower, if one is found.

        Units move off the device with the highest load, the largest improvement first; where no
        move of one unit helps, two are moved or swapped; then the search starts anew from other
        plans. What is in pieces stays so. The search ends when the highest load is at most 1.1
        times what it would be with all operations spread evenly and no traffic, when nothing
        improves it by a thousandth, or at a limit.

        Args:
            search_seconds: Time limit, at least 0; 10 by default. None sets none, so that the
                same arguments give the same plan however fast the machine is.
            search_placements: How many placements are tried at most, at least 0. None (the
                default) sets no limit.

        Returns:
            A plan whose highest load is at most that of this one.

        Raises:
            ValueError: If an argument is out of range.

        Example:
            >>> unit = Unit("top", "layer", flops=4e6, parameter_bytes=8192)
            >>> graph = StepGraph([unit, dataclasses.replace(unit, name="side")])
            >>> resources = Resources(trainers=2, servers=2)
            >>> plan = OperatorPlan(graph, resources, {"top": 0, "side": 0})
            >>> plan.refined().highest_load < plan.highest_load
            True
        """
        if search_seconds is not None:
            check_amount("search_seconds", search_seconds)
        if search_placements is not None:
            check_at_least("search_placements", search_placements, 0)
        model = LoadModel(self.graph, self.resources, self.divided)
        return self._of(model, refine(model, self.positions, search_seconds, search_placements))

    @classmethod
    def _of(cls, model: LoadModel, positions: np.ndarray) -> OperatorPlan:
        numbers, homes = model.operators(positions).tolist(), model.homes(positions).tolist()
        names = [unit.name for unit in model.graph.units]
        operators: dict[str, int | How | None] = dict(zip(names, numbers, strict=True))
        operators |= {name: None for name in names if operators[name] == model.servers}
        operators |= model.divided
        weights = {
            unit.name: home
            for unit, home in zip(model.graph.units, homes, strict=True)
            if unit.parameter_bytes and home >= 0
        }
        return cls(model.graph, model.resources, operators, weights)

    @staticmethod
    def step_graph(
        model: keras.Model, batch_size: int, *, inputs: Any = None, slots: int | None = None
    ) -> StepGraph:
        """Counts what a training step of a model computes and sends.

        The model's call is traced once, without data. Units are its layers: nested models, and
        layers with embedding tables inside, are taken apart, other layers are whole, and a layer
        that is called several times is one unit. Operations are counted from the shapes of the ops,
        of the forward and backward pass.

        Args:
            model: A built Keras model: functional, sequential or a subclass.
            batch_size: Examples of a batch, at least 1.
            inputs: The inputs of one call, in the structure that `call` takes, as `tf.TensorSpec`s
                or `keras.KerasTensor`s; unknown first dimensions become `batch_size`. None (the
                default) takes those that a functional or sequential model knows; a subclass needs
                them.
            slots: Accumulators that the optimizer keeps for each element. None (the default) takes
                those of the optimizer that the model was compiled with, if it is one of this
                package, or else 1.

        Returns:
            The graph; names of units are the layers' paths, with "#2" after them for the second
            layer of a path, and so on.

        Raises:
            ValueError: If an argument is out of range, the model is not built, or the shape of
                something that travels between units is not known.

        Example:
            >>> features = keras.Input((8,), name="features")
            >>> hidden = keras.layers.Dense(4, use_bias=False, name="bottom")(features)
            >>> model = keras.Model(features, keras.layers.Dense(1, name="top")(hidden))
            >>> graph = OperatorPlan.step_graph(model, batch_size=10)
            >>> [unit.name for unit in graph.units]
            ['features', 'bottom', 'top', 'loss']
            >>> graph["bottom"].flops  # 2 * 10 * 8 * 4 forward, and as many for its gradient.
            1280.0
        """
        return model_graph.step_graph(model, batch_size, inputs=inputs, slots=slots)

    @staticmethod
    def profile(
        model: keras.Model,
        batches: Iterable[Any],
        *,
        steps: int = 20,
        slots: int | None = None,
    ) -> StepGraph:
        """Measures what the units of a training step of a model cost.

        Like `step_graph`, but the time of each op is measured, on one core of this machine, and a
        unit gets that part of all floating-point operations which it has of the time. So what is
        slow for its number of operations, as normalization is, counts as much as it takes.
        Lookups are left out, as they are the embedding PSs' work; so are layers that look up in a
        table of TensorFlow's, such as StringLookup.

        Args:
            model: A built Keras model.
            batches: At least one batch, as for `fit`: inputs, or a tuple that begins with them.
                All have the shapes of the first; others are skipped.
            steps: How many batches to take, at least 1; 20 by default.
            slots: As of `step_graph`.

        Returns:
            The graph, for the batch size of the first batch.

        Raises:
            ValueError: If there is no batch, a layer with weights has a table of TensorFlow's
                besides, or as for `step_graph`.

        Example:
            >>> features = keras.Input((8,))
            >>> model = keras.Model(features, keras.layers.Dense(4, name="dense")(features))
            >>> graph = OperatorPlan.profile(model, [np.zeros((32, 8), "float32")])
            >>> graph["dense"].flops > 0
            True
        """
        return profile.profile(model, batches, steps=steps, slots=slots)

    @property
    def loads(self) -> DeviceLoads:
        """Loads of the group's devices: the servers in their order, and then a trainer."""
        return LoadModel(self.graph, self.resources).loads(self.positions)

    @property
    def highest_load(self) -> float:
        """Seconds a step of the device with the highest load."""
        return float(self.loads.highest)

    @property
    def imbalance(self) -> float:
        """The highest load divided by the mean of the devices' loads: 1 for an even plan."""
        seconds = self.loads.seconds
        mean = float(seconds.mean())
        return float(seconds.max()) / mean if mean > 0 else 1.0

    @property
    def positions(self) -> np.ndarray:
        """int64 `[units]`: operators and weights as `tf_recsync.placement.loads` counts them."""
        servers = self.resources.servers
        in_pieces = {"columns": 2 * servers, "rows": 2 * servers + 1}
        return np.array(
            [
                servers + self.weights.get(unit.name, 0)
                if self.operators[unit.name] is None
                else in_pieces.get(self.operators[unit.name], self.operators[unit.name])
                for unit in self.graph.units
            ],
            np.int64,
        )

    def __str__(self) -> str:
        return report.table(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws each device's seconds a step of processor, by units, and of network.

        Needs matplotlib (the extra `plot`).

        Args:
            path: The file; its ending (".png") tells the format.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        report.draw(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, with its graph and resources, one line for each unit and edge.

        Args:
            path: The file; it is overwritten.
        """
        units = [
            {
                **dataclasses.asdict(unit),
                "operator": self.operators[unit.name],
                "weights": self.weights.get(unit.name),
            }
            for unit in self.graph.units
        ]
        parts = {"units": units, "edges": [dataclasses.asdict(edge) for edge in self.graph.edges]}
        lists = ",\n".join(
            f'  "{name}": [\n' + ",\n".join(f"    {_json(row)}" for row in rows) + "\n  ]"
            for name, rows in parts.items()
        )
        resources = _json(dataclasses.asdict(self.resources))
        text = f'{{\n  "version": {_VERSION},\n  "resources": {resources},\n{lists}\n}}\n'
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OperatorPlan:
        """Reads a plan that `save` wrote.

        Args:
            path: The file.

        Returns:
            A plan equal to the one saved.

        Raises:
            ValueError: If the file is not a plan, is of another version, or was changed to
                something that is no valid plan.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            version = content["version"]
            if version in _READABLE:
                return cls._from_content(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: not an operator plan: {error}") from error
        raise ValueError(
            f"{os.fspath(path)}: an operator plan of version {version}; this release reads "
            f"versions {' and '.join(map(str, _READABLE))}."
        )

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> OperatorPlan:
        units, operators, weights = [], {}, {}
        for row in content["units"]:
            row = dict(row)
            operator, home = row.pop("operator"), row.pop("weights")
            unit = Unit(**row)
            units.append(unit)
            operators[unit.name] = operator
            if home is not None:
                weights[unit.name] = home
        graph = StepGraph(units, [Edge(**row) for row in content["edges"]])
        return cls(graph, Resources(**content["resources"]), operators, weights)


def _json(values: dict[str, Any]) -> str:
    """JSON in one line, of numbers of numpy too."""
    return json.dumps(values, default=lambda number: number.item())
