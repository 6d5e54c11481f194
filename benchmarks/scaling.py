"""How asynchronous training scales: speed and traffic per step for 1, 2, 4 and 8 workers.

What is measured: `AsyncStrategy` training Wide & Deep (see click_models.py) with `model.fit` on 2
parameter servers and a growing number of workers, all processes of this machine. Each step waits
for an artificial compute time (`tf_recsync.testing.set_compute_time`, 30 ms by default) beside what
it really computes. The wait uses no processor, so that workers on a few cores overlap as machines
of their own would, until the real work of all of them fills the cores. That is what limits the
speed here: compare `cpu_ms` times steps per second with the cores of the machine.

What is counted, from the kernel's TCP statistics (`ss -ti`) of the machine's connections before and
after a turn, each end of a connection counting what it sent:

- `wire_kb_per_step`: bytes that were sent and acknowledged, TCP and IP headers not included, on
  connections of which one end is the listening port of a worker or a parameter server: pulls,
  pushes, the coordinator's calls, and gRPC's framing and acknowledgements. Nothing else uses these
  ports.
- `input_kb_per_step`: the same for the coordinator's other listening ports, those of tf.data's
  service, from which workers fetch their batches.
- `segments_per_step`: TCP segments with data on the former connections, a proxy for messages. gRPC
  writes a message of up to 64 KB as one segment if the socket is free, may put several small ones
  into one, and needs several for a larger one; so it bounds neither, but is comparable between
  runs and systems on the same kernel.

The number of workers is that of each JSON line. Each has a turn's median over the rounds; the
numbers of workers are measured one after the other, as many processes at a time as memory holds.
The summary's `ratio` is the speed with the most workers over that with the fewest, `efficiency`
that divided by how many times more workers there are.

    python benchmarks/scaling.py --batch_size=128 --compute_ms=30 --json=scaling.json
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
from typing import Any

import common
from absl import app, flags

FLAGS = flags.FLAGS
BATCH_SIZE = 128
common.define_flags(batch_sizes=(BATCH_SIZE,))
flags.DEFINE_list("workers", ["1", "2", "4", "8"], "Numbers of workers.")
flags.DEFINE_integer("ps", 2, "Parameter servers.", lower_bound=1)
flags.DEFINE_float("compute_ms", 30.0, "Artificial compute time of a step.", lower_bound=0)
flags.DEFINE_integer("steps_per_execution", 1, "Steps per call to a worker.", lower_bound=1)
flags.DEFINE_integer("own_workers", None, "Used by the benchmark itself.")

_COUNTERS = re.compile(r"\b(bytes_acked|data_segs_out):(\d+)")


def sent_by_port(ports: set[int]) -> tuple[int, int]:
    """Bytes and data segments sent so far on connections with an end at one of the ports."""
    command = ["ss", "-tinHO", "state", "established"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size = segments = 0
    for line in output.splitlines():
        # Receive queue, send queue, local address, peer's address, statistics.
        fields = line.split()
        if not ports & {int(address.rpartition(":")[2]) for address in fields[2:4]}:
            continue
        counters = dict(_COUNTERS.findall(line))
        size += int(counters.get("bytes_acked", 0))
        segments += int(counters.get("data_segs_out", 0))
    return size, segments


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process of this user listens."""
    output = subprocess.run(["ss", "-tlnpHO"], check=True, capture_output=True, text=True).stdout
    own = (line for line in output.splitlines() if f"pid={pid}," in line)
    return {int(line.split()[3].rpartition(":")[2]) for line in own}


def run_ours(rounds: common.Rounds) -> None:
    """AsyncStrategy with some number of workers."""
    if shutil.which("ss") is None:
        raise common.Unavailable("needs the program ss: apt-get install iproute2")
    import click_models

    import tf_recsync as recsync

    workers = FLAGS.own_workers
    cluster = click_models.start_cluster(rounds, workers, FLAGS.ps)
    servers = {
        int(address.rpartition(":")[2])
        for job in ("worker", "ps")
        for address in cluster.cluster_spec.job_tasks(job)
    }
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, FLAGS.compute_ms / 1e3)
    data = click_models.make_data(rounds.batch_size)
    with strategy.scope():
        model = click_models.build_ours(data.spec)
        weights = recsync.staleness.InversePower(k=2, baseline=workers)
        model.compile(
            recsync.optimizers.Adagrad(click_models.LEARNING_RATE, staleness=weights),
            "binary_crossentropy",
            steps_per_execution=FLAGS.steps_per_execution,
        )

    def sent() -> dict[str, int]:
        own = listening_ports(os.getpid())
        size, segments = sent_by_port(servers)
        return {"wire": size, "segments": segments, "input": sent_by_port(own - servers)[0]}

    rounds.describe(workers=workers)
    multiple = FLAGS.steps_per_execution * workers
    batches = click_models.in_memory(data.train(rounds.batch_size))
    click_models.serve_fit(rounds, model, batches, multiple=multiple, counters=sent)


SYSTEMS = {common.OURS: run_ours}


def measure(workers: int, batch_size: int) -> dict[str, Any] | None:
    """The line of one number of workers; None if that can't be measured here."""
    results = common.compare(SYSTEMS, batch_size, arguments=[f"--own_workers={workers}"])
    if not results.systems:
        return None
    line = results.line(common.OURS)

    def per_step(counter: str) -> float:
        turns = results.turns[common.OURS]
        return statistics.median(turn[counter] / turn["steps"] for turn in turns)

    line["wire_kb_per_step"] = round(per_step("wire") / 1e3, 1)
    line["input_kb_per_step"] = round(per_step("input") / 1e3, 1)
    line["segments_per_step"] = round(per_step("segments"), 1)
    return line


def main(argv: list[str]) -> None:
    common.check_arguments(argv, systems=SYSTEMS)
    if common.is_system():
        common.be_system(SYSTEMS)
    numbers = sorted(int(number) for number in FLAGS.workers)
    for batch_size in common.batch_sizes([BATCH_SIZE]):
        speeds = {}
        for workers in numbers:
            line = measure(workers, batch_size)
            if line is None:
                return
            speeds[workers] = line["examples_per_second"]
            common.report(line)
        ratio = speeds[numbers[-1]] / speeds[numbers[0]]
        common.report(
            {
                "benchmark": "scaling",
                "batch_size": batch_size,
                "compute_ms": FLAGS.compute_ms,
                "workers": numbers,
                "ratio": round(ratio, 3),
                "efficiency": round(ratio * numbers[0] / numbers[-1], 3),
                "rounds": FLAGS.rounds,
            }
        )


if __name__ == "__main__":
    app.run(main)
