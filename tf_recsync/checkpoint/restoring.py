"""Checkpoints that servers read."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync._checks import checked_path
from tf_recsync.checkpoint.blocks import HERE, BlockReader, moves_of
from tf_recsync.checkpoint.index import KEYS, WEIGHTS, WORKERS, Index, chain_of, content_of
from tf_recsync.checkpoint.saving import (
    decays_of_tables,
    is_of_table,
    on_servers,
    optimizers_of,
    owners_of,
    tables_of,
    weights_of,
)
from tf_recsync.checkpoint.weights import load_weights
from tf_recsync.cluster import fetch
from tf_recsync.embedding.table_rows import RowsApart, TableRows
from tf_recsync.optimizers.per_table import check_parts, named_parts
from tf_recsync.optimizers.saving import check_signature, counters_of_collections
from tf_recsync.strategies.copied_strategy import CopiedStrategy


def restore(path: str | os.PathLike, model: keras.Model, *, verify: bool = True) -> dict[str, Any]:
    """Sets a model, its optimizer and what a strategy needs to what `save` wrote.

    The strategy may be another one, the number of parameter servers as well, and tables may be
    split and placed otherwise: servers read the blocks of files side by side, and send each other
    the rows that belong elsewhere. The copies of workers or groups are taken over where the
    strategy has copies; on another number of them, or where workers have copies of other variables,
    as of tables, all begin with the mean. Of a delta, which
    `callbacks.Checkpoint` has saved with `full_every`, the full checkpoint that it is based on is
    restored first, then all deltas up to it in their order.

    Nothing is changed if the checkpoint is of another model or optimizer, or if a file is missing
    or cut off, or, with `verify`, changed; nor if that is so of one that it is based on.

    Args:
        path: the folder of a checkpoint that `save` or `callbacks.Checkpoint` wrote.
        model: a built model like the saved one; if it is not compiled, its weights alone are
            restored.
        verify: whether all files are read first, to compare their checksums, before anything is
            changed. Default True; False restores in half the time, and an error may leave rows of
            tables half restored.

    Returns:
        The `metadata` that the checkpoint was saved with.

    Raises:
        FileNotFoundError: if there is no whole checkpoint at `path`.
        ValueError: if an argument is wrong, the checkpoint is of another model, or a file is not
            whole, or one that a delta is based on is missing; the error names it.
        RuntimeError: if a parameter server is lost or silent.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import tf_recsync as recsync
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recsync.checkpoint.save(f"{folder}/first", model, metadata={"day": 1})
    ...     metadata = recsync.checkpoint.restore(f"{folder}/first", model)
    >>> metadata
    {'day': 1}
    """
    return _restored(checked_path(path), model, verify)


def restore_lost(path: str, model: keras.Model, lost: Collection[tf.Variable]) -> None:
    """Sets what a model lost with a server to what a checkpoint has; all else stays as it is.

    Args:
        path: see `restore`, like the other one.
        model: as above.
        lost: the variables of the model and its optimizer that were lost.
    """
    _restored(path, model, verify=True, lost={id(variable) for variable in lost})


def _restored(
    path: str, model: keras.Model, verify: bool, lost: Collection[int] | None = None
) -> dict[str, Any]:
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(f"model={model!r}: must be a keras.Model that has been built")
    chain = chain_of(path)
    _, index = chain[-1]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    _check_model(path, index, model)
    contents: dict[str, bytes] = {}
    for folder, own in chain:
        contents = {name: content_of(folder, name, about) for name, about in own.files.items()}
    _check_blocks(chain, model, verify)
    restore_copies = _copies_to_restore(path, contents.get(WORKERS), model)
    # From here on, things change. Where rows belong, Keras finds out as it loads all else.
    rows = RowsApart({number: own.shape for number, own in enumerate(index.rows)})
    kept = [] if lost is None else _kept(model, lost)
    try:
        load_weights(model, contents[WEIGHTS], rows)
    finally:
        # Also where another server is lost meanwhile: those that are there keep what they have.
        _assign(kept)
    targets = rows.loaded if lost is None else _only(rows.loaded, lost)
    for own_rows in targets.values():
        own_rows.settle()
    log_decays = [part.log_decay for part in index.parts]
    for folder, own in chain:
        _restore_rows(folder, own, model, targets, log_decays)
    for own_rows in targets.values():
        own_rows.tell_of_change()
    restore_copies()
    logging.info("Restored global step %d from %s.", index.global_step, path)
    return dict(index.metadata)


def _copies_to_restore(path: str, content: bytes | None, model: keras.Model) -> Callable[[], None]:
    """What gives groups the copies of a checkpoint when all else is restored.

    Which variables groups have copies of depends on where tables are. Where these are others than
    in the checkpoint, all groups begin with the weights, which are the mean of the copies.
    """
    strategy = model.distribute_strategy
    if content is None or not isinstance(strategy, CopiedStrategy) or model.optimizer is None:
        return lambda: None
    states = strategy.worker_states(model)
    try:
        parsed = states.parsed(content)
    except ValueError as error:
        logging.warning(
            "All groups begin with what the weights of %s are, as the copies of its groups do not "
            "fit this strategy and cluster: %s",
            *(path, error),
        )
        return lambda: None
    return functools.partial(states.restore, parsed)


def _assign(values: list[tuple[tf.Variable, np.ndarray]]) -> None:
    """Sets variables; raises the first error when it has tried all."""
    failed = None
    for variable, value in values:
        try:
            variable.assign(value)
        except tf.errors.OpError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _kept(model: keras.Model, lost: Collection[int]) -> list[tuple[tf.Variable, np.ndarray]]:
    """What variables of no collection's table get after a checkpoint was loaded, if some were lost.

    Those that were not lost get the values that they have now.
    """
    # The rows of tables, and what lies beside them, are restored by themselves.
    beside = {n for n, table in owners_of(model).items() if hasattr(table, "physical_table")}
    beside |= {id(log_decays) for log_decays in decays_of_tables(model).values()}
    found = {id(v._value): v for v in [*model.variables, *model.optimizer.variables]}
    kept = [
        (v._value, fetch(v._value.read_value()))
        for number, v in found.items()
        if number not in lost and id(v) not in beside and not is_of_table(v)
    ]
    for optimizer in optimizers_of(model):
        for counters in counters_of_collections(optimizer) if hasattr(optimizer, "states") else ():
            own = [v._value for v in counters if id(v._value) in lost]
            if len(own) < len(counters):
                # The sum is loaded, of which others have their shares; the lost one is not known.
                kept += [(counter, np.zeros(counter.shape, np.int64)) for counter in own]
    return kept


def _only(targets: Mapping[int, TableRows], lost: Collection[int]) -> dict[int, TableRows]:
    """The shards of these that were lost."""
    shards = {
        number: [(v, piece) for v, piece in rows.shards if id(v._value) in lost]
        for number, rows in targets.items()
    }
    return {number: TableRows(own) for number, own in shards.items() if own}


def _check_model(path: str, index: Index, model: keras.Model) -> None:
    """Raises a ValueError if a checkpoint is of another model or optimizer."""
    own, saved = weights_of(model), index.weights
    for there, here in itertools.zip_longest(saved, own):
        # Names are the process's own.
        if there is None or here is None or there[1:] != here[1:]:
            raise ValueError(
                f"the checkpoint {path} is of another model than {model.name!r}: {_words(there)} "
                f"of the checkpoint is {_words(here)} here"
            )
    tables = tables_of(model)
    saved_tables = sorted((rows.table, rows.shape) for rows in index.rows if rows.is_values)
    if tables != saved_tables:
        (name, _), *_ = sorted(set(tables) ^ set(saved_tables)) or tables
        there, here = ([shape for n, shape in t if n == name] for t in (saved_tables, tables))
        raise ValueError(
            f"the checkpoint {path} is of another model than {model.name!r}: the shapes of tables "
            f"named {name!r} are {there} in the checkpoint, {here} here"
        )
    own_keys = {f"{v.collection}/{v.keyed.table}" for v in model.variables if hasattr(v, "keyed")}
    saved_keys = {
        rows.name.removesuffix(f"/{KEYS}")
        for rows in index.rows
        if rows.name.endswith(f"/{KEYS}") and not rows.is_values
    }
    if own_keys != saved_keys:
        name = min(own_keys ^ saved_keys)
        there, here = ("no keys", "keys='any'") if name in own_keys else ("keys='any'", "no keys")
        raise ValueError(
            f"the checkpoint {path} is of another model than {model.name!r}: table {name!r} has "
            f"{there} in the checkpoint, {here} here"
        )
    parts = named_parts(getattr(model, "optimizer", None))
    if parts and index.optimizers:
        # Older versions wrote no names.
        names = parts if len(parts) == len(index.optimizers) else map(str, itertools.count())
        saved_parts = {
            one.get("part", name): one for one, name in zip(index.optimizers, names, strict=False)
        }
        check_parts(saved_parts, parts, f"the optimizer of the checkpoint {path}")
        for name, part in parts.items():
            signature = {key: own for key, own in saved_parts[name].items() if key != "part"}
            check_signature(part, signature)


def _words(weight: tuple[str, tuple[int, ...], str] | None) -> str:
    return "nothing" if weight is None else f"{weight[0]}, {weight[2]} {list(weight[1])},"


def _check_blocks(chain: list[tuple[str, Index]], model: keras.Model, verify: bool) -> None:
    """Raises a ValueError if a file of a part is not whole."""
    devices = _devices(model)
    work: dict[str, list] = {}
    for path, index in chain:
        for number, part in enumerate(index.parts):
            device = devices[number % len(devices)]
            reader = BlockReader(path, number, part, device)
            check = reader.check if verify else reader.check_size
            work.setdefault(device, []).extend(
                functools.partial(check, block) for block in part.blocks
            )
    on_servers(work, model)


def _restore_rows(
    path: str,
    index: Index,
    model: keras.Model,
    targets: dict[int, TableRows],
    log_decays: Sequence[float],
) -> None:
    """Puts saved rows where they belong, decayed by as much as those of the last of a chain."""
    work: dict[str, list] = {}
    moves = moves_of(index.rows, targets, len(index.parts))
    for number, (part, own) in enumerate(zip(index.parts, moves, strict=True)):
        if not own:
            continue
        # A server that needs some of it reads it; of those of a table another one for each part.
        device = own[number % len(own)].variable._value.device
        reader = BlockReader(path, number, part, device, log_decays[number])
        work.setdefault(device, []).extend(
            functools.partial(reader.restore, block, own) for block in part.blocks
        )
    on_servers(work, model)


def _devices(model: keras.Model) -> list[str]:
    """Those of the servers that hold tables; this process's, if none does."""
    found = {v._value.device for v in model.variables if hasattr(v, "physical_table")}
    return sorted(found) or [HERE]
