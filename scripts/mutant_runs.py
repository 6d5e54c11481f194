"""Runs the tests that reach a fault, in a private copy of a tree that has it."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

import changes
import coverage_map
import faults as faults_
import tree_environment

_FLAVORS = {
    "plain": "",
    "thread": "-fsanitize=thread",
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
}
# How long simulations are, as in scripts/cc_test.sh.
_SIMULATION_PERCENT = {"plain": "10", "thread": "0.2", "address": "1"}
_FLAGS = {"CXXFLAGS": "-O1"}  # Of the libraries: a fault does not wait for an optimizer.
_BATCH_SECONDS = 60.0  # Of the tests that one pytest runs.


def cc_compiles(tree: pathlib.Path, fault: faults_.Fault) -> bool:
    """Whether a file that has the fault, or a source that includes it, compiles."""
    test = fault.file.rpartition(".")[0] + "_test.cc"
    sources = [f for f in sorted(changes.dependents(tree, fault.file)) if f.endswith(".cc")]
    source = test if test in sources else (sources or [fault.file])[0]
    source = fault.file if fault.file.endswith(".cc") else source
    with tempfile.TemporaryDirectory() as folder:
        changed = pathlib.Path(folder) / fault.file
        changed.parent.mkdir(parents=True)
        changed.write_text(fault.apply((tree / fault.file).read_text()))
        place = changed if source == fault.file else tree / source
        command = [*tree_environment.compiler(), "-std=c++17", "-fsyntax-only", "-w"]
        command += [f"-I{folder}", f"-I{tree}", "-DEIGEN_USE_THREADS"]
        command += ["-isystem", tree_environment.tensorflow_headers(), str(place)]
        return subprocess.run(command, capture_output=True).returncode == 0


def _put_back(path: pathlib.Path, text: str, state: os.stat_result) -> None:
    """Writes what a file had, with the times that it had: nothing is compiled again for it."""
    path.write_text(text)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


class Place:
    """A copy of the tree in which one fault at a time is tried."""

    def __init__(self, environment: tree_environment.TreeEnvironment, folder: pathlib.Path):
        """Builds the copy's libraries.

        Args:
          environment: With the copy.
          folder: For objects, programs and logs.
        """
        self._environment = environment
        self._tree = environment.tree
        self._folder = folder
        self._fault: faults_.Fault | None = None  # While it is in the copy.
        environment.build(_FLAGS)

    def try_fault(self, fault: faults_.Fault, map_: coverage_map.Map, limit: float) -> dict:
        """Looks for a test that fails with a fault, and passes without it.

        Args:
          fault: Where it was drawn; it is looked for in the copy.
          map_: Which tests reach which line of the copy.
          limit: Seconds of tests, after which it counts as survived.

        Returns:
          `status`: "caught", "survived", "not located", "not reached" or "does not compile";
          `by`: the test that caught it; `tests`: how many ran; `left_out`: how many did not,
          for the limit; `flaky`: tests that failed without the fault, too.
        """
        path = self._tree / fault.file
        found = faults_.locate(fault, path.read_text()) if path.exists() else None
        if found is None:
            return {"status": "not located"}
        lines = range(found.line, found.line + found.before.count("\n") + 1)
        reaching = set().union(*(map_.tests(fault.file, str(line)) for line in lines)) - {""}
        if not reaching:
            return {"status": "not reached"}
        by_cost = sorted(reaching, key=lambda test: (map_.seconds[test], test))
        programs = [test for test in by_cost if test.startswith("cc/")]
        batches = list(_batches([t for t in by_cost if t not in programs], map_.seconds))
        result: dict = {
            "by": None,
            "tests": 0,
            "left_out": 0,
            "flaky": [],
            "reaching": len(reaching),
        }
        try:
            with self._applied(found):
                caught = self._try_programs(programs, map_, limit, result)
            if not caught and batches:
                self._try_batches(found, batches, map_, limit, result)
        except subprocess.CalledProcessError as error:
            return {"status": "does not compile", "error": str(error.output)[-2000:]}
        return {"status": "caught" if result["by"] else "survived", **result}

    def _try_programs(
        self, programs: Sequence[str], map_: coverage_map.Map, limit: float, result: dict
    ) -> bool:
        began = time.monotonic()
        for flavor in _FLAVORS:
            for program in programs:
                if time.monotonic() - began > limit:
                    result["left_out"] += 1
                    continue
                timeout = 60 + 30 * map_.seconds[program]
                result["tests"] += 1
                if self._program_passes(program, flavor, timeout):
                    continue
                with self._removed():
                    passes = self._program_passes(program, flavor, timeout)
                if passes:
                    result["by"] = f"{program} ({flavor})"
                    return True
                result["flaky"].append(f"{program} ({flavor})")
        return False

    def _try_batches(
        self,
        fault: faults_.Fault,
        batches: Sequence[Sequence[str]],
        map_: coverage_map.Map,
        limit: float,
        result: dict,
    ) -> None:
        began = time.monotonic()
        with self._applied(fault), self._built(fault):
            for number, batch in enumerate(batches):
                if time.monotonic() - began > limit:
                    result["left_out"] += sum(map(len, batches[number:]))
                    return
                left = list(batch)
                while left:
                    failed, begun = self._pytest(left, map_)
                    result["tests"] += len(begun)
                    if failed is None:
                        break
                    with self._removed(), self._unbuilt(fault):
                        if self._pytest([failed], map_)[0] is None:
                            result["by"] = failed
                            return
                    result["flaky"].append(failed)
                    left = [test for test in left if test != failed and test not in begun]

    def _pytest(self, tests: Sequence[str], map_: coverage_map.Map) -> tuple[str | None, set[str]]:
        """Runs tests until one fails; gives that one, and those that have begun."""
        outcomes = self._folder / "outcomes"
        outcomes.write_text("")
        seconds = [map_.seconds.get(test, 0.0) for test in tests]
        one = max(60, round(30 + 5 * max(seconds)))
        command = [self._environment.python, "-m", "pytest", "-x", "-p", "outcome_plugin"]
        command += ["-p", "no:cacheprovider", "-m", "not soak", "-o", f"timeout={one}", *tests]
        environ = {"OUTCOMES": str(outcomes), "TF_CPP_MIN_LOG_LEVEL": "2", **_FLAGS}
        with open(self._folder / "pytest.log", "w") as log:
            status = _run(command, self._tree, environ, log, 180 + 4 * sum(seconds) + one)
        lines = [line.split(" ", 1) for line in outcomes.read_text().splitlines()]
        begun = [test for word, test in lines if word == "begins"]
        failed = [test for word, test in lines if word == "fails"]
        if status == 0:
            return None, set(begun)
        # Who crashed, or did not end, began last; or the first module can't be imported.
        return (failed or begun[-1:] or [tests[0]])[0], set(begun)

    def _program_passes(self, test: str, flavor: str, timeout: float) -> bool:
        program = self._link(test, flavor)
        with open(self._folder / "cc_test.log", "w") as log:
            environ = {
                "TSAN_OPTIONS": "halt_on_error=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "RECSYNC_SIMULATION_PERCENT": _SIMULATION_PERCENT[flavor],
            }
            return _run([program], self._tree, environ, log, timeout) == 0

    def _link(self, test: str, flavor: str) -> pathlib.Path:
        """Builds a test program; objects without the fault are kept."""
        command = [*tree_environment.compiler(), "-std=c++17", "-O1", "-g1", "-pthread", "-I."]
        command += [*shlex.split(_FLAVORS[flavor]), "-fno-omit-frame-pointer"]
        engine = sorted(
            str(path.relative_to(self._tree))
            for folder in ("engine", "simulation")
            for path in (self._tree / "cc" / folder).glob("*.cc")
            if not path.stem.endswith("_test")
        )
        faulty = changes.dependents(self._tree, self._fault.file) if self._fault else set()
        objects = []
        for source in [test, *engine]:
            kind = "faulty" if source in faulty else "sound"
            target = self._folder / "cc" / flavor / kind / (pathlib.Path(source).stem + ".o")
            objects.append(target)
            if _is_current(target, self._tree):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            compile_ = [*command, "-isystem", tree_environment.tensorflow_headers()]
            compile_ += ["-MMD", "-MF", target.with_suffix(".d"), "-c", source, "-o", target]
            _check(compile_, self._tree)
        program = self._folder / "cc" / flavor / "program"
        link = [*command, *objects, "-lgtest", "-lgtest_main", "-ldl", "-o", program]
        _check(link, self._tree)
        return program

    @contextlib.contextmanager
    def _applied(self, fault: faults_.Fault) -> Iterator[None]:
        """Has the fault in the copy; the file's time is the old one afterwards."""
        path = self._tree / fault.file
        source, state = path.read_text(), path.stat()
        for flavor in _FLAVORS:
            shutil.rmtree(self._folder / "cc" / flavor / "faulty", ignore_errors=True)
        path.write_text(fault.apply(source))
        self._fault, self._source, self._state = fault, source, state
        try:
            yield
        finally:
            self._fault = None
            _put_back(path, source, state)

    @contextlib.contextmanager
    def _removed(self) -> Iterator[None]:
        """Has the copy without its fault for a while."""
        fault, path = self._fault, self._tree / self._fault.file
        faulty, times = path.read_text(), path.stat()
        _put_back(path, self._source, self._state)
        self._fault = None
        try:
            yield
        finally:
            self._fault = fault
            _put_back(path, faulty, times)

    @contextlib.contextmanager
    def _built(self, fault: faults_.Fault) -> Iterator[None]:
        """Has the libraries with the fault; keeps all that was compiled without it."""
        if not fault.file.startswith("cc/"):
            yield
            return
        sound = self._folder / "sound"
        shutil.rmtree(sound, ignore_errors=True)
        names = {
            source.replace("/", "_") + ".o" for source in changes.dependents(self._tree, fault.file)
        }
        moved = []
        for path in (self._tree / "build" / "objects").glob("*/*.o"):
            if path.name in names:
                moved.append((path, sound / path.parent.name / path.name))
        for path in (self._tree / "tf_recsync").glob("*.so"):
            moved.append((path, sound / path.name))
        for path, kept in moved:
            kept.parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept)
        try:
            self._environment.build(_FLAGS)
            yield
        finally:
            for path, kept in moved:
                kept.rename(path)

    @contextlib.contextmanager
    def _unbuilt(self, fault: faults_.Fault) -> Iterator[None]:
        """Has the libraries without the fault for a while."""
        libraries = list((self._tree / "tf_recsync").glob("*.so"))
        if not fault.file.startswith("cc/"):
            libraries = []
        for path in libraries:
            path.rename(path.with_suffix(".faulty"))
            shutil.copy2(self._folder / "sound" / path.name, path)
        try:
            yield
        finally:
            for path in libraries:
                path.with_suffix(".faulty").rename(path)


def _batches(tests: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Tests by module, the cheapest modules first, in batches for a pytest each."""
    modules = collections.defaultdict(list)
    for test in tests:
        modules[test.partition("::")[0]].append(test)
    costs = {name: sum(seconds[test] for test in own) for name, own in modules.items()}
    batch: list[str] = []
    spent = 0.0
    for name in sorted(modules, key=lambda name: (costs[name], name)):
        if batch and spent + costs[name] > _BATCH_SECONDS:
            yield batch
            batch, spent = [], 0.0
        batch += modules[name]
        spent += costs[name]
    if batch:
        yield batch


def _is_current(target: pathlib.Path, tree: pathlib.Path) -> bool:
    depends = target.with_suffix(".d")
    if not target.exists() or not depends.exists():
        return False
    names = depends.read_text().replace("\\\n", " ").partition(":")[2].split()
    own = [tree / name for name in names if name.startswith("cc/")]
    return all(path.exists() and path.stat().st_mtime <= target.stat().st_mtime for path in own)


def _check(command: Sequence, folder: pathlib.Path) -> None:
    subprocess.run(
        list(map(str, command)),
        cwd=folder,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _run(
    command: Sequence, folder: pathlib.Path, environ: dict[str, str], log, timeout: float
) -> int | None:
    """The status of a program; None if it had to be ended for the time."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **environ},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # And what it has left.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
