"""Data services of this process, and their ends."""

import threading
import time

import tensorflow as tf
from helpers import wait_until

from tf_recsync.cluster.data_service import DataServices
from tf_recsync.cluster.signs_of_life import accepts_connections


def test_a_service_does_not_end_while_a_generator_of_its_pipeline_waits():
    """TensorFlow would wait for the generator with Python's lock held, and all with it."""
    may_go_on, waits = threading.Event(), threading.Event()

    def elements():
        yield 1
        waits.set()
        may_go_on.wait()

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([], tf.int64))
    service = DataServices("127.0.0.1").new()
    address = service.own_address.removeprefix("grpc://")
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
    assert wait_until(lambda: service._servers.tasks() == 0, 60)
    time.sleep(3.0)  # Longer than a service that nothing holds takes to end.
    assert accepts_connections(address)
    may_go_on.set()
    assert wait_until(lambda: not accepts_connections(address), 60)
