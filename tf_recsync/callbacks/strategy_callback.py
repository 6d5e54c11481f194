"""What callbacks have in common that report on the strategy that a model trains on."""

from __future__ import annotations

import keras

# What strategies have on which reports can be made.
_REPORTS = {"TrainingReport": "staleness", "HopReport": "topology", "ShadowReport": "sync_report"}


class StrategyCallback(keras.callbacks.Callback):
    """A callback that reports on the strategy that the model trains on."""

    _needs = ""  # What of the strategy shows that it can report from it.

    def set_model(self, model):
        super().set_model(model)
        strategy = model.distribute_strategy
        if hasattr(strategy, self._needs):
            return
        fitting = [report for report, needs in _REPORTS.items() if hasattr(strategy, needs)]
        advice = f"use {' or '.join(fitting)}" if fitting else "it is none of this package's"
        raise ValueError(
            f"{type(self).__name__} can't report on a {type(strategy).__name__}; {advice}"
        )

    @property
    def _strategy(self):
        return self.model.distribute_strategy


def mean_data_wait(strategy, model: keras.Model) -> float:
    """The seconds that a worker has waited for batches, on average."""
    waits = strategy.data_wait(model)
    return sum(waits) / len(waits)
