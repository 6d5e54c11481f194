"""Calls as an earlier version took them."""

import warnings

import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync._deprecation import keywords_after, renamed, renamed_method, without_strategy


class Thing:
    @renamed("size", "length")
    @keywords_after(1)
    def __init__(self, first, *, second=2, length=3):
        self.values = first, second, length


def test_arguments_by_position_go_on_with_a_warning_that_names_them():
    with pytest.warns(FutureWarning, match="Thing takes second, length by name only"):
        assert Thing(1, 5, 6).values == (1, 5, 6)
    with pytest.warns(FutureWarning, match="Thing takes second by name only"):
        assert Thing(1, 5, length=6).values == (1, 5, 6)


def test_an_earlier_name_goes_on_with_a_warning_that_has_the_new_one():
    with pytest.warns(FutureWarning, match="Thing calls size length; what you wrote works for one"):
        assert Thing(1, size=7).values == (1, 2, 7)


def test_an_earlier_name_of_a_method_goes_on_with_a_warning_that_has_the_new_one():
    class Reporting:
        @renamed_method("hop_report")
        def workers(self, model):
            return [model]

    with pytest.warns(FutureWarning, match="Reporting calls workers hop_report; what you wrote"):
        assert Reporting().workers("clicks") == ["clicks"]


def test_a_warning_points_to_the_line_that_called_the_package():
    class Inheriting(recsync.callbacks.HopTimeline):
        pass

    strategy = tf.distribute.get_strategy()
    for call in (
        lambda: Thing(1, 5, size=6),
        lambda: recsync.callbacks.HopTimeline("hop.json"),
        lambda: Inheriting(strategy, "hop.json"),
        lambda: recsync.metrics.AUC(200, True),
        lambda: recsync.data.CsvSchema,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert caught and {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from tf_recsync.data import CsvSchema  # noqa: F401
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((1, 2, 3, 4), {}), ((1, 2), {"second": 3}), ((1,), {"size": 1, "length": 2}), ((), {})],
)
def test_what_was_never_right_is_an_error(arguments, named):
    with pytest.raises(TypeError):
        Thing(*arguments, **named)


def test_calls_as_they_are_now_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Thing(1, second=5, length=6).values == (1, 5, 6)
        recsync.callbacks.TrainingReport()


def test_a_callback_takes_a_strategy_no_more_and_goes_on_without_it():
    strategy = tf.distribute.get_strategy()
    with pytest.warns(FutureWarning, match="TrainingReport takes no strategy"):
        recsync.callbacks.TrainingReport(strategy)
    with pytest.warns(FutureWarning, match="HopReport takes no strategy"):
        recsync.callbacks.HopReport(strategy=strategy, per_worker=True)

    class Kept:
        @without_strategy
        def __init__(self, path, limit=1):
            self.values = path, limit

    with pytest.warns(FutureWarning, match="Kept takes no strategy"):
        assert Kept(strategy, "here", 5).values == ("here", 5)
    assert Kept("here").values == ("here", 1)
