"""Hop against a parameter server that waits for all workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from results.hop import (
    GIGABIT,
    ITERATION_SECONDS,
    MACHINES,
    TARGET_LOSS,
    VGG11_BYTES,
    draw_curves,
    means,
    run_one,
)
from results.parts import PROGRAM, Row, draw_bars, mean
from tf_recsync import modes, simulation, topology
from tf_recsync._figures import new_figure
from tf_recsync.simulation import HopResult
from tf_recsync.testing import RandomSlowdown
from tf_recsync.testing.slowdown import Slowdown

_WORKERS = len(MACHINES)


def compute(seeds: int, iterations: int) -> Row:
    """Figure 13 of Luo et al. 2019."""
    slowdowns: dict[str, Callable[[int], Slowdown | None]] = {
        "no slowdown": lambda seed: None,
        "random slowdown": lambda seed: RandomSlowdown(6.0, 1 / 16, seed=seed),
    }
    # With all gradients of an iteration averaged, the order of things in time does not matter.
    averaged = [_averaged(seed, iterations) for seed in range(seeds)]
    rows = []
    for name, slowdown in slowdowns.items():
        results = [
            run_one(
                topology.ring_based(_WORKERS),
                slowdown(seed),
                seed,
                iterations,
                machines=MACHINES,
                compute=ITERATION_SECONDS,
            )
            for seed in range(seeds)
        ]
        rows.append({"figure": "13", "setting": f"ring-based, {name}", **means(results)})
        times = [_server_seconds(slowdown(seed), seed, iterations) for seed in range(seeds)]
        rows.append(
            {"figure": "13", "setting": f"parameter server, {name}", **_server_row(times, averaged)}
        )
    return {
        "paper": "Luo et al. 2019, Hop",
        "fitted": {"compute_seconds": ITERATION_SECONDS},
        "fitted_to": "the time of an iteration without slow workers (section 7.3.5)",
        "given": "16 workers on 4 machines, 1 Gbit/s, updates of VGG11, 6x at a probability of "
        "1/16; the parameter server has a machine of its own, from which each worker pulls all "
        "parameters and to which it pushes all gradients",
        "predicted": "the time of an iteration, on servers by recsync.simulation.run, and the "
        "loss, which is that of a logistic regression, not of the paper's. By iterations, that of "
        "the parameter server is that of the complete graph, where all average what all computed",
        "target_loss": TARGET_LOSS,
        "differs": "nothing that the paper's text tells; the paper has no slow workers on the "
        "parameter server",
        "rows": rows,
    }


def _averaged(seed: int, iterations: int) -> HopResult:
    return run_one(
        topology.complete(_WORKERS),
        None,
        seed,
        iterations,
        machines=MACHINES,
        compute=2.0,  # A look at the loss in each iteration.
        order="serial",
        update_bytes=0,
    )


def _server_seconds(slowdown: Slowdown | None, seed: int, iterations: int) -> float:
    """Of an iteration of all workers."""
    result = simulation.run(
        modes.Sync(),
        workers=_WORKERS,
        ps=1,
        compute_seconds=ITERATION_SECONDS,
        noise=0.05,
        slowdown=slowdown,
        steps=iterations * _WORKERS,
        network=simulation.Network(bandwidth=GIGABIT, latency=1e-4, workers_per_machine=4),
        pull_bytes=VGG11_BYTES,
        push_bytes=VGG11_BYTES,
        seed=seed,
    )
    return result.seconds / iterations


def _server_row(times: list[float], averaged: list[HopResult]) -> Row:
    reached = [
        next((look.steps / _WORKERS for look in result.losses if look.loss <= TARGET_LOSS), None)
        for result in averaged
    ]
    looks = averaged[0].losses
    return {
        "seconds_per_iteration": mean(times),
        "seconds_to_target": None
        if None in reached
        else mean(one * time for one, time in zip(reached, times, strict=True)),
        "steps_to_target": None if None in reached else _WORKERS * statistics.fmean(reached),
        "last_loss": mean(result.losses[-1].loss for result in averaged),
        "losses": [
            [round(look.steps / _WORKERS * times[0], 3), round(look.loss, 5)]
            for look in looks[:: len(looks) // 100 + 1]
        ],
    }


def draw(found: Row, path: str) -> None:
    """Losses in the course of time, and the time of an iteration."""
    figure = new_figure(10.0, 4.2, PROGRAM)
    losses, times = figure.subplots(1, 2)
    rows = found["rows"]
    draw_curves(losses, "figure 13: loss", rows, lambda row: row["setting"], found["target_loss"])
    draw_bars(
        times,
        "seconds of an iteration",
        {row["setting"].replace(", ", "\n"): row["seconds_per_iteration"] for row in rows},
    )
    figure.suptitle("simulated: Hop against a parameter server", fontsize=11)
    figure.savefig(path, dpi=110)
