"""A made-up click log with a known click model, of any size."""

import functools
import math
from collections.abc import Sequence
from numbers import Integral

import numpy as np
import tensorflow as tf

from tf_recsync._checks import integer, list_of, number
from tf_recsync.data import _spec
from tf_recsync.metrics.exact import exact_auc

# Roughly the Criteo data set, with the largest columns cut down to 100,000 ids.
_CARDINALITIES = (
    *(1_460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 100_000, 3_194),
    *(27, 14_992, 100_000, 10, 5_652, 2_173, 4, 100_000, 18, 15, 100_000, 105, 100_000),
)
# Rows are numbered by 32 bits: training rows from 0, test rows and rows for calibration behind.
_TEST_START = 1 << 31
_CALIBRATION_START = 3 << 30
_CALIBRATION_ROWS = 1 << 16
_BLOCK = 8192
_READER_BLOCK = 1024  # Rows that several readers hand out at once.
_MISSING_SHARE = 0.1
_PAIR_WEIGHT = 0.5

Rows = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


class Synthetic(_spec.ClickData):
    """A click log in the shape of the Criteo data set, made up on the fly.

    The numeric features `I1`, ... are exponentially distributed, as logarithms of counts are, and 0
    in a tenth of the rows. The ids of the categorical features `C1`, ... follow a Zipf
    distribution. A click has the probability `sigmoid(bias + signal * z)`, where `z` (mean 0,
    variance 1) is a sum of an effect of every single id, an effect linear in each numeric feature,
    and an effect of every combination of ids for some pairs of features with few ids. As the
    probabilities are known, so is how well a model can do at best.

    Each row is a function of the seed and its own number: it does not depend on the batch size, the
    shuffling or the number of rows (but for the rounding of the click probability, which may turn
    one label in ten million). Data sets that differ only in `rows` have the same test part.

    For continual training the rows can be those of several days (`days`), from each to the next of
    which what makes people click changes a little (`drift`); `day` gives the rows of one day. The
    test part then is the day after the last.

    Args:
        rows: Number of training rows, from 1 to 2**31.
        test_rows: Number of test rows, from 0 to 2**30. Default 100,000.
        cardinalities: Number of ids of each categorical feature, each at least 1. None (the
            default) takes 26 features like those of Criteo, with up to 100,000 ids.
        numeric: Number of numeric features, at least 0. Default 13.
        seed: Seed of everything that is random, features and click model. Default 0.
        base_rate: Mean click probability, between 0 and 1. Default 0.25.
        signal: Standard deviation of the logits, at least 0; with more signal clicks can be
            predicted better. Default 1.5.
        interactions: Number of pairs of features with an effect of the combination, cut down to
            the number of pairs there are. Default 8.
        zipf: Exponent of the Zipf distribution, at least 0 (all ids equally frequent).
            Default 1.1.
        days: Number of days that the training rows are of, in equal parts; it must divide `rows`.
            Default 1.
        drift: The share of the click model that is replaced from day to day, from 0 to 1. The
            logits of a row on day 0 and on day n have a correlation of about
            cos(pi / 2 * drift * n), until after 1 / drift days nothing is left of the first
            click model. Default 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> data = Synthetic(rows=1000, test_rows=500, cardinalities=[10, 50], seed=1)
        >>> features, label = next(iter(data.train(batch_size=4)))
        >>> sorted(features), features["numeric"].shape.as_list(), label.shape.as_list()
        (['C1', 'C2', 'numeric'], [4, 13], [4, 1])
        >>> 0.7 < data.best_auc() < 0.95
        True
    """

    def __init__(
        self,
        rows: int,
        *,
        test_rows: int = 100_000,
        cardinalities: Sequence[int] | None = None,
        numeric: int = 13,
        seed: int = 0,
        base_rate: float = 0.25,
        signal: float = 1.5,
        interactions: int = 8,
        zipf: float = 1.1,
        days: int = 1,
        drift: float = 0.0,
    ) -> None:
        """See the class."""
        rows = integer("rows", rows, 1, 1 << 31)
        test_rows = integer("test_rows", test_rows, 0, 1 << 30)
        sizes = list_of(
            "cardinalities", _CARDINALITIES if cardinalities is None else cardinalities, Integral
        )
        sizes = [integer("each of cardinalities", n, 1, (1 << 31) - 1) for n in sizes]
        numeric = integer("numeric", numeric, 0 if sizes else 1)
        seed = integer("seed", seed, 0)
        base_rate = number("base_rate", base_rate, above=0, below=1)
        signal = number("signal", signal, least=0)
        interactions = integer("interactions", interactions, 0)
        zipf = number("zipf", zipf, least=0)
        days = integer("days", days, 1)
        if rows % days:
            raise ValueError(f"days={days}: must divide rows={rows}.")
        drift = number("drift", drift, least=0, most=1)
        self._rows = rows
        self._test_rows = test_rows
        self._numeric = numeric
        self._sizes = sizes
        self._zipf = zipf
        self._days = days
        self._drift = drift
        self._spec = _spec.FeatureSpec(
            tuple(f"I{i + 1}" for i in range(numeric)),
            {f"C{i + 1}": size for i, size in enumerate(sizes)},
        )
        rng = np.random.default_rng(seed)
        draw_keys = functools.partial(rng.integers, 0, 1 << 32, dtype=np.uint32)
        self._row_key = draw_keys()
        self._column_keys = draw_keys(numeric + len(sizes) + 1)
        self._effect_keys = draw_keys(len(sizes))
        # Weaker with more ids: rare ids cannot be learned, and should not hold most of the signal.
        strength = np.array(sizes, dtype=np.float64) ** -0.15
        self._effect_weights = (rng.uniform(0.5, 1.5, len(sizes)) * strength).astype(np.float32)
        self._numeric_weights = rng.normal(0.0, 0.5, (1, numeric)).astype(np.float32)
        # Without this the most frequent ids would be the lowest of every feature.
        self._steps = np.array([_coprime(size, rng) for size in sizes], dtype=np.int64)
        # Combinations of features with few ids come up often enough to be learned.
        small = np.argsort(sizes, kind="stable")[:12]
        pairs = [(a, b) for i, a in enumerate(small) for b in small[i + 1 :]]
        chosen = rng.permutation(len(pairs))[:interactions]
        self._pairs = np.array([pairs[i] for i in chosen], dtype=np.int64).reshape(-1, 2)
        self._pair_keys = draw_keys(len(chosen))
        if drift:
            # The weights of later click models; drawn last, so that drift changes nothing else.
            later = rng.normal(0.0, 0.5, (int(days * drift) + 1, numeric)).astype(np.float32)
            self._numeric_weights = np.concatenate([self._numeric_weights, later])
        self._scale, self._shift = 1.0, 0.0
        self._calibrate(base_rate, signal)

    @property
    def spec(self) -> _spec.FeatureSpec:
        """The names and sizes of the features."""
        return self._spec

    @property
    def train_rows(self) -> int:
        """The number of rows of the training part."""
        return self._rows

    @property
    def test_rows(self) -> int:
        """The number of rows of the test part."""
        return self._test_rows

    def train(self, batch_size: int, shuffle: int = 0, seed: int | None = None) -> tf.data.Dataset:
        """See `ClickData.train`; the rows are in random order even without shuffling."""
        return self._dataset(0, self._rows, batch_size, shuffle, seed)

    @property
    def days(self) -> int:
        """The number of days of the training part."""
        return self._days

    def day(
        self, day: int, batch_size: int, shuffle: int = 0, seed: int | None = None
    ) -> tf.data.Dataset:
        """Returns the training rows of one day, as `train` does those of all.

        Args:
            day: Its number, from 0.
            batch_size: See `ClickData.train`.
            shuffle: See `ClickData.train`; default 0.
            seed: See `ClickData.train`; default None.

        Raises:
            ValueError: If there is no such day, or an argument is out of range.

        Example:
            >>> data = Synthetic(rows=1000, cardinalities=[50], days=10, drift=0.1)
            >>> sum(len(label) for _, label in data.day(3, batch_size=40))
            100
        """
        day = integer("day", day, 0, self._days - 1)
        count = self._rows // self._days
        return self._dataset(day * count, count, batch_size, shuffle, seed)

    def test(self, batch_size: int) -> tf.data.Dataset:
        """See `ClickData.test`."""
        if not self._test_rows:
            raise ValueError("test_rows=0: there is no test part.")
        return self._dataset(_TEST_START, self._test_rows, batch_size, 0, None)

    def click_probabilities(self) -> np.ndarray:
        """Returns the true click probability of each test row, float32 `[test_rows]`.

        Raises:
            ValueError: If there is no test part.
        """
        return tf.sigmoid(self._oracle[1]).numpy()

    def best_auc(self) -> float:
        """Returns the area under the ROC curve of the true probabilities on the test part.

        A row with a click and one without are ordered rightly with this probability; no model can
        be expected to do better.

        Raises:
            ValueError: If there is no test part, or its labels are all equal.
        """
        labels, logits = self._oracle
        if labels.min() == labels.max():
            raise ValueError(f"test_rows={self._test_rows}: must be enough to have both labels.")
        return exact_auc(labels, logits)

    def best_normalized_entropy(self) -> float:
        """Returns the normalized entropy of the true probabilities on the test part.

        This is the mean log loss divided by the entropy of the mean label, see
        `tf_recsync.metrics.NormalizedEntropy`.

        Raises:
            ValueError: If there is no test part, or its labels are all equal.
        """
        labels, logits = (values.astype(np.float64) for values in self._oracle)
        rate = labels.mean()
        if rate in (0.0, 1.0):
            raise ValueError(f"test_rows={self._test_rows}: must be enough to have both labels.")
        loss = np.mean(np.logaddexp(0.0, logits) - labels * logits)
        return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))

    @functools.cached_property
    def _oracle(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and logits of the test part, float32 `[test_rows]` each."""
        if not self._test_rows:
            raise ValueError("test_rows=0: there is no test part.")
        return self._collect(_TEST_START, self._test_rows)

    def _collect(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns labels and logits of the rows, float32 `[count]` each."""
        numbers = _row_numbers(start, count, _BLOCK)
        blocks = numbers.map(lambda n: self._make(n)[2:], num_parallel_calls=tf.data.AUTOTUNE)
        labels, logits = zip(*blocks.as_numpy_iterator(), strict=True)
        return np.concatenate(labels), np.concatenate(logits)

    def _calibrate(self, base_rate: float, signal: float) -> None:
        """Chooses scale and shift of the logits to have the given deviation and mean rate."""
        _, raw = self._collect(_CALIBRATION_START, _CALIBRATION_ROWS)
        raw = raw.astype(np.float64)
        scale = signal / (raw.std() or 1.0)
        low, high = -100.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = np.mean(1 / (1 + np.exp(-(scale * raw + middle))))
            low, high = (middle, high) if rate < base_rate else (low, middle)
        self._scale, self._shift = float(scale), low

    def _dataset(
        self, start: int, count: int, batch_size: int, shuffle: int, seed: int | None
    ) -> tf.data.Dataset:
        _spec.check_batching(batch_size, shuffle)

        def make(numbers: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            numeric, ids, label, _ = self._make(numbers)
            features = {_spec.NUMERIC: numeric}
            columns = tf.unstack(ids, num=len(self._sizes), axis=1)
            features.update(zip(self._spec.categorical, columns, strict=True))
            return features, label[:, tf.newaxis]

        if shuffle:
            # Shuffling the numbers of the rows is cheaper than shuffling the rows.
            rows = _rows(start, count)
            rows = rows.shuffle(shuffle, seed=seed, reshuffle_each_iteration=True)
            batches = rows.batch(batch_size)
        else:
            batches = _row_numbers(start, count, batch_size)
        batches = batches.map(make, num_parallel_calls=tf.data.AUTOTUNE)
        batches = batches.apply(tf.data.experimental.assert_cardinality(-(-count // batch_size)))
        return batches.prefetch(tf.data.AUTOTUNE)

    def _make(self, numbers: tf.Tensor) -> Rows:
        """Makes rows.

        Args:
            numbers: int64 `[batch]`, numbers of the rows.

        Returns:
            Numeric features float32 `[batch, numeric]`, ids int64 `[batch, categorical]`, labels
            and logits float32 `[batch]`.
        """
        rows = _mix(tf.bitwise.bitwise_xor(tf.cast(numbers, tf.uint32), self._row_key))
        draws = _uniform(_mix(rows[:, tf.newaxis] + self._column_keys))
        split = self._numeric

        # One draw says both whether the value is missing and how large it is.
        # In float64, because the last bit of a float32 logarithm depends on the place in the batch.
        tail = (1.0 - tf.cast(draws[:, :split], tf.float64)) / (1.0 - _MISSING_SHARE)
        numeric = tf.cast(tf.maximum(-tf.math.log(tail), 0.0), tf.float32)
        ids = self._draw_ids(draws[:, split:-1])

        words = tf.cast(ids, tf.uint32)
        if self._drift:
            # From one whole number to the next, a click model turns into another one.
            place = tf.cast(self._day_of(numbers), tf.float64) * self._drift
            model = tf.math.floor(place)
            angle = tf.cast((place - model) * (math.pi / 2), tf.float32)
            model = tf.cast(model, tf.int64)
            logits = tf.cos(angle) * self._raw_logits(numeric, words, model)
            logits += tf.sin(angle) * self._raw_logits(numeric, words, model + 1)
        else:
            logits = self._raw_logits(numeric, words, tf.zeros_like(numbers))
        logits = logits * self._scale + self._shift
        label = tf.cast(draws[:, -1] < tf.sigmoid(logits), tf.float32)
        return numeric, ids, label, logits

    def _day_of(self, numbers: tf.Tensor) -> tf.Tensor:
        """The day of rows, int64 `[batch]`."""
        day = numbers // (self._rows // self._days)
        day = tf.where(numbers < _TEST_START, day, self._days)
        return tf.where(numbers < _CALIBRATION_START, day, 0)

    def _raw_logits(self, numeric: tf.Tensor, words: tf.Tensor, model: tf.Tensor) -> tf.Tensor:
        """Logits of rows before they are scaled, float32 `[batch]`.

        Args:
            numeric: Float32 `[batch, numeric]`.
            words: The ids, uint32 `[batch, categorical]`.
            model: Which of the click models, int64 `[batch]`.
        """
        logits = tf.reduce_sum(numeric * tf.gather(self._numeric_weights, model), axis=1)
        # Any odd number will do: effects of other keys have nothing to do with each other.
        key = tf.cast(model, tf.uint32)[:, tf.newaxis] * np.uint32(0x9E3779B9)
        effects = _effect(tf.bitwise.bitwise_xor(_mix(words), self._effect_keys + key))
        logits += tf.linalg.matvec(effects, self._effect_weights)
        first = _mix(tf.gather(words, self._pairs[:, 0], axis=1) + self._pair_keys)
        second = tf.gather(words, self._pairs[:, 1], axis=1)
        return logits + _PAIR_WEIGHT * tf.reduce_sum(_effect(first + second + key), axis=1)

    def _draw_ids(self, draws: tf.Tensor) -> tf.Tensor:
        """Turns uniform float32 `[batch, categorical]` numbers into int64 ids."""
        sizes = np.array(self._sizes, dtype=np.float64)
        draws = tf.cast(draws, tf.float64)
        # The inverse of the distribution function of the continuous counterpart, a power law.
        power = 1.0 - self._zipf
        if abs(power) < 1e-3:
            values = tf.exp(draws * np.log1p(sizes))
        else:
            spread = np.expm1(power * np.log1p(sizes))
            values = tf.exp(tf.math.log1p(draws * spread) / power)
        ranks = tf.cast(tf.clip_by_value(values - 1.0, 0.0, sizes - 1.0), tf.int64)
        return tf.math.floormod(ranks * self._steps, np.array(self._sizes, dtype=np.int64))


def _rows(start: int, count: int) -> tf.data.Dataset:
    """Returns int64 scalars, consecutive numbers; several readers divide them by blocks."""
    stop = start + count

    def block(first: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(first, tf.minimum(first + _READER_BLOCK, stop))

    return tf.data.Dataset.range(start, stop, _READER_BLOCK).flat_map(block)


def _row_numbers(start: int, count: int, batch_size: int) -> tf.data.Dataset:
    """Returns int64 `[batch]` tensors of consecutive numbers."""
    stop = start + count

    def block(first: tf.Tensor) -> tf.Tensor:
        return tf.range(first, tf.minimum(first + batch_size, stop))

    return tf.data.Dataset.range(start, stop, batch_size).map(block)


def _coprime(size: int, rng: np.random.Generator) -> int:
    """Returns a number whose multiples run through all remainders modulo `size`."""
    if size == 1:
        return 1
    while True:
        step = int(rng.integers(1, size))
        if np.gcd(step, size) == 1:
            return step


def _mix(x: tf.Tensor) -> tf.Tensor:
    """Mixes the bits of uint32 numbers; a bijection (Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, np.uint32(shift)))
        x = x * np.uint32(factor)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, np.uint32(16)))


def _uniform(x: tf.Tensor) -> tf.Tensor:
    """Turns mixed uint32 numbers into float32 ones from 0 up to (not including) 1."""
    # Through int32, for which the conversion is faster; 24 bits are what a float32 can hold.
    bits = tf.cast(tf.bitwise.right_shift(x, np.uint32(8)), tf.int32)
    return tf.cast(bits, tf.float32) * 2.0**-24


def _effect(x: tf.Tensor) -> tf.Tensor:
    """Mixes uint32 numbers into effects, uniform with mean 0 and variance 1."""
    return (_uniform(_mix(x)) - 0.5) * 12.0**0.5
