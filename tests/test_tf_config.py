"""What `TF_CONFIG` may say, and what becomes of it."""

import json

import pytest

from tf_recsync import cluster as recsync_cluster
from tf_recsync.cluster import tf_config


def test_cluster_from_tf_config_is_this_process_as_chief(monkeypatch):
    servers = {
        "chief": ["127.0.0.1:1"],
        "worker": ["127.0.0.1:2"],
        "evaluator": ["127.0.0.1:3"],
        "reader": ["127.0.0.1:4", "127.0.0.1:5"],
    }
    task = {"type": "chief", "index": "0"}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": servers, "task": task}))
    cluster = recsync_cluster.cluster_from_tf_config()
    assert (cluster.workers, cluster.ps, cluster.readers) == (1, 0, 2)
    # Readers are no TensorFlow servers.
    assert cluster.cluster_spec.as_dict() == {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    assert cluster.resolver.task_type == "chief"
    missing = r"worker:0 \(127.0.0.1:2\), reader:0 \(127.0.0.1:4\), reader:1 \(127.0.0.1:5\)"
    with pytest.raises(RuntimeError, match=f"not up within timeout=0.1 s: {missing}"):
        cluster.connect(timeout=0.1)
    with pytest.raises(ValueError, match="timeout must be positive, in seconds, not 0"):
        cluster.connect(timeout=0)
    with pytest.raises(RuntimeError, match="call connect"):
        cluster.readmit()


WORKER = {"worker": ["10.0.0.2:4711"]}
CHIEF = {"chief": ["10.0.0.1:4711"]}


@pytest.mark.parametrize(
    ("cluster_spec", "task", "message"),
    [
        ({**CHIEF, **WORKER}, {"type": "worker", "index": 0}, "must be 'chief' .* got 'worker'"),
        (WORKER, {"type": "chief", "index": 0}, r"one of \['worker'\], got 'chief'"),
        (CHIEF, {"type": "chief", "index": 0}, r"must have the job 'worker'.*\['chief'\]"),
        ({**CHIEF, **WORKER}, {"type": "chief", "index": 1}, "from 0 to 0 .* got 1"),
        ({**CHIEF, **WORKER}, {"type": "chief"}, "got None"),
        ({**CHIEF, "worker": "x:1"}, {"type": "chief", "index": 0}, "list of .* got 'x:1'"),
        ({**CHIEF, "worker": ["x"]}, {"type": "chief", "index": 0}, "'worker' .* got 'x'"),
        ({**CHIEF, "boss": ["x:1"]}, {"type": "chief", "index": 0}, "got 'boss'"),
        (
            {**CHIEF, "worker": ["x:1", "y:1", "x:1"]},
            {"type": "chief", "index": 0},
            "must have an address of its own, but 'x:1' is that of worker:0 and worker:2",
        ),
        ({**CHIEF, "ps": CHIEF["chief"]}, {"type": "chief", "index": 0}, "of chief:0 and ps:0"),
        ({"ps": ["[::1]:1"], "worker": ["::1:1"]}, {"type": "ps", "index": 0}, "ps:0 and worker:0"),
        ({}, {"type": "chief", "index": 0}, '"cluster" in TF_CONFIG must be .* got {}'),
    ],
)
def test_wrong_tf_config_is_refused(monkeypatch, cluster_spec, task, message):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster_spec, "task": task}))
    with pytest.raises(ValueError, match=message):
        recsync_cluster.cluster_from_tf_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "variable TF_CONFIG must be set"),
        ("{cluster", "must be JSON .* got '{cluster'"),
        ("[]", "must be a JSON object"),
    ],
)
def test_unreadable_tf_config_is_refused(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message):
        recsync_cluster.cluster_from_tf_config()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", "127.0.0.1"),
        ("127.3.2.1:1", "127.3.2.1"),
        ("[::1]:1", "::1"),
        ("localhost:1", "127.0.0.1"),
        ("10.0.0.1:1", None),
        ("worker-0.example.org:1", None),
    ],
)
def test_servers_listen_on_loopback_if_their_address_is_there(address, expected):
    assert tf_config.loopback_address(address) == expected


def test_flags_override_the_task():
    environ = {"TF_CONFIG": json.dumps({"cluster": {**WORKER, "ps": ["10.0.0.3:1", "10.0.0.4:2"]}})}
    config = tf_config.parse_tf_config(environ, job_name="ps", task_index=1)
    assert (config.task_type, config.task_index) == ("ps", 1)
    assert config.own_address == "10.0.0.4:2"


@pytest.mark.parametrize("address", ["", "x", "x:", ":1", "x:0", "x:65536", "x:-1", "x:y"])
def test_wrong_addresses_are_refused(address):
    with pytest.raises(ValueError, match=f"address must be .* got '{address}'"):
        tf_config.split_address(address)
