"""Optimizers of which each trains a part of a model, such as a single table."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_recsync.embedding.table_rows import PartOfStore, narrowed
from tf_recsync.optimizers.saving import LoadsWhenBuilt, warn_of_no_state

_ITERATIONS = "iterations"
_OF_PART = ":"  # Between the name of a part and that of what it saves.


@keras.saving.register_keras_serializable(package="tf_recsync")
class TableOptimizers:
    """Says which optimizer trains a variable: that of its table, else the default one.

    Args:
        default_optimizer: the default one.
    """

    def __init__(self, default_optimizer: keras.optimizers.Optimizer):
        self.default_optimizer = default_optimizer

    def __call__(self, variable: keras.Variable) -> keras.optimizers.Optimizer:
        """The optimizer of a variable."""
        own = getattr(variable, "table_optimizer", None)
        return self.default_optimizer if own is None else own

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        optimizer = keras.saving.serialize_keras_object(self.default_optimizer)
        return {"default_optimizer": optimizer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableOptimizers:
        """Returns what `get_config` described."""
        return cls(keras.saving.deserialize_keras_object(config["default_optimizer"]))


@keras.saving.register_keras_serializable(package="tf_recsync")
class MultiOptimizer(LoadsWhenBuilt, keras.optimizers.MultiOptimizer):
    """A `keras.optimizers.MultiOptimizer` that can be loaded where tables are placed otherwise.

    Its parts, which are in `optimizers`, are saved one by one under names that do not depend on
    where tables are, each in the way of its own class.

    Args:
        optimizer_map: A `keras.optimizers.OptimizerMap`. `per_table` has one for tables.
        loss_scale_factor: As in `keras.optimizers.MultiOptimizer`.
        name: A str or None.

    Raises:
        TypeError: If `optimizer_map` is no such map.

    Example:
        >>> import keras
        >>> import tf_recsync as recsync
        >>> deep, wide = recsync.optimizers.Adagrad(0.01), recsync.optimizers.Ftrl(0.1)
        >>> by_path = keras.optimizers.OptimizerMap(deep, {"wide/.*": wide})
        >>> optimizer = recsync.optimizers.MultiOptimizer(by_path)
        >>> [type(part).__name__ for part in optimizer.optimizers]
        ['Ftrl', 'Adagrad']
    """

    def __init__(
        self,
        optimizer_map: keras.optimizers.OptimizerMap | TableOptimizers,
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ):
        if not isinstance(optimizer_map, keras.optimizers.OptimizerMap | TableOptimizers):
            raise TypeError(
                f"optimizer_map must be a keras.optimizers.OptimizerMap, not {optimizer_map!r}"
            )
        super().__init__(optimizer_map, loss_scale_factor=loss_scale_factor, name=name)
        self._part_names: list[str] = []

    def build(self, var_list):
        if self.built:
            return
        super().build(var_list)
        parts = _named(self._optimizer_map, var_list)
        # Of each of `optimizers`, which is all that has them.
        self._part_names = [next((n for n in parts if parts[n] is p), "") for p in self.optimizers]
        for name, part in self.parts.items():
            self._track_trackable(part, name)
        with tf.init_scope():
            self._load_kept()

    @property
    def parts(self) -> dict[str, keras.optimizers.Optimizer]:
        """The parts that train something, by the names under which they are saved."""
        pairs = zip(self._part_names, self.optimizers, strict=False)
        return {name: part for name, part in pairs if name}

    def _save(self, store):
        """Saves the parts as well, see `__dir__`."""
        store[_ITERATIONS] = self._iterations.numpy()
        for name, part in self.parts.items():
            part.save_own_variables(PartOfStore(store, name + _OF_PART))

    def __dir__(self):
        # Keras's files have what is found here: parts by their classes, in the order of variables.
        hidden = ("optimizers", "_inner_optimizers", "parts")
        return [name for name in super().__dir__() if name not in hidden]

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            return children
        # These have the order and the shapes of one placement; the parts have names.
        for name in ("_variables", "_trainable_variables", "_inner_optimizers", "_part_names"):
            children.pop(name, None)
        return children

    def _load(self, saved: Mapping[str, Any]) -> None:
        if saved and _ITERATIONS not in saved:
            self._load_raw(saved)
            return
        parts: dict[str, dict[str, Any]] = {}
        for key, value in saved.items():
            name, separator, own = key.partition(_OF_PART)
            if separator:
                parts.setdefault(name, {})[own] = value
        if not parts:
            warn_of_no_state(self)
            return
        check_parts(parts, self.parts, f"the saved {self.name}")
        for name, part in self.parts.items():
            part.load_own_variables(parts[name])
        self._iterations.assign(np.asarray(saved[_ITERATIONS]))

    def _load_raw(self, saved: Mapping[str, Any]) -> None:
        """Loads what Keras's own optimizer wrote: all variables of all parts, by their order."""
        variables = self.variables
        values = [saved.get(str(i)) for i in range(len(variables))]
        if len(saved) != len(variables) or any(
            value is None or tuple(value.shape) != tuple(variable.shape)
            for variable, value in zip(variables, values, strict=True)
        ):
            raise ValueError(
                f"the saved {self.name} is another optimizer than tf_recsync.optimizers."
                "MultiOptimizer: what a keras.optimizers.MultiOptimizer has saved, as older "
                "versions did, can only be loaded into the same model with its tables on as many "
                "servers as they were then"
            )
        states = [state for part in self.optimizers for state in getattr(part, "states", ())]
        # Rows are saved as they are decayed by then.
        decays = {id(variable) for state in states for variable in state.log_decays}
        for variable, value in zip(variables, values, strict=True):
            if id(variable) not in decays:
                variable.assign(narrowed(np.asarray(value), variable.dtype))


def check_parts(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Raises a ValueError if the parts of an optimizer are not those that were saved.

    Args:
        saved: those that were saved, by their names.
        own: those that are here, by their names.
        what: what was saved, in words.
    """
    if saved.keys() != own.keys():
        raise ValueError(
            f"{what} has the parts {', '.join(sorted(saved)) or 'none'}, the optimizer here has "
            f"{', '.join(sorted(own)) or 'none'}: the same tables must have optimizers of their "
            "own, and equal ones"
        )


def named_parts(
    optimizer: keras.optimizers.Optimizer | None,
) -> dict[str, keras.optimizers.Optimizer]:
    """The built optimizers that train a model, by names that do not depend on the placement.

    Args:
        optimizer: the model's; its name is empty if it is the only one.
    """
    if isinstance(optimizer, MultiOptimizer):
        return optimizer.parts
    parts = getattr(optimizer, "optimizers", None)
    if parts is not None:
        return {f"part_{i}": part for i, part in enumerate(parts) if part.built}
    return {"": optimizer} if optimizer is not None and optimizer.built else {}


def _named(
    optimizer_map: keras.optimizers.OptimizerMap | TableOptimizers,
    variables: Sequence[keras.Variable],
) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers that train variables, by names that do not depend on the placement."""
    # The first table that each of them trains.
    firsts: dict[keras.optimizers.Optimizer, tuple[int, str]] = {}
    used = list(dict.fromkeys(map(optimizer_map, variables)))
    collections = list(dict.fromkeys(getattr(v, "collection", None) for v in variables))
    for variable in variables:
        part = optimizer_map(variable)
        physical = getattr(variable, "physical_table", None)
        for piece in () if physical is None else physical.pieces:
            # The layers' order is the model's; that of a layer's variables the placement's.
            table = collections.index(variable.collection), piece.table
            firsts[part] = min(table, firsts.get(part, table))
    default = optimizer_map.default_optimizer
    named = {"default": default} if default in used else {}
    others = [one for one in used if one is not default]
    if isinstance(optimizer_map, TableOptimizers):
        others.sort(key=firsts.__getitem__)
        names = {one: f"table_{urllib.parse.quote(firsts[one][1], safe='')}" for one in others}
    else:
        names = {part: f"part_{i}" for i, part in reversed([*enumerate(optimizer_map.values())])}
    for one in others:
        name, number = names[one], 2
        while name in named:  # Two layers may have tables of one name.
            name, number = f"{names[one]}_{number}", number + 1
        named[name] = one
    return named


def per_table(default: keras.optimizers.Optimizer) -> MultiOptimizer:
    """An optimizer that trains each table by the optimizer of its `TableConfig`.

    Args:
        default: The optimizer of all tables that have none of their own, and of all other
            parameters. Under a strategy, it and the others must be of this package.

    Returns:
        A `MultiOptimizer`, to compile a model with. Each of its parts counts its own steps, so
        that a learning-rate schedule is its optimizer's own.

    Raises:
        TypeError: If `default` is no optimizer of Keras.

    Example:
        >>> import keras
        >>> import tf_recsync as recsync
        >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
        >>> users = TableConfig("users", 100, 4, optimizer=recsync.optimizers.Ftrl(0.1))
        >>> films = TableConfig("films", 100, 4)
        >>> layer = EmbeddingCollection(
        ...     [users, films], [FeatureConfig("user", "users"), FeatureConfig("film", "films")],
        ...     concatenate=True,
        ... )
        >>> inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "film")}
        >>> model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        >>> optimizer = recsync.optimizers.per_table(recsync.optimizers.Adagrad(0.01))
        >>> model.compile(optimizer, "mse")
        >>> optimizer.build(model.trainable_variables)
        >>> [type(part).__name__ for part in optimizer.optimizers]
        ['Adagrad', 'Ftrl']
    """
    if not isinstance(default, keras.optimizers.Optimizer):
        raise TypeError(f"default must be an optimizer of Keras, not {default!r}")
    return MultiOptimizer(TableOptimizers(default))
