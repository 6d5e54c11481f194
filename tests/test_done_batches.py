"""The set of batches that are done, and what is left of a dataset."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.done_batches import DoneBatches, rest_of

NUMBERS = st.lists(st.integers(0, 40), max_size=12)


@hypothesis.given(st.integers(0, 10), st.lists(NUMBERS, max_size=8))
@hypothesis.settings(deadline=None)
def test_it_is_a_set_of_numbers(prefix, added):
    done, expected = DoneBatches(prefix), set(range(prefix))
    for numbers in added:
        assert done.add(numbers) == len(set(numbers) - expected)
        expected |= set(numbers)
        assert done.count == len(expected)
        first, beyond = done.ranges
        assert first == min(set(range(len(expected) + 1)) - expected)
        listed = [number for begin, end in beyond for number in range(begin, end)]
        assert [*range(first), *listed] == sorted(expected)
        # Ranges are as long as they can be.
        assert all(a[1] < b[0] for a, b in zip([(0, first), *beyond], beyond, strict=False))
        again = DoneBatches(first, beyond)
        assert (again.count, again.ranges) == (done.count, done.ranges)


@hypothesis.given(st.integers(0, 3), st.sets(st.integers(0, 20)))
@hypothesis.settings(deadline=None, max_examples=15)
def test_what_is_left_of_a_dataset_keeps_its_numbers_and_its_order(prefix, more):
    done = DoneBatches(prefix)
    done.add(list(more))
    left = rest_of(tf.data.Dataset.range(100, 118), *done.ranges)
    found = [(int(number), int(batch)) for number, batch in left]
    assert found == [(n, 100 + n) for n in range(18) if n >= prefix and n not in more]


def test_a_position_tells_what_is_done():
    position = DataPosition(1, 9, 9, (), 16, ((6, 8), (10, 12)))
    assert position.prefix == 5
    assert DataPosition.parsed(position.as_json()) == position
    earlier = {name: value for name, value in position.as_json().items() if name != "done"}
    assert DataPosition.parsed(earlier) == DataPosition(1, 9, 9, (), 16)
    for wrong in ([[7, 5]], [[6, 9], [8, 10]], [[3]], ["5"], [[0, 5]], [[5.0, 6]], 3, [[5, 99]]):
        with pytest.raises(ValueError, match="done"):
            DataPosition.parsed({**position.as_json(), "done": wrong})


def test_numbers_may_be_an_array():
    done = DoneBatches()
    assert done.add(np.array([2, 2, 0])) == 2
    assert done.add(np.zeros([0], np.int64)) == 0
    assert done.ranges == (1, ((2, 3),))
