"""What the experiments on Hierarchical Training share: settings, clusters, speed and quality.

All settings train the same DLRM on synthetic clicks. Devices have an artificial speed and links an
artificial bandwidth, which use no processor (`recsync.testing.set_device_speed`, `set_bandwidth`):
so many trainers and servers overlap on a few cores, and compete for servers of a group as on
machines of their own. A trainer's nets, or threads, share its speed. The link of the sync PS is
given as the synchronizations that it carries in a second: all dense parameters, there and back.

Quality is measured from where a model is that one process has trained on as many clicks as
`--warm_days` times `--rows`: all settings go on with its weights and accumulators. A model of so
many layers learns next to nothing from its first clicks, whatever the setting, and when it begins
to learn is chance.

What was measured is kept in a file (`--runs`), a line for each run, so that a long run of the
benchmark goes on where it was interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import common
import continual
import keras
import machine
import mode_runs
import numpy as np
from absl import flags
from dlrm_model import build_dlrm

import tf_recsync as recsync
from tf_recsync.placement import OperatorPlan, Resources, StepGraph

FLAGS = flags.FLAGS
SIZES = (1000, 500, 200, 100, 50, 20)  # Ids of the categorical features.
# A gap that no run gets to: groups never synchronize.
NEVER = 1_000_000_000
MOST_BUSY = 0.7  # Of the machine: beyond, artificial times are no longer what steps take.


def define_flags() -> None:
    """Defines the flags of what is trained and how."""
    flags.DEFINE_integer("processes", 4, "Of the servers; they share these.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "Examples per step of a net.", lower_bound=1)
    flags.DEFINE_integer("nets", 4, "Of a trainer, or threads under EASGD.", lower_bound=1)
    flags.DEFINE_float("alpha", 0.3, "The elastic parameter.")
    flags.DEFINE_float("learning_rate", 0.005, "Of Adagrad.", lower_bound=0)
    flags.DEFINE_integer("units", 64, "Of each dense layer.", lower_bound=1)
    flags.DEFINE_integer("top_layers", 8, "Dense layers behind the interactions.", lower_bound=1)
    flags.DEFINE_float(
        "device_seconds", 0.8, "That one device takes for a step by itself.", lower_bound=0.001
    )
    flags.DEFINE_float(
        "link_bytes", 700_000.0, "That a device's link carries in device_seconds.", lower_bound=1
    )
    flags.DEFINE_float(
        "sync_capacity",
        8.0,
        "Synchronizations per second that the sync PS's link carries.",
        lower_bound=0.001,
    )
    flags.DEFINE_float("speed_seconds", 40.0, "How long a speed is measured.", lower_bound=0.1)
    flags.DEFINE_integer("rows", 49_152, "Clicks to train on, and to test on.", lower_bound=1)
    flags.DEFINE_integer(
        "warm_days", 4, "As many clicks times this are trained on before.", lower_bound=0
    )
    flags.DEFINE_float(
        "quality_faster", 1.35, "How many times as fast all is where quality is measured."
    )
    flags.DEFINE_float("search_seconds", 10.0, "Of the search for a plan, at most.", lower_bound=0)
    flags.DEFINE_string(
        "runs", None, "Keeps what was measured, so that the same command goes on with what is left."
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train.

    Attributes:
        name: as in the paper.
        groups: how many; 0 for EASGD, whose trainers are each by themselves.
        trainers: of a group, or in all under EASGD.
        ps: of a group.
        plan: how layers are placed: "search", "whole" (no layer is divided), "rules" (no
            refinement), or "turn" (no tagging: each layer on the next server).
        compression: of what travels to layers on servers and from them.
        syncs: whether groups are synchronized.
        nets: of a trainer, or threads; None for the flag's.
        bandwidth: of links, a multiple of the flag's.
        unbalanced: whether the model's layers differ in what they cost.
    """

    name: str
    groups: int
    trainers: int
    ps: int = 0
    plan: str = "search"
    compression: bool = False
    syncs: bool = True
    nets: int | None = None
    bandwidth: float = 1.0
    unbalanced: bool = False

    @property
    def all_trainers(self) -> int:
        """Trainers of all groups."""
        return self.trainers * max(self.groups, 1)

    @property
    def nets_per_trainer(self) -> int:
        """Nets of a trainer, or threads."""
        return self.nets or FLAGS.nets

    @property
    def nodes(self) -> int:
        """Trainers and group PSs."""
        return (self.trainers + self.ps) * max(self.groups, 1)


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was measured while a setting trained.

    Attributes:
        eps: examples per second.
        trainer_compute: of the artificial speed of trainers, the part in use, on average.
        ps_compute: the same of group PSs, by their numbers in a group; empty under EASGD.
        trainer_link: of the artificial bandwidth.
        ps_link: the same.
        sync_gap: steps of a group per synchronization; infinite without any.
        cpu_share: of the machine's processors, what this benchmark used.
        machine_share: what all programs used.
        highest_load: of a device, by the plan, in seconds a step of a net; 0 under EASGD.
    """

    eps: float
    trainer_compute: float
    ps_compute: tuple[float, ...]
    trainer_link: float
    ps_link: tuple[float, ...]
    sync_gap: float
    cpu_share: float
    machine_share: float
    highest_load: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well a model predicted.

    Attributes:
        curve: the normalized entropy of training batches so far, before they were trained on, at
            tenths of the pass.
        train_ne: the last of these.
        eval_ne: of clicks that were not trained on, by the first copy.
        sync_gap: as in `Speed`, like the shares.
        cpu_share: see above.
        machine_share: see above.
    """

    curve: tuple[float, ...]
    train_ne: float
    eval_ne: float
    sync_gap: float
    cpu_share: float
    machine_share: float


class Laboratory:
    """Runs settings, on one cluster at a time, unless they were run already.

    Args:
        runs: a file of what was measured; None keeps nothing.
    """

    def __init__(self, runs: str | None):
        self._cluster: recsync.LocalCluster | None = None
        self._weights = tempfile.TemporaryDirectory()
        self._path = None if runs is None else pathlib.Path(runs)
        self._known: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                run = json.loads(line)
                self._known[run["key"]] = run["measured"]

    def close(self) -> None:
        """Ends the cluster, if there is one."""
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None

    def _warm(self, seed: int) -> pathlib.Path | None:
        """The weights and accumulators that training on a seed's clicks begins with, if any."""
        if not FLAGS.warm_days:
            return None
        path = pathlib.Path(self._weights.name, f"{seed}.weights.h5")
        if not path.exists():
            model = _compiled(build(False, common.SEED + seed))
            for day in range(FLAGS.warm_days):
                model.fit(clicks(seed).train(day), verbose=0, shuffle=False)
            model.save_weights(path)
        return path

    def speed(self, setting: Setting, number: int) -> Speed:
        """What a fresh model's training measured, in the round of this number."""
        names = ("speed_seconds", *_ALL_FLAGS)
        return Speed(**self._measured("speed", setting, number, names, self._speed))

    def quality(self, setting: Setting, seed: int) -> Quality:
        """How well a model predicted that was trained once on all clicks of a seed."""
        names = ("rows", "warm_days", "quality_faster", "alpha", "learning_rate", *_ALL_FLAGS)
        return Quality(**self._measured("quality", setting, seed, names, self._quality))

    def _measured(self, kind, setting: Setting, number: int, names: Sequence[str], measure):
        """The values of a run: those that are known, or new ones, which are kept."""
        options = {name: FLAGS[name].value for name in names}
        # Of the same setting under two names.
        how = {**dataclasses.asdict(setting), "name": None}
        key = json.dumps([kind, how, number, options], sort_keys=True)
        if key not in self._known:
            measured = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in dataclasses.asdict(measure(setting, number)).items()
            }
            self._known[key] = measured
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, "measured": measured}) + "\n")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self._known[key].items()
        }

    def _started(self, setting: Setting) -> recsync.LocalCluster:
        """A cluster for a setting; an earlier one of another size is closed."""
        # An embedding PS and a sync PS beside the groups'.
        ps = max(setting.groups, 1) * setting.ps + 2
        of = self._cluster
        if of is None or (of.workers, of.ps) != (setting.all_trainers, ps):
            self.close()
            processes = min(FLAGS.processes, setting.all_trainers + ps)
            self._cluster = mode_runs.start_cluster(setting.all_trainers, ps, processes)
        return self._cluster

    def _speed(self, setting: Setting, number: int) -> Speed:
        del number
        strategy, model, plan = self._make(setting, 0, 1.0)
        nets = setting.all_trainers * setting.nets_per_trainer
        # At most as many as with all devices in use.
        steps = max(4 * nets, round(FLAGS.speed_seconds * setting.nodes / FLAGS.device_seconds))
        watch = _Watch(strategy, self._cluster, 3 * nets, FLAGS.speed_seconds)
        model.fit(
            clicks(0).train(0).repeat(),
            steps_per_epoch=3 * nets + steps + 2 * nets,
            callbacks=[watch],
            verbose=0,
            shuffle=False,
        )
        return watch.speed(setting, steps, 0.0 if plan is None else plan.highest_load)

    def _quality(self, setting: Setting, seed: int) -> Quality:
        warm = self._warm(seed)
        strategy, model, _ = self._make(setting, seed, FLAGS.quality_faster)
        if warm is not None:
            model.load_weights(warm)
        data, day = clicks(seed), FLAGS.warm_days
        watch = _CurveWatch(strategy, self._cluster, 1, None)
        model.fit(data.train(day), verbose=0, shuffle=False, callbacks=[watch])
        features, labels = data.part(day + 1)
        tested = model.evaluate(features, labels, batch_size=2048, verbose=0, return_dict=True)
        curve = watch.curve(data.steps)
        return Quality(
            curve=curve,
            train_ne=curve[-1],
            eval_ne=float(tested["normalized_entropy"]),
            sync_gap=strategy.average_sync_gap(model),
            cpu_share=watch.cpu_share,
            machine_share=watch.machine_share,
        )

    def _make(
        self, setting: Setting, seed: int, faster: float
    ) -> tuple[Any, keras.Model, OperatorPlan | None]:
        cluster = self._started(setting)
        algorithm = recsync.EASGD(FLAGS.alpha)
        mode = "shadow" if setting.syncs else recsync.Foreground(gap=NEVER)
        graph = step_graph(setting.unbalanced)
        speed = faster * graph.flops / FLAGS.device_seconds
        bandwidth = faster * link_bandwidth(setting)
        plan = None
        if not setting.groups:
            strategy: Any = recsync.ShadowSyncStrategy(
                cluster,
                algorithm,
                mode=mode,
                threads_per_trainer=setting.nets_per_trainer,
                sync_ps=1,
                local_batch_size=FLAGS.batch_size,
            )
        else:
            plan = planned(setting)
            compression = recsync.Compression("int8", "bfloat16") if setting.compression else None
            strategy = recsync.HierarchicalStrategy(
                cluster,
                algorithm,
                groups=setting.groups,
                trainers_per_group=setting.trainers,
                ps_per_group=setting.ps,
                nets_per_trainer=setting.nets_per_trainer,
                mode=mode,
                placement=plan,
                compression=compression,
                sync_ps=1,
                local_batch_size=FLAGS.batch_size,
            )
        with strategy.scope():
            model = _compiled(build(setting.unbalanced, common.SEED + seed))
        group_ps = range(setting.groups * setting.ps)
        recsync.testing.set_device_speed(strategy, speed)
        recsync.testing.set_bandwidth(strategy, bandwidth, job="worker")
        if setting.groups:
            recsync.testing.set_device_speed(strategy, speed, group_ps, job="ps")
            recsync.testing.set_bandwidth(strategy, bandwidth, group_ps, job="ps")
        elements = sum(np.size(value) for value in strategy.copies(model)[0])
        synchronizations = faster * FLAGS.sync_capacity
        recsync.testing.set_bandwidth(
            strategy, synchronizations * 8 * elements, strategy.sync_ps, job="ps"
        )
        return strategy, model, plan


# What all runs depend on.
_ALL_FLAGS = (
    *("batch_size", "nets", "units", "top_layers", "device_seconds", "link_bytes"),
    *("sync_capacity", "search_seconds"),
)


# The time, the machine's processor time, a report on synchronization, what devices of jobs did.
_Reading = tuple[float, float, Any, dict[str, list[recsync.testing.Use]]]


class _Watch(mode_runs.StepWatch):
    """Reads what devices do, too."""

    def __init__(self, strategy, cluster, warm_up: int, seconds: float | None):
        super().__init__(strategy, mode_runs.server_pids(cluster), warm_up, seconds)
        self._last: _Reading | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        # Trainers end one after the other: what is used then is not part of it.
        if self.model.stop_training and self._last is None:
            self._last = self._read()

    def before(self) -> None:
        self._before = self._read()

    def after(self) -> None:
        before, after = self._before, self._last or self._read()
        self.seconds = after[0] - before[0]
        self.machine_share = (after[1] - before[1]) / self.seconds / machine.machine_cores()
        self.report = after[2], before[2]
        self.use = {
            job: [
                (b.compute_seconds - a.compute_seconds, b.link_seconds - a.link_seconds)
                for a, b in zip(before[3][job], after[3][job], strict=True)
            ]
            for job in after[3]
        }

    def _read(self) -> _Reading:
        use = {job: recsync.testing.device_use(self._strategy, job) for job in ("worker", "ps")}
        report = self._strategy.sync_report(self.model)
        return time.perf_counter(), machine.busy_seconds(), report, use

    def speed(self, setting: Setting, steps: int, highest_load: float) -> Speed:
        times, counts, _ = self.readings(steps)
        after, before = self.report
        syncs = sum(after.syncs) - sum(before.syncs)
        shares = {job: np.array(use) / self.seconds for job, use in self.use.items()}
        of_ps = shares["ps"][: setting.groups * setting.ps].reshape(-1, max(setting.ps, 1), 2)
        of_ps = of_ps.mean(0) if len(of_ps) else np.zeros([0, 2])
        # The slope of a line, as nets that wait for the same server come in bunches.
        rate = np.polyfit(times, counts.sum(axis=1), 1)[0]
        return Speed(
            eps=FLAGS.batch_size * float(rate),
            trainer_compute=float(shares["worker"][:, 0].mean()),
            ps_compute=tuple(of_ps[:, 0].tolist()),
            trainer_link=float(shares["worker"][:, 1].mean()),
            ps_link=tuple(of_ps[:, 1].tolist()),
            sync_gap=(after.steps - before.steps) / syncs if syncs else float("inf"),
            cpu_share=self.cpu_share,
            machine_share=self.machine_share,
            highest_load=highest_load,
        )


class _CurveWatch(_Watch):
    """Reads the metric of the batches so far, too."""

    def __init__(self, strategy, cluster, warm_up: int, seconds: float | None):
        super().__init__(strategy, cluster, warm_up, seconds)
        self._curve: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._curve.append((batch + 1, float(logs["normalized_entropy"])))

    def curve(self, steps: int) -> tuple[float, ...]:
        """At tenths of so many steps."""
        done, values = zip(*self._curve, strict=True)
        return tuple(np.interp(steps * np.arange(1, 11) / 10, done, values).tolist())


@functools.lru_cache(maxsize=8)
def clicks(seed: int) -> continual.Days:
    """Days of clicks: those to begin with, one to train on, and one to test on."""
    return continual.synthetic(
        *(FLAGS.warm_days + 1, FLAGS.rows, FLAGS.batch_size, 0.0, seed),
        cardinalities=SIZES,
        numeric=4,
    )


def _compiled(model: keras.Model) -> keras.Model:
    model.compile(
        recsync.optimizers.Adagrad(FLAGS.learning_rate),
        "binary_crossentropy",
        metrics=[recsync.metrics.NormalizedEntropy()],
    )
    return model


def build(unbalanced: bool, seed: int) -> keras.Model:
    """The DLRM; unbalanced, a layer has more than a third of all weights."""
    keras.utils.set_random_seed(seed)
    units = FLAGS.units
    bottom, top = [units] * 2, [units] * FLAGS.top_layers
    if unbalanced:
        bottom, top = [units] * 5, [units, units // 4, units // 4, 4 * units, units, units]
    return build_dlrm(
        clicks(0).spec,
        embedding_dimension=8,
        bottom_units=bottom,
        top_units=top,
        kernel_initializer="he_uniform",
    )


@functools.lru_cache(maxsize=2)
def step_graph(unbalanced: bool) -> StepGraph:
    """What a step computes and sends."""
    return OperatorPlan.step_graph(build(unbalanced, common.SEED), FLAGS.batch_size)


def link_bandwidth(setting: Setting) -> float:
    """Bytes per second of the link of a trainer or a group PS."""
    return setting.bandwidth * FLAGS.link_bytes / FLAGS.device_seconds


@functools.lru_cache(maxsize=16)
def planned(setting: Setting) -> OperatorPlan:
    """Where layers run."""
    graph = step_graph(setting.unbalanced)
    speed = graph.flops / FLAGS.device_seconds
    resources = Resources(
        trainers=setting.trainers,
        servers=setting.ps,
        nets_per_trainer=setting.nets_per_trainer,
        trainer_flops_per_second=speed / setting.nets_per_trainer,
        server_flops_per_second=speed,
        bytes_per_second=link_bandwidth(setting),
        activation_ratio=0.3 if setting.compression else 1.0,
        gradient_ratio=0.5 if setting.compression else 1.0,
    )
    if setting.plan != "turn":
        seconds = 0.0 if setting.plan == "rules" else FLAGS.search_seconds
        return OperatorPlan.search(graph, resources, seconds, splits=setting.plan != "whole")
    operators: dict[str, int | None] = {unit.name: None for unit in graph.units}
    layers = [unit for unit in graph.units if unit.parameter_bytes and not unit.pinned]
    operators |= {unit.name: i % setting.ps for i, unit in enumerate(layers)}
    return OperatorPlan(graph, resources, operators)
