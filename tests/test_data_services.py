"""Data services of this process, and their ends."""

import contextlib
import socket
import threading
import time

import tensorflow as tf

from tf_recsync.cluster.data_service import DataServices


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def test_a_service_does_not_end_while_a_generator_of_its_pipeline_waits():
    """TensorFlow would wait for the generator with Python's lock held, and all with it."""
    may_go_on, waits = threading.Event(), threading.Event()

    def elements():
        yield 1
        waits.set()
        may_go_on.wait()

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([], tf.int64))
    service = DataServices("127.0.0.1").new()
    port = int(service.own_address.rpartition(":")[2])
    dataset = dataset.apply(
        tf.data.experimental.service.distribute("distributed_epoch", service.own_address)
    )
    iterator = iter(dataset)
    assert int(next(iterator)) == 1 and waits.wait(60)
    del iterator
    has_closed = threading.Event()

    def close():
        service.close()
        has_closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert has_closed.wait(60)
    # The pipeline is gone from the service's list within seconds, though it waits still.
    deadline = time.monotonic() + 10
    while service._servers.tasks() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3.0)
    assert listens(port)
    may_go_on.set()
    deadline = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.1)
