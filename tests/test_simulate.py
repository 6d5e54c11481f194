"""The program `python -m tf_recsync.simulate` of strategies with copies of the parameters."""

import json

import pytest

import tf_recsync as recsync
from tf_recsync import simulate, simulation, topology

SLOW = recsync.testing.SlowWorkers(4.0, [1])
SHADOW = ["--strategy=shadowsync", "--trainers=3", "--compute_seconds=0.1", "--steps=90"]
COPY = ["--parameter_bytes=1000000", "--bandwidth=1e7"]
HOP = ["--strategy=hop", "--topology=ring_based:8", "--compute_seconds=0.5", "--steps=400"]
GROUPS = [
    *("--strategy=hierarchical", "--groups=2", "--trainers_per_group=2", "--trainer_flop=1e9"),
    *("--ps_flop=3e9,1e9", "--trainer_flops=1e10", "--ps_flops=1e10", "--steps=80"),
]


def shadow(algorithm=None, **options):
    """What the arguments SHADOW and COPY say, by the public function."""
    return simulation.run_shadow_sync(
        algorithm or recsync.EASGD(alpha=0.5),
        trainers=3,
        compute_seconds=0.1,
        steps=90,
        parameter_bytes=1_000_000,
        network=simulation.Network(bandwidth=1e7),
        **options,
    )


def hop(**options):
    graph = topology.ring_based(8)
    return simulation.run_hop(graph, compute_seconds=0.5, steps=400, **options)


def groups():
    return simulation.run_hierarchical(
        recsync.EASGD(alpha=0.5),
        simulation.GroupStep(trainer_flop=1e9, ps_flop=(3e9, 1e9), ps_bytes=(4000, 8000)),
        groups=2,
        trainers_per_group=2,
        trainer_flops=1e10,
        ps_flops=1e10,
        lookup_seconds=0.25,
        parameter_bytes=1_000_000,
        mode=recsync.Shadow(min_interval=2.0),
        steps=80,
        network=simulation.Network(bandwidth=1e7),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [*HOP, "--slow_workers=4:1", "--backup_workers=1", "--max_jump=10", "--seed=3"],
            lambda: hop(slowdown=SLOW, backup_workers=1, skip=recsync.Skip(max_jump=10), seed=3),
        ),
        (
            [*HOP, "--max_iteration_gap=3", "--model=logistic_regression", "--momentum=0.5"],
            lambda: hop(max_iteration_gap=3, model=simulation.LogisticRegression(momentum=0.5)),
        ),
        ([*SHADOW, *COPY], shadow),
        (
            [*SHADOW, *COPY, "--gap=5", "--threads_per_trainer=2", "--batch_size=16"],
            lambda: shadow(mode=recsync.Foreground(gap=5), threads_per_trainer=2, batch_size=16),
        ),
        (
            [*SHADOW, *COPY, "--algorithm=bmuf", "--alpha=0.9", "--momentum=0.5", "--nesterov"],
            lambda: shadow(recsync.BMUF(alpha=0.9, eta=1.0, momentum=0.5, nesterov=True)),
        ),
        (
            [*GROUPS, *COPY, "--ps_bytes=4000,8000", "--lookup_seconds=0.25", "--min_interval=2"],
            groups,
        ),
    ],
)
def test_the_program_gives_what_the_function_gives(arguments, expected, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [f"--json={tmp_path / 'a.json'}", f"--plot={tmp_path / 'a.png'}"]
    assert simulate.main([*arguments, *files]) == 0
    result = expected()
    assert capsys.readouterr().out == f"{result}\n"
    content = json.loads((tmp_path / "a.json").read_text())
    given = content.pop("arguments")
    assert f"--strategy={given['strategy']}" in arguments
    assert content == json.loads(json.dumps(result.as_dict()))
    assert content["simulated"] is True
    assert sum(content["steps"]) / content["seconds"] == pytest.approx(content["steps_per_second"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_of_a_ring_are_those_of_its_rules(tmp_path):
    path = tmp_path / "a.json"
    simulate.main([*HOP, "--slow_workers=4:1", f"--json={path}"])
    found = json.loads(path.read_text())
    # All wait for the slowest, whose iterations take 2 s. At the end, others take steps of the
    # pool before it does, as many as they may be ahead.
    assert found["seconds"] == pytest.approx(50 * 2.0, abs=2 * 2.0)
    assert found["steps"][1] == min(found["steps"]) >= 48
    waits = [
        a + b for a, b in zip(found["waited_for_updates"], found["waited_for_tokens"], strict=True)
    ]
    assert waits[1] == pytest.approx(0.0, abs=1e-9)
    assert min(waits[:1] + waits[2:]) > 0.7 * found["seconds"]
    # Workers 0 and 2 are its neighbors, and 5, and no worker is farther from it than two edges.
    ahead = [row[1] for row in found["largest_gaps"]]
    assert ahead == [row[1] for row in found["bounds"]] == [1, 0, 1, 2, 2, 1, 2, 2]


def test_the_graph_has_the_workers_that_its_numbers_say(tmp_path):
    path = tmp_path / "a.json"
    for name, workers in (("grid:2,3", 6), ("hierarchical:3,3,2", 8), ("exponential:5", 5)):
        arguments = ["--strategy=hop", "--compute_seconds=1", "--seconds=3", f"--json={path}"]
        assert simulate.main([*arguments, f"--topology={name}"]) == 0
        assert len(json.loads(path.read_text())["steps"]) == workers


def test_a_timeline_has_what_workers_did(tmp_path, capsys):
    simulate.main([*HOP, f"--timeline={tmp_path / 'timeline.json'}"])
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy=gossip"], "argument --strategy: invalid choice: 'gossip' (choose from"),
        (["--strategy=hop", "--mode=gba"], "are required: --topology, --compute_seconds"),
        ([*HOP, "--mode=gba"], "unrecognized arguments: --mode=gba"),
        ([*HOP, "--topology=ring"], "topology must be like ring:16, grid:4,4 or"),
        ([*HOP, "--topology=circle:4"], "not 'circle:4': the graphs are ring, ring_based,"),
        ([*HOP, "--topology=grid:4"], "not 'grid:4': grid takes 2 numbers, not 1"),
        ([*HOP, "--topology=ring_based:5"], "not 'ring_based:5': workers must be even, got 5"),
        ([*HOP, "--max_iteration_gap=some"], "max_iteration_gap must be like 5, none or default"),
        ([*HOP, "--max_jump=1"], "max_jump must be an integer of at least 2, got 1"),
        ([*HOP, "--compute_seconds=1,2"], "compute_seconds must be a number, or one for each"),
        ([*HOP, "--learning_rate=1"], "--learning_rate needs --model"),
        ([*HOP, "--target_loss=1"], "target_loss needs a model to be learned"),
        (HOP[:-1], "steps or seconds must be given"),
        ([*SHADOW, *COPY, "--eta=2"], "--eta is of --algorithm=bmuf, not of --algorithm=easgd"),
        (
            [*SHADOW, *COPY, "--algorithm=none", "--sync_ps=2"],
            "--sync_ps is of --algorithm=easgd, not of --algorithm=none",
        ),
        (
            [*SHADOW, *COPY, "--gap=3", "--min_interval=2"],
            "--min_interval is of the background, and --gap of the foreground",
        ),
        ([*SHADOW, *COPY, "--alpha=2"], "alpha must be"),
        (
            [*SHADOW, "--parameter_bytes=8", "--algorithm=model_averaging"],
            "synchronizations in the background must take time",
        ),
        ([*GROUPS, *COPY, "--ps_bytes=1"], "must be of the same group PSs"),
        ([*SHADOW, *COPY, f"--gap={10**20}"], f"gap must be at most {2**62}, not {10**20}"),
        (
            [*SHADOW, *COPY, f"--threads_per_trainer={10**20}"],
            "threads_per_trainer must be at most 16384",
        ),
        ([*SHADOW, *COPY, f"--sync_ps={10**20}"], "sync_ps must be at most 16384"),
        (
            [*SHADOW, *COPY, "--noise=1e200"],
            "noise must be a finite number, from 0 to 5, not 1e",
        ),
        ([*HOP, "--noise=6"], "noise must be a finite number, from 0 to 5, not 6"),
        ([*GROUPS, *COPY, "--ps_flop=x"], "ps_flop must be like 2e9,1e9 with one for each group"),
    ],
)
def test_the_program_refuses_wrong_arguments_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("--json=/", "that is a folder, not a file"),
        ("--timeline=/", "that is a folder, not a file"),
        ("--plot=/", "that is a folder, not a file"),
        ("--plot=/a.bmp", "the ending must be one of "),
    ],
)
def test_what_can_not_be_written_is_refused_before_anything_is_simulated(output, message, capsys):
    if output.endswith("bmp"):
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        simulate.main([*HOP, output])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"{output}: {message}" in printed.err


@pytest.mark.parametrize(
    ("strategy", "its_own", "not_its_own"),
    [
        ("ps", "--staleness_tolerance", "--topology"),
        ("hop", "--topology", "--sync_ps"),
        ("shadowsync", "--per_minute", "--groups"),
        ("hierarchical", "--ps_flop", "--memory_seconds"),
    ],
)
def test_help_is_that_of_the_strategy(strategy, its_own, not_its_own, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main([f"--strategy={strategy}", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed = text[text.index("\noptions:") :]
    assert its_own in listed and not_its_own not in listed
    assert "--json" in listed and "--strategy" in listed
