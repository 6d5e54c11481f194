"""The benchmarks' model in PyTorch, in two forms; needs torch and, for one, fbgemm_gpu."""

from __future__ import annotations

import itertools

import click_models
import common
import numpy as np
import torch

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_model(batch_size: int, *, fbgemm: bool, rowwise: bool) -> Trainer:
    """The model with its data in memory.

    Args:
        batch_size: Examples per step.
        fbgemm: Uses FBGEMM's embeddings instead of PyTorch's.
        rowwise: With FBGEMM: one accumulator for each row.
    """
    data = click_models.make_data(batch_size)
    sizes = list(data.spec.categorical.values())
    torch.manual_seed(common.SEED)
    deep, wide = (
        FusedTables(sizes, dimension, rowwise) if fbgemm else MergedTables(sizes, dimension)
        for dimension in (click_models.DIMENSION, 1)
    )
    batches: list[Batch] = []
    for features, label in data.train(batch_size).as_numpy_iterator():
        ids = np.stack([features[name] for name in data.spec.categorical], axis=1)
        batches.append(
            (
                torch.from_numpy(features["numeric"].copy()),
                torch.from_numpy(deep.merge(ids)),
                torch.from_numpy(label.copy()),
            )
        )
    return Trainer(deep, wide, len(data.spec.numeric), batches)


class MergedTables(torch.nn.Module):
    """EmbeddingBag over the tables of all features, one behind the other."""

    def __init__(self, sizes: list[int], dimension: int):
        super().__init__()
        self.features, self.dimension = len(sizes), dimension
        self._offsets = np.cumsum([0, *sizes[:-1]])
        self.bag = torch.nn.EmbeddingBag(sum(sizes), dimension, mode="sum", sparse=True)
        with torch.no_grad():
            if dimension == 1:
                self.bag.weight.zero_()
            else:
                self.bag.weight.uniform_(-0.05, 0.05)

    def merge(self, ids: np.ndarray) -> np.ndarray:
        """The merged table's rows for ids [batch, features]."""
        return np.ascontiguousarray(ids + self._offsets)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Embeddings side by side [batch, features * dimension]; their sum for dimension 1."""
        if self.dimension == 1:
            return self.bag(rows)
        return self.bag(rows.view(-1, 1)).view(-1, self.features * self.dimension)


class FusedTables(torch.nn.Module):
    """FBGEMM's table-batched embeddings, which update themselves in the backward pass."""

    def __init__(self, sizes: list[int], dimension: int, rowwise: bool):
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.features, self.dimension = len(sizes), dimension
        width = max(dimension, 4)
        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD if rowwise else EmbOptimType.EXACT_ADAGRAD
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(size, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes],
            optimizer=kind,
            learning_rate=click_models.LEARNING_RATE,
            eps=click_models.EPSILON,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            stochastic_rounding=False,
            device="cpu",
        )
        for weights in self.tables.split_embedding_weights():
            if dimension == 1:
                weights.zero_()
            else:
                weights.uniform_(-0.05, 0.05)

    def merge(self, ids: np.ndarray) -> np.ndarray:
        """The ids feature by feature, as the kernel takes them."""
        return np.ascontiguousarray(ids.T)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings side by side [batch, features * dimension]; their sum for dimension 1."""
        flat = ids.view(-1)
        found = self.tables(flat, torch.arange(flat.numel() + 1))
        if self.dimension == 1:
            return found.view(ids.shape[1], self.features, -1)[:, :, 0].sum(1, keepdim=True)
        return found


class Trainer:
    """Trains the model, going through its batches in random order."""

    def __init__(
        self,
        deep: torch.nn.Module,
        wide: torch.nn.Module,
        numeric: int,
        batches: list[Batch],
    ):
        layers: list[torch.nn.Module] = []
        width = numeric + deep.features * deep.dimension
        for units in click_models.HIDDEN_UNITS:
            layers += [torch.nn.Linear(width, units), torch.nn.ReLU()]
            width = units
        self._mlp = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self._linear = torch.nn.Linear(numeric, 1)
        self._deep, self._wide = deep, wide
        settings = {
            "lr": click_models.LEARNING_RATE,
            "initial_accumulator_value": click_models.INITIAL_ACCUMULATOR,
            "eps": click_models.EPSILON,
        }
        dense = [*self._mlp.parameters(), *self._linear.parameters()]
        self._optimizers = [torch.optim.Adagrad(dense, fused=True, **settings)]
        if isinstance(deep, MergedTables):
            tables = [*deep.parameters(), *wide.parameters()]
            self._optimizers.append(torch.optim.Adagrad(tables, **settings))
        rng = np.random.default_rng(common.SEED)
        self._batches = itertools.cycle([batches[i] for i in rng.permutation(len(batches))])

    def train(self, steps: int) -> None:
        """Runs steps."""
        for numeric, ids, labels in itertools.islice(self._batches, steps):
            hidden = torch.cat([numeric, self._deep(ids)], 1)
            logits = self._mlp(hidden) + self._linear(numeric) + self._wide(ids)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()
