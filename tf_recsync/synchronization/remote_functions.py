"""Functions that this process has servers run, again and again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import cancellation, context, execute
from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError

from tf_recsync._instead import instead
from tf_recsync.cluster.making_functions import making_functions

_thread = threading.local()
_Traced = TypeVar("_Traced")
_MOST_KEPT = 64  # Functions of a kind that this process keeps.


def traced_once(trace: Callable[..., _Traced]) -> Callable[..., _Traced]:
    """Keeps what a function traces, by its arguments: threads that need the same one trace once.

    It is traced outside of all scopes, and stays when another cluster is connected to.
    """
    tracing = threading.Lock()

    @functools.lru_cache(maxsize=_MOST_KEPT)
    def kept(*key: Any) -> _Traced:
        with tf.init_scope(), tf.device(None):
            return making_functions(lambda: trace(*key))

    @functools.wraps(trace)
    def get(*key: Any) -> _Traced:
        with tracing:
            return kept(*key)

    return get


def cancellable(
    manager: cancellation.CancellationManager,
) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread's calls of `RemoteFunction` end with an error when the manager is told to
    cancel. TensorFlow's own context would concern all threads."""
    return instead(_thread, "manager", manager)


class RemoteFunction:
    """A function of variables and other resources, called with others in place of some.

    It ends with the error by which data end as servers tell it. TensorFlow explains any error by
    the lines of Python that made the operation. It looks for them in all that is known of the
    function, with Python's lock held: hundredths of a second for each worker at the end of a pass.

    Args:
        concrete: a concrete function of tensors or an iterator and tensors; no tape watches it.
        replaced: the handles whose replacements come after its arguments.
    """

    def __init__(self, concrete: Callable, replaced: Sequence[tf.Tensor] = ()):
        self._concrete = concrete
        self._arguments = len(concrete.structured_input_signature[0])
        place = {id(handle): i for i, handle in enumerate(replaced)}
        self._captures = [
            (place.get(id(captured)), captured) for captured in concrete.captured_inputs
        ]

    def __call__(self, *all_arguments) -> Any:
        arguments = all_arguments[: self._arguments]
        replacements = all_arguments[self._arguments :]
        captured = [c if i is None else replacements[i] for i, c in self._captures]
        tensors = [*tf.nest.flatten(arguments, True), *captured]
        function, kind = self._concrete.inference_fn, self._concrete.function_type
        try:
            found = _call(function.name, tensors, len(kind.flat_outputs))
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError:
            with InterpolateRuntimeError(function):
                raise
        return kind.pack_output(found)


def _call(name: bytes, tensors: list[tf.Tensor], outputs: int) -> list[tf.Tensor] | None:
    manager = getattr(_thread, "manager", None)
    called = context.context()
    if manager is None:
        return called.call_function(name, tensors, outputs)
    # As `call_function` does.
    found = execute.execute_with_cancellation(
        name.decode("utf-8"),
        num_outputs=outputs,
        inputs=tensors,
        attrs=tuple(itertools.chain(*called.function_call_options.as_attrs().items())),
        ctx=called,
        cancellation_manager=manager,
    )
    return found or None
