"""What an optimizer keeps, in a form that does not depend on where tables are.

Tables of an `EmbeddingCollection` are saved row by row under their own names,
so that they can be loaded where they are split and placed otherwise. All else
is saved in the order of the optimizer's variables, as Keras does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync import staleness
from tf_recsync.cluster import fetch
from tf_recsync.embedding.checkpoint import SavedCounters, SavedIntegers, SavedRows
from tf_recsync.embedding.config import name_in_files
from tf_recsync.embedding.physical_tables import shards_of
from tf_recsync.embedding.table_rows import TableRows, narrowed, saved_array
from tf_recsync.shown_variable import shown

COUNTERS = "staleness"
_STEPS = "step_state"
_SIGNATURE = "signature"
_KEPT = "kept"
# Where Keras has the learning rate among an optimizer's variables, unless it is a schedule.
_RATE = 1
# Gradients that wait for others in one process: whoever has none begins anew.
_ACCUMULATED = "accumulated_"


class LoadsWhenBuilt:
    """Keeps what is loaded before there are variables; mixed into optimizers.

    An optimizer has `_save(store)` and `_load(saved)`, and `build` calls `_load_kept` at its end.
    """

    _saved_variables: dict[str, Any] | None = None

    def save_own_variables(self, store):
        """Saves the variables, those beside collections' tables row by row."""
        if self._saved_variables is None:
            self._save(store)
            return
        # What was loaded, and is to be built yet.
        for name, value in self._saved_variables.items():
            store[name] = value

    def load_own_variables(self, store):
        """Loads saved variables; keeps them for `build` if that is still to come."""
        saved = {name: saved_array(store, name) for name in store.keys()}  # noqa: SIM118
        if self.built:
            self._load(saved)
        else:
            # The store is closed by then.
            self._saved_variables = {name: value[()] for name, value in saved.items()}

    def _load_kept(self) -> None:
        """Loads what was kept."""
        if self._saved_variables is not None:
            saved, self._saved_variables = self._saved_variables, None
            self._load(saved)


def save_variables(optimizer: Any, store: Any) -> None:
    """Writes an optimizer's variables into a Keras store.

    Args:
        optimizer: a built optimizer of this package.
        store: what `save_own_variables` gets.
    """
    if optimizer.built:
        store[_SIGNATURE] = np.frombuffer(json.dumps(signature(optimizer)).encode(), np.uint8)
        store[_STEPS] = optimizer.step_state.array
    for i, variable in enumerate(_others(optimizer)):
        value = fetch(variable._value.read_value())
        if variable is optimizer._iterations:
            value, waiting = np.divmod(value, optimizer.batches_counted)
        store[str(i)] = value
    for i, variable in enumerate(_accumulated(optimizer)):
        store[f"{_ACCUMULATED}{i}"] = fetch(variable._value.read_value())
    if _accumulated(optimizer):
        store[f"{_ACCUMULATED}batches"] = waiting
    for name, slot, variables, tables in _beside_tables(optimizer):
        if slot == COUNTERS:
            values = fetch([v._value.read_value() for v in variables])
            store[_key(name, slot)] = staleness.sum_counters(values)
        for table, shards in tables.items():
            TableRows(shards).save(store, _key(name, slot, table))


def load_variables(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Sets an optimizer's variables to what `save_variables` wrote.

    What is counted in global steps is converted where another strategy saved it, if it is
    known already how many examples a step has here; else at the next fit.

    Args:
        optimizer: a built optimizer of this package.
        saved: the arrays of the store, by name, or what gives them when it is sliced.

    Raises:
        ValueError: if they were saved for another model, by another optimizer, or with
            another swap or staleness policy. Nothing is changed then.
    """
    saved = dict(saved)
    kept, steps = (_whole(saved.pop(key, None)) for key in (_SIGNATURE, _STEPS))
    if kept is None and saved.keys() <= {"0", "1"}:
        warn_of_no_state(optimizer)
        return
    waiting = {key: saved.pop(key) for key in [*saved] if key.startswith(_ACCUMULATED)}
    if kept is not None:
        renamed = check_signature(optimizer, json.loads(bytes(kept).decode()))
        keys = {_key(old, ""): _key(new, "") for old, new in renamed.items()}
        saved = {_with_prefix(key, keys): value for key, value in saved.items()}
    others = _others(optimizer)
    saved = _with_own_rate(optimizer, len(others), saved)
    # By their keys, like tables; of a collection's counters the sum is saved.
    variables = {str(i): [variable] for i, variable in enumerate(others)}
    tables: dict[str, TableRows] = {}
    for name, slot, own, shards in _beside_tables(optimizer):
        if slot == COUNTERS:
            variables[_key(name, slot)] = own
        tables |= {_key(name, slot, table): TableRows(rows) for table, rows in shards.items()}
    expected = variables.keys() | tables.keys()
    wrong = sorted(expected ^ saved.keys())
    values = {key: _whole(saved[key]) for key in variables if key in saved}
    wrong += [v.path for key in values for v in variables[key] if values[key].shape != v.shape]
    shapes = {key: tuple(saved[key].shape) for key in tables if key in saved}
    wrong += [key for key, shape in shapes.items() if shape != tables[key].shape]
    if wrong:
        raise ValueError(
            f"the saved {optimizer.name} has {len(saved)} variables, this one {len(expected)}: it "
            "was saved for another model, or with another swap or staleness policy (they differ in "
            f"{', '.join(wrong[:5])})"
        )
    for key, value in values.items():
        first, *more = variables[key]
        if first is optimizer._iterations:
            value = value * optimizer.batches_counted
        elif first is optimizer._learning_rate:
            _tell_of_rate(optimizer, value)
        first.assign(narrowed(value, first.dtype))
        for other in more:  # The first keeps the sum (`counters_of_collections`).
            other.assign(np.zeros_like(value))
    for key, rows in tables.items():
        rows.load(saved[key])
    accumulated = _accumulated(optimizer)
    sums = [_whole(waiting.get(f"{_ACCUMULATED}{i}")) for i in range(len(accumulated))]
    batches = int(_whole(waiting.get(f"{_ACCUMULATED}batches", 0)))
    # Of so many batches in the place of one, as many can wait here.
    fits = (
        bool(sums)
        and 0 < batches < optimizer.batches_counted
        and all(
            value is not None and value.shape == tuple(variable.shape)
            for variable, value in zip(accumulated, sums, strict=True)
        )
    )
    for variable, value in zip(accumulated, sums, strict=True):
        variable.assign(value if fits else np.zeros(variable.shape))
    if fits:
        optimizer._iterations.assign_add(batches)
    if steps is not None:
        optimizer.load_steps(steps)


def warn_of_no_state(optimizer: keras.optimizers.Optimizer) -> None:
    """Says that a file has nothing of an optimizer."""
    logging.warning(
        "The checkpoint holds no state of %s, which stays as it is: it was saved by a model "
        "that was not compiled, or not trained.",
        optimizer.name,
    )


def _with_own_rate(optimizer: Any, count: int, saved: dict[str, Any]) -> dict[str, Any]:
    """What was saved, as if the learning rate had been a schedule where it is one here, and a
    number where it is a number.

    Args:
        optimizer: as above.
        count: of its variables that are not of a collection.
        saved: as above.
    """
    numbers = sorted(int(key) for key in saved if key.isdigit())
    has_own = isinstance(optimizer._learning_rate, keras.Variable)
    if len(numbers) != count + (-1 if has_own else 1):
        return saved
    rest = {key: value for key, value in saved.items() if not key.isdigit()}
    if has_own:
        values = [saved[str(number)] for number in numbers]
        values.insert(_RATE, fetch(optimizer._learning_rate._value.read_value()))
    else:
        values = [saved[str(number)] for number in numbers if number != _RATE]
    return rest | {str(i): value for i, value in enumerate(values)}


def _tell_of_rate(optimizer: Any, saved: np.ndarray) -> None:
    """Says if another learning rate takes the place of the program's, as Keras has it."""
    own = float(fetch(optimizer._learning_rate._value.read_value()))
    if own != float(saved):
        logging.warning(
            "The learning_rate of %s is %g from now on, as it was saved, and not %g; assign it "
            "after loading to have another one.",
            optimizer.name,
            float(saved),
            own,
        )


def _whole(saved: Any) -> np.ndarray | None:
    return None if saved is None else np.asarray(saved)


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


def signature(optimizer: Any) -> dict[str, Any]:
    """What the state of a built optimizer is of, to tell what differs before it is loaded.

    Args:
        optimizer: one of this package, or any other of Keras.
    """
    if not hasattr(optimizer, "states"):
        shapes = [list(variable.shape) for variable in optimizer.variables]
        return {"optimizer": type(optimizer).__name__, "shapes": shapes}
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
        # Only where it is so: else a signature is what it was before there was a choice.
        **({"rowwise": True} if _is_rowwise(optimizer) else {}),
    }


def _is_rowwise(optimizer: Any) -> bool:
    """Whether accumulators of tables have one number for each row."""
    return any(state.rowwise for state in optimizer.states)


def _kept(optimizer: Any) -> list[str]:
    """What an optimizer keeps of each variable, by name."""
    kept = [*optimizer.accumulator_names]
    if optimizer.states:
        kept += [slot for slot in optimizer.states[0].slots if "accumulator_" not in slot]
    return kept


def _kept_of(optimizer: Any, state: Any) -> list[str]:
    """The same of one variable, in the order of its slots."""
    names = optimizer.accumulator_names
    # Others, or TensorFlow would restore accumulators of elements to them, before it is refused.
    own = [f"row_{name}" for name in names] if state.rowwise else [*names]
    return own + _kept(optimizer)[len(names) :]


def check_signature(optimizer: Any, saved: dict[str, Any]) -> dict[str, str]:
    """Compares what was saved with what an optimizer keeps.

    Args:
        optimizer: a built optimizer.
        saved: the `signature` of the one that was saved.

    Returns:
        The names of its collections here, by those that they had.

    Raises:
        ValueError: naming what differs.
    """
    own, renamed = signature(optimizer), {}
    if "tables" in saved and "tables" in own:
        renamed = _renamed(saved["tables"], list(_collections(optimizer)))
        keys = {key: _of_table(key) for key in saved["tables"]}
        tables = {f"{renamed[n]}/{t}": saved["tables"][key] for key, (n, t) in keys.items()}
        differences = _differences(own, {**saved, "tables": tables})
    else:
        differences = [] if own == saved else [f"{_words(saved)} is {_words(own)} here"]
    if differences:
        raise ValueError(
            f"the checkpoint is of another model or optimizer than {optimizer.name}'s: "
            f"{'; '.join(differences[:5])}"
        )
    return renamed


def _words(kept: dict[str, Any]) -> str:
    shapes = kept.get("shapes", [shape for _, shape in kept.get("variables", [])])
    return f"{kept['optimizer']} of variables of the shapes {', '.join(map(str, shapes))}"


def _differences(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """What differs in what two optimizers of this package keep, in words."""
    differences = []
    if own["kept"] != saved["kept"]:
        differences.append(
            f"{saved['optimizer']} keeps {', '.join(saved['kept'])} of each variable, "
            f"{own['optimizer']} here {', '.join(own['kept'])}"
        )
    old, new = saved.get("rowwise", False), own.get("rowwise", False)
    if old != new:
        differences.append(f"it was saved with rowwise={old}, {own['optimizer']} here has {new}")
    pairs = itertools.zip_longest(saved["variables"], own["variables"], fillvalue=("nothing", ""))
    for (there, old), (here, new) in pairs:
        if old != new:
            differences.append(f"{there} {old} of the checkpoint is {here} {new} here".strip())
    for name in sorted(saved["tables"].keys() | own["tables"].keys()):
        old, new = saved["tables"].get(name, "not there"), own["tables"].get(name, "not there")
        if old != new:
            differences.append(f"table {name} is {old} in the checkpoint, {new} here")
    return differences


def track_variables(optimizer: Any, group: tf.__internal__.tracking.Trackable) -> None:
    """Has checkpoints (`tf.train.Checkpoint`) save an optimizer's variables, too, by table.

    Args:
        optimizer: a built optimizer of this package.
        group: what stands for the variables in checkpoints; it restores each of them at once if
            its checkpoint was read before.
    """
    group._track_trackable(_SavedKept(optimizer), _KEPT)
    # Converted at the next fit, if another strategy saved it.
    group._track_trackable(optimizer.step_variable, _STEPS)
    # By what they are, so that another optimizer's are not taken for them.
    slots = {
        id(variable): f"{slot}_{number}"
        for number, state in enumerate(filter(_is_saved_whole, optimizer.states))
        for slot, variable in zip(_kept_of(optimizer, state), state.slots.values(), strict=True)
    }
    counted = {
        id(variable)
        for state in optimizer.states
        if state.is_table
        for variable in (*state.last_periods, *state.last_steps)
    }
    for i, variable in enumerate(_others(optimizer)):
        saved = SavedIntegers(variable) if id(variable) in counted else variable
        group._track_trackable(saved, slots.get(id(variable), f"variable_{i}"))
    for i, variable in enumerate(_accumulated(optimizer)):
        group._track_trackable(variable, f"{_ACCUMULATED}{i}")
    # A model's layers save what is in their attributes only.
    dense = [s.variable for s in optimizer.states if _is_saved_whole(s)]
    for i, variable in enumerate(dense):
        group._track_trackable(variable, f"trained_{i}")
    numbers = {collection: number for number, collection in enumerate(_collections(optimizer))}
    for collection, slot, variables, tables in _beside_tables(optimizer):
        name = f"collection_{numbers[collection]}_{slot}"
        if slot == COUNTERS:
            group._track_trackable(SavedCounters(variables, staleness.MAXIMUM), name)
        for table, shards in tables.items():
            label = f"the {slot} of table {table!r}"
            # Integers as older versions wrote them.
            dtype = variables[0].dtype.replace("int32", "int64")
            group._track_trackable(SavedRows(label, shards, dtype), f"{name}_{table}")


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
            f"{', of tables with rowwise=True' if _is_rowwise(optimizer) else ''}"
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


def counters_of_collections(optimizer: Any) -> list[list[keras.Variable]]:
    """The staleness counters of the tables of each collection, of which the sum is saved.

    When it is loaded, the first one gets it, and the others are 0.
    """
    return [[state.counters for state in states] for states in _collections(optimizer).values()]


def _beside_tables(
    optimizer: Any,
) -> Iterator[tuple[str, str, list[keras.Variable], dict[str, list]]]:
    """What is kept beside the tables of collections.

    Each with the layer's path, what it is, its variables, one for each physical table, and where
    in these each table has its rows, by the tables' names; none for counters.
    """
    for collection, states in _collections(optimizer).items():
        tables = [state.variable.physical_table for state in states]
        for slot in states[0].slots:
            variables = [state.slots[slot] for state in states]
            shards = {} if slot == COUNTERS else shards_of(tables, variables)
            yield collection, slot, variables, shards


def _others(optimizer: Any) -> list[keras.Variable]:
    """The variables that are not of a collection."""
    beside = [v for _, _, variables, _ in _beside_tables(optimizer) for v in variables]
    # Rows are saved as they are decayed by then.
    decays = [variable for state in optimizer.states for variable in state.log_decays]
    apart = [*beside, *decays, optimizer.step_variable, *_accumulated(optimizer)]
    own = {id(variable) for variable in apart}
    return [variable for variable in optimizer.variables if id(variable) not in own]


def _accumulated(optimizer: Any) -> list[keras.Variable]:
    """Keras's sums of gradients, where this process adds up those of several steps."""
    found = getattr(optimizer, "_accumulated_gradients", None)
    return [variable for variable in found or [] if variable is not None]


def _key(*parts: str) -> str:
    return name_in_files(":".join(parts))
