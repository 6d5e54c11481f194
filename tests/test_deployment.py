"""The files of deploy/, against what Kubernetes accepts and what servers and clusters expect."""

import json
import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tf_recsync.cluster.tf_config import parse_tf_config

DEPLOY = pathlib.Path(__file__).parent.parent / "deploy"
SERVER = ["python", "-m", "tf_recsync.server"]


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict]:
    """The objects of the cluster on Kubernetes, by kind and name."""
    text = (DEPLOY / "kubernetes" / "recsync.yaml").read_text()
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def config(objects) -> dict:
    return json.loads(objects["ConfigMap", "recsync-cluster"]["data"]["TF_CONFIG"])


def flags_of(command: list[str]) -> dict[str, str]:
    assert command[: len(SERVER)] == SERVER
    return dict(flag.removeprefix("--").split("=") for flag in command[len(SERVER) :])


def test_kubernetes_accepts_every_object(objects):
    assert len(objects) == 11
    for described in objects.values():
        kubernetes_validate.validate(described, kubernetes_validate.latest_version(), strict=True)


def test_each_address_is_that_of_a_pod_of_the_job(objects, config):
    for job, addresses in config["cluster"].items():
        name = f"recsync-{job}"
        service = objects["Service", name]["spec"]
        (port,) = service["ports"]
        if job == "chief":
            owner = objects["Job", name]["spec"]
            assert owner["completionMode"] == "Indexed"
            replicas, subdomain = owner["completions"], owner["template"]["spec"]["subdomain"]
        else:
            owner = objects["StatefulSet", name]["spec"]
            replicas, subdomain = owner["replicas"], owner["serviceName"]
            assert owner["selector"]["matchLabels"] == owner["template"]["metadata"]["labels"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        assert service["selector"] == owner["template"]["metadata"]["labels"]
        assert addresses == [
            f"{name}-{index}.{subdomain}:{port['port']}" for index in range(replicas)
        ]
        assert subdomain == name


def test_servers_find_their_task(objects, config):
    for job in ("worker", "ps", "reader"):
        pod = objects["StatefulSet", f"recsync-{job}"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        flags = flags_of(container["command"])
        assert flags.pop("bind_address") == "$(POD_IP)"
        assert flags.pop("task_index") == "$(TASK_INDEX)"
        # TensorFlow would take as many as the node has. Readers have no use for the flag.
        processors = container["resources"]["requests"]["cpu"]
        assert flags.get("intra_op_threads") == (None if job == "reader" else processors)
        for index in range(len(config["cluster"][job])):
            found = parse_tf_config(
                {"TF_CONFIG": json.dumps(config)}, job_name=flags["job_name"], task_index=index
            )
            assert (found.task_type, found.task_index) == (job, index)
        # A probe's command is not expanded: a shell has to.
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"][:2] == ["sh", "-c"]


def test_an_image_that_was_loaded_into_a_node_need_not_be_pulled(objects):
    pods = [
        o["spec"]["template"]["spec"] for o in objects.values() if "template" in o.get("spec", {})
    ]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len(containers) == 4
    # By default, Kubernetes pulls a tag "latest" each time.
    assert {container["imagePullPolicy"] for container in containers} == {"IfNotPresent"}
    (image,) = {container["image"] for container in containers}
    text = (DEPLOY.parent / "docs" / "deployment.md").read_text()
    # The page has it pushed before it is needed, under another name.
    assert f"'s#{image}#" in text.partition("kubectl create")[0]


def test_pods_have_no_more_rights_than_they_need(objects):
    policy = objects["NetworkPolicy", "recsync"]["spec"]
    assert policy["podSelector"] == policy["ingress"][0]["from"][0]["podSelector"]
    pods = [o["spec"]["template"] for o in objects.values() if "template" in o.get("spec", {})]
    assert len(pods) == 4
    for pod in pods:
        assert pod["metadata"]["labels"]["app"] == policy["podSelector"]["matchLabels"]["app"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        for container in pod["spec"]["containers"]:
            rights = container["securityContext"]
            assert not rights["allowPrivilegeEscalation"] and rights["readOnlyRootFilesystem"]


def test_the_containers_of_one_machine_are_those_of_their_cluster():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    configs = {service["environment"]["TF_CONFIG"] for service in services.values()}
    (text,) = configs
    cluster = json.loads(text)["cluster"]
    assert {a.partition(":")[0] for job in cluster.values() for a in job} == set(services)
    for job in ("worker", "ps"):
        for index, address in enumerate(cluster[job]):
            flags = flags_of(services[address.partition(":")[0]]["command"])
            assert (flags["job_name"], flags["task_index"]) == (job, str(index))


def test_the_image_has_what_its_commands_need(objects):
    image = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", image, re.M)
    for source in " ".join(copied).split():
        assert (DEPLOY.parent / source).exists(), source
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert {f"!{source}" for source in " ".join(copied).split()} <= set(ignored)
    # The extras of which its programs say that they need them, and TensorFlow.
    programs = [path.read_text() for path in (DEPLOY.parent / "examples").glob("*.py")]
    needed = set(re.findall(r"pip install 'tf_recsync\[(\w+)\]'", "\n".join(programs)))
    (names,) = re.findall(r"^names = (.+); \\$", image, re.M)
    assert needed == {"tensorboard"} and needed | {"tensorflow-cpu"} <= set(json.loads(names))
    # Nobody is root in it.
    assert re.findall(r"^USER (.+)$", image, re.M) == ["10001"]
    program = objects["Job", "recsync-chief"]["spec"]["template"]["spec"]["containers"][0]
    example = pathlib.Path(program["command"][1])
    assert (DEPLOY.parent / "examples" / example.name).exists()
    done = subprocess.run(
        [sys.executable, DEPLOY.parent / "examples" / example.name, "--helpshort"],
        capture_output=True,
        text=True,
        check=False,
    )
    known = set(re.findall(r"^  --(?:\[no\])?(\w+)", done.stdout, re.M))
    flags = dict(flag.removeprefix("--").split("=") for flag in program["command"][2:])
    assert set(flags) <= known
    # A node that is added and pulls the image may need longer than the minute of the default.
    assert float(flags["connect_seconds"]) >= 600
    # Each run has a folder of its own, as the documentation says.
    assert flags["checkpoint"] == "/shared/checkpoints/run-1"
    text = (DEPLOY.parent / "docs" / "deployment.md").read_text()
    assert re.search(r"For another run, .* with another `--checkpoint` folder,", text)


def test_a_probe_tells_servers_that_answer_from_those_that_stand_still(clusters):
    cluster = clusters.get(workers=1, ps=1)
    address = cluster._addresses["worker"][0]

    def probe(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, DEPLOY / "answers.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert probe(address, "--seconds=100").returncode == 0
    cluster.pause("worker", 0)
    try:
        silent = probe(address, "--seconds=0.5")
    finally:
        cluster.resume("worker", 0)
    assert silent.returncode == 1
    assert silent.stderr == f"{address} does not answer\n"
    assert probe("127.0.0.1:1").returncode == 1
    for wrong in ("4711", "host:", "host:0", ":4711"):
        refused = probe(wrong)
        assert refused.returncode == 2 and "must be HOST:PORT" in refused.stderr
    assert "--seconds must be positive" in probe(address, "--seconds=0").stderr
