"""Functions in Python that pipelines call in whatever process they run: here, or in a reader.

TensorFlow's `tf.numpy_function` finds its function by a token that only the process knows which
made the graph. The functions of this package have their names for tokens, and each process that
imports the package, as servers do, knows them. They have no state that a result depends on, so
that pipelines may be divided, run anew and moved.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import script_ops

_functions: dict[str, Callable] = {}  # TensorFlow itself refers to them weakly.


def register(name: str) -> Callable[[Callable], Callable]:
    """Makes a function known to `call`, in each process that imports its module.

    Args:
        name: Its name, of no other one.

    Returns:
        A decorator. The function takes and returns numpy arrays, and bytes for string scalars.
    """

    def decorate(function: Callable) -> Callable:
        token = _token(name)
        _functions[token] = function
        script_ops._py_funcs._funcs[token] = function
        return function

    return decorate


def call(
    name: str, inputs: Sequence[tf.Tensor | str], types: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Calls a registered function, eagerly or in a graph.

    Args:
        name: Its name.
        inputs: Its arguments.
        types: Types of its results, whose shapes are unknown.

    Returns:
        The results.
    """
    tensors = [tf.convert_to_tensor(value) for value in inputs]
    return tf.raw_ops.PyFuncStateless(input=tensors, token=_token(name), Tout=list(types))


def _token(name: str) -> str:
    return f"tf_recsync.{name}"
