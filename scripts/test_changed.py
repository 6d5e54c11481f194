"""Runs the tests that a change can touch, the cheapest that reach all that has changed.

    make test-changed                  # what differs from where this branch left main
    make test-changed BASE=HEAD~1      # from another commit
    make test-changed BUDGET=600       # seconds of tests; 0 for all tests that can be touched

Changed lines of the package and of the C++ part lead to functions, and these to the tests that
tests/coverage_map.json.xz says reach them (`make coverage` records it). For a new function all
tests of its file count; for a new file, or one without a record, those that import it. A
changed test file runs whole; a changed helper of tests runs the files that import it. Within
the budget, tests are chosen so that every changed function is reached, the cheapest first and
of different modules; what is left out is said at the end.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(HERE / "recording")]

import changes  # noqa: E402
import coverage_map  # noqa: E402

MAP = ROOT / "tests" / "coverage_map.json.xz"
_BUILD_SECONDS = 15.0  # Of a C++ test.


def main() -> None:
    arguments = _arguments()
    try:
        map_ = coverage_map.read(arguments.map)
        base = arguments.base or changes.merge_base(ROOT)
        changed = changes.since(ROOT, base)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"test_changed.py: {error}")
    touched = changes.touched_tests(ROOT, changed, map_)
    everything = sorted(set().union(*touched.values()))
    for place in sorted(place for place, tests in touched.items() if not tests):
        print(f"no test is known to reach {place}")
    if not everything:
        print(f"No test is known to reach what has changed since {base}.")
        return
    budget = arguments.budget or float("inf")
    # A C++ test has to be built.
    seconds = {t: s + _BUILD_SECONDS * t.startswith("cc/") for t, s in map_.seconds.items()}
    chosen = changes.choose(touched, seconds, budget)
    print(
        f"{len(chosen)} tests, of {len(everything)} that can touch what has changed since "
        f"{base[:12]}; {sum(seconds.get(test, 1.0) for test in chosen):.0f} s, as recorded",
        flush=True,
    )
    if arguments.list:
        print(*chosen, sep="\n")
        return
    failed = _run_cc([test for test in chosen if test.startswith("cc/")], arguments.cc_command)
    python = [test for test in chosen if not test.startswith("cc/")]
    if python:
        failed |= _run_python(python, arguments)
    left_out = len(everything) - len(chosen)
    if left_out:
        more = sum(seconds.get(test, 1.0) for test in set(everything) - set(chosen))
        print(
            f"{left_out} more tests can touch the change and were left out for time ({more:.0f} "
            f"s): `make test-changed BUDGET=0` runs them too, `make test` and `make cc-test` all."
        )
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="a commit; default: where HEAD left main")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds of tests; 0: all")
    parser.add_argument("--map", type=pathlib.Path, default=MAP, help="by function")
    parser.add_argument("--list", action="store_true", help="say which tests, and run none")
    parser.add_argument("--processes", type=int, default=2, help="that run Python tests")
    parser.add_argument("--pytest", default="", help="more arguments for pytest")
    parser.add_argument("--cc_command", default="scripts/cc_test.sh thread", help="runs C++ tests")
    arguments = parser.parse_args()
    if arguments.budget < 0:
        parser.error(f"--budget must be at least 0, not {arguments.budget}")
    return arguments


def _run_cc(tests: list[str], command: str) -> bool:
    """Runs C++ tests by name; whether one failed."""
    if not tests:
        return False
    names = [pathlib.Path(test).stem for test in tests]
    print("== C++ tests:", *names, flush=True)
    return subprocess.run([*command.split(), *names], cwd=ROOT).returncode != 0


def _run_python(tests: list[str], arguments: argparse.Namespace) -> bool:
    """Runs Python tests with the options of `make test`; whether one failed."""
    modules = {test.partition("::")[0] for test in tests}
    print(f"== {len(tests)} Python tests and files, of {len(modules)} files", flush=True)
    # A process that has no file to run would import TensorFlow for nothing.
    processes = 0 if len(modules) < 2 else arguments.processes
    command = [sys.executable, "-m", "pytest", "-n", str(processes)]
    # It may have chosen a case that `make test` leaves out.
    command += ["--dist", "loadfile", "--no-loadscope-reorder", "-m", "not soak"]
    command += shlex.split(arguments.pytest)
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    return subprocess.run([*command, *tests], cwd=ROOT, env=environ).returncode != 0


if __name__ == "__main__":
    main()
