"""Calls functions when workers are lost and come back."""

from __future__ import annotations

import collections
from collections.abc import Callable

from tf_recsync.callbacks.strategy_callback import StrategyCallback
from tf_recsync.cluster import Server
from tf_recsync.cluster.membership import Order


class WorkerEvents(StrategyCallback):
    """Is called when a worker is lost while `fit` runs, and when it takes part again.

    Give functions, or override `on_worker_lost` and `on_worker_back` in a class of your own. They
    are called in the thread of `fit`, about a second after it was noticed at most, one at a time.
    They may set `model.stop_training`, and what they raise ends `fit`.

    Args:
        on_worker_lost: `on_worker_lost(worker)`, of the worker's task index; None (the default)
            does nothing.
        on_worker_back: `on_worker_back(worker)`, likewise.

    Raises:
        ValueError: by `fit`, if the model's strategy is none of this package's.

    Example:

    >>> import tf_recsync as recsync
    >>> lost = []
    >>> events = recsync.callbacks.WorkerEvents(on_worker_lost=lost.append)
    >>> events.on_worker_lost(3)  # `fit` calls it, with `callbacks=[events]`.
    >>> lost
    [3]
    """

    _needs = "members"

    def __init__(
        self,
        on_worker_lost: Callable[[int], None] | None = None,
        on_worker_back: Callable[[int], None] | None = None,
    ):
        super().__init__()
        self._functions = {"on_worker_lost": on_worker_lost, "on_worker_back": on_worker_back}
        for name, function in self._functions.items():
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function of a worker's index, not {function!r}")
        self._told: _Told | None = None

    def on_worker_lost(self, worker: int) -> None:
        """A worker is gone, killed or silent, and the others go on without it.

        Args:
            worker: its task index.
        """
        if self._functions["on_worker_lost"] is not None:
            self._functions["on_worker_lost"](worker)

    def on_worker_back(self, worker: int) -> None:
        """A worker that was lost, or was not there at first, takes part.

        Args:
            worker: its task index.
        """
        if self._functions["on_worker_back"] is not None:
            self._functions["on_worker_back"](worker)

    def on_train_begin(self, logs=None):
        self._told = _Told()
        self._strategy.cluster.membership.listen(self._told, Order.REPORTS)
        for function in (self.model.train_function, self.model.test_function):
            function.observers.add(self)

    def on_train_batch_end(self, batch, logs=None):
        self.tell()

    def on_train_end(self, logs=None):
        self.tell()
        self.failed()

    def failed(self) -> None:
        """Is told no more: training has ended."""
        for function in (self.model.train_function, self.model.test_function):
            function.observers.discard(self)
        self._told = None

    def tell(self) -> None:
        """Calls the functions of what has happened; in the thread of `fit`."""
        while self._told is not None and self._told.events:
            event, worker = self._told.events.popleft()
            getattr(self, event)(worker)


class _Told:
    """Keeps what happens to workers until the thread of `fit` gets to it."""

    def __init__(self):
        self.events: collections.deque[tuple[str, int]] = collections.deque()

    def lost(self, server: Server, is_news: bool) -> None:
        """A server is gone."""
        if server[0] == "worker" and is_news:
            self.events.append(("on_worker_lost", server[1]))

    def back(self, server: Server) -> None:
        """A server takes part again."""
        if server[0] == "worker":
            self.events.append(("on_worker_back", server[1]))
