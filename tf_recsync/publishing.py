"""Inference models that are published while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_recsync._checks import check_at_least, check_seconds
from tf_recsync.optimizers.base import global_step_of
from tf_recsync.serving import Inference
from tf_recsync.versions import Versions

_LOG_SECONDS = 60.0  # Between two log entries about one who waits.


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


class Publish(keras.callbacks.Callback):
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
    >>> import numpy as np
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
        super().__init__()
        if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
            raise ValueError(f"target must be the path of a folder, not {target!r}")
        check_seconds("every_seconds", every_seconds)
        check_seconds("timeout", timeout)
        if keep is not None:
            check_at_least("keep", keep, 1)
        if not isinstance(at_end, bool):
            raise ValueError(f"at_end must be a bool, not {at_end!r}")
        self.publications: list[Publication] = []
        self._target = os.fspath(target)
        self._versions = Versions(target)
        self._every, self._timeout = float(every_seconds), float(timeout)
        self._keep, self._at_end, self._input_signature = keep, at_end, input_signature
        self._inference: Inference | None = None
        self._due = 0.0  # When the next one is (time.monotonic).
        self._is_new = False  # Whether there were steps since the parameters were read last.
        # Of the thread that writes, which is the only one to use them as long as it runs.
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._error: Exception | None = None

    def on_train_begin(self, logs=None):
        self._wait()  # For that of a call of `fit` that ended with an error.
        try:
            self._versions.prepare()
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                f"target={self._target!r} can't be written: {_words(error)}; it must be a folder "
                "that this process may make and write"
            ) from error
        self._inference = self._made_inference() if self.model.built else None
        self._is_new = False
        self._due = time.monotonic() + self._every

    def on_train_batch_end(self, batch, logs=None):
        if self._inference is None:  # Some models the first step builds.
            self._inference = self._made_inference()
        self._is_new = True
        self._publish_if_due()

    def on_epoch_end(self, epoch, logs=None):
        self._publish_if_due()

    def on_train_end(self, logs=None):
        self._wait()
        if self._at_end and self._is_new:
            self._publish()
            self._wait()
        self._inference = None

    def _made_inference(self) -> Inference:
        inference = Inference(self.model, self._input_signature)
        if inference.others:
            names = sorted(variable.name for variable in inference.others)
            raise ValueError(
                f"the model {self.model.name!r} computes with {names}, which are variables of no "
                "layer: they must be made by add_weight, to be read with the others"
            )
        return inference

    def _publish_if_due(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._wait()
        if self._thread is not None:
            self._check_time()
        elif self._is_new and time.monotonic() >= self._due:
            self._publish()

    def _publish(self) -> None:
        began = time.monotonic()
        self._inference.read()
        # Read last: to read it alone would hold nobody.
        step = global_step_of(self.model.optimizer)
        self._began = time.monotonic()
        self._is_new = False
        self._due = began + self._every
        self._thread = threading.Thread(
            target=self._write,
            args=(self._inference, step, self._began - began, _scope_of(self.model)),
            name="recsync_publish",
            daemon=True,
        )
        self._thread.start()

    def _write(
        self,
        inference: Inference,
        step: int,
        pause: float,
        scope: contextlib.AbstractContextManager,
    ) -> None:
        """Writes what was read; in the thread."""
        try:
            with scope:
                number, folder = self._versions.begin()
                try:
                    inference.write(folder)
                    self._versions.finish(number, {"global_step": step})
                except Exception:
                    self._forget(number)
                    raise
            path, seconds = self._versions.path(number), time.monotonic() - self._began
            self.publications.append(Publication(number, path, step, pause, seconds))
            logging.info(
                "Published version %d of global step %d to %s: training paused for %.3f s, "
                "writing took %.3f s.",
                *(number, step, path, pause, seconds),
            )
            if self._keep is not None:
                for old in self._versions.published()[: -self._keep]:
                    self._versions.remove(old)
        except Exception as error:  # Handed to the thread of `fit`.
            self._error = error

    def _forget(self, number: int) -> None:
        """Makes room: what was written of a version can't be used."""
        try:
            self._versions.remove(number)
        except (OSError, tf.errors.OpError) as error:
            logging.warning("What is there of version %d could not be removed: %s", number, error)

    def _wait(self) -> None:
        """Waits for the thread that writes, if there is one; raises what it has failed of."""
        if self._thread is None:
            return
        while self._thread.is_alive():
            self._thread.join(timeout=min(_LOG_SECONDS, self._timeout))
            self._check_time()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failed(_words(error)) from error

    def _check_time(self) -> None:
        seconds = time.monotonic() - self._began
        if not self._thread.is_alive():
            return
        logging.log_every_n_seconds(
            logging.INFO, "Writing to %s takes %.0f s so far.", _LOG_SECONDS, self._target, seconds
        )
        if seconds > self._timeout:
            raise self._failed(f"writing has taken {seconds:.0f} s, timeout={self._timeout:g}")

    def _failed(self, reason: str) -> RuntimeError:
        last = self.publications[-1].path if self.publications else None
        kept = "nothing was published before" if last is None else f"{last} is whole"
        return RuntimeError(
            f"the model could not be published to target={self._target!r}: {reason}; {kept}. The "
            "folder must be one that can be written and has room; then call fit again, as the "
            "model has all that it was trained on"
        )


def _scope_of(model: keras.Model) -> contextlib.AbstractContextManager:
    """In which a thread's calls hinder no other one's."""
    cluster = getattr(model.distribute_strategy, "cluster", None)
    return contextlib.nullcontext() if cluster is None else cluster.dispatch_scope()


def _words(error: Exception) -> str:
    return getattr(error, "message", None) or str(error)
