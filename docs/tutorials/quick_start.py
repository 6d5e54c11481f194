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
# # First steps
#
# At the end of this tutorial you will have trained the same click model twice: with plain Keras in
# one process, and then on a cluster of two workers and a parameter server. Only the second training
# needs a strategy, and the model is the same in both.
#
# You need to know Keras. The cluster consists of processes on your own machine, and the data are
# made up, so that nothing is downloaded.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import matplotlib.pyplot as plt

import tf_recsync as recsync

# %% [markdown]
# Once TensorFlow is connected to a cluster, it gives the devices of a process other names. This
# program makes a model before it connects, so it asks for the final names at once. A program that
# makes its strategy first does not need this line.

# %%
recsync.use_final_device_names()

# %% [markdown]
# ## The data
#
# `Synthetic` is a made-up click log. Each row has four numbers, two ids, and a label that says
# whether there was a click. `data.spec.categorical` has the names of the features of ids, and how
# many ids each of them has.

# %%
data = recsync.data.Synthetic(rows=40_000, test_rows=10_000, cardinalities=[2000, 50], numeric=4)
print(data.spec.categorical)

# %% [markdown]
# `data.train` and `data.test` are ordinary `tf.data.Dataset`s of batches.

# %%
features, label = next(iter(data.train(batch_size=3)))
for name, value in features.items():
    print(name, value.numpy(), sep="\n")
print("label", label.numpy(), sep="\n")

# %% [markdown]
# ## The model
#
# The model is an ordinary Keras model. Its ids go through embedding tables, and the vectors of
# these tables go through dense layers, together with the numbers. The optimizer is one of this
# package. It works like the optimizer of the same name in Keras, and its updates can run on
# parameter servers.


# %%
def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    tables = data.spec.categorical
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    vectors = [keras.layers.Embedding(tables[name], 8)(inputs[name]) for name in tables]
    inputs["numeric"] = keras.Input((4,), name="numeric")
    hidden = keras.layers.Concatenate()([*vectors, inputs["numeric"]])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(recsync.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=["AUC"])
    return model


# %% [markdown]
# ## Training in one process
#
# Without a strategy, Keras trains as it always does. (`shuffle=False` says that the data set comes
# in its own order. Keras would warn of it otherwise.)

# %%
model = make_model()
alone = model.fit(
    data.train(batch_size=256),
    validation_data=data.test(batch_size=2000),
    epochs=3,
    shuffle=False,
    verbose=2,
)

# %% [markdown]
# ## Training on a cluster
#
# `LocalCluster` starts three TensorFlow servers, each in a process of its own. Two of them are
# *workers*, which compute gradients. The third one is a *parameter server*, which holds the
# parameters and applies the gradients. Your program is the *coordinator*: it hands out the batches,
# and `fit` runs in it.
#
# A strategy says how the workers work together. Under `AsyncStrategy` each gradient is applied as
# it arrives, and no worker waits for another one. Two things are new in the program: the model is
# made within `strategy.scope()`, so that its variables are placed on the parameter server, and a
# callback adds figures of the cluster to the logs of each epoch.

# %%
cluster = recsync.LocalCluster(workers=2, ps=1)
strategy = recsync.AsyncStrategy(cluster)
with strategy.scope():
    model = make_model()
together = model.fit(
    data.train(batch_size=256),
    validation_data=data.test(batch_size=2000),
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[recsync.callbacks.TrainingReport()],
)
print("AUC on the test data:", [round(auc, 4) for auc in together.history["val_AUC"]])

# %% [markdown]
# ## What is different
#
# While a worker computes a gradient, the other worker may change the parameters. A gradient then
# arrives late: it was computed for parameters that are not the latest ones. How late it is is
# called its [staleness](../staleness.md). It is 1 if nothing came between, and it grows with the
# number of workers.

# %%
print("steps of each worker in the last epoch:", strategy.worker_steps(model))
print("mean staleness in each epoch:", [round(s, 2) for s in together.history["staleness"]])

# %% [markdown]
# The AUC of both trainings is about the same. It would not be exactly the same in a second run
# either, as which worker is first depends on the machine.

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(range(1, 4), alone.history["val_AUC"], "o-", label="one process")
axes.plot(range(1, 4), together.history["val_AUC"], "s--", label="two workers")
axes.axhline(data.best_auc(), color="gray", linestyle=":", label="the best possible")
axes.set(xlabel="epoch", ylabel="AUC on the test data", xticks=[1, 2, 3])
axes.legend()
plt.show()

# %% [markdown]
# The servers end with the program, or when you close the cluster.

# %%
cluster.close()

# %% [markdown]
# ## Where to go from here
#
# - The next tutorial reads [your own click log](your_own_click_log.ipynb).
# - [Quick start](../quick_start.md) explains each line once more, and shows programs that train
#   larger models.
# - [Choosing a strategy](../strategies.md) compares the ways in which workers can work together.
# - [Running on several machines](../cluster.md) replaces `LocalCluster` by machines of your own.
