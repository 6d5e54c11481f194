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
# # Your own click log
#
# At the end of this tutorial you will have trained a model on a click log in CSV files, with raw
# user names, a column of several values, and a file for each day. You will have seen how good the
# model is at predicting the clicks of the following day.
#
# The files are made up here, so that you can run the tutorial as it is. To read your own files,
# change the names of the columns.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import csv
import datetime
import itertools
import pathlib

import keras
import matplotlib.pyplot as plt
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import Admission, EmbeddingCollection, FeatureConfig, TableConfig

# %% [markdown]
# ## The files
#
# A row of the log says when an advertisement was shown to which user, on which device, how old the
# user is (if that is known), which topics the page was about, and whether there was a click. Some
# users appear often and most of them rarely, and each day brings new ones.

# %%
TOPICS = np.array(["sport", "news", "music", "cars", "food", "games", "travel"])
DEVICES = np.array(["phone", "tablet", "laptop"])
DAYS = [datetime.date(2024, 3, day) for day in range(1, 6)]
folder = pathlib.Path("clicks")
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(1)
clicks_of_user = rng.normal(size=5000)  # Some users click often,
clicks_on_topic = rng.normal(size=len(TOPICS))  # and some topics are clicked on often.

for number, day in enumerate(DAYS):
    with open(folder / f"{day}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "user", "device", "age", "topics", "click"])
        for second in np.sort(rng.integers(0, 86_400, 8000)):
            user = (rng.zipf(1.3) + rng.integers(0, 5 + 5 * number)) % len(clicks_of_user)
            topics = rng.choice(len(TOPICS), size=rng.integers(1, 4), replace=False)
            device = rng.integers(len(DEVICES))
            age = 20 + user % 50
            logit = clicks_of_user[user] + clicks_on_topic[topics].mean() + (device == 0) - 2.0
            writer.writerow(
                [
                    datetime.datetime.combine(day, datetime.time())
                    + datetime.timedelta(seconds=int(second)),
                    f"user-{user}",
                    DEVICES[device],
                    age if rng.random() < 0.8 else "",
                    "|".join(TOPICS[topics]),
                    int(rng.random() < 1 / (1 + np.exp(-logit))),
                ]
            )
print((folder / "2024-03-01.csv").read_text()[:300])

# %% [markdown]
# ## The schema
#
# A `Schema` says what the columns are. `Schema.fit` reads the first day, and computes the
# vocabularies of the devices and topics, and the mean and the deviation of the age. A missing age
# becomes the mean. Users get no vocabulary, as new ones come every day: their names are hashed to
# so many numbers that practically no two users share one.

# %%
schema = recsync.data.Schema.fit(
    folder / "2024-03-01.csv",
    label="click",
    positive=("1",),
    numeric=("age",),
    categorical=("user", "device", "topics"),
    hashed={"user": 2**62},
    multi_hot={"topics": "|"},
    timestamp="time",
)
for column in (*schema.numeric, *schema.categorical):
    print(column)

# %% [markdown]
# With the schema, files become batches. The topics of a row are a list, so those of a batch are a
# ragged tensor.

# %%
first = recsync.data.Csv(folder / "2024-03-01.csv", schema, test_fraction=0)
features, label = next(iter(first.train(batch_size=3)))
for name, value in features.items():
    print(name, value.to_list() if hasattr(value, "to_list") else value.numpy().tolist())
print("label", label.numpy().tolist())

# %% [markdown]
# The timestamp is no feature. It chooses rows: here those of one morning.

# %%
morning = recsync.data.Csv(
    folder,
    schema,
    test_fraction=0,
    between=(datetime.datetime(2024, 3, 2, 6), datetime.datetime(2024, 3, 2, 12)),
)
print(sum(len(label) for _, label in morning.train(batch_size=1000)), "rows")

# %% [markdown]
# ## The model
#
# An `EmbeddingCollection` looks up all features of ids. The table of users has *keys*: it takes any
# number, and gives a row to a user that training has looked up twice. When the table is full, a new
# user takes the row of one who has not come for a long time. All users without a row share one
# vector, which is trained, too. The vectors of a row's topics are averaged.


# %%
def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "device": keras.Input((), dtype="int64", name="device"),
        "topics": keras.Input((None,), dtype="int64", name="topics", ragged=True),
    }
    sizes = schema.spec.categorical
    vectors = EmbeddingCollection(
        tables=[
            TableConfig(
                "users",
                rows=2000,
                dimension=8,
                keys="any",
                admission=Admission(min_count=2),
                unknown="trained",
            ),
            TableConfig("devices", rows=sizes["device"], dimension=2),
            TableConfig("topics", rows=sizes["topics"], dimension=8, combiner="mean"),
        ],
        features=[
            FeatureConfig("user", table="users"),
            FeatureConfig("device", table="devices"),
            FeatureConfig("topics", table="topics"),
        ],
        concatenate=True,
        name="embeddings",
    )(inputs)
    inputs["numeric"] = keras.Input((1,), name="numeric")
    hidden = keras.layers.Concatenate()([vectors, inputs["numeric"]])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(
        recsync.optimizers.Adagrad(0.1),
        "binary_crossentropy",
        metrics=[recsync.metrics.AUC(name="auc"), recsync.metrics.NormalizedEntropy(name="ne")],
    )
    return model


# %% [markdown]
# ## Training, day by day
#
# `Days` finds the files of each day. Each day trains the model, and the day after it tests the
# model: that is what the model is for. Two metrics tell how good it is.
#
# - The **AUC** is the share of pairs of a click and a non-click that the model puts in the right
#   order. Guessing has 0.5, and 1 is perfect.
# - The **normalized entropy** (NE) is the loss divided by the loss of a model that predicts the
#   mean click rate for every row. Below 1 is better than that, and lower is better.

# %%
cluster = recsync.LocalCluster(workers=2, ps=1)
strategy = recsync.AsyncStrategy(cluster)
with strategy.scope():
    model = make_model()

days = list(
    recsync.data.Days(
        folder,
        "2024-03-01",
        "2024-03-05",
        lambda files: recsync.data.Csv(files, schema, test_fraction=0),
    )
)
results = []
for (day, today), (_, tomorrow) in itertools.pairwise(days):
    model.fit(today.train(128, shuffle=10_000, seed=1), epochs=2, shuffle=False, verbose=0)
    result = model.evaluate(tomorrow.train(1000), verbose=0, return_dict=True)
    keys = strategy.tables(model)["embeddings/users"]
    print(f"{day}: {keys.used} users have rows; on the next day", end=" ")
    print(f"AUC {result['auc']:.3f}, NE {result['ne']:.3f}")
    results.append(result)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharex=True)
names = [f"{day:%b %d}" for day in DAYS[:-1]]
titles = {"auc": "AUC", "ne": "normalized entropy"}
for axis, (metric, title) in zip(axes, titles.items(), strict=True):
    axis.plot(names, [result[metric] for result in results], marker="o")
    axis.set(title=f"{title} on the next day", xlabel="trained up to")
figure.tight_layout()
plt.show()

# %% [markdown]
# The model becomes better with each day, as it gets to know more users and knows them better.

# %%
print(strategy.tables(model)["embeddings/users"])
cluster.close()

# %% [markdown]
# `admitted` users got a row. `refused` counts lookups in training of users that came for the first
# time, and `unknown` those of users without a row in evaluation.
#
# ## Where to go from here
#
# - [Data](../data.md) describes schemas, Parquet and TFRecord files, weights, and what happens to
#   malformed rows.
# - [Raw ids: tables with keys](../keys.md) says when to use keys, and what is admitted and evicted.
# - [Continual training, day by day](../continual.md) goes further with `Days`.
# - [Serving](../serving.md#from-rows-of-a-log-to-the-models-inputs) says how a program that serves
#   the model makes ids of the raw texts of a row.
# - The next tutorial takes [a model from synchronous training to GBA](from_sync_to_gba.ipynb).
