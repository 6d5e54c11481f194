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
# # Decentralized training
#
# At the end of this tutorial you will have trained a model without parameter servers, on six
# workers that average their parameters with neighbors in a graph. You will have seen how workers
# that are slow now and then hold up the others, and how a backup worker prevents that.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.testing import RandomSlowdown, set_compute_time

# %% [markdown]
# ## The data and the model
#
# Points in a plane belong to one of two spirals. Under this strategy a model may have any Keras
# optimizer but FTRL.

# %%
rng = np.random.default_rng(1)
labels = rng.integers(0, 2, 12_000)
angles = rng.uniform(0.5, 3.0, labels.size) * np.pi
points = (angles / 3)[:, None] * np.stack(
    [np.cos(angles + labels * np.pi), np.sin(angles + labels * np.pi)], axis=1
)
points = (points + rng.normal(scale=0.1, size=points.shape)).astype(np.float32)
train_data = tf.data.Dataset.from_tensor_slices((points, labels[:, None])).batch(32)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", metrics=["accuracy"]
    )
    return model


# %% [markdown]
# ## The graph
#
# Each worker has a copy of the model. In each iteration it trains the copy on a batch, sends its
# parameters to its neighbors, and averages what it gets from them. In this graph the workers form a
# ring, and each one has the most distant worker as a third neighbor. The spectral gap says how fast
# information spreads: 1 is the fastest, and 0 means that it does not reach all.

# %%
topology = recsync.topology.ring_based(6)
print("spectral gap:", round(topology.spectral_gap, 3))
topology.plot("graph.png")
figure, axes = plt.subplots(figsize=(3, 3))
axes.imshow(plt.imread("graph.png"))
axes.axis("off")
plt.show()

# %% [markdown]
# ## Workers that are slow now and then
#
# `recsync.testing` has each step take 20 ms more, and on each worker every tenth step, at random,
# six times as long, as if other programs disturbed it.

# %%
cluster = recsync.LocalCluster(workers=6)
reports = {}
histories = {}


def train(name: str, **options) -> None:
    """Trains for three epochs under a HopStrategy with these options."""
    strategy = recsync.HopStrategy(cluster, topology, **options)
    set_compute_time(strategy, 0.02, RandomSlowdown(6.0, probability=0.1, seed=1))
    with strategy.scope():
        model = make_model()
    histories[name] = model.fit(
        train_data,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[recsync.callbacks.HopReport()],
    ).history
    reports[name] = strategy.hop_report(model)
    print("accuracy:", [round(value, 3) for value in histories[name]["accuracy"]])
    copies = strategy.copies(model)
    spread = max(np.ptp([copy[0] for copy in copies], axis=0).ravel())
    print(f"largest difference between two copies of a weight: {spread:.3f}")


# %% [markdown]
# By default a worker waits in each iteration for the updates of all its neighbors.

# %%
train("waiting for all")

# %% [markdown]
# With a *backup worker*, a worker waits for all neighbors but one, whichever is last. A worker may
# be at most four iterations ahead of its neighbors, so that no worker is left behind.

# %%
train("one backup worker", backup_workers=1, max_iteration_gap=4)

# %% [markdown]
# ## The report
#
# `HopReport` adds figures to the logs of each epoch, such as the share of time that workers waited
# for their neighbors.

# %%
for name, history in histories.items():
    for figure in ("iterations_per_second", "waiting"):
        print(f"{name}, {figure}:", [round(value, 2) for value in history[figure]])
print(reports["one backup worker"][0])

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
for shift, (name, report) in zip((-0.2, 0.2), reports.items(), strict=True):
    waited = [worker.waited_for_updates + worker.waited_for_tokens for worker in report]
    axes[0].bar(np.arange(6) + shift, waited, width=0.4, label=name)
axes[0].set(xlabel="worker", ylabel="seconds of waiting")
for name, history in histories.items():
    axes[1].plot(range(1, 4), history["loss"], marker="o", label=name)
axes[1].set(xlabel="epoch", ylabel="loss", xticks=range(1, 4))
axes[1].legend()
figure.tight_layout()
plt.show()

# %%
cluster.close()

# %% [markdown]
# With a backup worker all workers wait less, and the model learns as well.
#
# ## Where to go from here
#
# - [Decentralized training](../hop.md) has all options, and says what to do about workers that are
#   always slow.
# - [The reference of topologies](../reference/topology.md) has other graphs, and says how to make
#   your own.
# - The next tutorial is about [groups of trainers](groups_of_trainers.ipynb), which share parameter
#   servers.
