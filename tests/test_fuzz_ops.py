"""scripts/fuzz_ops.py finds what it looks for, and a short run of it finds nothing."""

import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

import fuzz_calls  # noqa: E402
import fuzz_ops  # noqa: E402
import fuzz_world  # noqa: E402

# Says what fuzz_calls.py says, and fails in three ways.
FAILING = """
    import os, sys, time
    seed, first, calls = map(int, sys.argv[1:4])
    for number in range(first, first + calls):
        print(number, f"op_{number}", flush=True)
        if number == 13:
            sys.stderr.write(f"seed {seed}: a check failed")
            sys.stderr.flush()
            os.abort()
        if number == 15:
            time.sleep(1000)
        if number == 16:
            sys.exit(3)
    print("end")
"""


def test_calls_that_end_their_process_or_do_not_end_are_found_and_the_others_go_on(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(textwrap.dedent(FAILING))
    command = [sys.executable, str(program)]
    expected = [
        (13, "op_13", "was ended by SIGABRT"),
        (15, "op_15", "did not end within 4 s"),
        (16, "op_16", "ended with status 3"),
    ]
    for _ in range(20):  # On a busy machine, another call may not end in time.
        results = list(fuzz_ops.failures(command, seed=7, first=11, calls=8, limit=4.0, minutes=5))
        failed = [r for r in results if not isinstance(r, int)]
        if [(f.number, f.ops, f.how) for f in failed] == expected:
            break
    assert [(f.number, f.ops, f.how) for f in failed] == expected
    assert [r for r in results if isinstance(r, int)] == list(range(11, 19))
    assert failed[0].said == "seed 7: a check failed"


def test_a_run_ends_when_its_time_is_over(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(textwrap.dedent(FAILING))
    results = fuzz_ops.failures([sys.executable, str(program)], 0, 20, 10**9, 60.0, minutes=0)
    assert list(results) == [20]


def test_all_ops_are_called_with_all_their_arguments():
    assert not fuzz_calls.uncovered()


def test_a_call_is_told_by_its_seed_and_number():
    def arguments(seed, number):
        world = fuzz_world.World(np.random.default_rng([seed, number]), f"again_{seed}_{number}")
        return re.sub("handle=.*|object at .*", "", str(fuzz_calls.arguments_of(world, "pack")))

    assert fuzz_calls.Calls(3, 4).title == fuzz_calls.Calls(3, 4).title
    assert arguments(3, 4) == arguments(3, 4)
    assert len({arguments(seed, number) for seed in range(3) for number in range(3)}) == 9


def test_a_short_run_finds_nothing():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "fuzz_ops.py"), "--seed=20", "--calls=200"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("Seed 20: 200 calls in .* s, 0 failed", done.stdout)
