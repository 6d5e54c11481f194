"""Which variables of a model the steps of workers use, and where they find them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Server
from tf_recsync.optimizers import base
from tf_recsync.optimizers.per_table import MultiOptimizer
from tf_recsync.placement import OperatorPlan
from tf_recsync.strategies.operators import Batches, Operators, layers_of
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import CopiedVariable, Pieces, is_copied
from tf_recsync.synchronization.divided import DividedLayer, How, divided_layer
from tf_recsync.synchronization.placed import NO_LAYERS, PlacedLayers
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.seeds import generator_of_steps, is_seed
from tf_recsync.synchronization.units import (
    Plan,
    Unit,
    by_weights,
    followers_of,
    names_of,
    place_variables,
    planned,
    units_of,
)

_LARGE_BYTES = 4 * 2**20  # What takes a step milliseconds to pull.


def _like(optimizer: keras.optimizers.Optimizer) -> str:
    """What takes the place of an optimizer of Keras, in words; "" if nothing does."""
    name = type(optimizer).__name__
    is_there = any(kind.__name__ == name for kind in base.Optimizer.__subclasses__())
    return f"; use tf_recsync.optimizers.{name}" if is_there else ""


def optimizers_of(model: keras.Model) -> list[base.Optimizer]:
    """The optimizers of this package that a model trains with.

    Raises:
        ValueError: if it trains with another one, or with options that can't
            work on parameter servers.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []
    inner = base.parts_of(optimizer)
    for one in inner:
        if isinstance(one, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "optimizer can't be a LossScaleOptimizer under this strategy, which compile makes "
                "of any optimizer with the dtype policy mixed_float16: use mixed_bfloat16, which "
                "needs no scaling, or compile(..., auto_scale_loss=False)"
            )
        if not isinstance(one, base.Optimizer):
            raise ValueError(
                "optimizer must be one of tf_recsync.optimizers (or a MultiOptimizer of "
                f"them) under this strategy, not {type(one).__module__}.{type(one).__name__}"
                f"{_like(one)}"
            )
        for name in ("use_ema", "loss_scale_factor"):
            if getattr(one, name):
                raise ValueError(
                    f"{name} of the optimizer can't be used under this strategy: "
                    f"{name}={getattr(one, name)!r}; leave it unset"
                )
    if inner != [optimizer] and not isinstance(optimizer, MultiOptimizer):
        # It saves what is beside rows as one placement has it.
        raise ValueError(
            f"optimizer {optimizer.name} must be a tf_recsync.optimizers.MultiOptimizer, or of "
            "tf_recsync.optimizers.per_table, under this strategy, not "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}; make it of the same map"
        )
    accumulated = {one.gradient_accumulation_steps for one in inner}
    if len(accumulated) > 1:
        raise ValueError(
            "gradient_accumulation_steps must be the same of all optimizers of a model, not "
            f"{[one.gradient_accumulation_steps for one in inner]}"
        )
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise ValueError(
                f"the constraint of {variable.path} can't be kept under this strategy; remove it"
            )
    return inner


def peeked_variables(model: keras.Model) -> list[keras.Variable]:
    """Those that callbacks look at while workers train: reading them holds nobody."""
    found = list(model.metrics_variables)
    for part in base.parts_of(model.optimizer):
        # Keras wraps it with the policy mixed_float16.
        optimizer = getattr(part, "inner_optimizer", part)
        found += [optimizer._iterations, *(s.counters for s in getattr(optimizer, "states", ()))]
        if isinstance(optimizer._learning_rate, keras.Variable):
            found.append(optimizer._learning_rate)
    return found


def copied_variables(model: keras.Model) -> list[CopiedVariable]:
    """What every worker has a copy of: the parameters first, then what belongs to them.

    Metrics and the states of random generators are apart: they begin anew in each pass. So is
    what lies on parameter servers.
    """
    apart = {id(v) for v in private_variables(model)}
    found = [*model.trainable_variables, *model.non_trainable_variables]
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    unique = {id(v): v for v in found if id(v) not in apart}
    return [v._value for v in unique.values() if isinstance(v._value, CopiedVariable)]


def private_variables(
    model: keras.Model, logged: Iterable[keras.Variable] = ()
) -> list[keras.Variable]:
    """What begins anew in each pass of each worker; of what is merged, metrics come first.

    Args:
        model: a built model.
        logged: the variables of numbers that its steps return besides.
    """
    metrics = [*model.metrics_variables, *logged]
    known = {id(variable) for variable in metrics}
    seeds = [v for v in model.variables if is_seed(v) and id(v) not in known]
    return metrics + seeds


def variables_of(model: keras.Model) -> list[tf.Variable]:
    """Those of a model and its optimizer, each once."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *([] if optimizer is None else optimizer.variables)]
    return list({id(variable._value): variable._value for variable in found}.values())


def servers_of(model: keras.Model) -> set[Server]:
    """The parameter servers that have variables of a model or its optimizer.

    Not those that only have a group's copies.
    """
    specs = map(tf.DeviceSpec.from_string, {v.device for v in variables_of(model)})
    return {(spec.job, spec.task) for spec in specs if spec.job == "ps"}


def uses_servers(model: keras.Model) -> bool:
    """Whether some of a built model's variables lie on servers, once for all workers."""
    return any("/job:ps/" in variable._value.device for variable in model.variables)


def _of_units(plan: OperatorPlan, units: Sequence[Unit]) -> Plan:
    """Where a plan has layers with dense weights run; one that is frozen has none to the plan."""
    paths = {unit.path for unit in units}
    return {
        path: where
        for path, where in layers_of(plan).items()
        if path in paths or plan.graph[path].parameter_bytes
    }


class OnServers:
    """Steps pull what servers keep, and push gradients there; all else begins anew on each worker.

    Args:
        model: a model that was built in the strategy's scope.
        operators: where its layers run; by default on the trainers.
        batch_size: examples of a batch, if that is known before there are data.

    Attributes:
        pieces: of what servers have pieces of, by the ids of the variables that users see.
        plan: that says where layers run; None before that is decided, and where none does.
        batches: that the model trains on.
        shards: of what groups have copies of, as `Copies.shards`, once there are copies.
    """

    def __init__(
        self,
        model: keras.Model,
        operators: Operators | None = None,
        batch_size: int | None = None,
    ):
        self._model = model
        self.plan: OperatorPlan | None = None
        self.batches = Batches(size=batch_size)
        self.pieces: dict[int, Pieces] = {}
        self.shards: Mapping[int, int] = {}
        self._operators = operators or Operators()
        self._divided: tuple[DividedLayer, ...] = ()
        self._name = f"feedback_{uuid.uuid4().hex}"
        self._placed: list[tuple[Unit, int]] = []
        # Of these, and of those that are pulled; None before that is decided.
        self._homes: list[tuple[Unit, int]] | None = None
        self._followers: tuple[keras.Operation, ...] = ()
        self._unseeded = generator_of_steps()
        self._warned: set[str] = set()  # Of these variables, by their paths.

    @property
    def optimizers(self) -> list[base.Optimizer]:
        """Those whose variables stand for what servers keep."""
        return optimizers_of(self._model)

    def place(self, servers: int) -> None:
        """Decides on which server of a group layers run and their variables are.

        It is called when the model and its optimizers are built, and before groups have copies.
        After the first time nothing changes any more: pieces have been made.

        Args:
            servers: of a group.

        Raises:
            ValueError: if the placement does not fit the model, or there is nothing to compress.
        """
        placement, compression = self._operators.placement, self._operators.compression
        if placement == "trainers":
            return
        states = [state for optimizer in self.optimizers for state in optimizer.states]
        if self._homes is not None:
            # Another model that shares layers may have been placed since.
            place_variables(self._homes, states)
            return
        apart = [state.variable for state in states if state.is_table]
        apart += [variable for variable in self._model.variables if not is_copied(variable)]
        units = units_of(self._model, apart)
        found = self._decided(units, servers)
        self._placed = [(unit, where) for unit, where in found if not isinstance(where, str)]
        by_variable = {id(state.variable): state for state in states}
        with self._model.distribute_strategy.scope():  # As the model's variables were made.
            self._divided = tuple(
                divided_layer(unit.layer, how, by_variable, servers)
                for unit, how in found
                if isinstance(how, str)
            )
        for layer in self._divided:
            for variable in layer.variables:
                self.pieces.update(variable.shown)
        self._place_others(followers_of(self._model, apart))
        if compression is not None and not self._placed and not self._divided:
            nothing = (
                f"compression={compression} would do nothing: placement has no layer of "
                f"{self._model.name} run on a server, so that no activations travel"
            )
            if placement != "auto":
                raise ValueError(nothing)
            logging.warning("%s", nothing)
        weights = {} if self.plan is None else self.plan.weights
        on_trainers = [unit for unit in units if all(unit is not other for other, _ in found)]
        pulled = [(unit, weights[unit.path]) for unit in on_trainers if unit.path in weights]
        homes = [*pulled, *self._placed]
        place_variables(homes, states)
        self._homes = homes

    def _decided(self, units: Sequence[Unit], servers: int) -> list[tuple[Unit, int | How]]:
        """The layers with dense weights that run on servers, and where or how they are divided."""
        operators, optimizers = self._operators, self.optimizers
        placement, is_searched = operators.placement, operators.placement == "auto"
        try:
            if is_searched:
                placement = operators.searched(self._model, self.batches)
            if isinstance(placement, OperatorPlan):
                placement, self.plan = _of_units(placement, units), placement
            found = planned(units, placement, servers, optimizers)
        except Exception as error:  # The model's own code may raise anything when it is traced.
            if not is_searched:
                raise
            self.plan = None
            logging.warning(
                "Layers of %s are placed by their weights alone, as its step can't be planned: %s",
                self._model.name,
                error,
            )
            return by_weights(units, servers, operators.splits, optimizers)
        if is_searched:
            logging.info("Layers of %s are placed by a search.\n%s", self._model.name, self.plan)
        return found

    def _place_others(self, others: Sequence[keras.Operation]) -> None:
        """Decides where layers without weights run: where a plan has them, or by their inputs."""
        places = {} if self.plan is None else layers_of(self.plan)
        names = names_of(self._model)
        followers = []
        for other in others:
            name = names.get(id(other), "")  # Operations have none.
            where = places.get(name, "columns")
            if isinstance(where, int):
                self._placed.append((Unit(other, (), name), where))
            elif where is not None:
                followers.append(other)
        self._followers = tuple(followers)

    def layout(self, group: Group | None = None, logged: Sequence[keras.Variable] = ()) -> Layout:
        """Where a step finds the model's variables.

        Args:
            group: whose step it is; None where no variable is copied.
            logged: the variables of what it returns besides metrics.
        """
        placed = self._placed_layers(group)
        found = Layout.of(
            self._model, self.optimizers, group, placed, logged, self._unseeded, self.shards
        )
        self._warn_of_moved(found.shared)
        return found

    def _warn_of_moved(self, variables: Sequence[keras.Variable]) -> None:
        """Warns once of what is large and not trained: it travels whole, tables as well."""
        for variable in variables:
            size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
            if size < _LARGE_BYTES or variable.path in self._warned:
                continue
            self._warned.add(variable.path)
            logging.warning(
                "%s, %s MB, is not trained by the model's optimizer, as its layer is frozen or the "
                "model not compiled: each step pulls all of it. Of a table that is trained, in a "
                "compiled model, steps pull no more than the rows that they look up.",
                variable.path,
                f"{size / 2**20:,.0f}",
            )

    def _placed_layers(self, group: Group | None) -> PlacedLayers:
        if not self._placed and not self._divided:
            return NO_LAYERS
        layers = tuple((unit.layer, group.device(number)) for unit, number in self._placed)
        devices = {id(v): group.device(n) for unit, n in self._placed for v in unit.variables}
        for divided in self._divided:
            for variable in divided.variables:
                for number, state in enumerate(variable.states):
                    devices[id(state.variable)] = group.device(number)
        return PlacedLayers(
            layers, self._divided, self._followers, devices, self._operators.compression, self._name
        )

    def unneeded(self, ps: int, others: Iterable[Server] = ()) -> set[Server]:
        """The parameter servers on which there is nothing that steps need.

        Args:
            ps: how many there are.
            others: those that are needed for something else than variables of the model.

        Returns:
            None as long as the model or its optimizer is not built.
        """
        optimizer = getattr(self._model, "optimizer", None)
        if not self._model.built or not getattr(optimizer, "built", True):
            return set()
        return {("ps", index) for index in range(ps)} - servers_of(self._model) - set(others)

    def trace_key(
        self, element_spec: Any, bandwidths: dict[str, float], *others: Hashable
    ) -> Hashable:
        """What functions of the steps depend on: where it is another one, they are traced anew.

        Args:
            element_spec: of the data.
            bandwidths: artificial ones, in bytes per second by server's device.
            *others: what else they depend on.
        """
        states = tuple(o.traced_state for o in self.optimizers if o.built)
        renewals = self._model.distribute_strategy.renewals
        return (repr(element_spec), tuple(bandwidths.items()), states, renewals, *others)


class OnWorkers(OnServers):
    """Each worker has a copy of all variables, to which it applies the model's optimizer itself.

    Unless there are tables on servers: then it pulls these and pushes to them, and the copy is
    pulled and pushed where the step runs.
    """

    @property
    def optimizers(self) -> list[base.Optimizer]:
        """Those whose variables stand for what servers keep: none if they keep nothing."""
        return super().optimizers if uses_servers(self._model) else []

    def layout(self, group: Group | None = None, logged: Sequence[keras.Variable] = ()) -> Layout:
        """Where a step finds the model's variables."""
        if uses_servers(self._model):
            return super().layout(group, logged)
        private = [*private_variables(self._model, logged), self._unseeded.state]
        return Layout((), {}, [], [], private, group, unseeded=self._unseeded)


class AsShown(OnServers):
    """Every worker gets the copied variables as users see them when a pass begins.

    Tables on parameter servers stay there.
    """

    @property
    def optimizers(self) -> list[base.Optimizer]:
        """None: nothing is pushed."""
        return []

    def layout(self, group: Group | None = None, logged: Sequence[keras.Variable] = ()) -> Layout:
        """Where a step finds the model's variables."""
        model = self._model
        tables = []
        if uses_servers(model):
            states = [state for o in optimizers_of(model) for state in o.states]
            tables = [s for s in states if s.is_table and not is_copied(s.variable)]
        metrics = [*model.metrics_variables, *logged]
        known = {id(variable) for variable in [*metrics, *(state.variable for state in tables)]}
        others = [v for v in model.variables if id(v) not in known]
        private = [*metrics, *others, self._unseeded.state]
        return Layout((), {}, tables, [], private, group, unseeded=self._unseeded)
