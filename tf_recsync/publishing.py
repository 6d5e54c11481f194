"""Inference models that are published while training goes on."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_recsync._checks import checked_path
from tf_recsync.checkpoint.saving import check_folder, described_rows, write_parts
from tf_recsync.checkpoint.writing_rows import WritingRows
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.published import TABLES, TablesIndex, collections_of, parsed_tables
from tf_recsync.serving import Inference, symbolic_inputs
from tf_recsync.versions import Versions
from tf_recsync.writing_beside import Write


@dataclasses.dataclass(frozen=True)
class Publication:
    """An inference model that was published.

    Attributes:
        version: its number; versions rise by one.
        path: its folder.
        global_step: the updates of the parameters that are in it.
        pause_seconds: for how long training stood still while its parameters were read.
        write_seconds: how long it took to write it then, while training went on.
        rows: how many rows of tables were written apart from the model; 0 if they are inside.
        is_delta: whether these are only those that had changed since the version before.
    """

    version: int
    path: str
    global_step: int
    pause_seconds: float
    write_seconds: float
    rows: int = 0
    is_delta: bool = False


class Publish(WritingRows):
    """Publishes the model for inference again and again while it is trained.

    Every so many seconds the parameters are read, at one moment: steps in flight end, and none
    begins until this process has a copy in its memory. Training goes on then, and a thread writes
    the copy, in the form of `export_model`, to `<target>/<version>`, where TensorFlow Serving
    looks for it: straight to the target, without files elsewhere. A version is seen when it is
    whole, and not before; see `latest_published`. Versions that an earlier program left
    unfinished are removed when training begins. One program at a time may publish to a target.

    If a version can't be written, `fit` raises a RuntimeError after the next step, and the
    version before stays. `fit` ends when the last publication has ended. What is due while
    the one before is still being written is published when that is done.

    With `tables="apart"`, nothing large passes through this process: the model takes the looked-up
    vectors of features in place of their ids, and parameter servers write the rows of the tables
    of `EmbeddingCollection`s, without what the optimizer keeps, while training goes on. What is
    dense is of one moment, and so is each row; rows may have updates that came after the version's
    global step. `recsync.serving.TableReader` serves such versions. With `full_every`, most of
    them are deltas: they have all that is dense, but only the rows that were updated since the
    version before, whose folder must stay beside theirs. When the next one is full, and which
    tables are whole in each, is as in `callbacks.Checkpoint`.

    It works under every strategy and without one.

    Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on
    Large CPU Clusters", section 4.3.

    Args:
        target: the folder for the versions, made if it is missing; a path that `tf.io.gfile` knows,
            such as "gs://models/clicks". On plain paths and HDFS, a version's folder gets its
            name when it is whole. Elsewhere, as in object stores, it is whole when it has a file
            `published.json`.
        every_seconds: seconds from one publication to the next; default 7200, two hours.
        keep: how many versions are kept, at least 1; older ones that were published are removed.
            None (the default) keeps all. Those that a kept one is based on are kept as well.
        at_end: whether the model is published when training ends, too, if Keras has counted a step
            since it was last. Default True.
        timeout: seconds that writing may take at most; default 3600. Then `fit` fails.
        input_signature: see `export_model`.
        tables: where the tables of `EmbeddingCollection`s are: "inside" of the model, as all other
            parameters (the default), or "apart".
        full_every: with tables="apart", how many versions there are from one full one to the next,
            at least 1; those between are deltas. Default 1: all are full.

    Attributes:
        publications: a `Publication` for each version that was published, in their order.

    Raises:
        ValueError: if an argument is wrong; by `fit`, before training begins, if the model can't be
            exported. Of a model that its first step builds, some reasons are known after that step.
        OSError: by `fit`, before training begins, if the target can't be written, with
            tables="apart" by this process or by a server.
        RuntimeError: by `fit`, if a version could not be written.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as target:
    ...     publish = Publish(target, every_seconds=600, keep=3)
    ...     history = model.fit(np.ones([4, 1]), np.ones([4, 1]), callbacks=[publish], verbose=0)
    ...     served = tf.saved_model.load(publish.publications[-1].path)
    ...     clicks = served.serve(tf.ones([2, 1]))
    >>> publish.publications[-1].version, publish.publications[-1].global_step
    (1, 1)
    """

    _noun = "publication"

    def __init__(
        self,
        target: str | os.PathLike,
        every_seconds: float = 7200.0,
        *,
        keep: int | None = None,
        at_end: bool = True,
        timeout: float = 3600.0,
        input_signature: Any = None,
        tables: str = "inside",
        full_every: int = 1,
    ):
        target = checked_path(target, "target")
        if tables not in ("inside", "apart"):
            raise ValueError(f'tables must be "inside" or "apart", not {tables!r}')
        super().__init__(
            Versions(target),
            ("target", target),
            every_seconds,
            None,
            keep,
            at_end,
            timeout,
            full_every,
        )
        if tables == "inside" and full_every > 1:
            raise ValueError(
                f'full_every={full_every}: must be 1 with tables="inside", as deltas are of rows '
                "that are apart"
            )
        self.publications: list[Publication] = []
        self._input_signature = input_signature
        self._is_apart = tables == "apart"
        self._inference: Inference | None = None

    def on_train_batch_end(self, batch, logs=None):
        if self._inference is None:  # Of a model that this batch has built.
            try:
                self._inference = self._made_inference()
            except (tf.errors.OpError, RuntimeError) as error:
                if not self._is_excused(error):
                    raise
        super().on_train_batch_end(batch, logs)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._inference = None

    def _prepare(self) -> None:
        super()._prepare()
        self._inference = None
        if self.model.built:
            self._inference = self._made_inference()
        elif self._input_signature is None and not isinstance(self.model, keras.Sequential):
            symbolic_inputs(self.model)  # The first step builds a model, but gives it none.

    def _made_inference(self) -> Inference:
        inference = Inference(self.model, self._input_signature, tables_apart=self._is_apart)
        if inference.others:
            names = sorted(variable.name for variable in inference.others)
            raise ValueError(
                f"the model {self.model.name!r} computes with {names}, which are variables of no "
                "layer: they must be made by add_weight, to be read with the others"
            )
        if self._is_apart:
            check_folder(self._argument[1], self.model)
        return inference

    def _read(self) -> tuple[int, Write]:
        inference = self._inference or self._made_inference()
        inference.read()
        if self._is_apart:
            return self._read_apart(inference)
        self._begin_chain()
        # Read last: to read it alone would hold nobody.
        step = global_step_of(self.model.optimizer)

        def write(folder: str) -> dict[str, int]:
            inference.write(folder)
            return {"global_step": step}

        return step, write

    def _read_apart(self, inference: Inference) -> tuple[int, Write]:
        collections = collections_of(self.model, inference.given)
        layers = [layer for layer, _ in collections]
        saved = [rows for layer in layers for rows in layer.table_rows().values()]
        sources, described = described_rows(saved, self.model, scales=False)
        chain, step = self._begin_chain(), global_step_of(self.model.optimizer)

        def write(folder: str) -> Mapping[str, Any]:
            base = chain.begin(described, self._is_there)
            inference.write(folder)
            path = os.path.join(folder, TABLES)
            parts = write_parts(path, sources, self.model, chain.versions, base is not None)
            own = tuple(collection for _, collection in collections)
            index = TablesIndex(secrets.token_hex(16), base, step, parts, described, own)
            return self._end_rows(index)

        return step, write

    def _parse(self, path: str) -> TablesIndex:
        return parsed_tables(path)

    def _written(self, version: int, step: int, pause: float, seconds: float) -> None:
        written = self._versions.path(version), step, pause, seconds
        if not self._is_apart:
            self.publications.append(Publication(version, *written))
            return
        super()._written(version, step, pause, seconds)
        index = self._last_index
        is_delta = index.base is not None
        self.publications.append(Publication(version, *written, index.written, is_delta))

    def _about(self) -> str:
        return super()._about() if self._is_apart else ""
