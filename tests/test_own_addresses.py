"""Where a process reaches what it runs itself, whatever the network makes of its name."""

import os
import re
import subprocess
import sys

import pytest
from started_servers import Server

from tf_recsync.cluster import local_cluster, proxies

_SECONDS = 280  # On a busy machine, importing TensorFlow takes a minute.

# In a process of its own: without an answer, TensorFlow waits for ever with Python's lock held.
PROGRAM = """
import json
import os
import pathlib
import socket

import keras
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.cluster import data_service, redirections


def refuse(port, bind_address):
    jobs = {"chief": [f"127.0.0.2:{port}"], "worker": ["127.0.0.1:1"]}
    task = {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": task})
    try:
        recsync.use_final_device_names(bind_address)
    except RuntimeError as error:
        print("refused", str(error).replace(str(port), "PORT"), flush=True)
    del os.environ["TF_CONFIG"]


def train():
    with recsync.LocalCluster(workers=1, ps=1, processes=0) as cluster:
        cluster.connect()
        with recsync.AsyncStrategy(cluster).scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(recsync.optimizers.SGD(0.1), "mse")
        model.fit(tf.ones([8, 1]), tf.ones([8, 1]), verbose=0)


def serve(listens, host):
    redirections.confine_listeners(listens)
    service = data_service.DataServices(host).new()
    dataset = tf.data.Dataset.range(3)
    tf.data.experimental.service.register_dataset(service.own_address, dataset)
    print(listens, host, service.address, flush=True)


with socket.create_server(("127.0.0.1", 0)) as taken:
    refuse(taken.getsockname()[1], "127.0.0.1")
refuse(4711, "192.0.2.1")
serve("127.0.0.1", "127.0.0.2")
if pathlib.Path("/proc/net/if_inet6").exists():
    serve("::1", "::1")
print("served", flush=True)
os.environ["http_proxy"] = "http://127.0.0.1:9"
train()
print("trained", flush=True)
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


def test_a_coordinator_that_cannot_listen_says_where_and_why(said):
    where = r"the coordinator, chief:0 \(127.0.0.2:PORT\), cannot listen on port PORT of"
    in_use = "127.0.0.1: Address already in use; another process has the port, perhaps an earlier"
    assert re.search(f"refused {where} {in_use} run of the program", said), said[-2000:]
    foreign = "192.0.2.1: Cannot assign requested address; the bind address must be an address of"
    assert re.search(f"refused {where} {foreign} this machine", said), said[-2000:]


def test_a_data_service_starts_where_its_process_is_not_reached_by_its_name(said):
    assert "127.0.0.1 127.0.0.2 grpc://127.0.0.2:" in said, said[-2000:]


def test_a_data_service_of_a_numeric_ipv6_address_starts(said):
    assert "served" in said, said[-2000:]
    assert "::1 ::1" not in said or "::1 ::1 grpc://[::1]:" in said


def test_a_cluster_of_this_machine_trains_where_the_environment_has_a_proxy(said):
    assert "trained" in said, said[-2000:]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a, b"}, None),
        ({"http_proxy": "http://p:1"}, "ps,0.0.0.0,127.0.0.1,10.0.0.1"),
        ({"grpc_proxy": "p:1", "no_proxy": "a, ps"}, "a,ps,0.0.0.0,127.0.0.1,10.0.0.1"),
        (
            {"https_proxy": "p:1", "no_proxy": "a", "no_grpc_proxy": "b"},
            "b,ps,0.0.0.0,127.0.0.1,10.0.0.1",
        ),
    ],
)
def test_servers_are_exceptions_from_proxies_beside_those_that_there_are(
    monkeypatch, variables, expected
):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.setenv(name, "")  # So that it is as before in the end.
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxies.go_around(["ps:1", "ps:2"], "10.0.0.1")
    assert os.environ.get(proxies._EXCEPTIONS[0]) == expected


def test_the_first_reader_starts_where_its_name_leads_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = local_cluster._reserve_port()
    with port:
        address = f"127.0.0.2:{port.getsockname()[1]}"
        cluster = {"worker": ["127.0.0.1:4711"], "reader": [address]}
        with Server(tmp_path, cluster, "reader", 0, "--bind_address=127.0.0.1") as reader:
            assert reader.says(f"listening on {address} (--bind_address=127.0.0.1)\n")
