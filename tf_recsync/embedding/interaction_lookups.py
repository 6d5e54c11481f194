"""What interactions look up, and how their results come of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_recsync.embedding.config import FeatureConfig
from tf_recsync.embedding.feature_inputs import FeatureInput
from tf_recsync.embedding.interactions import BagRows, Interaction
from tf_recsync.embedding.placement import PlacementPlan
from tf_recsync.ops.bags import Bags, Computation, Request


def tables_of(interaction: Interaction, features: Sequence[FeatureConfig]) -> list[str]:
    """The names of the tables that an interaction needs, each once."""
    table_of = {feature.name: feature.table for feature in features}
    return list(dict.fromkeys(table_of[name] for name in interaction.features))


def server_of(
    interaction: Interaction, features: Sequence[FeatureConfig], plan: PlacementPlan
) -> int:
    """The parameter server that holds all tables of an interaction.

    Raises:
        ValueError: if there is no such server.
    """
    places = {
        table: [shard.ps for shard in plan.shards_of(table)]
        for table in tables_of(interaction, features)
    }
    servers = {ps for own in places.values() for ps in own}
    if len(servers) > 1:
        where = ", ".join(f"{table!r} on {own}" for table, own in places.items())
        raise ValueError(
            f"interaction {interaction.name!r} needs its tables whole on one parameter server, but "
            f"placement has table {where}; plan_placement(..., together=[{list(places)}]) keeps "
            "them there."
        )
    return servers.pop()


class ServerInteractions:
    """The interactions that one server computes, all at once.

    A feature that several of them use is looked up once, or twice if some use its pooled
    vectors and others its rows.

    Args:
        interactions: at least one, with the widths of their results.
        features: the collection's features.

    Attributes:
        names: the interactions' names.
        widths: the widths of their results.
        looked_up: the features that they use, and whether pooled.
    """

    def __init__(
        self,
        interactions: Sequence[tuple[Interaction, int]],
        features: Sequence[FeatureConfig],
    ):
        self._interactions = [interaction for interaction, _ in interactions]
        self.names = [interaction.name for interaction in self._interactions]
        self.widths = [width for _, width in interactions]
        configs = {feature.name: feature for feature in features}
        uses = [(f, f not in i.unpooled) for i in self._interactions for f in i.features]
        self.looked_up = [(configs[name], is_pooled) for name, is_pooled in dict.fromkeys(uses)]

    def request(
        self, inputs: Mapping[str, FeatureInput], bags: list[Bags], batch: tf.Tensor
    ) -> Request:
        """What to ask the server for.

        Args:
            inputs: the features' ids, by name.
            bags: the bags of each of `looked_up`.
            batch: the batch size, an int64 scalar.
        """
        forms, tensors = self._bags_of_rows(inputs)
        function = functools.partial(self._compute, forms)
        return Request(bags, Computation(function, tensors, batch, sum(self.widths)))

    def compute(
        self, inputs: Mapping[str, FeatureInput], vectors: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """The results side by side, [batch, sum of the widths], computed here.

        Args:
            inputs: the features' ids, by name.
            vectors: the vectors of each of `looked_up`.
        """
        forms, tensors = self._bags_of_rows(inputs)
        return self._compute(forms, vectors, tensors)

    def _bags_of_rows(
        self, inputs: Mapping[str, FeatureInput]
    ) -> tuple[dict[str, tuple[int, bool]], list[tf.Tensor]]:
        """How the rows of features that are not pooled form bags.

        Returns:
            For each of them, by name, the ids per example, 0 where they differ, and
            whether they have weights; and the row splits and weights, where there are any.
        """
        forms, tensors = {}, []
        for feature, is_pooled in self.looked_up:
            if is_pooled:
                continue
            data = inputs[feature.name]
            forms[feature.name] = data.length, data.weights is not None
            tensors += [t for t in (data.splits, data.weights) if t is not None]
        return forms, tensors

    def _compute(
        self,
        forms: Mapping[str, tuple[int, bool]],
        vectors: Sequence[tf.Tensor],
        tensors: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """All results, of what `_bags_of_rows` gave; the same on a server and here."""
        left = iter(tensors)
        pooled, unpooled = {}, {}
        for (feature, is_pooled), own in zip(self.looked_up, vectors, strict=True):
            if is_pooled:
                pooled[feature.name] = own
                continue
            length, is_weighted = forms[feature.name]
            if length:
                count = tf.size(own[:, 0], out_type=tf.int64) // length
                splits = tf.range(count + 1) * length
            else:
                splits = next(left)
            weights = next(left) if is_weighted else tf.ones_like(own[:, 0])
            unpooled[feature.name] = BagRows(
                tf.RaggedTensor.from_row_splits(own, splits, validate=False),
                tf.RaggedTensor.from_row_splits(weights, splits, validate=False),
            )
        results = [
            interaction({**pooled, **{name: unpooled[name] for name in interaction.unpooled}})
            for interaction in self._interactions
        ]
        return tf.concat(results, 1)
