"""Exporting models whose inputs are ragged or sparse, and reading tables that are apart."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_recsync._checks import check_bool, checked_path
from tf_recsync.embedding.keys import sorted_entries
from tf_recsync.input_parts import InputParts, name_of
from tf_recsync.table_reader import TableReader, TableVersion
from tf_recsync.tables_apart import GivenInput, TablesApart

__all__ = [
    "TableReader",
    "TableVersion",
    "export_model",
]


def export_model(
    model: keras.Model,
    filepath: str | os.PathLike,
    input_signature: Any = None,
    verbose: bool = False,
) -> None:
    """Exports a model as a SavedModel that takes ragged and sparse inputs as they are.

    `model.export` of Keras declares all inputs dense, so that lists of ids must be filled up. Here
    an input made by `keras.Input(..., ragged=True)` takes a `tf.RaggedTensor`, and one with
    `sparse=True` a `tf.SparseTensor`. What is exported computes in inference, of stock TensorFlow
    ops, and is served without this package.

    The SavedModel has two endpoints:

    - `serve`, the function that `tf.saved_model.load(filepath).serve` is: it takes what the model
      takes.
    - `serving_default`, the signature that TensorFlow Serving calls. It takes dense tensors by
      name: a dense input under its name; a ragged one as its values, under its name, and
      `<name>_row_splits` (int64, [batch + 1]: where each example's values begin, and where the
      last ones end); a sparse one as `<name>_indices`, `<name>` (its values) and
      `<name>_dense_shape`.

    An input's name is its key, where the model takes a dict, or that of the `keras.Input`. Where an
    `input_signature` is given that is no dict, it is the name of the `tf.TensorSpec`, or "input",
    in a list with its place, as in "input_0".

    Args:
        model: A built model; where it is trained, and under which strategy, makes no difference.
        filepath: The folder to write.
        input_signature: The `tf.TypeSpec`s of the model's inputs, in the structure that it takes
            them: `tf.TensorSpec`, `tf.RaggedTensorSpec` of ragged rank 1, or
            `tf.SparseTensorSpec`. None (the default) reads them off a model that was made of
            `keras.Input`s, for batches of any size.
        verbose: Whether Keras says what it wrote. Default False.

    Raises:
        ValueError: If `model` is no built Keras model, or `input_signature` is None and the model
            was not made of `keras.Input`s, or it has other entries.

    Example:
        >>> import tempfile
        >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
        >>> watched = keras.Input((None,), dtype="int64", ragged=True, name="watched")
        >>> layer = EmbeddingCollection(
        ...     [TableConfig("films", rows=100, dimension=4)], [FeatureConfig("watched", "films")]
        ... )
        >>> model = keras.Model({"watched": watched}, layer({"watched": watched})["watched"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_model(model, folder)
        ...     served = tf.saved_model.load(folder)
        ...     vectors = served.serve({"watched": tf.ragged.constant([[1, 2], []], tf.int64)})
        >>> tuple(vectors.shape)
        (2, 4)
    """
    filepath = checked_path(filepath, "filepath")
    check_bool("verbose", verbose)
    inference = Inference(model, input_signature)
    inference.read()
    inference.write(filepath, verbose)


class Inference:
    """What a model computes in inference, with variables of its own in this process.

    The model's parameters are read at one moment (`read`), and written as often and as slowly as
    one likes (`write`) while the model is trained on. Where nothing has been trained since, the
    values are not copied.

    Args:
        model: see `export_model`, like the other one.
        input_signature: as above.
        tables_apart: whether its collections' tables are elsewhere, and it takes looked-up vectors
            in place of ids; see `TablesApart`. Default False.

    Attributes:
        given: the inputs that stand for lookups; empty if tables are inside.
        others: variables that it computes with and that are of no layer.

    Raises:
        ValueError: see `export_model` and `TablesApart`.
    """

    def __init__(
        self, model: keras.Model, input_signature: Any = None, *, tables_apart: bool = False
    ):
        if not isinstance(model, keras.Model) or not model.built:
            raise ValueError(f"model={model!r}: must be a keras.Model that has been built.")
        names: dict[tuple, str] = {}
        if input_signature is None:
            symbolic = symbolic_inputs(model)
            names = {path: x.name for path, x in keras.tree.flatten_with_path(symbolic)}
            input_signature = tf.nest.map_structure(_spec, symbolic)
        specs = keras.tree.flatten_with_path(input_signature)
        for path, spec in specs:
            _check_spec(path, spec)
        metrics = {id(variable) for variable in model.metrics_variables}
        self._read_from = [v for v in model.variables if id(v) not in metrics]
        with tf.init_scope(), tf.device("/CPU:0"):
            self._variables = [
                resource_variable_ops.UninitializedVariable(
                    v.trainable, shape=v.shape, dtype=v.dtype, name=v.name
                )
                for v in self._read_from
            ]
        scope = _OwnVariables(zip(self._read_from, self._variables, strict=True))
        call = functools.partial(model, training=False)
        self.given: tuple[GivenInput, ...] = ()
        if tables_apart:
            apart = TablesApart(model, input_signature, names, scope)
            input_signature, call, self.given = apart.signature, apart.call, apart.given
            names = {}  # Its keys are the names.
            specs = keras.tree.flatten_with_path(input_signature)

        @tf.function(input_signature=[input_signature], autograph=False)
        def serve(inputs):
            with scope, sorted_entries():
                return call(inputs)

        self._archive = keras.export.ExportArchive()
        for layer in _layers(model):
            for table in _lookup_tables(layer):
                self._archive.track(table)
        traced = [serve.get_concrete_function()]
        self._archive.add_endpoint("serve", serve)
        parts = [InputParts(name_of(path, spec, names.get(path)), spec) for path, spec in specs]
        if any(not isinstance(part.spec, tf.TensorSpec) for part in parts):

            @tf.function(input_signature=[[spec for part in parts for spec in part.specs]])
            def serve_parts(tensors):
                left = iter(tensors)
                inputs = [part.join([next(left) for _ in part.specs]) for part in parts]
                with scope, sorted_entries():
                    return call(tf.nest.pack_sequence_as(input_signature, inputs))

            traced.append(serve_parts.get_concrete_function())
            self._archive.add_endpoint("serving_default", serve_parts)
        own = {id(variable) for variable in self._variables}
        # TensorFlow's own, which a layer holds without Keras's knowledge.
        self.others = list(
            {id(v): v for f in traced for v in f.variables if id(v) not in own}.values()
        )
        # What no function uses is not read, like a table that only training looks up in.
        used = {id(v) for function in traced for v in function.variables}
        pairs = zip(self._read_from, self._variables, strict=True)
        self._pairs = [(shown, variable) for shown, variable in pairs if id(variable) in used]

    def read(self) -> None:
        """Takes over the model's parameters as they are.

        In a callback of `fit`, what is read is of one moment: workers go on when Keras asks for
        the next step.
        """
        own = {id(shown): variable for shown, variable in self._pairs}
        for shown, variable in self._pairs:
            keyed = getattr(shown, "keyed", None)
            if keyed is not None:
                entries, order = keyed.in_order()
                own[id(keyed.entries)].assign(entries, read_value=False)
                variable.assign(tf.gather(shown._value.read_value(), order), read_value=False)
            elif not hasattr(shown, "beside_table"):
                variable.assign(shown._value.read_value(), read_value=False)

    def write(self, folder: str, verbose: bool = False) -> None:
        """Writes what was read last, as a SavedModel.

        Args:
            folder: where to.
            verbose: see `export_model`.
        """
        self._archive.write_out(folder, verbose=verbose)


class _OwnVariables(keras.StatelessScope):
    """A scope in which a model computes with other variables than its own.

    Args:
        pairs: of the model's variables, and those that take their place.
    """

    def __init__(self, pairs: Iterable[tuple[keras.Variable, tf.Variable]]):
        super().__init__()
        self.state_mapping = {id(variable): own for variable, own in pairs}

    def add_update(self, update):
        """As of the seeds of layers that are random in inference, too."""
        variable, value = update
        self.state_mapping[id(variable)].assign(value)


def symbolic_inputs(model: keras.Model) -> Any:
    """The symbolic inputs of a model, as it takes them.

    Raises:
        ValueError: if it was not made of `keras.Input`s.
    """
    symbolic = getattr(model, "inputs", None)
    if symbolic and isinstance(model, keras.Sequential):
        return symbolic[0]
    if not symbolic:
        raise ValueError(
            f"input_signature=None: must be given for the model {model.name!r}, which was not made "
            "of keras.Input."
        )
    return model.input


def _lookup_tables(layer: keras.layers.Layer) -> Iterator[tf.__internal__.tracking.Trackable]:
    """What a layer's functions use, and what is no variable."""
    for trackable in tf.train.TrackableView(layer).descendants():
        if isinstance(trackable, tf.saved_model.experimental.TrackableResource):
            yield trackable


def _layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """The layers of a model, which may hold lookup tables.

    Not models: Keras would call one that it tracks with dense inputs, and float32 ones if it is of
    one's own class.
    """
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def _spec(x: keras.KerasTensor) -> tf.TypeSpec:
    shape = [None, *x.shape[1:]]
    if x.ragged:
        return tf.RaggedTensorSpec(shape, x.dtype, ragged_rank=1)
    if x.sparse:
        return tf.SparseTensorSpec(shape, x.dtype)
    return tf.TensorSpec(shape, x.dtype, name=x.name)


def _check_spec(path: tuple, spec: Any) -> None:
    is_ragged = isinstance(spec, tf.RaggedTensorSpec)
    if isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec) or (
        is_ragged and spec.ragged_rank == 1
    ):
        return
    raise ValueError(
        f"input_signature: has {spec!r} at {path}, must be a tf.TensorSpec, a tf.RaggedTensorSpec "
        "of ragged rank 1 or a tf.SparseTensorSpec."
    )
