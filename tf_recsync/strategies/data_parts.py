"""Divides a dataset among several readers in an order that is the same each time.

tf.data's service hands out the elements of a dataset's source one by one, so that nobody knows who
reads what. Here the source's elements go in turn to as many parts as there are readers. A part is
the whole dataset over its own elements, and so has batches in an order of its own, which have
numbers. What the service hands out are the numbers of the parts, each to one reader. What `zip`
puts together is divided behind it: every n-th element of two datasets need not belong together.
Unless functions before it draw random numbers, as the one does by which Keras shuffles arrays: each
part would draw others, and have other elements in its turns. There the source is divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2
from tensorflow.python.data.experimental.ops import cardinality
from tensorflow.python.data.ops import dataset_ops

from tf_recsync.strategies import reshuffling
from tf_recsync.strategies.data_lengths import cardinality_of
from tf_recsync.strategies.done_batches import Ranges, rest_of

# The numbers of a part's batches begin with so much times the part's number.
PART_BATCHES = 2**40
_ZIP = "ZipDataset"
_ASSERTION = "AssertCardinalityDataset"
# Whose elements can be counted off: and which of their attributes says the types of these.
_DIVIDED = {
    "RangeDataset": "output_types",
    "TensorDataset": "Toutput_types",
    "TensorSliceDataset": "Toutput_types",
    _ZIP: "output_types",
}
# What elements of other datasets get beside them: it does not matter which has which.
_BESIDE = {"RandomDataset", "RandomDatasetV2", "TensorDataset"}
# Ops that draw numbers, others each time that they run.
_DRAWS = re.compile(r"Random\w*|\w*TruncatedNormal|Multinomial|Stateful\w+|(Eager)?PyFunc")
# What makes several elements of one, which are of a source then.
_OPENING = re.compile(r"FlatMap|Interleave|Unbatch")
_PARTS, _INDEX = "recsync_parts", "recsync_index"  # What a part is made of besides.
_DATASET = re.compile(r"\w+Dataset(V\d+)?")


def why_indivisible(dataset: tf.data.Dataset) -> str:
    """Why parts of a dataset have no order of their own; "" if they have."""
    if cardinality_of(dataset) == tf.data.INFINITE_CARDINALITY:
        return "a part without an end would be missing for ever with its reader"
    try:
        graph = reshuffling.described(dataset)
    except tf.errors.OpError as error:
        return error.message
    divided, passed = _Description(graph).divided()
    if not divided:  # Each part would be the whole.
        return "it begins with random numbers or counters, and not with elements to be divided"
    others = [node.op for node in divided if node.op not in _DIVIDED]
    if others:
        return f"it begins with {others[0]}, and not with range, slices or names of files"
    # They choose, by an order that a part has not.
    choosing = [op for op in passed if op != "ConcatenateDataset"]
    if choosing:
        return (
            f"{choosing[0]} puts elements of several datasets together, which parts have not alike"
        )
    return ""


def pairs_sources(dataset: tf.data.Dataset) -> bool:
    """Whether `zip` puts elements of several sources together, which must not be divided each by
    itself."""
    found = _Description(reshuffling.described(dataset))
    zips = [name for name, (op, _) in found.datasets.items() if op == _ZIP]
    return any(len(found.sources(name)) > 1 for name in zips)


def without_assertions(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset without what asserts a cardinality in it: parts of it have another one."""
    if not _may_assert(dataset):
        return dataset  # Describing it may take long: it may have large arrays.
    try:
        graph = reshuffling.described(dataset)
    except tf.errors.OpError:
        return dataset  # Whoever registers it says what is wrong.
    found = _bypass(graph.node, [])
    for function in graph.library.function:
        found |= _bypass(function.node_def, [function.ret])
    return reshuffling.rebuilt(dataset, graph) if found else dataset


def _may_assert(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset, or one that its functions make, may assert its cardinality."""
    for found in reshuffling.with_sources(dataset):
        # Of what was described and made anew, Python does not know what it is made of.
        if isinstance(found, (cardinality._AssertCardinalityDataset, dataset_ops._VariantDataset)):
            return True
        for nodes in reshuffling.functions_of(found):
            if any(node.op == _ASSERTION for node in nodes):
                return True
    return False


def _bypass(
    nodes: MutableSequence[node_def_pb2.NodeDef], results: Sequence[MutableMapping[str, str]]
) -> bool:
    """Takes assertions of cardinalities out of a graph, or of a function with these results.

    Returns:
        Whether there were any.
    """
    asserted = {node.name: node.input[0] for node in nodes if node.op == _ASSERTION}

    def behind(output: str) -> str:
        while _name(output) in asserted:
            output = asserted[_name(output)]
        return output

    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = behind(name)
    for result in results:
        for key, name in result.items():
            result[key] = behind(name)
    for node in [node for node in nodes if node.name in asserted]:
        nodes.remove(node)
    return bool(asserted)


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
    graph = reshuffling.described(dataset)
    divided, _ = _Description(graph).divided()
    shards = {node.name: f"{node.name}_shard" for node in divided}
    (result,) = [node for node in graph.node if node.op == "_Retval"]
    output = result.input[0]
    graph.node.remove(result)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = shards.get(name, name)
    for node in divided:
        shard = graph.node.add(op="ShardDataset", name=shards[node.name])
        shard.input.extend([node.name, _PARTS, _INDEX])
        shard.attr["output_types"].CopyFrom(node.attr[_DIVIDED[node.op]])
        shard.attr["output_shapes"].CopyFrom(node.attr["output_shapes"])
        shard.attr["require_non_empty"].b = False

    def part(index: tf.Tensor) -> tf.data.Dataset:
        inputs = {_PARTS: tf.constant(parts, tf.int64), _INDEX: index}
        (variant,) = tf.graph_util.import_graph_def(
            graph, inputs, [f"{shards.get(output, output)}:0"], name=""
        )
        return dataset_ops._VariantDataset(variant, dataset.element_spec)

    return part


class _Description:
    """The graph by which the service describes a dataset.

    Attributes:
        datasets: the datasets by their names, each with its op and the names of those that it is
            made of.
    """

    def __init__(self, graph: graph_pb2.GraphDef):
        self._nodes = {node.name: node for node in graph.node}
        self._functions = {own.signature.name: own.node_def for own in graph.library.function}
        datasets = {name: n for name, n in self._nodes.items() if _DATASET.fullmatch(n.op)}
        self.datasets = {
            name: (node.op, [own for own in map(_name, node.input) if own in datasets])
            for name, node in datasets.items()
        }

    def divided(self) -> tuple[list[node_def_pb2.NodeDef], set[str]]:
        """The datasets whose elements parts get in turn: sources, and what `zip` puts together.

        Returns:
            These, and the ops of several datasets that come behind them.
        """
        nodes = self._nodes.values()
        (pending,) = ([_name(node.input[0])] for node in nodes if node.op == "_Retval")
        found: set[str] = set()
        passed: set[str] = set()
        while pending:
            name = pending.pop()
            op, inputs = self.datasets[name]
            if op == _ZIP and self._is_drawn(name):
                sources = self.sources(name)
                if len(sources) > 1:
                    passed.add(f"{op} behind random numbers")
                found.update(sources)
                continue
            if op == _ZIP or not inputs:
                found.add(name)
                continue
            if len(inputs) > 1:
                passed.add(op)
            pending += inputs
        return [node for node in nodes if node.name in found], passed

    def sources(self, name: str, is_opened: bool = False) -> list[str]:
        """The sources of a dataset but for those of what elements get beside them.

        Args:
            name: the dataset's.
            is_opened: whether what is made of it makes several elements of one.
        """
        op, inputs = self.datasets[name]
        is_opened = is_opened or _OPENING.search(op) is not None
        if inputs:
            return [source for own in inputs for source in self.sources(own, is_opened)]
        is_beside = not is_opened and (op in _BESIDE or self._counts(name))
        return [] if is_beside else [name]

    def _counts(self, name: str) -> bool:
        """Whether a dataset is of numbers without an end, which `enumerate` has, too."""
        if self.datasets[name][0] != "RangeDataset":
            return False
        stop = self._nodes[_name(self._nodes[name].input[1])]
        return stop.op == "Const" and reshuffling.value_of(stop) == tf.int64.max

    def _is_drawn(self, name: str) -> bool:
        """Whether functions of a dataset, or of what it is made of, draw random numbers."""
        pending, seen = [self._nodes[name]], set()
        while pending:
            node = pending.pop()
            if _DRAWS.fullmatch(node.op):
                return True
            if node.name in self.datasets:
                pending += [self._nodes[own] for own in self.datasets[node.name][1]]
            called = {own for value in node.attr.values() for own in _functions_in(value)} - seen
            seen |= called
            pending += [inner for own in called for inner in self._functions[own]]
        return False


def _functions_in(value: attr_value_pb2.AttrValue) -> list[str]:
    """The names of the functions that an attribute has."""
    return [own.name for own in (value.func, *value.list.func) if own.name]


def _name(output: str) -> str:
    """The name of the node that an input comes from."""
    return output.partition(":")[0]
