"""Data sets for click models, all with the same layout of features.

`Criteo` reads click logs, `Csv` any CSV file described by a `CsvSchema`, `adult` the census income
data, and `Synthetic` makes up a click log of any size. All are `ClickData`; their `FeatureSpec`
says what a model needs to know. `load_libsvm` reads a file in LIBSVM's format into arrays.
"""

from tf_recsync.data._spec import ClickData, FeatureSpec
from tf_recsync.data.adult_reader import adult
from tf_recsync.data.criteo import Criteo
from tf_recsync.data.csv_reader import Csv
from tf_recsync.data.csv_schema import (
    CategoricalColumn,
    CrossedColumn,
    CsvSchema,
    NumericColumn,
)
from tf_recsync.data.libsvm_reader import load_libsvm
from tf_recsync.data.synthetic import Synthetic

__all__ = [
    "CategoricalColumn",
    "ClickData",
    "CrossedColumn",
    "Criteo",
    "Csv",
    "CsvSchema",
    "FeatureSpec",
    "NumericColumn",
    "Synthetic",
    "adult",
    "load_libsvm",
]
