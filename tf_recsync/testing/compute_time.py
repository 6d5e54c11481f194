"""Artificial compute time."""

from __future__ import annotations

from tf_recsync.strategies.async_strategy import AsyncStrategy


def set_compute_time(strategy: AsyncStrategy, seconds: float | None) -> None:
    """Adds a fixed time to every worker's training step.

    The step waits, without using a processor, after its gradients are computed
    and before it pushes them, so that workers on one machine overlap as they
    would on machines of their own. The real step is done all the same.

    Args:
        strategy: the strategy whose workers are slowed, from the next epoch's
            start on.
        seconds: a float of at least 0, or None for no artificial time.

    Raises:
        ValueError: if `seconds` is negative.
    """
    is_number = isinstance(seconds, (int, float))
    if seconds is not None and not (is_number and seconds >= 0):
        raise ValueError(f"seconds must be at least 0 or None, not {seconds!r}")
    strategy._compute_time = seconds
