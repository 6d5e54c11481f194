"""Has datasets that shuffle do so anew in each pass, as TensorFlow does where it iterates itself.

tf.data's service builds a dataset anew for each pass, from a description in which seeds are
constants: with a seed, of the dataset or of the program, each pass would have the order of the
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.data.ops import dataset_ops, options, random_op, shuffle_op

# Ops that count passes, and the places of the two seeds and of the count among their inputs.
_SEEDS = {
    "RandomDatasetV2": ((0, 1), 2),
    "ShuffleAndRepeatDatasetV2": ((2, 3), 5),
    "ShuffleDatasetV3": ((2, 3), 4),
}
# The places of the seeds, of these and of others like them.
_SEEDS_ALONE = {op: places for op, (places, _) in _SEEDS.items()} | {
    "RandomDataset": (0, 1),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleDataset": (2, 3),
}
_EACH_PASS = ("reshuffle_each_iteration", "rerandomize_each_iteration")


def with_sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset, and all those that it is made of."""
    pending = [dataset]
    while pending:
        found = pending.pop()
        yield found
        pending += found._inputs()


def described(dataset: tf.data.Dataset) -> graph_pb2.GraphDef:
    """A dataset as the service describes it."""
    # The servers' names mean nothing there.
    with tf.device("/CPU:0"):
        policy = dataset.options().experimental_external_state_policy
        graph = dataset._as_serialized_graph(
            external_state_policy=policy or options.ExternalStatePolicy.WARN
        )
        return graph_pb2.GraphDef.FromString(graph.numpy())


def rebuilt(dataset: tf.data.Dataset, graph: graph_pb2.GraphDef) -> tf.data.Dataset:
    """A dataset made of a description of another one that was changed."""
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    made = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return made.with_options(dataset.options())


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's order depends on a seed and on the number of the pass."""
    for found in with_sources(dataset):
        if isinstance(found, shuffle_op._ShuffleDataset):
            is_anew = found._reshuffle_each_iteration
        else:
            is_anew = isinstance(found, random_op._RandomDataset) and found._rerandomize
        # Two zeros: another order each time it is built.
        if is_anew and any(int(seed) for seed in (found._seed, found._seed2)):
            return True
    return False


def has_any_order(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's order depends on random numbers without seeds, or on what is faster."""
    if dataset.options().deterministic is False:
        return True
    for found in with_sources(dataset):
        if getattr(found, "_deterministic", "") == "false":
            return True
        kinds = (shuffle_op._ShuffleDataset, random_op._RandomDataset)
        if isinstance(found, kinds) and not any(int(s) for s in (found._seed, found._seed2)):
            return True
        if any(map(_have_any_order, functions_of(found))):
            return True
    return False


def functions_of(dataset: tf.data.Dataset) -> Iterator[Sequence[node_def_pb2.NodeDef]]:
    """The nodes of each function that a dataset calls, and of each that these call."""
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        yield graph.node
        yield from (inner.node_def for inner in graph.library.function)


def _have_any_order(nodes: Sequence[node_def_pb2.NodeDef]) -> bool:
    """Whether a function makes datasets that have any order, or draws numbers without seeds."""
    zeros = {node.name for node in nodes if node.op == "Const" and _is_zero(node)}
    for node in nodes:
        seeds = [node.attr[name].i for name in ("seed", "seed2") if name in node.attr]
        if len(seeds) == 2 and not any(seeds):
            return True
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            return True
        places = _SEEDS_ALONE.get(node.op, ())
        if places and all(node.input[place].partition(":")[0] in zeros for place in places):
            return True
    return False


def in_pass(dataset: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """A dataset with the seeds of a pass.

    Args:
        dataset: one that `is_reshuffled`.
        number: of the pass, from 0, in which the seeds are the dataset's own.

    Returns:
        The same elements in an order that depends on the dataset's seeds and the number.
    """
    if number == 0:
        return dataset
    try:
        graph = described(dataset)
        _reseed(graph, number)
        return rebuilt(dataset, graph)
    except (tf.errors.OpError, ValueError) as error:
        logging.warning("The dataset keeps its order in each epoch: %s", error)
        return dataset


def _reseed(graph: graph_pb2.GraphDef, number: int) -> None:
    """Replaces the seeds of what counts passes."""
    by_name = {node.name: node for node in graph.node}
    for node in list(graph.node):
        if node.op not in _SEEDS or not any(node.attr[name].b for name in _EACH_PASS):
            continue
        places, count = _SEEDS[node.op]
        seeds = [value_of(by_name[node.input[place]]) for place in places]
        if not any(seeds):
            continue
        entropy = [seed % 2**64 for seed in seeds]
        fresh = np.random.SeedSequence([*entropy, number]).generate_state(2, np.uint64) >> 1
        for place, seed in zip(places, fresh, strict=True):
            # A node of its own: others may share the constant.
            constant = graph.node.add()
            constant.CopyFrom(by_name[node.input[place]])
            constant.name = f"{node.name}_seed_{place}"
            tensor = tf.make_tensor_proto(np.int64(seed))
            constant.attr["value"].tensor.CopyFrom(tensor)
            node.input[place] = constant.name
        # The count that the described dataset goes by is bound to its own seeds.
        node.input[count] = graph.node.add(op="DummySeedGenerator", name=f"{node.name}_count").name


def _is_zero(constant: node_def_pb2.NodeDef) -> bool:
    tensor = constant.attr["value"].tensor
    is_number = tensor.dtype == tf.int64.as_datatype_enum and not tensor.tensor_shape.dim
    return is_number and value_of(constant) == 0


def value_of(constant: node_def_pb2.NodeDef) -> int:
    """The number that a constant has."""
    return int(tf.make_ndarray(constant.attr["value"].tensor))
