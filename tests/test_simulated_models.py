"""What simulated workers learn with hidden layers, mean-normalization and data that drift."""

from __future__ import annotations

import dataclasses

import pytest

import tf_recsync as recsync
from tf_recsync import modes
from tf_recsync.layers import MeanNormalization
from tf_recsync.simulation import ClickModel, run


def products(**options):
    """A model of data with products of numbers.

    Not made when this module is imported: the variables of its optimizer would be lost when another
    test connects to a cluster.
    """
    given = {"optimizer": recsync.optimizers.Adagrad(0.1), **options}
    return ClickModel(
        features=2, vocabulary=5, numbers=4, number_pairs=1.5, test_examples=4000, **given
    )


def learn(model, workers=1, steps=2000, **options):
    return run(
        modes.Async(), workers=workers, compute_seconds=1.0, steps=steps, model=model, **options
    )


def test_hidden_layers_learn_products_of_numbers_that_others_can_not():
    linear = learn(products())
    for units, layer in (((16,), None), ((16, 8), None), ((16,), MeanNormalization(0.9, 0.1))):
        model = products(hidden_units=units, mean_normalization=layer)
        result = learn(model)
        assert linear.auc + 0.05 < result.auc < result.bayes_auc
        assert result.bayes_auc == linear.bayes_auc


def test_hidden_layers_learn_alike_whatever_the_number_of_servers():
    layer = MeanNormalization(0.9)
    model = products(dimension=2, hidden_units=[4], mean_normalization=layer)
    one, several = (learn(model, workers=5, steps=200, ps=ps, noise=0.3) for ps in (1, 3))
    assert one.evaluations == several.evaluations


def test_moving_means_swing_if_they_forget_in_fewer_steps_than_there_are_workers():
    def auc(momentum):
        model = products(
            hidden_units=(16,),
            number_mean=3.0,
            mean_normalization=MeanNormalization(momentum, 0.1),
            optimizer=recsync.optimizers.Adagrad(0.01),
        )
        return learn(model, workers=50, steps=4000, noise=0.1).auc

    assert auc(1 - 1 / 100) > auc(0.5) + 0.02


def test_a_model_is_tested_on_the_next_days_clicks_within_a_day_too():
    model = ClickModel(
        features=3,
        vocabulary=4,
        signal=2.0,
        drift=1.5707963,  # A day says nothing of the next one.
        day_batches=300,
        optimizer=recsync.optimizers.SGD(0.3),
        test_examples=4000,
        evaluations=4,
    )
    within, after, within_second, end = learn(model, steps=600).evaluations
    for day in (within, after, within_second, end):
        assert day.auc < day.bayes_auc - 0.1
    assert within.bayes_auc == after.bayes_auc != within_second.bayes_auc == end.bayes_auc
    steady = dataclasses.replace(model, drift=0.0)
    result = learn(steady, steps=600)
    assert len({one.bayes_auc for one in result.evaluations}) == 1
    assert result.auc > result.bayes_auc - 0.03
    assert all(one.auc > one.bayes_auc - 0.06 for one in result.evaluations)


def test_numbers_may_have_a_mean_that_logits_do_not_know():
    models = products(), products(number_mean=5.0)
    one, other = (learn(model, steps=100) for model in models)
    assert one.bayes_auc == other.bayes_auc
    assert one.auc != other.auc


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_units": "12"}, "hidden_units must be a sequence of ints, not '12'"),
        ({"hidden_units": 3}, "hidden_units must be a sequence of ints, not 3"),
        ({"hidden_units": (3, 0)}, r"hidden_units\[1\] must be an integer of at least 1, got 0"),
        ({"hidden_units": (3,), "numbers": 0}, "hidden_units need inputs: dimension or numbers"),
        ({"hidden_units": (3,), "mean_normalization": True}, "MeanNormalization or None, not True"),
        ({"mean_normalization": MeanNormalization()}, "mean_normalization needs hidden_units"),
        ({"drift": -0.1}, "drift must be a finite number, at least 0, not -0.1"),
        ({"day_batches": 0}, "day_batches must be an integer of at least 1, got 0"),
        ({"number_pairs": -1.0}, "number_pairs must be a finite number, at least 0"),
        ({"number_mean": -1.0}, "number_mean must be a finite number, at least 0"),
    ],
)
def test_what_a_model_can_not_have_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ClickModel(**wrong)


def test_what_the_engine_refuses_is_named():
    model = ClickModel(dimension=1000, features=20, hidden_units=(2,))
    with pytest.raises(ValueError, match=r"features \* dimension \+ numbers must be at most 16384"):
        learn(model, steps=1)
