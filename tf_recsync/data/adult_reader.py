"""The UCI Adult data set (census income), the one of the first Wide & Deep tutorials."""

import os

from tf_recsync._checks import checked_path
from tf_recsync.data.columns import CrossedColumn
from tf_recsync.data.csv_reader import Csv
from tf_recsync.data.schema import Schema

_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "classification",
)
_NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_CATEGORICAL = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
# fnlwgt has none: it says how many people a row stands for, which tells little of their income.
# education-num has none: it is education by another name, which is a category already.
_BUCKETS = {"age": 20, "capital-gain": 24, "capital-loss": 16, "hours-per-week": 10}
_CROSSES = (
    CrossedColumn(("education", "occupation")),
    CrossedColumn(("marital-status", "age_bucket")),
    CrossedColumn(("relationship", "sex")),
)


def adult(location: str | os.PathLike[str]) -> Csv:
    r"""Reads the UCI Adult data set: does a person earn more than 50,000 dollars a year?

    The features are the six numbers, standardised (capital gains and losses as logarithms), the
    eight categories, quantile buckets of four of the numbers, and three crosses of categories. All
    statistics come from the training file.

    Args:
        location: A folder with `adult.data` and `adult.test`, as they are distributed or with
            the suffix `.gz`, with or without a line of column names.

    Returns:
        The data set. The label is 1 for `>50K`; `adult.test` may write it as `>50K.`.

    Raises:
        FileNotFoundError: If one of the files is missing; the message names it.
        ValueError: If a line of the training file is malformed.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> row = (
        ...     "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, "
        ...     "White, Male, 2174, 0, 40, United-States, >50K"
        ... )
        >>> _ = (folder / "adult.data").write_text(row + "\n")
        >>> _ = (folder / "adult.test").write_text(row + ".\n")
        >>> data = adult(folder)
        >>> features, label = next(iter(data.test(batch_size=1)))
        >>> features["numeric"].shape.as_list(), label.numpy().tolist()
        ([1, 6], [[1.0]])
    """
    location = checked_path(location, "location")
    train, test = (_find(location, name) for name in ("adult.data", "adult.test"))
    schema = Schema.fit(
        train,
        columns=_COLUMNS,
        label="classification",
        positive=(">50K", ">50K."),
        negative=("<=50K", "<=50K."),
        numeric=_NUMERIC,
        categorical=_CATEGORICAL,
        log1p=("capital-gain", "capital-loss"),
        buckets=_BUCKETS,
        crosses=_CROSSES,
        # The first line of the original adult.test.
        comment="|",
    )
    return Csv(train, schema, test_path=test)


def _find(location: str, name: str) -> str:
    """Returns the path of a file that may have been compressed."""
    plain = os.path.join(location, name)
    for path in (plain, plain + ".gz"):
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(f"No file {name} or {name}.gz in location={location!r}.")
