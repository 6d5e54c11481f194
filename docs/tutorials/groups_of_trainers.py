# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Groups of trainers
#
# At the end of this tutorial you will have trained a model on two groups of two workers. Each group
# has a parameter server with a copy of the dense parameters, and the copies are synchronized in the
# background. You will have measured how many steps lie between two synchronizations, and what the
# time between them changes.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import matplotlib.pyplot as plt
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.testing import set_compute_time

# %% [markdown]
# ## The model
#
# Its tables are those of an `EmbeddingCollection`. They exist once, on a parameter server of their
# own. The dense layers have a copy in each group.

# %%
data = recsync.data.Synthetic(rows=51_200, test_rows=10_000, cardinalities=[2000, 50], numeric=4)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    tables = data.spec.categorical
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    vectors = EmbeddingCollection(
        [TableConfig(name, rows=rows, dimension=8) for name, rows in tables.items()],
        [FeatureConfig(name, table=name) for name in tables],
        concatenate=True,
    )(inputs)
    inputs["numeric"] = keras.Input((4,), name="numeric")
    hidden = keras.layers.Concatenate()([vectors, inputs["numeric"]])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=["AUC"])
    return model


# %% [markdown]
# ## The cluster
#
# There are four parameter servers. The first two have the copies of the groups. The third one has
# the tables. The last one has a central copy of the dense parameters, with which the groups
# exchange by *EASGD*: each exchange moves the group's copy and the central copy towards each other.

# %%
cluster = recsync.LocalCluster(workers=4, ps=4)


def train(min_interval: float):
    """Trains with a synchronization at most every so many seconds."""
    strategy = recsync.HierarchicalStrategy(
        cluster,
        recsync.EASGD(alpha=0.3),
        groups=2,
        trainers_per_group=2,
        ps_per_group=1,
        mode=recsync.Shadow(min_interval=min_interval),
    )
    set_compute_time(strategy, 0.02)
    with strategy.scope():
        model = make_model()
    history = model.fit(
        data.train(batch_size=128),
        validation_data=data.test(batch_size=2500),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[recsync.callbacks.ShadowReport()],
    ).history
    return strategy, model, history


# %% [markdown]
# ## Training
#
# Synchronization runs in the background: no trainer waits for it. Here it is done at most ten times
# a second.

# %%
strategy, model, history = train(min_interval=0.1)
report = strategy.sync_report(model)
print("synchronizations of each group:", report.syncs)
print("steps of all trainers:", report.steps)
print(f"a synchronization takes {1000 * report.seconds[0] / report.syncs[0]:.0f} ms")
print(f"the sync PS has sent and received {report.sync_ps_bytes / 1e6:.1f} MB")
print("AUC on the test data:", [round(value, 4) for value in history["val_AUC"]])

# %% [markdown]
# The *sync gap* is the number of steps that a group does from one synchronization to the next.
# `ShadowReport` also adds figures to the logs.

# %%
print(f"sync gap: {strategy.average_sync_gap(model):.1f} steps")
for name in ("average_sync_gap", "syncs_per_second", "batches_per_second"):
    print(f"{name} in each epoch:", [round(value, 1) for value in history[name]])

# %% [markdown]
# ## How often to synchronize
#
# Fewer synchronizations need less of the network, and the copies of the groups differ more. How far
# they are apart is measured here as the largest difference of a weight between the two copies at
# the end of training.

# %%
intervals = [0.1, 0.4, 1.6]
gaps, differences, losses = [], [], []
for interval in intervals:
    if interval != 0.1:
        strategy, model, history = train(interval)
    gaps.append(strategy.average_sync_gap(model))
    first, second = strategy.copies(model)
    differences.append(max(np.abs(a - b).max() for a, b in zip(first, second, strict=True)))
    losses.append(history["val_loss"][-1])
    print(
        f"at most every {interval} s: sync gap {gaps[-1]:.1f}, "
        f"difference {differences[-1]:.3f}, loss on the test data {losses[-1]:.4f}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
axes[0].plot(gaps, differences, marker="o")
axes[0].set(xlabel="sync gap in steps", ylabel="difference of the copies", ylim=0)
axes[1].plot(gaps, losses, marker="o")
axes[1].set(xlabel="sync gap in steps", ylabel="loss on the test data", ylim=(0.45, 0.48))
figure.tight_layout()
plt.show()

# %%
cluster.close()

# %% [markdown]
# The copies are further apart where synchronizations are rarer. The loss of so short a training
# hardly depends on that: what differs in the fourth digit is chance.
#
# ## Where to go from here
#
# - [Groups of trainers](../hierarchical.md) says how groups are arranged, and how layers can run on
#   the servers of their weights.
# - [Synchronization in the background](../shadowsync.md) has the algorithms, and
#   `ShadowSyncStrategy`, in which each worker has a copy itself.
# - The next tutorial brings a model [into production](serving.ipynb).
