"""What the benchmarks share: systems in processes of their own that take turns, and reports.

A benchmark compares systems, each a function of a `Rounds` object. `compare` starts a process for
each system, in which the function builds its model, warms up, says that it is ready, and then waits
(without using a processor) until it is its turn. A round is one turn of every system, so that all
see the same machine; ratios are those of one round's pair, and their median is reported. Only the
turns are timed: tracing, starting servers and the first steps are not part of them.

`compare_variants` does the same with threads of this process, for systems that differ by a few
percent: two processes of the same program do too, because their memory lies differently.

Times are wall-clock times. `cpu_ms`, the processor time of a step in all processes of the system,
hardly changes when other programs use the machine, as the wall-clock figures do.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import machine  # noqa: E402
from absl import app, flags, logging  # noqa: E402

FLAGS = flags.FLAGS
SEED = 1
OURS = "recsync"
_CALIBRATION_STEPS = 48

_lines: list[dict[str, Any]] = []


def define_flags(
    *, batch_sizes: Sequence[int] = (512, 2048), rounds: int = 5, round_seconds: float = 4.0
) -> None:
    """Defines the flags that all benchmarks have."""
    sizes = " and ".join(str(size) for size in batch_sizes)
    flags.DEFINE_integer("batch_size", None, f"Examples per step. Default: {sizes}.", lower_bound=1)
    flags.DEFINE_integer("rounds", rounds, "Rounds that count.", lower_bound=1)
    flags.DEFINE_float(
        "round_seconds", round_seconds, "How long about a turn takes.", lower_bound=0.1
    )
    flags.DEFINE_string("json", None, "Gets the printed lines.")
    flags.DEFINE_list("systems", [], "The systems to run. Default: all that can run.")
    flags.DEFINE_string("run_system", None, "Used by the benchmark itself: the system to be.")
    flags.DEFINE_integer("channel", None, "Used by the benchmark itself: the socket to its parent.")


def report(line: dict[str, Any]) -> None:
    """Prints a JSON line, and keeps it for `--json`."""
    print(json.dumps(line), flush=True)
    _lines.append(line)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text("".join(json.dumps(one) + "\n" for one in _lines))


def summary_of_ratios(ratios: Sequence[float]) -> dict[str, float]:
    """The median of the rounds' ratios, the smallest and the largest."""
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


class Unavailable(Exception):
    """A system can't run here; says what is missing."""


class _Finished(Exception):
    """No more turns."""


class _Channel:
    """JSON lines over a socket."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._file = connection.makefile("rw")

    def send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone."""
        try:
            line = self._file.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Rounds:
    """A system's view of the benchmark, in the system's process.

    Args:
        channel: To the benchmark.
        batch_size: Examples per step.
        steps: The steps of a turn; None to choose them by `--round_seconds`.

    Attributes:
        batch_size: Examples per step.
    """

    def __init__(
        self, channel: _Channel | _QueueChannel, batch_size: int, steps: int | None = None
    ):
        self._channel = channel
        self._steps = steps
        self.batch_size = batch_size
        self._info: dict[str, Any] = {}
        self._servers: list[int] = []

    def describe(self, **info: Any) -> None:
        """Adds to the system's line in the report."""
        self._info.update(info)

    def watch_servers(self, pids: Iterable[int]) -> None:
        """Names the processes beside this one whose processor time counts."""
        self._servers = list(pids)

    def steps_for(self, seconds_per_step: float, multiple: int = 1) -> int:
        """How many steps make a turn."""
        if self._steps is not None:
            return self._steps
        return multiple * max(1, round(FLAGS.round_seconds / seconds_per_step / multiple))

    def ready(self, steps: int) -> None:
        """Warmed up, and ready for turns of that many steps."""
        self._channel.send({"ready": self._info, "steps": steps})

    def wait(self) -> bool:
        """Waits for the system's turn; False when there is none any more."""
        return self._channel.receive() is not None

    def start(self) -> None:
        """The turn's timed part begins."""
        self._started = time.perf_counter(), self._cpu_seconds()

    def stop(self, steps: int, measure: Callable[[], dict[str, Any]] = dict) -> None:
        """The turn's timed part is over; what `measure` returns is sent with the times."""
        seconds = time.perf_counter() - self._started[0]
        cpu = self._cpu_seconds() - self._started[1]
        self._channel.send({"steps": steps, "seconds": seconds, "cpu_seconds": cpu, **measure()})

    def serve(self, run: Callable[[int], None], *, multiple: int = 1) -> None:
        """Warms up and takes turns, for a system with a function `run(steps)`.

        Args:
            run: Runs steps, and returns when all are done.
            multiple: What steps come in.
        """
        steps = -(-_CALIBRATION_STEPS // multiple) * multiple
        run(steps)
        started = time.perf_counter()
        run(steps)
        steps = self.steps_for((time.perf_counter() - started) / steps, multiple)
        run(steps)
        self.ready(steps)
        while self.wait():
            self.start()
            run(steps)
            self.stop(steps)

    def serve_fit(
        self,
        callback_class: type,
        fit: Callable[[int, int, list[Any]], Any],
        *,
        multiple: int = 1,
        counters: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Warms up and takes turns, for a system with Keras's `fit`: an epoch is a turn.

        A single call of `fit` runs all turns, so that what a call of `fit` costs by itself, like
        making iterators, is not part of them.

        Args:
            callback_class: The Callback class of the Keras in use.
            fit: `fit(steps_per_epoch, epochs, callbacks)`.
            multiple: What steps come in.
            counters: Reads counters; by how much they rose is sent with each turn.
        """
        seconds = self.calibrate_fit(callback_class, fit, multiple=multiple)
        steps = self.steps_for(seconds, multiple)
        rounds = self

        class Turns(callback_class):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 0:
                    return  # Warms up.
                if epoch == 1:
                    rounds.ready(steps)
                if not rounds.wait():
                    raise _Finished
                self.before = counters()
                rounds.start()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if epoch > 0:
                    rounds.stop(steps, self.rise)

            def rise(self) -> dict[str, int]:
                return {name: value - self.before[name] for name, value in counters().items()}

        fit(steps, 1_000_000, [Turns()])

    def calibrate_fit(
        self, callback_class: type, fit: Callable[[int, int, list[Any]], Any], *, multiple: int = 1
    ) -> float:
        """The seconds per step of `fit`, measured after a short warm-up."""
        steps = -(-_CALIBRATION_STEPS // multiple) * multiple
        seconds: list[float] = []

        class Timer(callback_class):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.started = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seconds.append(time.perf_counter() - self.started)

        fit(steps, 2, [Timer()])
        return seconds[-1] / steps

    def _cpu_seconds(self) -> float:
        return machine.cpu_seconds(self._servers)


class _Process:
    """A system's process, seen from the benchmark's."""

    def __init__(self, system: str, batch_size: int, arguments: Sequence[str]):
        ours, theirs = socket.socketpair()
        self.system = system
        with theirs:
            # What it prints must not come between the JSON lines.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, sys.argv[0], *sys.argv[1:], *arguments),
                    *("--json=", f"--batch_size={batch_size}", f"--run_system={system}"),
                    f"--channel={theirs.fileno()}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
            )
        self._channel = _Channel(ours)
        self.turns: list[dict[str, Any]] = []
        try:
            message = self._receive()
            if "unavailable" in message:
                raise Unavailable(message["unavailable"])
        except BaseException:
            self.close()
            raise
        self.info: dict[str, Any] = message["ready"]

    def turn(self) -> None:
        self._channel.send({})
        self.turns.append(self._receive())

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        message = self._channel.receive()
        if message is None:
            code = self._process.wait()
            raise RuntimeError(f"the process of system {self.system} ended with code {code}")
        return message


class _QueueChannel:
    """A `_Channel` between threads."""

    def __init__(self, incoming: queue.SimpleQueue, outgoing: queue.SimpleQueue):
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, message: dict[str, Any] | None) -> None:
        self._outgoing.put(message)

    def receive(self) -> dict[str, Any] | None:
        return self._incoming.get()


class _Thread:
    """A system's thread, with the interface of `_Process`."""

    def __init__(
        self,
        system: str,
        function: Callable[[Rounds], None],
        batch_size: int,
        steps: int | None,
    ):
        self.system = system
        self.turns: list[dict[str, Any]] = []
        requests: queue.SimpleQueue = queue.SimpleQueue()
        answers: queue.SimpleQueue = queue.SimpleQueue()
        self._channel = _QueueChannel(answers, requests)
        self._error: BaseException | None = None
        rounds = Rounds(_QueueChannel(requests, answers), batch_size, steps)

        def run() -> None:
            try:
                function(rounds)
            except _Finished:
                pass
            except BaseException as error:
                self._error = error
                answers.put(None)

        self._thread = threading.Thread(target=run, name=system, daemon=True)
        self._thread.start()
        message = self._receive()
        self.info: dict[str, Any] = message["ready"]
        self.steps: int = message["steps"]

    def turn(self) -> None:
        self._channel.send({})
        self.turns.append(self._receive())

    def close(self) -> None:
        self._channel.send(None)
        self._thread.join(timeout=30)

    def _receive(self) -> dict[str, Any]:
        message = self._channel.receive()
        if message is None:
            raise RuntimeError(f"system {self.system} failed") from self._error
        return message


class Results:
    """What one comparison measured, with one batch size.

    Attributes:
        batch_size: Examples per step.
        systems: The names of those that ran.
        turns: Of each system, what `Rounds.stop` sent, one dict a round.
        info: Of each system, what `Rounds.describe` was told.
    """

    def __init__(self, batch_size: int, processes: Sequence[_Process | _Thread]):
        self.batch_size = batch_size
        self.systems = [process.system for process in processes]
        self.turns = {process.system: process.turns for process in processes}
        self.info = {process.system: process.info for process in processes}

    def step_seconds(self, system: str) -> list[float]:
        """Seconds of a step, for each round."""
        return [turn["seconds"] / turn["steps"] for turn in self.turns[system]]

    def cpu_seconds(self, system: str) -> list[float]:
        """Processor seconds of a step, for each round."""
        return [turn["cpu_seconds"] / turn["steps"] for turn in self.turns[system]]

    def ratios(self, system: str, other: str) -> list[float]:
        """The speed of a system over that of another, for each round."""
        pairs = zip(self.step_seconds(system), self.step_seconds(other), strict=True)
        return [theirs / mine for mine, theirs in pairs]

    def cpu_ratios(self, system: str, other: str) -> list[float]:
        """The processor time of another system over that of a system, for each round."""
        pairs = zip(self.cpu_seconds(system), self.cpu_seconds(other), strict=True)
        return [theirs / mine for mine, theirs in pairs]

    def median_ratio(self, system: str, other: str) -> float | None:
        """The median of `ratios`; None if one of the two did not run."""
        if system not in self.turns or other not in self.turns:
            return None
        return round(statistics.median(self.ratios(system, other)), 3)

    def line(self, system: str) -> dict[str, Any]:
        """The system's line in the report."""
        seconds = statistics.median(self.step_seconds(system))
        return {
            "system": system,
            "batch_size": self.batch_size,
            "examples_per_second": round(self.batch_size / seconds, 1),
            "step_ms": round(1e3 * seconds, 3),
            "cpu_ms": round(1e3 * statistics.median(self.cpu_seconds(system)), 3),
            "steps_per_round": self.turns[system][0]["steps"],
            **self.info[system],
        }


def is_system() -> bool:
    """Whether this process is that of a system."""
    return FLAGS.run_system is not None


def be_system(systems: Mapping[str, Callable[[Rounds], None]]) -> None:
    """Runs the system that this process is for; does not return."""
    logging.set_verbosity(logging.WARNING)
    channel = _Channel(socket.socket(fileno=FLAGS.channel))
    try:
        systems[FLAGS.run_system](Rounds(channel, FLAGS.batch_size))
    except _Finished:
        pass
    except Unavailable as error:
        channel.send({"unavailable": str(error)})
    sys.stderr.flush()
    # TensorFlow's server in this process has no clean end.
    os._exit(0)


def compare(
    systems: Iterable[str],
    batch_size: int,
    *,
    optional: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> Results:
    """Runs systems in turns.

    Args:
        systems: Their names. Those that are not in `--systems`, if set, are left out; of those that
            can't run here it is reported why.
        batch_size: Examples per step.
        optional: Which of them run only if `--systems` names them.
        arguments: Further command-line arguments for the systems' processes.
    """
    processes: list[_Process] = []
    try:
        for system in systems:
            wanted = system in FLAGS.systems if FLAGS.systems else system not in optional
            if not wanted:
                continue
            try:
                processes.append(_Process(system, batch_size, arguments))
            except Unavailable as error:
                report({"system": system, "batch_size": batch_size, "unavailable": str(error)})
        for _ in range(FLAGS.rounds):
            for process in processes:
                process.turn()
    finally:
        for process in processes:
            process.close()
    return Results(batch_size, processes)


def compare_variants(systems: Mapping[str, Callable[[Rounds], None]], batch_size: int) -> Results:
    """Runs systems in turns of equally many steps, in threads of this process; see `compare`."""
    threads: list[_Thread] = []
    try:
        for system, function in systems.items():
            if not FLAGS.systems or system in FLAGS.systems:
                steps = threads[0].steps if threads else None
                threads.append(_Thread(system, function, batch_size, steps))
        for _ in range(FLAGS.rounds):
            for thread in threads:
                thread.turn()
    finally:
        for thread in threads:
            thread.close()
    return Results(batch_size, threads)


def check_arguments(
    argv: Sequence[str], *, needs_one: bool = False, **choices: Iterable[str]
) -> None:
    """Refuses command lines that would be ignored.

    Args:
        argv: what is no flag, after the program's name.
        needs_one: whether an empty list is refused, too.
        **choices: what lists of flags may name, by the name of the flag.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    for name, known in choices.items():
        unknown = set(FLAGS[name].value) - set(known)
        if unknown or (needs_one and not FLAGS[name].value):
            raise app.UsageError(f"--{name}: {sorted(unknown)} unknown; there are {list(known)}")


def batch_sizes(default: Sequence[int] = (512, 2048)) -> list[int]:
    """The batch sizes to run."""
    return [FLAGS.batch_size] if FLAGS.batch_size else list(default)
