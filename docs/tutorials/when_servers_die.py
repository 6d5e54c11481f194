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
# # When servers die
#
# At the end of this tutorial you will have killed a worker and a parameter server in the middle of
# training. You will have seen that training goes on, what the log says about it, and that no batch
# is missing at the end.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import logging
import time

import keras
import matplotlib.pyplot as plt

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.testing import FailureSchedule, set_compute_time

# %% [markdown]
# ## The model
#
# The data are a made-up click log of 300 batches. The embedding tables of the model are divided
# between two parameter servers.

# %%
data = recsync.data.Synthetic(rows=38_400, test_rows=10_000, cardinalities=[2000, 50], numeric=4)
train_data = data.train(batch_size=128)
print(len(train_data), "batches")


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
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["AUC"])
    return model


# %% [markdown]
# The coordinator writes what happens to the log of Python's `logging`, under the name `absl`. This
# program prints its messages, with the seconds since training began.


# %%
class Printer(logging.Handler):
    """Prints each message of the log."""

    began = time.monotonic()

    def emit(self, record):
        # The reason at the end of some messages is that of the network, and long.
        print(f"{time.monotonic() - self.began:5.1f} s  {record.getMessage()[:150]}")


log = logging.getLogger("absl")
log.handlers, log.propagate = [Printer()], False

# %% [markdown]
# ## The cluster
#
# Servers of a `LocalCluster` are processes, so they can be killed as machines can fail:
# `cluster.kill("worker", 1)` ends a process without a warning. Here a `FailureSchedule` kills at
# given numbers of steps: first a worker, then a parameter server. Each one is started again, as
# systemd or Kubernetes would do it. (Each step is made 20 ms longer, so that something can happen
# meanwhile.)

# %%
cluster = recsync.LocalCluster(workers=3, ps=2)
strategy = recsync.AsyncStrategy(cluster)
set_compute_time(strategy, 0.02)
with strategy.scope():
    model = make_model()

failures = [
    (60, "kill", "worker", 1),
    (90, "restart", "worker", 1),
    (180, "kill", "ps", 0),
    (180, "restart", "ps", 0),
]

# %% [markdown]
# ## Training
#
# A lost worker holds no parameters: the others go on and do its batches. A lost parameter server
# takes parameters with it. The callback `Checkpoint` saves them while training goes on, here every
# 50 steps. When the server is back, it reads its part of the latest checkpoint, and training goes
# on.


# %%
class Steps(keras.callbacks.Callback):
    """Notes when how many steps are done."""

    def on_train_begin(self, logs=None):
        Printer.began = time.monotonic()
        self.seconds, self.steps = [0.0], [0]

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.monotonic() - Printer.began)
        self.steps.append(batch + 1)


steps = Steps()
checkpoint = recsync.callbacks.Checkpoint("checkpoints", every_steps=50)
with FailureSchedule(cluster, failures, unit="steps") as schedule:
    history = model.fit(
        train_data,
        shuffle=False,
        verbose=0,
        callbacks=[steps, checkpoint, schedule, recsync.callbacks.TrainingReport()],
    ).history

# %% [markdown]
# ## What was lost
#
# `strategy.losses` says how often a worker was lost. The batches that worker 1 had in its hands
# were trained on at the end of the epoch: their number is `retried`. `batches` counts those that
# nobody has trained on. Some may have been trained on twice, because nobody knew that they had been
# done: their number is `repeated`.

# %%
losses = strategy.losses(model)
print(losses)
print("steps that the epoch has counted:", steps.steps[-1], "of", len(train_data))
print("recoveries of a parameter server:", checkpoint.recoveries)
print("checkpoints:", len(checkpoint.saved))

# %% [markdown]
# So each of the 300 batches was trained on. But what the lost parameter server had learned after
# its last checkpoint is missing in its part of the parameters. If that is not good enough,
# `Checkpoint(..., recovery="all")` has all parameters go back to the checkpoint, and the batches
# since then are trained on again.
#
# The curve of the steps over time shows both failures. While a worker is away, the curve is less
# steep. While the parameter server is away, the curve is flat.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(steps.seconds, steps.steps)
for seconds, (_, action, job, index) in schedule.happened:
    is_kill = action == "kill"
    axes.axvline(seconds, color="tab:red" if is_kill else "tab:green", linestyle=":")
    side = "right" if is_kill else "left"
    axes.text(seconds, 300, f" {action} {job}:{index} ", rotation=90, va="top", ha=side)
axes.set(xlabel="seconds", ylabel="steps")
plt.show()

# %%
print(model.evaluate(data.test(batch_size=2500), verbose=0, return_dict=True))
cluster.close()

# %% [markdown]
# If your own program dies, start it again: with the same `Checkpoint`, its first `fit` goes on
# where the latest checkpoint was saved.
#
# ## Where to go from here
#
# - [Failures and checkpoints](../operations.md) says what happens when which server dies, and what
#   a checkpoint has.
# - [Slow and failing machines, on one machine](../testing.md) describes `FailureSchedule`.
# - The next tutorial needs [no parameter servers at all](decentralized.ipynb).
