"""Data sets for click models, all with the same layout of features.

`Csv`, `TfRecord` and `Parquet` read files whose columns a `Schema` describes, and `Days` gives one
day of them after the other; `Criteo` reads click logs, `adult` the census income data, and
`Synthetic` makes up a click log of any size. All are `ClickData`; their `FeatureSpec` says what a
model needs to know. `load_libsvm` reads a file in LIBSVM's format into arrays.
"""

from tf_recsync import _deprecation
from tf_recsync.data._spec import ClickData, FeatureSpec
from tf_recsync.data.adult_reader import adult
from tf_recsync.data.columns import CategoricalColumn, CrossedColumn, NumericColumn
from tf_recsync.data.criteo import Criteo
from tf_recsync.data.csv_reader import Csv
from tf_recsync.data.days import Days
from tf_recsync.data.libsvm_reader import load_libsvm
from tf_recsync.data.parquet_reader import Parquet
from tf_recsync.data.schema import Schema
from tf_recsync.data.synthetic import Synthetic
from tf_recsync.data.tfrecord_reader import TfRecord

__all__ = [
    "CategoricalColumn",
    "ClickData",
    "CrossedColumn",
    "Criteo",
    "Csv",
    "Days",
    "FeatureSpec",
    "NumericColumn",
    "Parquet",
    "Schema",
    "Synthetic",
    "TfRecord",
    "adult",
    "load_libsvm",
]

__getattr__ = _deprecation.renamed_names(__name__, {"CsvSchema": ("Schema", Schema)})
