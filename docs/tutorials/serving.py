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
# # Serving a model
#
# At the end of this tutorial you will have exported a trained model, had another process compute
# scores with it that has nothing but TensorFlow, and served new versions of it that were published
# while training went on.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import json
import logging
import pathlib
import subprocess
import sys

import keras
import matplotlib.pyplot as plt
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.testing import set_compute_time

logging.getLogger("tensorflow").setLevel(logging.WARNING)  # TensorFlow tells of files it writes.

# %% [markdown]
# ## Training
#
# The data are a made-up click log, and the model is trained on two workers and a parameter server.

# %%
data = recsync.data.Synthetic(rows=40_000, test_rows=2_000, cardinalities=[2000, 50], numeric=4)


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


cluster = recsync.LocalCluster(workers=2, ps=1)
strategy = recsync.AsyncStrategy(cluster)
with strategy.scope():
    model = make_model()
history = model.fit(data.train(batch_size=256), shuffle=False, verbose=2)

# %% [markdown]
# ## Exporting
#
# `export_model` writes the model as a SavedModel. It has only TensorFlow's own operations.

# %%
recsync.export_model(model, "exported", verbose=False)
print(sorted(path.name for path in pathlib.Path("exported").iterdir()))

# %% [markdown]
# The program that serves the model runs in a process of its own. It does not know `tf_recsync`; it
# loads the model by TensorFlow. A server such as TensorFlow Serving does the same.

# %%
pathlib.Path("serve.py").write_text("""
import json
import sys

import tensorflow as tf

served = tf.saved_model.load("exported")
features = json.load(open("features.json"))
scores = served.serve(
    {
        "C1": tf.constant(features["C1"], tf.int64),
        "C2": tf.constant(features["C2"], tf.int64),
        "numeric": tf.constant(features["numeric"], tf.float32),
    }
)
assert "tf_recsync" not in sys.modules
json.dump(scores.numpy().ravel().tolist(), open("scores.json", "w"))
""")

features, labels = next(iter(data.test(batch_size=500)))
with open("features.json", "w") as file:
    json.dump({name: value.numpy().tolist() for name, value in features.items()}, file)
subprocess.run([sys.executable, "serve.py"], check=True, capture_output=True)
with open("scores.json") as file:
    served = np.array(json.load(file))

predicted = model.predict_on_batch(features).ravel()
print("served:", served[:4].round(4))
print("of the model itself:", predicted[:4].round(4))
print("they agree:", np.allclose(served, predicted, atol=1e-5))

# %% [markdown]
# ## Publishing while training goes on
#
# A model that trains all day is published again and again. With `tables="apart"`, the parameter
# servers write the embedding tables themselves. Most versions are *deltas*: they have only those
# rows that have changed since the version before. The first version is full, and so is every third
# one here.
#
# (Each step is made 20 ms longer here, so that training lasts for some seconds.)

# %%
set_compute_time(strategy, 0.02)
publish = recsync.callbacks.Publish("published", every_seconds=2, tables="apart", full_every=3)
history = model.fit(
    data.train(batch_size=256), epochs=2, shuffle=False, verbose=0, callbacks=[publish]
)
for publication in publish.publications:
    print(f"version {publication.version}: global step {publication.global_step}")

# %% [markdown]
# ## Serving what was published
#
# A `TableReader` opens the latest version. It maps the rows into memory, so that tables may be
# larger than the memory. `reader.vectors` looks the ids up, and the model computes with the
# vectors.

# %%
reader = recsync.serving.TableReader("published")


def score(features) -> np.ndarray:
    now = reader.current  # What is looked up and what computes with it are of one version.
    vectors = now.vectors({name: features[name] for name in data.spec.categorical})
    return now.model.serve({**vectors, "numeric": features["numeric"]}).numpy().ravel()


print("version", reader.current.version)
before = score(features)
predicted = model.predict_on_batch(features).ravel()
print("the same as the model:", np.allclose(before, predicted, atol=1e-5))

# %% [markdown]
# After more training there is a new version. `refresh` takes it over, while other threads go on
# with the version before.

# %%
history = model.fit(data.train(batch_size=256), shuffle=False, verbose=0, callbacks=[publish])
reader.refresh()
print("version", reader.current.version)
after = score(features)

# %%
figure, axes = plt.subplots(figsize=(4, 4))
axes.scatter(before, after, s=5)
axes.axline((0, 0), slope=1, color="gray", linestyle=":")
axes.set(xlabel="scores of the version before", ylabel="scores of the latest version")
plt.show()

# %%
cluster.close()

# %% [markdown]
# ## Where to go from here
#
# - [Serving](../serving.md) describes lists of ids, the signatures of exported models, and what is
#   in a published version.
# - [Publishing models](../operations.md#publishing-models) says where versions can be written, and
#   what happens after a crash.
# - [Observability](../observability.md) says how to watch a training that goes on for days.
