"""Inference models that are published while training goes on."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tf_recsync._checks import checked_path
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.serving import Inference
from tf_recsync.versions import Versions
from tf_recsync.writing_beside import Write, WritingBeside


@dataclasses.dataclass(frozen=True)
class Publication:
    """An inference model that was published.

    Attributes:
        version: its number; versions rise by one.
        path: its folder.
        global_step: the updates of the parameters that are in it.
        pause_seconds: for how long training stood still while its parameters were read.
        write_seconds: how long it took to write it then, while training went on.
    """

    version: int
    path: str
    global_step: int
    pause_seconds: float
    write_seconds: float


class Publish(WritingBeside):
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
            None (the default) keeps all.
        at_end: whether the model is published when training ends, too, if Keras has counted a step
            since it was last. Default True.
        timeout: seconds that writing may take at most; default 3600. Then `fit` fails.
        input_signature: see `export_model`.

    Attributes:
        publications: a `Publication` for each version that was published, in their order.

    Raises:
        ValueError: if an argument is wrong; by `fit`, before training begins if the model is built,
            if it can't be exported.
        OSError: by `fit`, before training begins, if the target can't be written.
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
    ):
        target = checked_path(target, "target")
        super().__init__(
            Versions(target),
            ("target", target),
            every_seconds,
            None,
            keep,
            at_end,
            timeout,
        )
        self.publications: list[Publication] = []
        self._input_signature = input_signature
        self._inference: Inference | None = None

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._inference = None

    def _prepare(self) -> None:
        # Some models the first step builds.
        self._inference = self._made_inference() if self.model.built else None

    def _made_inference(self) -> Inference:
        inference = Inference(self.model, self._input_signature)
        if inference.others:
            names = sorted(variable.name for variable in inference.others)
            raise ValueError(
                f"the model {self.model.name!r} computes with {names}, which are variables of no "
                "layer: they must be made by add_weight, to be read with the others"
            )
        return inference

    def _read(self) -> tuple[int, Write]:
        inference = self._inference = self._inference or self._made_inference()
        inference.read()
        # Read last: to read it alone would hold nobody.
        step = global_step_of(self.model.optimizer)

        def write(folder: str) -> dict[str, int]:
            inference.write(folder)
            return {"global_step": step}

        return step, write

    def _written(self, version: int, step: int, pause: float, seconds: float) -> None:
        path = self._versions.path(version)
        self.publications.append(Publication(version, path, step, pause, seconds))
