"""Carries what workers of decentralized training tell their neighbors (Hop).

Every edge has a loop of its own on the sender, which has one parcel after the other delivered at
the receiver; the parcels go from worker to worker. Calls of this process (loops.py) have it go on
for some turns, and again when it has failed: the worker gives out the same parcel until it hears
that it was carried, and the other one takes it once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from tf_recsync import ops
from tf_recsync.cluster import Cluster, Server, processor_of
from tf_recsync.ops import hop
from tf_recsync.synchronization.loops import ATTEMPTS, PAUSE_SECONDS, Loops, Told, tried_again
from tf_recsync.synchronization.remote_values import at

PARCELS_PER_TURN = 3  # Unrolled: each turn of the loop costs a message to the receiver.
TURNS_PER_CALL = 20  # Then this process knows that they went well.
NO_LIMIT = 1e15  # Bytes per second.


# What the network, or TensorFlow's own calls from worker to worker, may fail with once. All
# others would come again.
_PASSING = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,  # One part of a call, because the other one failed.
    tf.errors.DataLossError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)


class Edges:
    """The loops of all edges.

    Args:
        cluster: the connected cluster.
        holders: the server, job and index, that holds each worker's parameters.
        dtype: of the parameters.
        living: gives the workers that are there, with the handles of what they keep; called
            again whenever a loop goes on.
        answers: whether a worker that was there gives signs of the same life.
        fail: is called with what has gone wrong between two workers that are there.
    """

    def __init__(
        self,
        cluster: Cluster,
        holders: Sequence[Server],
        dtype: tf.DType,
        living: Callable[[], Mapping[int, tf.Tensor]],
        answers: Callable[[int], bool],
        fail: Callable[[Exception], None],
    ):
        self._cluster = cluster
        self._holders = list(holders)
        self._dtype = dtype
        self._living = living
        self._answers = answers
        self._limits: dict[str, float] = {}  # Bytes per second, by device.
        self._loops = Loops("recsync_hop", cluster, fail)  # By sender and receiver.
        self._pausing = threading.Lock()  # One pause at a time.

    def begin(self, limits: Mapping[str, float]) -> None:
        """Makes ready for an epoch, with artificial bandwidths by device."""
        self._limits = dict(limits)
        # Here, and not by the loops: TensorFlow sends what is traced to all servers, and meanwhile
        # one of them may be taken into the cluster again.
        self._carry = carry_function(self._dtype, bool(limits))
        self._loops.begin()

    def start(self, sender: int, receiver: int) -> None:
        """Starts the loop from one worker to another, unless it runs."""
        self._loops.start((sender, receiver), lambda: self._run(sender, receiver))

    def end(self) -> None:
        """Has the loops end when all is told, or something fails."""
        self._loops.end()
        self.everywhere(hop.close_outboxes)

    def join(self, deadline: float) -> None:
        """Waits for the ends of the loops, until a time (time.monotonic()).

        But for those from and to who is lost: a worker's call to one that stands still may never
        end, and nothing has to be told there.
        """
        living = self._living().keys()
        self._loops.drop(lambda pair: not living >= set(pair))
        self._loops.join(deadline)

    def leave(self, worker: int, handle: tf.Tensor) -> None:
        """Destroys what a lost worker kept, if it lives and only the connection broke.

        Calls may have reached it that nobody else would end. Does not wait for it.

        Args:
            worker: it is none of the living any more.
            handle: of what it kept.
        """

        def end_waits() -> None:
            with self._at(worker):
                hop.hold(handle, True)
                hop.interrupt(handle)
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

        def run() -> None:
            tried_again(end_waits, lambda: self._cluster.is_up(*self._holders[worker]))

        threading.Thread(target=run, name="recsync_hop_leave", daemon=True).start()

    @contextlib.contextmanager
    def renew(self, worker: int) -> Iterator[None]:
        """Has the loops from and to a worker end, and inside, no worker calls another.

        They might carry something to what it kept before. New ones can start when it is over;
        by then it must not be one of the living with what it kept.
        """
        with self.pause():
            self._loops.drop(lambda pair: worker in pair)
            yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no worker calls another; what they have to tell waits.

        While TensorFlow takes a server into the cluster again, servers refuse each other's
        calls now and then.
        """
        with self._pausing, self._loops.closed():
            is_over = threading.Event()

            def hold(handle: tf.Tensor) -> None:
                if not is_over.is_set():  # When it is, nobody would let a worker go on.
                    hop.hold(handle, True)

            try:
                self.everywhere(hold)
                # At the end they call again and again until all is told.
                self._loops.become_quiet(or_ending=True)
                yield
            finally:
                is_over.set()
                self.everywhere(lambda handle: hop.hold(handle, False))

    def everywhere(self, action: Callable[[tf.Tensor], None]) -> None:
        """Calls on all workers at once, and waits, with a limit for those that stand still."""

        def act(worker: int, handle: tf.Tensor) -> None:
            with self._at(worker):
                action(handle)

        threads = [
            threading.Thread(
                target=self.call, args=(worker, functools.partial(act, worker, handle)), daemon=True
            )
            for worker, handle in self._living().items()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PAUSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def call(self, worker: int, action: Callable[[], Told]) -> Told | None:
        """Calls a worker that is there; of one that is gone, its own thread will find out.

        Args:
            worker: which.
            action: the call; it is made again if it fails though the worker is there.

        Returns:
            What the call returns; None if it fails.
        """
        holder = self._holders[worker]

        def is_there() -> bool:
            return not self._cluster.membership.is_away(holder) and self._cluster.is_up(*holder)

        return tried_again(action, is_there)

    def _at(self, worker: int) -> contextlib.AbstractContextManager:
        """Inside, this thread calls on a worker's holder."""
        job, index = self._holders[worker]
        return at(self._cluster, index, job)

    def _run(self, sender: int, receiver: int) -> None:
        """Carries what a worker has to tell a neighbor, until it is closed or one is gone."""
        with self._at(sender):
            call: Callable[[int], bool] | None = None
            failures = 0  # In a row.
            while True:
                try:
                    if call is None:
                        begun = self._begun(sender, receiver)
                        with self._cluster.building.turn():
                            begun(-1)
                        call = begun
                    if not call(receiver):
                        return
                    failures = 0
                except tf.errors.OpError as error:
                    is_in_charge = self._is_in_charge(sender, receiver, self._living())
                    if self._loops.is_ending or not is_in_charge:
                        return
                    # One that is gone is found out by the thread that drives it, and is none of the
                    # living then. One that does not answer at the moment goes on: perhaps nobody
                    # else would begin this loop again.
                    if not all(self._answers(worker) for worker in (sender, receiver)):
                        self._loops.rest()
                        continue
                    if not self._is_in_charge(sender, receiver, self._living()):
                        return  # It was found out meanwhile.
                    failures += 1
                    if not self._may_try_again(sender, receiver, error, failures):
                        return

    def _begun(self, sender: int, receiver: int) -> Callable[[int], bool]:
        """What carries all that there is from one worker to another, called in the sender's scope.

        Returns:
            A function of the one that takes it, -1 for nobody; it returns whether there will be
            more to carry, by this loop.
        """
        source_index = tf.constant(sender, tf.int64)
        takers = {taker: tf.constant(taker, tf.int64) for taker in (receiver, -1)}
        ends = self._holders[sender], self._holders[receiver]
        devices = [processor_of(*holder) for holder in ends]
        turns = tf.constant(TURNS_PER_CALL, tf.int64)
        limits = [tf.constant(self._limits.get(d, NO_LIMIT), tf.float64) for d in devices]

        def call(taker: int) -> bool:
            with self._loops.call(ends, (sender, receiver)):
                living = self._living()
                if not self._is_in_charge(sender, receiver, living):
                    return False
                source, target = living[sender], living[receiver]
                return bool(
                    self._carry(source, source_index, target, takers[taker], *limits, turns)
                )

        return call

    def _is_in_charge(self, sender: int, receiver: int, living: Mapping[int, tf.Tensor]) -> bool:
        """Whether this thread is the edge's loop still, and both its ends are there."""
        is_loop = self._loops.is_in_charge((sender, receiver))
        return is_loop and {sender, receiver} <= living.keys()

    def _may_try_again(
        self, sender: int, receiver: int, error: tf.errors.OpError, failures: int
    ) -> bool:
        """Whether a call that failed, for so many times in a row, is to be made again, now."""
        source, target = (":".join(map(str, self._holders[w])) for w in (sender, receiver))
        what = f"A call from {source} to {target} failed and is made again"
        # What would come again, at once.
        is_passing = isinstance(error, _PASSING)
        return self._loops.may_try_again(what, error, failures if is_passing else ATTEMPTS)


@functools.cache
def carry_function(dtype: tf.DType, is_limited: bool) -> Callable:
    """What carries parcels along an edge for so many turns, and tells whether there will be more.

    It is called on the sender, and ends when that is held. It is the same for all models: the
    servers build their parts of it for each edge, which takes a tenth of a second.
    """

    def passed(update, place, bandwidth):
        if not is_limited:
            return update
        with framework_ops.colocate_with(place):
            return ops.transfer(update, bandwidth)

    def carry_one(source, sender, target, receiver, sending, receiving):
        parcel = hop.collect(source, receiver, dtype)
        with tf.control_dependencies([parcel.iteration]):
            began = tf.cast(tf.timestamp() * 1e6, tf.int64)
        wanted = hop.ask(target, sender, parcel.number, parcel.progress, parcel.iteration)
        delivered = tf.cond(
            wanted,
            lambda: hop.deliver(
                target,
                sender,
                parcel.number,
                parcel.iteration,
                passed(passed(parcel.update, source, sending), target, receiving),
            ),
            lambda: tf.constant(-1, tf.int64),
        )
        hop.carried(source, receiver, parcel.number, delivered, began)
        return parcel

    def carry(source, sender, target, receiver, sending, receiving, turns):
        def turn(left, goes_on, is_open):
            del goes_on, is_open
            for _ in range(PARCELS_PER_TURN):
                parcel = carry_one(source, sender, target, receiver, sending, receiving)
            # There is none while the worker is held.
            return left - 1, parcel.open & (parcel.number > 0), parcel.open

        def goes_on(left, goes_on, is_open):
            del is_open
            return goes_on & (left > 0)

        begun = turns, tf.constant(True), tf.constant(True)
        return tf.while_loop(goes_on, turn, begun, parallel_iterations=1)[-1]

    handle, number = tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int64)
    bandwidth = tf.TensorSpec([], tf.float64)
    return tf.function(carry, autograph=False).get_concrete_function(
        handle, number, handle, number, bandwidth, bandwidth, number
    )
