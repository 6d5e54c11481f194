"""Divides a dataset among several readers in an order that is the same each time.

tf.data's service hands out the elements of a dataset's source one by one, so that nobody knows who
reads what. Here the source's elements go in turn to as many parts as there are readers. A part is
the whole dataset over its own elements, and so has batches in an order of its own, which have
numbers. What the service hands out are the numbers of the parts, each to one reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.data.ops import dataset_ops, options

from tf_recsync.strategies.done_batches import Ranges, rest_of

# The numbers of a part's batches begin with so much times the part's number.
PART_BATCHES = 2**40
# Sources, whose elements can be counted off: and which of their attributes says the types of these.
_SOURCES = {
    "RangeDataset": "output_types",
    "TensorDataset": "Toutput_types",
    "TensorSliceDataset": "Toutput_types",
}
_INDEX = "recsync_index"
_DATASET = re.compile(r"\w+Dataset(V\d+)?")


def why_indivisible(dataset: tf.data.Dataset) -> str:
    """Why parts of a dataset have no order of their own; "" if they have."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return "a part without an end would be missing for ever with its reader"
    try:
        graph = _described(dataset)
    except tf.errors.OpError as error:
        return error.message
    others = [node.op for node in _sources(graph) if node.op not in _SOURCES]
    if others:
        return f"it begins with {others[0]}, and not with range, slices or names of files"
    pairing = _pairing(graph)
    if pairing:
        return f"{pairing} puts elements of several datasets together, which parts have not alike"
    return ""


def rest_of_parts(
    dataset: tf.data.Dataset, parts: int, prefix: int, beyond: Ranges
) -> tf.data.Dataset:
    """A dataset's batches that are not done, each as a pair of its number and the batch.

    Args:
        dataset: batches; one that is not `why_indivisible`.
        parts: how many parts it has.
        prefix: so many of the first part's are done from its beginning on.
        beyond: ranges of others that are, in order, see `DoneBatches.ranges`.
    """
    part = _parts_of(dataset, parts)
    skipped = np.zeros(parts, np.int64)
    skipped[0] = prefix
    left = []
    for first, end in beyond:
        if first % PART_BATCHES:
            left.append((first, end))
        else:
            skipped[first // PART_BATCHES] = end - first

    def rest(index: tf.Tensor) -> tf.data.Dataset:
        return rest_of(part(index), tf.gather(skipped, index), left, index * PART_BATCHES)

    return tf.data.Dataset.range(parts).flat_map(rest).with_options(dataset.options())


def _parts_of(dataset: tf.data.Dataset, parts: int) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Makes a part of a dataset by its index, in a graph."""
    graph = _described(dataset)
    sources = _sources(graph)
    shards = {node.name: f"{node.name}_shard" for node in sources}
    (result,) = [node for node in graph.node if node.op == "_Retval"]
    output = result.input[0]
    graph.node.remove(result)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = shards.get(name, name)
    for name, value in (("recsync_parts", parts), (_INDEX, 0)):
        constant = graph.node.add(op="Const", name=name)
        constant.attr["dtype"].type = tf.int64.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.int64(value)))
    for node in sources:
        shard = graph.node.add(op="ShardDataset", name=shards[node.name])
        shard.input.extend([node.name, "recsync_parts", _INDEX])
        shard.attr["output_types"].CopyFrom(node.attr[_SOURCES[node.op]])
        shard.attr["output_shapes"].CopyFrom(node.attr["output_shapes"])
        shard.attr["require_non_empty"].b = False

    def part(index: tf.Tensor) -> tf.data.Dataset:
        (variant,) = tf.graph_util.import_graph_def(
            graph, {_INDEX: index}, [f"{shards.get(output, output)}:0"], name=""
        )
        return dataset_ops._VariantDataset(variant, dataset.element_spec)

    return part


def _described(dataset: tf.data.Dataset) -> graph_pb2.GraphDef:
    """A dataset as the service describes it."""
    # The servers' names mean nothing there.
    with tf.device("/CPU:0"):
        policy = dataset.options().experimental_external_state_policy
        described = dataset._as_serialized_graph(
            external_state_policy=policy or options.ExternalStatePolicy.WARN
        )
        return graph_pb2.GraphDef.FromString(described.numpy())


def _sources(graph: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """The datasets that are made of no others."""
    return [node for node, inputs in _datasets(graph) if not inputs]


def _pairing(graph: graph_pb2.GraphDef) -> str:
    """The op that makes elements of those of several datasets, as zip does; "" if none does.

    One dataset may have one element for many of another one, and every n-th of both are no pairs.
    """
    several = [node.op for node, inputs in _datasets(graph) if len(inputs) > 1]
    return next((op for op in several if op != "ConcatenateDataset"), "")


def _datasets(graph: graph_pb2.GraphDef) -> list[tuple[node_def_pb2.NodeDef, list[str]]]:
    """The datasets, each with the names of those that it is made of."""
    datasets = {node.name: node for node in graph.node if _DATASET.fullmatch(node.op)}
    return [
        (node, [name for name in node.input if name.partition(":")[0] in datasets])
        for node in datasets.values()
    ]
