"""Looks for calls of the custom ops that end the process, or never end themselves.

Usage:
  fuzz_ops.py --minutes=5                        # a seed that is new each time
  fuzz_ops.py --seed=7 --calls=20000
  fuzz_ops.py --seed=7 --first=1234 --calls=1    # one call again, with its arguments

The calls are made in subprocesses (fuzz_calls.py), so that one that ends its process is found, and
one that takes longer than --limit seconds is stopped. Each is told by its seed and its number,
which is all that its arguments depend on, and made a second time, alone, to see its arguments and
whether it fails without those before it. Ends with status 1 if there were any.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

CALLS = pathlib.Path(__file__).resolve().parent / "fuzz_calls.py"
# Calls that a process makes: TensorFlow keeps something of each.
PER_PROCESS = 4000
# Seconds that importing TensorFlow may take, beside others.
START = 120.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call that ended its process or did not end."""

    number: int
    ops: str
    how: str
    said: str  # the end of what the process wrote


def calls_made(
    command: Sequence[str], seed: int, first: int, calls: int, limit: float
) -> Iterator[int | Failure]:
    """Makes calls in a process, up to one that fails.

    Args:
        command: what makes them; it takes a seed, a first number and how many, and says what it
            does as fuzz_calls.py does.
        seed: of the calls.
        first: the number of the first one.
        calls: how many.
        limit: seconds that a call may take.

    Yields:
        The number of each call that was begun; the failure, if there is one, at last.
    """
    process = subprocess.Popen(
        [*command, str(seed), str(first), str(calls)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []

    def read_calls():
        for line in process.stdout:
            lines.put(line.strip())
        lines.put(None)

    def read_errors():
        for line in process.stderr:
            said.append(line)
            del said[:-400]

    readers = [threading.Thread(target=f, daemon=True) for f in (read_calls, read_errors)]
    for reader in readers:
        reader.start()
    number, ops, how = first, "before the first call", None
    patience = START
    try:
        while how is None:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                how = f"did not end within {patience:g} s"
                break
            if line == "end":
                return
            if line is None:
                status = process.wait()
                how = f"ended with status {status}"
                if status < 0:
                    how = f"was ended by {signal.Signals(-status).name}"
                break
            called, _, ops = line.partition(" ")
            number, patience = int(called), limit
            yield number
    finally:
        # What hangs ends neither by itself nor by a gentle signal.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for reader in readers:
            reader.join(10)
        process.stdout.close()
        process.stderr.close()
    yield Failure(number, ops, how, "".join(said[-40:]))


def failures(
    command: Sequence[str], seed: int, first: int, calls: int, limit: float, minutes: float
) -> Iterator[int | Failure]:
    """Goes on after each failure with the next call, until all are made or the time is over."""
    end = time.monotonic() + 60 * minutes
    last = first + calls
    while first < last:
        number = None
        for result in calls_made(command, seed, first, min(PER_PROCESS, last - first), limit):
            yield result
            number = result.number if isinstance(result, Failure) else result
            if time.monotonic() > end:
                return
        first = first if number is None else number + 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="of the calls; a new one by default")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--calls", type=int, help="how many; by default as many as there is time")
    parser.add_argument("--minutes", type=float, help="how long; by default 5, or all --calls")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a call may take")
    flags = parser.parse_args()
    seed = random.randrange(10**6) if flags.seed is None else flags.seed
    calls = 10**9 if flags.calls is None else flags.calls
    minutes = flags.minutes
    if minutes is None:
        minutes = 5.0 if flags.calls is None else float("inf")
    command = [sys.executable, str(CALLS)]
    verbose = [*command, "--verbose"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    made = failed = 0
    began = time.monotonic()
    told = 0.0
    for result in failures(
        verbose if calls == 1 else command, seed, flags.first, calls, flags.limit, minutes
    ):
        seconds = time.monotonic() - began
        if not isinstance(result, Failure):
            made += 1
            if seconds - told > 30:
                told = seconds
                print(f"{made} calls in {seconds:.0f} s, {failed} failed", flush=True)
            continue
        failed += 1
        print(f"Call {result.number} of seed {seed} ({result.ops}) {result.how}. Again:")
        print(f"  scripts/fuzz_ops.py --seed={seed} --first={result.number} --calls=1")
        if calls > 1:
            again = list(calls_made(verbose, seed, result.number, 1, flags.limit))[-1]
            alone = isinstance(again, Failure)
            print(f"Alone, it {again.how if alone else 'does not fail'}.")
            result = again if alone else result
        print(result.said, flush=True)
    seconds = time.monotonic() - began
    print(f"Seed {seed}: {made} calls in {seconds:.0f} s, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
