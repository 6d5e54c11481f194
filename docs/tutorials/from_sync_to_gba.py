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
# # From synchronous training to GBA
#
# At the end of this tutorial you will have trained the same model twice on workers of which one is
# slow: synchronously, and by GBA ("global batch gradients aggregation"), with the same optimizer
# and the same learning rate. You will see that GBA is faster, and that the model is as good.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import time

import keras
import matplotlib.pyplot as plt

import tf_recsync as recsync
from tf_recsync.testing import SlowWorkers, set_compute_time

# %% [markdown]
# ## The model
#
# The data are a made-up click log. The model is compiled with a learning rate that suits batches of
# 1024 examples.

# %%
data = recsync.data.Synthetic(rows=32_768, test_rows=10_000, cardinalities=[2000, 50], numeric=4)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    tables = data.spec.categorical
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    vectors = [keras.layers.Embedding(tables[name], 8)(inputs[name]) for name in tables]
    inputs["numeric"] = keras.Input((4,), name="numeric")
    hidden = keras.layers.Concatenate()([*vectors, inputs["numeric"]])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["AUC"])
    return model


# %% [markdown]
# ## A cluster with a slow worker
#
# The cluster has four workers and a parameter server. On your machine, all workers are equally
# fast. `recsync.testing` has each step take 30 ms more on three workers, and 150 ms more on the
# fourth: it is like a machine on which other programs run. These waits use no processor.

# %%
cluster = recsync.LocalCluster(workers=4, ps=1)


class Times(keras.callbacks.Callback):
    """Notes how many seconds training has taken at the end of each epoch, without evaluation."""

    def on_train_begin(self, logs=None):
        self.seconds = [0.0]

    def on_epoch_begin(self, epoch, logs=None):
        self._began, self._tested = time.monotonic(), 0.0

    def on_test_begin(self, logs=None):
        self.seconds.append(self.seconds[-1] + time.monotonic() - self._began)


def train(strategy) -> tuple[list[float], dict[str, list[float]]]:
    """Trains for three epochs; returns the seconds at their ends and the history."""
    set_compute_time(strategy, 0.03, SlowWorkers(5.0, [3]))
    with strategy.scope():
        model = make_model()
    times = Times()
    history = model.fit(
        data.train(batch_size=256),
        validation_data=data.test(batch_size=2500),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[times],
    ).history
    print("steps of each worker in the last epoch:", strategy.worker_steps(model))
    report = strategy.aggregation(model)
    print(f"{report.included} gradients were applied, and {report.excluded} were left out.")
    print(f"Their age was {report.age_mean:.2f} on average, and {report.age_max} at most.")
    return times.seconds[1:], history


# %% [markdown]
# ## Synchronous training
#
# A global batch of 1024 examples consists of four local batches of 256. Under `SyncStrategy` each
# worker computes one of them, and then waits until the parameter server has applied the mean of all
# four. So the slow worker sets the pace for all.

# %%
results = {
    "synchronous": train(
        recsync.SyncStrategy(cluster, global_batch_size=1024, local_batch_size=256)
    )
}

# %% [markdown]
# ## GBA
#
# Under `GBAStrategy` no worker waits. The parameter server collects gradients, and whenever four
# are there, it applies their mean. The update is as large as in synchronous training, so the
# learning rate needs no tuning. Gradients that are more than `staleness_tolerance` global steps old
# are left out. Only one line of the program changes.

# %%
results["GBA"] = train(
    recsync.GBAStrategy(
        cluster, global_batch_size=1024, local_batch_size=256, staleness_tolerance=4
    )
)

# %% [markdown]
# The fast workers have done most of the steps. The *age* of a gradient says how many global steps
# it is late. The oldest gradients are those of the slow worker. They are still within the
# tolerance, so that few or none are left out.
#
# ## The comparison

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
for (name, (seconds, history)), style in zip(results.items(), ("o-", "s--"), strict=True):
    axes[0].plot(range(1, 4), history["val_loss"], style)
    axes[1].plot(seconds, history["val_loss"], style, label=name)
axes[0].set(xlabel="epoch", ylabel="loss on the test data", xticks=range(1, 4))
axes[1].set(xlabel="seconds")
axes[1].legend()
figure.tight_layout()
plt.show()

# %%
(sync_seconds, sync), (gba_seconds, gba) = results.values()
speedup = (sync_seconds[-1] - sync_seconds[0]) / (gba_seconds[-1] - gba_seconds[0])
print(f"After the first epoch, GBA was {speedup:.1f} times as fast.")
print(f"AUC: synchronous {sync['val_AUC'][-1]:.4f}, GBA {gba['val_AUC'][-1]:.4f}")
cluster.close()

# %% [markdown]
# For each epoch, both losses are nearly the same (left). GBA reaches them sooner (right). The first
# epoch has the time in it in which TensorFlow traces the training step, so speeds are compared
# without it. How much faster GBA is depends on how much slower the slowest worker is, and, as all
# workers share your machine here, on what else runs on it.
#
# ## Where to go from here
#
# - [Training modes](../modes.md) compares all modes, and says how to choose `staleness_tolerance`.
# - [Switching modes at a checkpoint](../modes.md#switching-modes-at-a-checkpoint): a model can be
#   trained synchronously by night, and by GBA by day, when the cluster is busy.
# - [Slow and failing machines, on one machine](../testing.md) has more of `recsync.testing`.
# - The next tutorial has [a worker and a parameter server die](when_servers_die.ipynb).
