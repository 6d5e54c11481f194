"""Where a process reaches what it runs itself, whatever the network makes of its name."""

import os
import subprocess
import sys

import pytest
from started_servers import Server

from tf_recsync.cluster import local_cluster

_SECONDS = 280  # On a busy machine, importing TensorFlow takes a minute.

# In a process of its own: without an answer, TensorFlow waits for ever with Python's lock held.
PROGRAM = """
import pathlib

import tensorflow as tf

from tf_recsync.cluster import data_service, redirections


def serve(listens, host):
    redirections.confine_listeners(listens)
    service = data_service.DataServices(host).new()
    dataset = tf.data.Dataset.range(3)
    tf.data.experimental.service.register_dataset(service.own_address, dataset)
    print(listens, host, service.address, flush=True)


serve("127.0.0.1", "127.0.0.2")
if pathlib.Path("/proc/net/if_inet6").exists():
    serve("::1", "::1")
print("succeeded", flush=True)
"""


@pytest.fixture(scope="module")
def said():
    try:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.decode()
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode() + f"\n(ended after {_SECONDS} s)"


def test_a_data_service_starts_where_its_process_is_not_reached_by_its_name(said):
    assert "127.0.0.1 127.0.0.2 grpc://127.0.0.2:" in said, said[-2000:]


def test_a_data_service_of_a_numeric_ipv6_address_starts(said):
    assert "succeeded" in said, said[-2000:]
    assert "::1 ::1" not in said or "::1 ::1 grpc://[::1]:" in said


def test_the_first_reader_starts_where_its_name_leads_elsewhere(tmp_path):
    port = local_cluster._reserve_port()
    with port:
        address = f"127.0.0.2:{port.getsockname()[1]}"
        cluster = {"worker": ["127.0.0.1:4711"], "reader": [address]}
        with Server(tmp_path, cluster, "reader", 0, "--bind_address=127.0.0.1") as reader:
            assert reader.says(f"listening on {address}")
