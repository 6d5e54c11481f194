"""What an optimizer keeps, in a form that does not depend on where tables are.

Tables of an `EmbeddingCollection` are saved row by row under their own names,
so that they can be loaded where they are split and placed otherwise. All else
is saved in the order of the optimizer's variables, as Keras does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync import staleness
from tf_recsync.embedding.checkpoint import SavedCounters, SavedRows
from tf_recsync.embedding.physical_tables import (
    gather_logical,
    scatter_logical,
    shards_of,
)
from tf_recsync.shown_variable import shown

_COUNTERS = "staleness"
_STEPS = "step_state"
_SIGNATURE = "signature"
_KEPT = "kept"


def save_variables(optimizer: Any, store: Any) -> None:
    """Writes an optimizer's variables into a Keras store.

    Args:
        optimizer: a built optimizer of this package.
        store: what `save_own_variables` gets.
    """
    collections = _collections(optimizer)
    if optimizer.built:
        store[_SIGNATURE] = np.frombuffer(json.dumps(_signature(optimizer)).encode(), np.uint8)
        store[_STEPS] = optimizer.step_state.array
    for i, variable in enumerate(_others(optimizer, collections)):
        store[str(i)] = np.asarray(variable._value.read_value())
    for name, states in collections.items():
        for slot, variables in _slots(states).items():
            values = [np.asarray(v._value.read_value()) for v in variables]
            if slot == _COUNTERS:
                store[_key(name, slot)] = staleness.sum_counters(values)
                continue
            logical = gather_logical([s.variable.physical_table for s in states], values)
            for table, value in logical.items():
                store[_key(name, slot, table)] = value


def load_variables(optimizer: Any, saved: Mapping[str, np.ndarray]) -> None:
    """Sets an optimizer's variables to what `save_variables` wrote.

    What is counted in global steps is converted where another strategy saved it, if it is
    known already how many examples a step has here; else at the next fit.

    Args:
        optimizer: a built optimizer of this package.
        saved: the arrays of the store, by name.

    Raises:
        ValueError: if they were saved for another model, by another optimizer, or with
            another swap or staleness policy. Nothing is changed then.
    """
    saved = dict(saved)
    signature, steps = saved.pop(_SIGNATURE, None), saved.pop(_STEPS, None)
    if signature is None and saved.keys() <= {"0", "1"}:
        logging.warning(
            "The checkpoint holds no state of %s, which stays as it is: it was saved by a model "
            "that was not compiled, or not trained.",
            optimizer.name,
        )
        return
    collections = _collections(optimizer)
    if signature is not None:
        kept = json.loads(bytes(signature).decode())
        renamed = _renamed(kept["tables"], list(collections))
        kept["tables"] = {
            f"{renamed[name]}/{table}": value
            for (name, table), value in ((_of_table(key), v) for key, v in kept["tables"].items())
        }
        _check_signature(optimizer, kept)
        keys = {_key(old, ""): _key(new, "") for old, new in renamed.items()}
        saved = {_with_prefix(key, keys): value for key, value in saved.items()}
    others = _others(optimizer, collections)
    values: list[tuple[keras.Variable, np.ndarray]] = []
    expected = {str(i) for i in range(len(others))}
    values += [(v, saved.get(str(i))) for i, v in enumerate(others)]
    for name, states in collections.items():
        for slot, variables in _slots(states).items():
            if slot == _COUNTERS:
                expected.add(_key(name, slot))
                counters = saved.get(_key(name, slot))
                # The sum is what counts; the first variable keeps it.
                values += [
                    (v, counters if i == 0 or counters is None else np.zeros_like(counters))
                    for i, v in enumerate(variables)
                ]
                continue
            tables = {p.table for s in states for p in s.variable.physical_table.pieces}
            logical = {table: saved.get(_key(name, slot, table)) for table in tables}
            expected |= {_key(name, slot, table) for table in tables}
            if any(value is None for value in logical.values()):
                values.append((variables[0], None))
                continue
            values += [
                (v, scatter_logical(s.variable.physical_table, logical))
                for s, v in zip(states, variables, strict=True)
            ]
    wrong = sorted(expected.symmetric_difference(saved))
    wrong += [v.path for v, value in values if value is not None and value.shape != v.shape]
    if wrong:
        raise ValueError(
            f"the saved {optimizer.name} has {len(saved)} variables, this one {len(expected)}: it "
            "was saved for another model, or with another swap or staleness policy (they differ in "
            f"{', '.join(wrong[:5])})"
        )
    for variable, value in values:
        variable.assign(value)
    if steps is not None:
        optimizer.load_steps(steps)


def _of_table(key: str) -> tuple[str, str]:
    """The collection's and the table's name in a signature's key."""
    collection, _, table = key.rpartition("/")
    return collection, table


def _renamed(tables: Mapping[str, Any], own: list[str]) -> dict[str, str]:
    """The collections' names here by those in a signature.

    In a program that makes a second model, Keras gives its layers other names.
    """
    there = list(dict.fromkeys(_of_table(key)[0] for key in tables))
    if set(there) == set(own) or len(there) != len(own):
        return {name: name for name in there}
    return dict(zip(there, own, strict=True))


def _with_prefix(key: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _signature(optimizer: Any) -> dict:
    """What the state of an optimizer is of, to tell what differs before it is loaded."""
    variables, tables = [], {}
    for state in optimizer.states:
        physical = getattr(state.variable, "physical_table", None)
        if physical is None:
            variables.append([state.variable.path, list(state.variable.shape)])
            continue
        for piece in physical.pieces:
            name = f"{state.variable.collection}/{piece.table}"
            rows = tables.get(name, [0])[0] + piece.rows
            tables[name] = [rows, physical.dimension]
    return {
        "optimizer": type(optimizer).__name__,
        "kept": _kept(optimizer),
        "variables": variables,
        "tables": tables,
    }


def _kept(optimizer: Any) -> list[str]:
    """What an optimizer keeps of each variable, by name."""
    kept = [*optimizer.accumulator_names]
    if optimizer.states:
        kept += [slot for slot in _slots(list(optimizer.states[:1])) if "accumulator_" not in slot]
    return kept


def _check_signature(optimizer: Any, saved: dict) -> None:
    """Raises a ValueError that names what differs from what was saved."""
    own = _signature(optimizer)
    differences = []
    if own["kept"] != saved["kept"]:
        differences.append(
            f"{saved['optimizer']} keeps {', '.join(saved['kept'])} of each variable, "
            f"{own['optimizer']} here {', '.join(own['kept'])}"
        )
    pairs = itertools.zip_longest(saved["variables"], own["variables"], fillvalue=("nothing", ""))
    for (there, old), (here, new) in pairs:
        if old != new:
            differences.append(f"{there} {old} of the checkpoint is {here} {new} here".strip())
    for name in sorted(saved["tables"].keys() | own["tables"].keys()):
        old, new = saved["tables"].get(name, "not there"), own["tables"].get(name, "not there")
        if old != new:
            differences.append(f"table {name} is {old} in the checkpoint, {new} here")
    if differences:
        raise ValueError(
            f"the checkpoint is of another model or optimizer than {optimizer.name}'s: "
            f"{'; '.join(differences[:5])}"
        )


def track_variables(optimizer: Any, group: tf.__internal__.tracking.Trackable) -> None:
    """Has checkpoints (`tf.train.Checkpoint`) save an optimizer's variables, too, by table.

    Args:
        optimizer: a built optimizer of this package.
        group: what stands for the variables in checkpoints; it restores each of them at once if
            its checkpoint was read before.
    """
    collections = _collections(optimizer)
    group._track_trackable(_SavedKept(optimizer), _KEPT)
    # Converted at the next fit, if another strategy saved it.
    group._track_trackable(optimizer.step_variable, _STEPS)
    # By what they are, so that another optimizer's are not taken for them.
    slots = {
        id(variable): f"{slot}_{number}"
        for number, state in enumerate(filter(_is_saved_whole, optimizer.states))
        for slot, variables in zip(_kept(optimizer), _slots([state]).values(), strict=True)
        for variable in variables
    }
    for i, variable in enumerate(_others(optimizer, collections)):
        group._track_trackable(variable, slots.get(id(variable), f"variable_{i}"))
    # A model's layers save what is in their attributes only.
    dense = [s.variable for s in optimizer.states if _is_saved_whole(s)]
    for i, variable in enumerate(dense):
        group._track_trackable(variable, f"trained_{i}")
    for number, states in enumerate(collections.values()):
        tables = [state.variable.physical_table for state in states]
        for slot, variables in _slots(states).items():
            name = f"collection_{number}_{slot}"
            if slot == _COUNTERS:
                counters = SavedCounters(variables, staleness.MAXIMUM)
                group._track_trackable(counters, name)
                continue
            for table, shards in shards_of(tables, variables).items():
                label = f"the {slot} of table {table!r}"
                rows = SavedRows(label, shards, variables[0].dtype)
                group._track_trackable(rows, f"{name}_{table}")


class _SavedKept(tf.__internal__.tracking.Trackable):
    """What an optimizer keeps of which variables, in checkpoints; restoring others is an error.

    TensorFlow itself leaves out what it finds no match for, and gives variables on servers the
    shape of what was saved.

    Args:
        optimizer: a built optimizer of this package.
    """

    def __init__(self, optimizer: Any):
        self._name = optimizer.name
        shapes = [s.variable.shape for s in optimizer.states if _is_saved_whole(s)]
        self._kept = (
            f"{', '.join(_kept(optimizer))} of variables of the shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}"
        )
        self._step = optimizer.step_variable._value

    def _serialize_to_tensors(self):
        # On the device of a task that saves other things, of which its owner has to know.
        with tf.init_scope(), tf.device(self._step.device):
            variable = shown(self._step)
            if variable is not None:
                variable.tell()
            return {_KEPT: tf.constant([self._kept])}

    def _restore_from_tensors(self, restored_tensors):
        tf.debugging.assert_equal(
            restored_tensors[_KEPT],
            tf.constant([self._kept]),
            f"the checkpoint is of another model or optimizer than {self._name}'s, which keeps "
            f"{self._kept}",
        )
        return []


def _is_saved_whole(state: Any) -> bool:
    """Whether a variable is none of a collection's, whose shapes depend on the placement."""
    return not hasattr(state.variable, "physical_table")


def _collections(optimizer: Any) -> dict[str, list]:
    """The states of the tables of each collection, by the layer's path."""
    collections: dict[str, list] = {}
    for state in optimizer.states:
        if hasattr(state.variable, "physical_table"):
            collections.setdefault(state.variable.collection, []).append(state)
    return collections


def _others(optimizer: Any, collections: dict[str, list]) -> list[keras.Variable]:
    """The variables that are not of a collection."""
    own = {
        id(variable)
        for states in collections.values()
        for variables in _slots(states).values()
        for variable in variables
    }
    own.add(id(optimizer.step_variable))
    return [variable for variable in optimizer.variables if id(variable) not in own]


def _slots(states: list) -> dict[str, list[keras.Variable]]:
    """The variables beside the tables of a collection, by what they are."""
    slots = {
        f"accumulator_{i}": [s.accumulators[i] for s in states]
        for i in range(len(states[0].accumulators))
    }
    slots["version"] = [s.versions for s in states]
    if states[0].last_periods:
        slots["last_period"] = [s.last_periods[0] for s in states]
    if states[0].last_updates:
        slots["last_update"] = [s.last_updates[0] for s in states]
    if states[0].last_steps:
        slots["last_step"] = [s.last_steps[0] for s in states]
    slots[_COUNTERS] = [s.counters for s in states]
    return slots


def _key(*parts: str) -> str:
    # A slash would begin a group of the file.
    return ":".join(parts).replace("/", "|")
