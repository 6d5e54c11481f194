"""Puts small faults into a tree, one at a time, and sees whether its tests notice them.

    P=.venv/bin/python
    $P scripts/record_coverage.py                                   # which tests reach what
    $P scripts/mutation_check.py draw --faults=faults.json          # 60 faults, half in C++
    $P scripts/mutation_check.py run --faults=faults.json --results=new.jsonl
    $P scripts/mutation_check.py report --results=new.jsonl

and, to see whether an older suite notices what this one does not:

    $P scripts/mutation_check.py run --faults=faults.json --survivors_of=new.jsonl \\
      --tree=../old --lines=build/old_coverage/lines.json.xz --results=old.jsonl

For each fault, the tests that reach its line run, the cheapest first, until one fails that
passes without the fault: C++ test programs plain, then under the thread and address
sanitizers, then Python tests. A fault in the results is not tried again, so that a run that
was interrupted goes on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import queue
import random
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "recording")]

import coverage_map  # noqa: E402
import faults as faults_  # noqa: E402
import mutant_runs  # noqa: E402
import tree_environment  # noqa: E402

_CC_FOLDERS = ("cc/engine/", "cc/kernels/", "cc/simulation/")


def main() -> None:
    arguments = _arguments()
    try:
        arguments.command(arguments)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"mutation_check.py: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    lines = HERE.parent / "build" / "coverage" / "lines.json.xz"

    draw = commands.add_parser("draw", help="write a list of faults")
    draw.set_defaults(command=_draw)
    draw.add_argument("--number", type=int, default=60, help="of faults")
    draw.add_argument("--seed", type=int, default=1)

    run = commands.add_parser("run", help="try the faults of a list")
    run.set_defaults(command=_run)
    run.add_argument("--results", type=pathlib.Path, required=True, help="JSON lines; appended to")
    run.add_argument("--survivors_of", type=pathlib.Path, help="results; others are left out")
    run.add_argument("--jobs", type=int, default=2, help="faults tried side by side")
    run.add_argument("--limit", type=float, default=900.0, help="seconds of tests for a fault")
    run.add_argument(
        "--folder", type=pathlib.Path, default=HERE.parent / "build" / "mutation", help="for copies"
    )
    for command in (draw, run):
        command.add_argument("--tree", type=pathlib.Path, default=HERE.parent, help="the checkout")
        command.add_argument("--faults", type=pathlib.Path, required=True, help="the list")
        command.add_argument(
            "--lines", type=pathlib.Path, default=lines, help="of record_coverage.py, of that tree"
        )

    report = commands.add_parser("report", help="sum up results")
    report.set_defaults(command=_report)
    report.add_argument("--results", type=pathlib.Path, required=True)
    return parser.parse_args()


def _draw(arguments: argparse.Namespace) -> None:
    """Writes the list: faults in covered lines, that compile."""
    tree, map_ = arguments.tree.resolve(), coverage_map.read(arguments.lines)
    random_ = random.Random(arguments.seed)
    chosen: list[faults_.Fault] = []
    for is_cc, number in ((True, arguments.number // 2), (False, -(-arguments.number // 2))):
        candidates, weights = {}, {}
        for file in map_.files():
            wanted = file.startswith(_CC_FOLDERS) if is_cc else file.startswith("tf_recsync/")
            covered = {line for line in map_.places(file) if map_.tests(file, line) - {""}}
            if not wanted or not covered:
                continue
            source = (tree / file).read_text()
            find = faults_.cc_faults if is_cc else faults_.python_faults
            candidates[file] = [f for f in find(file, source) if str(f.line) in covered]
            weights[file] = len(covered)
        taken = 0
        for fault in faults_.draw(candidates, weights, random_):
            if taken == number:
                break
            source = (tree / fault.file).read_text()
            fault = faults_.with_context(fault, source)
            if faults_.locate(fault, source) != fault:  # The place could be mistaken.
                continue
            if is_cc and not mutant_runs.cc_compiles(tree, fault):
                continue
            chosen.append(fault)
            taken += 1
            print(f"{fault.file}:{fault.line}: {fault.kind}", flush=True)
    text = json.dumps([dataclasses.asdict(fault) for fault in chosen], indent=1)
    arguments.faults.write_text(text + "\n")


def _read_faults(path: pathlib.Path) -> list[faults_.Fault]:
    faults = []
    for record in json.loads(path.read_text()):
        record["context"] = tuple(map(tuple, record["context"]))
        faults.append(faults_.Fault(**record))
    return faults


def _results(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _run(arguments: argparse.Namespace) -> None:
    faults = list(enumerate(_read_faults(arguments.faults)))
    if arguments.survivors_of is not None:
        if not arguments.survivors_of.exists():
            raise FileNotFoundError(f"there is no --survivors_of={arguments.survivors_of}")
        of = _results(arguments.survivors_of)
        survivors = {result["fault"] for result in of if result["status"] == "survived"}
        faults = [(number, fault) for number, fault in faults if number in survivors]
    done = {result["fault"] for result in _results(arguments.results)}
    todo = [(number, fault) for number, fault in faults if number not in done]
    print(f"{len(todo)} of {len(faults)} faults to try", flush=True)
    map_ = coverage_map.read(arguments.lines)
    mutex = threading.Lock()
    places: queue.SimpleQueue[mutant_runs.Place] = queue.SimpleQueue()
    for job in range(max(1, min(arguments.jobs, len(todo)))):
        folder = arguments.folder.resolve() / str(job)
        environment = tree_environment.TreeEnvironment(folder, [HERE / "recording"])
        environment.update(arguments.tree.resolve())
        places.put(mutant_runs.Place(environment, folder))

    def try_one(number: int, fault: faults_.Fault) -> None:
        place = places.get()
        began = time.monotonic()
        try:
            result = place.try_fault(fault, map_, arguments.limit)
        finally:
            places.put(place)
        result = {
            "fault": number,
            **{name: getattr(fault, name) for name in ("file", "line", "kind", "before", "after")},
            **result,
            "seconds": round(time.monotonic() - began, 1),
        }
        with mutex, open(arguments.results, "a") as results:
            results.write(json.dumps(result) + "\n")
            by = f" by {result['by']}" if result.get("by") else ""
            print(f"{number} {fault.file}:{fault.line} {result['status']}{by}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        for future in [pool.submit(try_one, *one) for one in todo]:
            future.result()


def _report(arguments: argparse.Namespace) -> None:
    results = _results(arguments.results)
    if not results:
        raise FileNotFoundError(f"--results={arguments.results} has no results")
    parts = {"C++": "cc/", "Python": "tf_recsync/"}
    for name, folder in parts.items():
        of_part = [result for result in results if result["file"].startswith(folder)]
        counts = collections.Counter(result["status"] for result in of_part)
        print(f"{name}: {dict(counts)}, {sum(r['seconds'] for r in of_part):.0f} s")
    for result in results:
        if result["status"] == "caught":
            continue
        print(f"\n{result['fault']} {result['status']}: {result['file']}:{result['line']}")
        print(f"  {result['kind']}: {result['before']!r} -> {result['after']!r}")
        print(f"  {result.get('tests', 0)} tests ran, {result.get('left_out', 0)} left out")
    flaky = {test for result in results for test in result.get("flaky", ())}
    if flaky:
        print("\nfailed without the fault, too:", *sorted(flaky), sep="\n  ")


if __name__ == "__main__":
    main()
