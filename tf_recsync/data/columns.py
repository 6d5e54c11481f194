"""Descriptions of columns: what features they become."""

import dataclasses
import itertools
from numbers import Real

from tf_recsync._checks import check_bool, check_text, integer, list_of, number, plain_values
from tf_recsync.data import _fields


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A column of numbers.

    It becomes a numeric feature, `(x - mean) / std` with `log(1 + max(x, 0))` in place of x if
    `log1p`, and 0 (the mean) where the value is missing. With `boundaries` it becomes a categorical
    feature `<name>_bucket` as well: 0 for a missing value, and otherwise 1 plus the number of
    boundaries that are less than or equal to x.

    Args:
        name: The column.
        mean: Mean for the standardisation. Default 0.
        std: Standard deviation for the standardisation, greater than 0. Default 1.
        log1p: Whether the logarithm is taken first. Default False.
        boundaries: Ascending boundaries between the buckets, in units of the column itself.
            Empty (the default) for no buckets.

    Raises:
        ValueError: If `mean`, `std` or `boundaries` have no finite numbers, `std` is not positive
            or `boundaries` do not ascend.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.NumericColumn("age", mean=40, std=12, boundaries=(18, 65)).bucket_name
    'age_bucket'
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    log1p: bool = False
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the numbers, and takes Python's in place of others, which can be saved."""
        plain_values(self)
        check_text("name", self.name)
        of = f"of column {self.name!r}"
        check_bool(f"log1p {of}", self.log1p)
        boundaries = list_of(f"boundaries {of}", self.boundaries, Real)
        for name, value in (
            ("mean", number(f"mean {of}", self.mean)),
            ("std", number(f"std {of}", self.std, above=0)),
            ("boundaries", tuple(number(f"boundaries {of}", b) for b in boundaries)),
        ):
            object.__setattr__(self, name, value)
        if any(a >= b for a, b in itertools.pairwise(self.boundaries)):
            raise ValueError(
                f"boundaries={self.boundaries} of column {self.name!r}: must be ascending."
            )

    @property
    def bucket_name(self) -> str:
        """Name of the categorical feature that the buckets make."""
        return f"{self.name}_bucket"


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories, numbered by a vocabulary or by hashing.

    With a vocabulary: 0 for a missing value, 1 for a value outside the vocabulary, 2 for its first
    word and so on. With hashing: 0 for a missing value, `1 + fingerprint mod (hash_buckets - 1)`
    for all others.

    Args:
        name: The column.
        vocabulary: The known values, without duplicates; spaces around them do not count. Default
            empty.
        hash_buckets: Number of ids, at least 2; 0 (the default) with a vocabulary.
        multi_hot: Whether a row has any number of categories, none included. Default False. The
            feature is then a `tf.RaggedTensor` `[batch, None]`. Parquet and TFRecord have a list
            in such a column, CSV has a field in which `separator` stands between the categories.
        separator: What stands between the categories of a field; a space stands for one or more.
            Default `"|"`; unused unless `multi_hot`, and by Parquet and TFRecord.
        weights: Name of a column with a weight for each category of this one, as many; they become
            the feature `<name>_weights`, a float32 `tf.RaggedTensor` `[batch, None]`. Default
            None: there are no weights. Needs `multi_hot`.

    Raises:
        ValueError: Unless there is either a vocabulary of texts or a number of buckets, if
            `weights` is given without `multi_hot`, or if `name` or `separator` is empty.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.CategoricalColumn("color", vocabulary=("red", "blue")).size
    4
    """

    name: str
    vocabulary: tuple[str, ...] = ()
    hash_buckets: int = 0
    multi_hot: bool = False
    separator: str = "|"
    weights: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        check_text("name", self.name)
        of = f"of column {self.name!r}"
        check_bool(f"multi_hot {of}", self.multi_hot)
        words = _fields.stripped(list_of(f"vocabulary {of}", self.vocabulary, str))
        object.__setattr__(self, "vocabulary", words)
        integer(f"hash_buckets {of}", self.hash_buckets, 0)
        if bool(self.vocabulary) == bool(self.hash_buckets) or self.hash_buckets == 1:
            raise ValueError(
                f"column {self.name!r} with hash_buckets={self.hash_buckets} and "
                f"{len(self.vocabulary)} words: give either a vocabulary or hash_buckets of at "
                "least 2."
            )
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError(f"vocabulary of column {self.name!r}: has duplicates.")
        if self.weights is not None and not self.multi_hot:
            raise ValueError(
                f"weights={self.weights!r} of column {self.name!r}: needs multi_hot=True."
            )
        check_text(f"separator {of}", self.separator)
        if self.weights is not None:
            check_text(f"weights {of}", self.weights)

    @property
    def size(self) -> int:
        """The number of ids."""
        return self.hash_buckets or len(self.vocabulary) + 2

    @property
    def weights_name(self) -> str:
        """Name of the feature that the weights become."""
        return f"{self.name}_weights"


@dataclasses.dataclass(frozen=True)
class CrossedColumn:
    """The combination of categorical features as a feature of its own, named `a_x_b`.

    The number of a combination is `id of a * size of b + id of b`, and so on with more columns.
    With `hash_buckets`, the id is the fingerprint of the number's text, `mod hash_buckets`. Where
    there are more than 2**63 combinations, it is that of the ids' texts with commas between them.

    Args:
        columns: Names of at least two categorical features, `<name>_bucket` included.
        hash_buckets: Number of ids that the combinations are hashed to; 0 (the default) numbers
            all of them without collisions, if there are at most 2**63.

    Raises:
        ValueError: If there are fewer than two columns or `hash_buckets` is negative.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.data.CrossedColumn(("color", "age_bucket"), hash_buckets=100).name
    'color_x_age_bucket'
    """

    columns: tuple[str, ...]
    hash_buckets: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        plain_values(self)
        object.__setattr__(self, "columns", list_of("columns", self.columns, str))
        if len(self.columns) < 2:
            raise ValueError(f"columns={self.columns}: a cross needs at least two columns.")
        integer("hash_buckets", self.hash_buckets, 0)

    @property
    def name(self) -> str:
        """Name of the feature."""
        return "_x_".join(self.columns)
