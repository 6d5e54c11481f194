"""Checkpoints that servers write."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync._checks import checked_path
from tf_recsync._scopes import dispatch_scope_of
from tf_recsync.checkpoint.blocks import Source, side_by_side, sources_of
from tf_recsync.checkpoint.deltas import SavedVersions
from tf_recsync.checkpoint.index import (
    INDEX,
    KEYS,
    WEIGHTS,
    WORKERS,
    Base,
    Block,
    Index,
    Part,
    Rows,
    block_prefix,
)
from tf_recsync.checkpoint.weights import saved_weights
from tf_recsync.embedding.table_rows import RowsApart, TableRows
from tf_recsync.optimizers.base import global_step_of, parts_of
from tf_recsync.optimizers.per_table import MultiOptimizer, named_parts
from tf_recsync.optimizers.saving import signature
from tf_recsync.shown_variable import shown
from tf_recsync.strategies.copied_strategy import CopiedStrategy
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.strategies.train_function import TrainFunction
from tf_recsync.synchronization.copies import is_copied


def save(
    path: str | os.PathLike, model: keras.Model, *, metadata: Mapping[str, Any] | None = None
) -> None:
    """Saves a model, its optimizer, and what a strategy needs beside them, to go on with.

    Each server writes the rows of embedding tables that it holds, with all that the optimizer keeps
    beside them, in blocks, all servers side by side: so tables may be larger than the memory of
    this process. All else, such as dense parameters, passes through this process.
    `tf_recsync.callbacks.Checkpoint` does it again and again while `fit` runs.

    The index of the checkpoint is written last: without it, nothing is there. What could not be
    saved as a whole is removed.

    Args:
        path: the folder to write, which must not exist or be empty; a path that `tf.io.gfile`
            knows, and that all parameter servers see.
        model: a built model, trained under any strategy of this package, or without one.
        metadata: what is to be known of it later, of types that JSON has; default nothing.

    Raises:
        ValueError: if an argument is wrong.
        FileExistsError: if there is something at `path`.
        OSError: if files can't be written there, by this process or by a server.
        RuntimeError: if a parameter server is lost or silent.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import tf_recsync as recsync
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    >>> history = model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recsync.checkpoint.save(f"{folder}/first", model, metadata={"day": 3})
    ...     recsync.checkpoint.restore(f"{folder}/first", model)["day"]
    3
    """
    path = checked_path(path)
    writer = Writer(model, metadata)
    if tf.io.gfile.exists(path) and (not tf.io.gfile.isdir(path) or tf.io.gfile.listdir(path)):
        raise FileExistsError(f"path={path!r} is there already, and is no empty folder")
    with writable(path):
        tf.io.gfile.makedirs(path)
    try:
        check_folder(path, model)
        about = writer.write(path, writer.read()).as_json()
        index = os.path.join(path, INDEX)
        # Under another name, as a process that is killed may leave a part of it.
        with writable(path):
            with tf.io.gfile.GFile(f"{index}.part", "w") as file:
                file.write(json.dumps(about) + "\n")
            tf.io.gfile.rename(f"{index}.part", index)
    except BaseException:
        remove(path)
        raise


def remove(path: str) -> None:
    """Makes room: what was written of a checkpoint can't be used."""
    try:
        tf.io.gfile.rmtree(path)
    except tf.errors.OpError as error:
        logging.warning("What is there of %s could not be removed: %s", path, error)


@contextlib.contextmanager
def writable(path: str) -> Iterator[None]:
    """Inside, this process or a server writes files: their errors name the folder.

    Raises:
        OSError: if they can't be written.
        RuntimeError: if a server is gone.
    """
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.CancelledError,
        tf.errors.AbortedError,
        tf.errors.InvalidArgumentError,
    ):
        raise  # None of files.
    except tf.errors.OpError as error:
        raise OSError(
            f"path={path!r} can't be written: {error.message}; it must be a folder with room that "
            "this process and all parameter servers may write"
        ) from error


@dataclasses.dataclass
class _Read:
    """What is of one moment in a checkpoint: all but the rows, and where these are.

    Attributes:
        weights: the content of the file of weights.
        workers: that of the file of workers' states; None if there is none.
        global_step: that of the moment.
        sources: what has the rows.
        rows: what of it is saved, and where.
    """

    weights: bytes
    workers: bytes | None
    global_step: int
    sources: list[Source]
    rows: tuple[Rows, ...]


class Writer:
    """Writes checkpoints of a model.

    Args:
        model: see `save`, like the other one.
        metadata: as above.
    """

    def __init__(self, model: keras.Model, metadata: Mapping[str, Any] | None = None):
        if not isinstance(model, keras.Model) or not model.built:
            raise ValueError(f"model={model!r}: must be a keras.Model that has been built")
        check_metadata(metadata)
        self._model = model
        self._metadata = dict(metadata or {})

    def read(self) -> _Read:
        """Reads what is of one moment: workers stand still from then on until `fit` goes on.

        Raises:
            RuntimeError: if some of it was lost with a parameter server, and not restored.
        """
        function = getattr(self._model, "train_function", None)
        if isinstance(function, TrainFunction):
            function.check_restored()
        rows = RowsApart()
        weights = saved_weights(self._model, rows)
        sources, described = described_rows(rows.saved, self._model)
        strategy = self._model.distribute_strategy
        workers = None
        optimizer = getattr(self._model, "optimizer", None)
        if isinstance(strategy, CopiedStrategy) and optimizer is not None:
            workers = strategy.worker_states(self._model).serialize()
        # Read last: to read it alone would hold nobody.
        step = 0 if optimizer is None else global_step_of(optimizer)
        return _Read(weights, workers, step, sources, described)

    def write(
        self,
        path: str,
        read: _Read,
        versions: SavedVersions | None = None,
        base: Base | None = None,
    ) -> Index:
        """Writes all files but the index, which it returns; training may go on meanwhile.

        Args:
            path: the folder to write.
            read: what `read` has given.
            versions: what keeps the versions of rows that are written; None: nothing does.
            base: the checkpoint before, whose rows `versions` has; None: all rows are written.

        Raises:
            OSError: if files can't be written.
            RuntimeError: if a parameter server is lost or silent.
        """
        files = {}
        with writable(path):
            tf.io.gfile.makedirs(path)
        for name, content in ((WEIGHTS, read.weights), (WORKERS, read.workers)):
            if content is not None:
                file = os.path.join(path, name)
                with writable(path), tf.io.gfile.GFile(file, "wb") as out:
                    out.write(content)
                files[name] = len(content), hashlib.sha256(content).hexdigest()
        return Index(
            id=secrets.token_hex(16),
            base=base,
            global_step=read.global_step,
            parts=write_parts(path, read.sources, self._model, versions, base is not None),
            rows=read.rows,
            weights=weights_of(self._model),
            optimizers=signatures_of(self._model),
            files=files,
            metadata=self._metadata,
        )


def check_folder(path: str, model: keras.Model) -> None:
    """Has all servers that hold rows of a model's tables show that they see a folder.

    Args:
        path: the folder.
        model: a built model.

    Raises:
        OSError: if one does not, or may not write there.
        RuntimeError: if one is lost.
    """
    tables = [v for v in model.variables if hasattr(v, "physical_table")]
    for device in sorted({v._value.device for v in tables}):
        token = secrets.token_hex(16)
        name = os.path.join(path, f".probe_{token}")
        with calls_of(model), writable(path), tf.device(device):
            tf.raw_ops.WriteFile(
                filename=np.asarray(name.encode()), contents=np.asarray(token.encode())
            )
        if not tf.io.gfile.exists(name):
            raise OSError(
                f"path={path!r}: what {_server(device)} writes there this process does not "
                "see; it must be a folder that all of them share"
            )
        tf.io.gfile.remove(name)


def described_rows(
    saved: Sequence[TableRows], model: keras.Model, scales: bool = True
) -> tuple[list[Source], tuple[Rows, ...]]:
    """What writes rows of a model's tables, and where each of `saved` will be in it.

    Those who train the rows are told that they are read.

    Args:
        saved: rows of tables, and what lies beside them.
        model: the model.
        scales: whether those who read a delta multiply the rows that it lacks of a table that
            decays; else such tables are never written as deltas. Default True.
    """
    for rows in saved:
        # They are copied as they are decayed by then.
        with rows.told(settled=False):
            pass
    log_decays, versions = decays_of_tables(model), versions_of(model)
    if not scales:
        versions = {table: own for table, own in versions.items() if table not in log_decays}
    sources, shards = sources_of(saved, owners_of(model), versions, log_decays)
    sources = [source.noted() for source in sources]
    names = _names(model)
    described = (
        Rows(_name(rows, names), rows.shape, own) for rows, own in zip(saved, shards, strict=True)
    )
    return sources, tuple(described)


def write_parts(
    path: str,
    sources: Sequence[Source],
    model: keras.Model,
    versions: SavedVersions | None = None,
    is_delta: bool = False,
) -> tuple[Part, ...]:
    """Has servers write rows that they hold, while they are trained.

    Args:
        path: the folder that gets a folder for each part.
        sources: what `described_rows` has given.
        model: the model.
        versions: what keeps the versions of rows that are written; None: nothing does.
        is_delta: whether only rows are written whose versions are other ones than those.

    Returns:
        What was written, source by source.

    Raises:
        OSError: if files can't be written.
        RuntimeError: if a parameter server is lost or silent.
    """
    if versions is not None:
        with calls_of(model):
            sources = [versions.beside(source, is_delta) for source in sources]
    parts = [source.part() for source in sources]
    blocks: list[list[Block]] = [[] for _ in parts]
    work: dict[str, list[Callable[[], None]]] = {}

    def write(source: Source, number: int, block: int) -> None:
        with writable(path):
            written = source.write(path, number, block)
        if written is not None:
            blocks[number].append(written)

    for number, (source, part) in enumerate(zip(sources, parts, strict=True)):
        with writable(path):
            tf.io.gfile.makedirs(os.path.dirname(block_prefix(path, number, 0)))
        work.setdefault(source.device, []).extend(
            functools.partial(write, source, number, block) for block in range(part.count)
        )
    on_servers(work, model)
    pairs = zip(parts, blocks, strict=True)
    return tuple(dataclasses.replace(part, blocks=tuple(own)) for part, own in pairs)


@contextlib.contextmanager
def calls_of(model: keras.Model) -> Iterator[None]:
    """Inside, this process calls a model's servers: a RuntimeError names one that is gone."""
    strategy = model.distribute_strategy
    if not isinstance(strategy, FitStrategy):
        yield
        return
    with strategy.watched(model):
        yield


def on_servers(work: Mapping[str, Sequence[Callable[[], None]]], model: keras.Model) -> None:
    """Has a model's servers do their work side by side, see `side_by_side`; calls are watched."""

    def called(one: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            with calls_of(model):
                one()

        return call

    watched = {device: [called(one) for one in own] for device, own in work.items()}
    side_by_side(watched, lambda: dispatch_scope_of(model))


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raises a ValueError if it can't be written."""
    try:
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError("it is no dict")
        json.dumps(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata must be a dict of what JSON has, not {metadata!r}: {error}"
        ) from error


def weights_of(model: keras.Model) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Path, shape and dtype of each weight that belongs to no collection's table."""
    return tuple((v.path, tuple(v.shape), v.dtype) for v in model.weights if not is_of_table(v))


def is_of_table(variable: keras.Variable) -> bool:
    """Whether a variable is a collection's table, or what finds the rows of its keys."""
    return hasattr(variable, "physical_table") or hasattr(variable, "beside_table")


def tables_of(model: keras.Model) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each table of a model's collections, sorted."""
    rows: collections.Counter = collections.Counter()
    for variable in model.variables:
        for piece in getattr(getattr(variable, "physical_table", None), "pieces", ()):
            rows[variable.collection, piece.table, variable.shape[1]] += piece.rows
    return sorted((table, (count, width)) for (_, table, width), count in rows.items())


def signatures_of(model: keras.Model) -> tuple[dict[str, Any], ...]:
    """What each part of a model's optimizer keeps of which variables, and the part's name."""
    optimizer = getattr(model, "optimizer", None)
    # Those of a MultiOptimizer of Keras are saved by their order.
    names = isinstance(optimizer, MultiOptimizer)
    return tuple(
        {**signature(part), **({"part": name} if names else {})}
        for name, part in named_parts(optimizer).items()
    )


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The parts of a model's optimizer; none, if it is not compiled."""
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else list(parts_of(optimizer))


def owners_of(model: keras.Model) -> dict[int, keras.Variable]:
    """The tables' variables, by the ids of what lies beside them."""
    return {name: variable for name, (variable, _) in _names(model).items()}


def versions_of(model: keras.Model) -> dict[int, keras.Variable]:
    """The versions of tables' rows, by the ids of the tables' variables.

    Those tables are left out whose rows change in other ways as well than by updates that raise
    their versions.
    """
    versions: dict[int, keras.Variable] = {}
    for part in optimizers_of(model):
        for state in getattr(part, "states", ()):
            table = state.variable
            moves_others = (
                not part.lazy or part.use_ema or table.constraint is not None or is_copied(table)
            )
            # What decays when it is needed is saved with its table's log-decay.
            decays = part.weight_decay is not None and part._use_weight_decay(table)
            if not moves_others and (state.log_decays or not decays):
                versions[id(table)] = state.versions
    return versions


def decays_of_tables(model: keras.Model) -> dict[int, keras.Variable]:
    """What is pending of the decay of tables' rows, by the ids of the tables' variables."""
    tables = ((id(variable), shown(variable._value)) for variable in model.variables)
    return {
        number: table.log_decays
        for number, table in tables
        if table is not None and table.log_decays is not None
    }


def _names(model: keras.Model) -> dict[int, tuple[keras.Variable, str]]:
    """What lies beside tables: the table's variable and what it is, by its id."""
    keyed = ((v, v.keyed.entries) for v in model.variables if hasattr(v, "keyed"))
    names = {id(entries): (table, KEYS) for table, entries in keyed}
    for part in optimizers_of(model):
        for state in getattr(part, "states", ()):
            kinds = dict(zip(part.accumulator_names, state.accumulators, strict=True))
            kinds["version"] = state.versions
            for kind in ("last_period", "last_update", "last_step"):
                kinds.update((kind, v) for v in getattr(state, f"{kind}s"))
            names.update((id(v), (state.variable, kind)) for kind, v in kinds.items())
    return names


def _name(rows: TableRows, names: Mapping[int, tuple[keras.Variable, str]]) -> str:
    variable, piece = rows.shards[0]
    table, kind = names.get(id(variable), (variable, ""))
    return "/".join(filter(None, (table.collection, piece.table, kind)))


def _server(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.job}:{spec.task}"
