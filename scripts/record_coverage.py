"""Records which test reaches which line of the package and of its C++ part.

    .venv/bin/python scripts/record_coverage.py                # this checkout: build/coverage
    .venv/bin/python scripts/record_coverage.py --tree=../old --output=build/old_coverage
    .venv/bin/python scripts/record_coverage.py --only=report  # from what is recorded already

A private copy of the tree is built with every basic block of the C++ part instrumented
(recording/record_blocks.cc), the C++ tests and then the Python tests run on it, and the
results are written to the output folder:

- `coverage.json` and `coverage.txt`: the percentage of lines reached, in all and by file.
- `lines.json.xz`: for each line the tests that reach it (see coverage_map.py).
- `functions.json.xz`: the same by function; small enough to be committed.

Lines of Python count if a thread ran them that Python started: coverage.py does not see
functions that TensorFlow's own threads call. Tests that fail are counted and don't matter.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
RECORDING = HERE / "recording"
sys.path[:0] = [str(HERE), str(RECORDING)]

import cc_blocks  # noqa: E402
import coverage  # noqa: E402
import coverage_map  # noqa: E402
import numpy as np  # noqa: E402
import tree_environment  # noqa: E402

# Blocks stay apart with -Og, as with -O0, but inner loops take a quarter of the time.
_FLAGS = "-Og -g1 -fsanitize-coverage=trace-pc -fno-optimize-sibling-calls"
_CC_FOLDERS = ("cc/engine", "cc/simulation")
_STEPS = ("build", "cc", "python", "report")


def main() -> None:
    arguments = _arguments()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    environment = tree_environment.TreeEnvironment(output, [RECORDING], "recording_start")
    sink = output / "record_blocks.o"
    # Also for what tests build: the wheel's libraries shall be the same.
    environ = {
        "CXX": f"{os.environ.get('CXX', 'g++')} -Wl,{sink}",
        "CXXFLAGS": f"{_FLAGS} {os.environ.get('CXXFLAGS', '')}".strip(),
    }
    if "build" in arguments.only:
        print("== Building an instrumented copy", flush=True)
        environment.update(arguments.tree.resolve())
        source = RECORDING / "record_blocks.cc"
        command = [*tree_environment.compiler(), "-O2", "-fPIC", "-c", source, "-o", sink]
        subprocess.run(command, check=True)
        try:
            environment.build(environ)
        except subprocess.CalledProcessError as error:
            sys.exit(f"the instrumented copy does not compile:\n{error.output}")
    if "cc" in arguments.only:
        print("== C++ tests", flush=True)
        _record_cc_tests(environment.tree, output, environ, arguments.cc_tests)
    if "python" in arguments.only:
        print("== Python tests", flush=True)
        _record_python_tests(environment, output, environ, arguments)
    if "report" in arguments.only:
        _report(environment.tree, output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=pathlib.Path, default=HERE.parent, help="the checkout")
    parser.add_argument("--output", type=pathlib.Path, help="default: build/coverage here")
    parser.add_argument("--processes", type=int, default=3, help="that run Python tests")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, e.g. files")
    parser.add_argument("--cc_tests", default="", help="a regular expression for their names")
    parser.add_argument("--only", default=",".join(_STEPS), help="some of the steps")
    arguments = parser.parse_args()
    arguments.output = arguments.output or HERE.parent / "build" / "coverage"
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(_STEPS):
        parser.error(f"--only has unknown steps {sorted(unknown)}; there are {', '.join(_STEPS)}")
    if not (arguments.tree / "tf_recsync").is_dir():
        parser.error(f"--tree={arguments.tree} has no folder tf_recsync")
    return arguments


def _record_cc_tests(
    tree: pathlib.Path, output: pathlib.Path, environ: dict[str, str], pattern: str
) -> None:
    """Builds the C++ tests and runs each; their blocks lie in a folder for each."""
    folder = output / "cc"
    folder.mkdir(exist_ok=True)
    compile_ = [*tree_environment.compiler(environ), "-std=c++17", "-pthread", *_FLAGS.split()]
    compile_ += ["-I.", "-isystem", tree_environment.tensorflow_headers()]

    def build_object(source: pathlib.Path) -> pathlib.Path:
        target = folder / f"{source.stem}.o"
        command = [*compile_, "-c", source, "-o", target]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{source} does not compile:\n{done.stderr}")
        return target

    sources = [s for f in _CC_FOLDERS for s in sorted((tree / f).glob("*.cc"))]
    tests = [s for s in sources if s.stem.endswith("_test") and re.search(pattern, s.stem)]
    engine = [s for s in sources if not s.stem.endswith("_test")]
    relative = [s.relative_to(tree) for s in [*engine, *tests]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip([*engine, *tests], pool.map(build_object, relative), strict=True))
    for test in tests:
        program, blocks = folder / test.stem, folder / f"{test.stem}.blocks"
        blocks.unlink(missing_ok=True)
        inputs = [objects[test], *(objects[s] for s in engine)]
        subprocess.run(
            [*compile_, *inputs, "-lgtest", "-lgtest_main", "-ldl", "-o", program], check=True
        )
        began = time.monotonic()
        length = {"RECSYNC_SIMULATION_PERCENT": "10"}  # Unless the environment says another.
        environ_of_test = {**length, **os.environ, "RECORDING_FOLDER": str(folder)}
        with open(folder / f"{test.stem}.log", "w") as log:
            done = subprocess.run([program], env=environ_of_test, stdout=log, stderr=log)
        record = {
            "test": str(test.relative_to(tree)),
            "seconds": time.monotonic() - began,
            "passed": done.returncode == 0,
        }
        (folder / f"{test.stem}.json").write_text(json.dumps(record))
        if done.returncode:
            print(f"{test.stem} failed with status {done.returncode}; see {log.name}", flush=True)


def _record_python_tests(
    environment: tree_environment.TreeEnvironment,
    output: pathlib.Path,
    environ: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    """Runs the tests; each process of pytest writes into a folder of its own."""
    root = output / "python"
    if root.exists():
        root.rename(output / f"python.{time.strftime('%Y%m%d-%H%M%S')}")
    root.mkdir()
    command = [environment.python, "-m", "pytest", "-p", "recording_plugin"]
    command += ["-n", str(arguments.processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-m", "not soak", *shlex.split(arguments.pytest)]  # All cases.
    recording = {
        "RECORDING_TREE": str(environment.tree),
        "RECORDING_ROOT": str(root),
        "COVERAGE_CORE": "ctrace",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    began = time.monotonic()
    done = subprocess.run(command, cwd=environment.tree, env={**os.environ, **environ, **recording})
    print(f"pytest ended with status {done.returncode} after {time.monotonic() - began:.0f} s")
    if not any(root.glob("*/records.jsonl")):
        sys.exit("pytest has recorded nothing")


def _report(tree: pathlib.Path, output: pathlib.Path) -> None:
    recorded = coverage_map.Recorded()
    for path in sorted((output / "cc").glob("*.json")):
        record = json.loads(path.read_text())
        test = recorded.add_test(record["test"], record["seconds"], record["passed"])
        binary = path.with_suffix("")
        ran = np.nonzero(np.fromfile(f"{binary}.blocks", np.uint8))[0].tolist()
        recorded.add_blocks(test, f"cc/{path.stem}", ran)
        recorded.add_binary(f"cc/{path.stem}", cc_blocks.read(binary, tree))
    for path in (tree / "tf_recsync").glob("*.so"):
        recorded.add_binary(path.name, cc_blocks.read(path, tree))
    for path in sorted((output / "python").glob("*/records.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            test = recorded.add_test(record["test"], record["seconds"], record["passed"])
            recorded.add_lines(test, record["lines"])
            for library, ran in record["blocks"].items():
                recorded.add_blocks(test, library, ran)
        for child in path.parent.glob("*.lines"):
            for line in child.read_text().splitlines():
                record = json.loads(line)
                for name in record["tests"]:
                    recorded.add_lines(recorded.add_test(name), record["lines"])
    statements = {}
    for path in sorted((tree / "tf_recsync").rglob("*.py")):
        analysis = coverage.Coverage(data_file=None, config_file=False).analysis2(str(path))
        statements[str(path.relative_to(tree))] = analysis[1]
    line_map = recorded.line_map(statements)
    coverage_map.write(line_map, output / "lines.json.xz")
    coverage_map.write(coverage_map.by_function(line_map, tree), output / "functions.json.xz")
    totals = recorded.totals(statements)
    (output / "coverage.json").write_text(json.dumps(totals, indent=1) + "\n")
    table = coverage_map.table(totals)
    (output / "coverage.txt").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
