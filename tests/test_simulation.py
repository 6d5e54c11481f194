"""Simulated parameter servers against closed forms and brute force."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs import strict_json

import tf_recsync as recsync
from tf_recsync import simulate
from tf_recsync.simulation._factors import Factors
from tf_recsync.testing import ChangingSlowdown, RandomSlowdown, Slowdown, SlowWorkers

run = recsync.simulation.run
modes = recsync.modes


def starts_and_ends(seconds, steps):
    """("start" or "end", worker) of workers that wait for nobody, in the order of time.

    Each has two batches ahead that nobody else gets.

    Args:
        seconds: gives how long a worker's step takes.
        steps: how many all do.
    """
    workers = 3
    left = steps - 3 * workers
    ahead = [2] * workers
    waiting = [(seconds(w, 0), w, 0) for w in range(workers)]
    heapq.heapify(waiting)
    happened = [("start", w) for w in range(workers)]
    while waiting:
        time, w, step = heapq.heappop(waiting)
        happened.append(("end", w))
        if ahead[w]:
            another = left > 0
            left -= another
            ahead[w] += another - 1
            happened.append(("start", w))
            heapq.heappush(waiting, (time + seconds(w, step + 1), w, step + 1))
    return happened


# No two workers ever end a step at the same time.
OF_WORKERS = [1.0, 1.7320508, 0.3141593]
BY_STEPS = ChangingSlowdown([(0, 1.0), (9, 4.0), (10, 1.0)], unit="steps", period=13)


def seconds_of(worker, step):
    """The compute time of a step, as numpy has it."""
    times, multiples = [0, 9, 10], [1.0, 4.0, 1.0]
    return OF_WORKERS[worker] * np.interp(step % 13, times, multiples)


def test_the_staleness_of_asynchronous_workers_is_that_of_brute_force():
    result = run(
        modes.Async(),
        workers=3,
        ps=2,
        compute_seconds=OF_WORKERS,
        steps=500,
        slowdown=BY_STEPS,
        warmup_steps=0,
    )
    version, pulled, counted = 0, {}, collections.Counter()
    for kind, worker in starts_and_ends(seconds_of, 500):
        if kind == "start":
            pulled[worker] = version
        else:
            counted[version - pulled[worker] + 1] += 1
            version += 1
    for server in ("ps:0", "ps:1"):
        statistics = result.staleness.variables[server]
        assert max(counted) < 32  # Exact buckets.
        assert dict(statistics.histogram) == dict(counted)
    assert result.staleness.dense.count == 2 * 500
    assert result.staleness.rows.count == 0


@pytest.mark.parametrize("decay", ["threshold", "inverse_power"])
def test_global_batches_are_those_of_brute_force(decay):
    mode = modes.GBA(global_batch_size=4, local_batch_size=1, staleness_tolerance=1, decay=decay)
    result = run(mode, workers=3, compute_seconds=OF_WORKERS, steps=503, slowdown=BY_STEPS)
    tokens = step = pending = included = decayed = excluded = ages = 0
    token, pulled, counted = {}, {}, collections.Counter()
    for kind, worker in starts_and_ends(seconds_of, 503):
        if kind == "start":
            token[worker], pulled[worker] = tokens // 4, step
            tokens += 1
            continue
        age = max(step - token[worker], 0)
        ages += age
        if age <= 1 or decay == "inverse_power":
            included += 1
            decayed += age > 1
        else:
            excluded += 1
        counted[step - pulled[worker] + 1] += 1
        pending += 1
        if pending == 4:
            step, pending = step + 1, 0
    report = result.aggregation
    assert report.global_step == step + 1  # The last three pushes are applied, too.
    assert (report.included, report.decayed, report.excluded) == (included, decayed, excluded)
    assert (excluded if decay == "threshold" else decayed) > 20
    assert report.age_mean == pytest.approx(ages / 503)
    assert dict(report.staleness.histogram) == dict(counted)
    assert report.late == report.left_over == 0
    assert result.staleness.dense == report.staleness


@pytest.mark.parametrize("window", [{"warmup_steps": 100}, {"cooldown_steps": 100}])
@pytest.mark.parametrize("bottleneck", ["server_in", "processors"])
def test_what_still_waits_for_a_bottleneck_does_not_count_as_busy(window, bottleneck):
    # All push at once: where the window begins or ends, many wait for the server.
    if bottleneck == "processors":
        limits = {"server": recsync.simulation.Server(seconds_per_application=0.01)}
    else:
        network = recsync.simulation.Network(server_bandwidth=1e8)
        limits = {"network": network, "pull_bytes": 1_000_000, "push_bytes": 1_000_000}
    result = run(modes.Async(), workers=100, compute_seconds=0.001, steps=400, **window, **limits)
    (share,) = getattr(result.utilization, bottleneck)
    assert 0.97 <= share <= 1.0


def test_what_does_not_fill_the_last_global_batch_is_left_over_if_it_shall_be():
    mode = modes.BSP(global_batch_size=4, local_batch_size=1, last_global_batch="drop")
    report = run(mode, workers=3, ps=2, compute_seconds=1.0, steps=10).aggregation
    assert report.left_over == 2 * 2
    assert report.global_step == 2
    assert report.included == 2 * 10


def test_synchronous_workers_take_the_time_of_the_slowest():
    result = run(modes.Sync(), workers=3, compute_seconds=OF_WORKERS, steps=60)
    assert result.seconds == pytest.approx(20 * max(OF_WORKERS))
    assert result.staleness.dense.max == 1
    waited = 20 * (max(OF_WORKERS) - np.array(OF_WORKERS)) * 19 / 20  # The last one is over.
    np.testing.assert_allclose(result.times.token, waited, atol=1e-9)


def test_bounded_staleness_lies_between_waiting_and_not_waiting():
    def seconds(mode):
        slow = RandomSlowdown(5.0, probability=0.2, seed=3)
        return run(mode, workers=8, compute_seconds=1.0, steps=800, slowdown=slow).seconds

    bounded = [seconds(modes.BoundedStaleness(staleness_bound=b)) for b in (0, 2, 8)]
    assert seconds(modes.Sync()) >= bounded[0] > bounded[1] > bounded[2] >= seconds(modes.Async())


def test_a_slowdown_that_changes_with_time_is_asked_at_the_time_of_the_step():
    jump = ChangingSlowdown([(0, 1.0), (10, 1.0), (10, 3.0)])
    result = run(modes.Async(), workers=1, compute_seconds=1.0, steps=14, slowdown=jump)
    assert result.seconds == pytest.approx(10 + 4 * 3)


def test_slow_workers_are_those_of_recsync_testing():
    slow = SlowWorkers(4.0, [1]) * RandomSlowdown(3.0, probability=0.3, seed=5)
    result = run(modes.Async(), workers=2, compute_seconds=0.5, steps=100, slowdown=slow)
    for worker, steps in enumerate(result.times.steps):
        number = tf.constant(worker, tf.int64)
        factors = [slow.factor(number, tf.constant(s, tf.int64), 0.0) for s in range(steps)]
        assert result.times.compute[worker] == pytest.approx(0.5 * float(sum(factors)))


def test_factors_in_blocks_are_those_of_single_steps():
    slow = BY_STEPS * RandomSlowdown(3.0, probability=0.5, seed=2)
    factors = Factors(slow, workers=5, steps=20)
    assert not factors.depend_on_time
    assert Factors(slow * ChangingSlowdown([(0, 1.0), (5, 2.0)]), 5, 20).depend_on_time
    block = factors.block(7)
    for worker in range(5):
        for step in range(7, 27):
            assert block[worker, step - 7] == factors.one(worker, step, 0.0)


def test_a_warm_up_is_left_out_of_all_reports():
    settings = {"workers": 20, "ps": 2, "compute_seconds": 1.0, "noise": 0.1}
    whole = run(modes.Async(), steps=2000, **settings)
    rest = run(modes.Async(), steps=2000, warmup_steps=1000, **settings)
    assert whole.seconds == rest.seconds and whole.steps == rest.steps
    # A server may have applied a push of which another one has not heard.
    assert rest.staleness.dense.count == pytest.approx(2 * 1000, abs=2 * 20)
    assert rest.staleness.dense.mean > whole.staleness.dense.mean
    assert rest.times.compute.sum() == pytest.approx(1000, rel=0.03)
    mode = modes.GBA(global_batch_size=20, local_batch_size=1)
    report = run(mode, steps=2000, warmup_steps=1000, **settings).aggregation
    assert report.included + report.excluded == pytest.approx(2 * 1000, abs=2 * 20)
    assert report.global_step == 100


def test_what_slow_workers_do_at_the_end_can_be_left_out():
    settings = {"workers": 10, "compute_seconds": 1.0, "steps": 1000}
    slow = SlowWorkers(5.0, [3])
    whole = run(modes.Async(), slowdown=slow, **settings)
    rest = run(modes.Async(), slowdown=slow, warmup_steps=100, cooldown_steps=100, **settings)
    assert whole.seconds == rest.seconds
    assert rest.steps == 1000
    # Nine workers, and one that takes five times as long.
    assert rest.steps_per_second == pytest.approx(9.2, rel=0.02)
    assert whole.steps_per_second == pytest.approx(1000 / whole.seconds)
    assert whole.steps_per_second < rest.steps_per_second
    assert rest.staleness.dense.count == pytest.approx(800, abs=10)


def test_the_seed_decides_the_noise():
    def seconds(seed):
        return run(
            modes.Async(), workers=5, compute_seconds=1.0, steps=500, noise=0.3, seed=seed
        ).seconds

    assert seconds(1) == seconds(1) != seconds(2)


class Half(Slowdown):
    """One that gives no number."""

    def factor(self, worker, step, seconds):
        return tf.constant(float("nan"))


RIGHT = {"workers": 4, "ps": 2, "compute_seconds": 1.0, "steps": 40}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "gba"}, "mode must be one of recsync.modes, not 'gba'"),
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"ps": 1.5}, "ps must be an integer of at least 1, got 1.5"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"warmup_steps": 9, "cooldown_steps": 31}, "cooldown_steps must be less .*=31, not 31"),
        ({"warmup_steps": 40}, "warmup_steps must be less than steps=40, not 40"),
        (
            {"compute_seconds": -1.0},
            "compute_seconds must be a finite number, from 0 to 1e.06, not -1",
        ),
        ({"compute_seconds": [1.0] * 3}, "one for each of 4 workers, not 3 numbers"),
        ({"compute_seconds": [1, 1, "x", 1]}, r"compute_seconds\[2\] must be .* not 'x'"),
        ({"compute_seconds": "1111"}, "compute_seconds must be a finite number, .* not '1111'"),
        ({"noise": float("nan")}, "noise must be a finite number, from 0 to 5, not nan"),
        ({"noise": 9.0}, "noise must be a finite number, from 0 to 5, not 9.0"),
        ({"workers": 10**10}, "workers must be at most 1048576, not 10000000000"),
        ({"ps": 10**10}, "ps must be at most 1048576, not 10000000000"),
        ({"steps": 10**20}, "steps must be at most 1099511627776, not 1000"),
        ({"reader_ahead": 10**10}, "reader_ahead must be at most 1048576, not 10000000000"),
        ({"push_bytes": 10**20}, "push_bytes must be at most 1125899906842624, not 1000"),
        ({"compute_seconds": 2e6}, "compute_seconds must be .* from 0 to 1e.06, not 2000000.0"),
        (
            {"mode": modes.BoundedStaleness(staleness_bound=10**20)},
            "staleness_bound must be at most 4611686018427387904, not 1000",
        ),
        (
            {"mode": modes.BSP(global_batch_size=10**20, local_batch_size=1)},
            "the batches of a global batch must be at most 1048576, not 1000",
        ),
        (
            {
                "mode": modes.Async(local_batch_size=10**10),
                "model": recsync.simulation.ClickModel(),
            },
            "local_batch_size must be at most 16777216, not 1000000000",
        ),
        ({"slowdown": 2.0}, "slowdown must be a Slowdown of recsync.testing or None, not 2.0"),
        ({"slowdown": Half()}, "factor must be finite and at least 0, not nan of worker 0"),
        ({"network": 1e9}, "network must be a recsync.simulation.Network, not 1"),
        ({"server": 4}, "server must be a recsync.simulation.Server, not 4"),
        ({"pull_bytes": -1}, "pull_bytes must be an integer of at least 0, got -1"),
        ({"push_bytes": 1.5}, "push_bytes must be an integer of at least 0, got 1.5"),
        ({"reader_seconds": -1}, "reader_seconds must be a finite number, from 0 to 1e.06, not -1"),
        ({"reader_ahead": -1}, "reader_ahead must be an integer of at least 0, got -1"),
        ({"seed": 2**64}, r"seed must be below 2 \*\* 64"),
        ({"mode": modes.BackupWorkers(backup_workers=4)}, "backup_workers must be less than"),
        ({"ps": 2**20, "workers": 2**20}, "workers . servers must be at most"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    arguments = {"mode": modes.Async(), **RIGHT, **wrong}
    with pytest.raises(ValueError, match=message):
        run(arguments.pop("mode"), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recsync.simulation.Network(bandwidth=0), "bandwidth must be .* positive, not 0"),
        (
            lambda: recsync.simulation.Network(server_bandwidth=-1.0),
            "server_bandwidth must be a finite number, positive, not -1.0",
        ),
        (lambda: recsync.simulation.Network(latency="1"), "latency must be .* not '1'"),
        (
            lambda: recsync.simulation.Network(workers_per_machine=0),
            "workers_per_machine must be an integer of at least 1, got 0",
        ),
        (lambda: recsync.simulation.Server(threads=0), "threads must be an integer of at least 1"),
        (lambda: recsync.simulation.Server(threads=3 * 10**9), "threads must be at most 1048576"),
        (
            lambda: recsync.simulation.Network(workers_per_machine=3 * 10**9),
            "workers_per_machine must be at most 1048576, not 3000000000",
        ),
        (
            lambda: recsync.simulation.Server(seconds_per_byte=-1e-9),
            "seconds_per_byte must be a finite number, from 0 to 1e.06, not -1e-09",
        ),
    ],
)
def test_wrong_machines_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


PROGRAM = ["--workers=6", "--ps=2", "--compute_seconds=0.5", "--steps=120"]


def test_the_program_prints_a_table_and_writes_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [f"--json={tmp_path / 'a.json'}", f"--plot={tmp_path / 'a.png'}"]
    of_gba = ["--mode=gba", "--local_batch_size=2", "--global_batch_size=12"]
    slow = ["--slow_workers=4:0,1", "--random_slowdown=3:0.1", "--latency=0.01"]
    assert simulate.main([*PROGRAM, *of_gba, *slow, *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("simulated: GBA, 6 workers, 2 parameter servers\n")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["simulated"] is True
    assert content["arguments"]["global_batch_size"] == 12
    expected = run(
        modes.GBA(local_batch_size=2, global_batch_size=12),
        workers=6,
        ps=2,
        compute_seconds=0.5,
        steps=120,
        slowdown=SlowWorkers(4.0, [0, 1]) * RandomSlowdown(3.0, probability=0.1),
        network=recsync.simulation.Network(latency=0.01),
    )
    assert printed == f"{expected}\n"
    arguments = content.pop("arguments")
    assert arguments["mode"] == "gba"
    assert content == json.loads(json.dumps(expected.as_dict()))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode=fast"], "argument --mode: invalid choice: 'fast' (choose from"),
        (["--mode=async", "--staleness_bound=3"], "--staleness_bound is of --mode=bounded, not"),
        (["--mode=bsp"], "--mode=bsp needs --global_batch_size"),
        (
            ["--mode=async", "--json=/nowhere/a.json"],
            "--json=/nowhere/a.json: there is no folder /nowhere",
        ),
        (["--mode=async", "--ps=0"], "ps must be an integer of at least 1, got 0"),
        (["--mode=async", "--threads=3000000000"], "threads must be at most 1048576, not 30000000"),
        (["--mode=async", "--bandwidth=-1"], "bandwidth must be a finite number, positive, not -1"),
        (["--mode=async", "--slow_workers=4"], "slow_workers must be like 4:0,1,2, not '4'"),
        (["--mode=async", "--random_slowdown=3:2"], "must be like 5:0.02, not '3:2': probability"),
    ],
)
def test_the_program_refuses_wrong_arguments_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main([*PROGRAM, *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_result_is_json_with_the_numbers_of_numpy():
    numbers = {"workers": 4, "ps": 2, "steps": 40}
    arguments = {name: np.int64(number) for name, number in numbers.items()}
    found = run(modes.Async(), compute_seconds=np.float32(1.0), **arguments).as_dict()
    text = json.dumps(found)
    assert {name: json.loads(text)[name] for name in numbers} == numbers


def test_what_is_infinite_is_null_in_the_file(tmp_path):
    path = tmp_path / "a.json"
    at_once = ["--workers=6", "--compute_seconds=0", "--steps=120", "--mode=async"]
    assert simulate.main([*at_once, f"--json={path}"]) == 0
    found = strict_json(path)
    assert found["seconds"] == 0.0 and found["steps_per_second"] is None


def test_what_is_learned_does_not_depend_on_the_number_of_servers():
    model = recsync.simulation.ClickModel(dimension=2, vocabulary=50, test_examples=2000)

    def result(ps):
        return run(
            modes.Async(),
            workers=9,
            ps=ps,
            compute_seconds=1.0,
            steps=600,
            noise=0.3,
            model=model,
        )

    one, several = result(1), result(4)
    assert one.evaluations == several.evaluations
    assert one.staleness.rows == several.staleness.rows
    assert len(one.evaluations) == 10
    assert one.evaluations[-1].steps == 600
    assert one.evaluations[-1].auc == one.auc > one.evaluations[0].auc


def test_one_worker_becomes_almost_as_good_as_the_truth():
    model = recsync.simulation.ClickModel(
        features=3,
        vocabulary=4,
        numbers=2,
        batch_size=32,
        optimizer=recsync.optimizers.SGD(0.2),
        table_optimizer=recsync.optimizers.Adagrad(0.2),
        test_examples=4000,
    )
    result = run(modes.Async(), workers=1, compute_seconds=1.0, steps=400, model=model)
    assert result.bayes_auc - 0.02 < result.auc < result.bayes_auc + 0.01
    still = recsync.optimizers.SGD(0.0)
    frozen = dataclasses.replace(model, optimizer=still, table_optimizer=still)
    assert run(modes.Async(), workers=1, compute_seconds=1.0, steps=9, model=frozen).auc == 0.5


def test_stale_gradients_do_harm_and_staleness_weights_help():
    def auc(workers, policy=None):
        model = recsync.simulation.ClickModel(
            vocabulary=30,
            batch_size=16,
            optimizer=recsync.optimizers.SGD(0.3, staleness=policy),
            test_examples=4000,
            evaluations=0,
        )
        return run(
            modes.Async(), workers=workers, compute_seconds=1.0, steps=2000, noise=0.2, model=model
        ).auc

    fresh, stale = auc(1), auc(200)
    assert fresh > stale + 0.03
    assert auc(200, recsync.staleness.InversePower(k=1, baseline=10)) > stale + 0.03


def test_the_size_of_batches_is_the_modes():
    model = recsync.simulation.ClickModel(batch_size=16)
    mode = modes.GBA(global_batch_size=64, local_batch_size=32)
    with pytest.raises(ValueError, match="batch_size must be None or .*=32, not 16"):
        run(mode, model=model, **RIGHT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"features": 0}, "features must be an integer of at least 1, got 0"),
        ({"dimension": -1}, "dimension must be an integer of at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"signal": -1.0}, "signal must be a finite number, at least 0, not -1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"vocabulary": 3 * 10**9}, "vocabulary must be at most 16777216, not 3000000000"),
        ({"hidden_units": [3 * 10**9]}, r"hidden_units\[0\] must be at most 16777216, not 3000"),
        (
            {
                "optimizer": recsync.optimizers.SwapAdagrad(
                    0.1, swap=recsync.Swap(period=10**20, decay=0.5)
                )
            },
            "period of the swap of optimizer must be at most",
        ),
        ({"optimizer": "sgd"}, "optimizer must be an SGD, Adagrad or SwapAdagrad .*, not 'sgd'"),
        ({"table_optimizer": recsync.optimizers.Adam()}, "table_optimizer must be an SGD"),
        (
            {"optimizer": recsync.optimizers.SGD(weight_decay=0.1)},
            "optimizer must be without weight_decay, which .* not 0.1",
        ),
        (
            {"optimizer": recsync.optimizers.Adagrad(0.05, gradient_accumulation_steps=4)},
            "optimizer must be without gradient_accumulation_steps, which .* not 4",
        ),
        (
            {"table_optimizer": recsync.optimizers.SGD(loss_scale_factor=2.0)},
            "table_optimizer must be without loss_scale_factor, which .* not 2.0",
        ),
        (
            {"optimizer": recsync.optimizers.SGD(nonfinite="error")},
            "optimizer must have nonfinite='apply' or 'skip', not 'error'",
        ),
        (
            {"optimizer": recsync.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9))},
            "optimizer must have a constant learning rate",
        ),
    ],
)
def test_what_can_not_be_learned_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        recsync.simulation.ClickModel(**wrong)


def test_the_program_learns(capsys, tmp_path):
    learned = ["--mode=async", "--model=factorization_machine", "--dimension=2", "--vocabulary=9"]
    assert simulate.main([*PROGRAM, *learned, "--optimizer=sgd", "--learning_rate=1"]) == 0
    assert "AUC          0." in capsys.readouterr().out
    deep = ["--model=wide_deep", "--hidden_units=4,2", "--mean_normalization", "--vocabulary=9"]
    drift = ["--drift=0.2", "--day_batches=20", "--evaluations=2", "--dimension=3", "--seed=5"]
    path = tmp_path / "result.json"
    arguments = [*PROGRAM, "--mode=async", *deep, *drift, f"--json={path}"]
    assert simulate.main(arguments) == 0
    options = dict(drift=0.2, day_batches=20, evaluations=2, dimension=3, vocabulary=9)
    model = recsync.simulation.ClickModel(
        hidden_units=(4, 2),
        mean_normalization=recsync.layers.MeanNormalization(),
        **options,
    )
    of_program = dict(workers=6, ps=2, compute_seconds=0.5, steps=120)  # As PROGRAM says.
    expected = recsync.simulation.run(recsync.modes.Async(), model=model, seed=5, **of_program)
    assert json.loads(path.read_text())["auc"] == expected.auc
    capsys.readouterr()
    for wrong, message in [
        (["--learning_rate=1"], "--learning_rate needs --model"),
        (["--model=logistic_regression", "--dimension=2"], "--dimension is of --model=fact"),
        (["--model=factorization_machine", "--hidden_units=2"], "--hidden_units is of --model=w"),
        (["--model=wide_deep", "--hidden_units=2,x"], "hidden_units must be like 16,8, not '2,x'"),
        (["--model=logistic_regression", "--swap_period=9"], "--swap_period is of --optimizer="),
        (["--model=factorization_machine", "--dimension=0"], "dimension must be .* got 0"),
    ]:
        with pytest.raises(SystemExit):
            simulate.main([*PROGRAM, "--mode=async", *wrong])
        assert re.search(message, capsys.readouterr().err)
