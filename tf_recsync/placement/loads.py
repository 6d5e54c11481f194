"""What a placement makes each device of a group compute, send and hold.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 3.2.1: processor, network and memory of a device.

A placement gives each unit a position. With p servers, position j < p has the unit's operator on
server j, with its weights beside it. Position p + k has the operator on the trainers, and the
weights, if there are any, on server k, from where they are pulled; a unit without parameters has
only k = 0. Devices are the p servers, and after them the trainers as one, since they are alike.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_recsync.placement.graph import StepGraph, Unit
from tf_recsync.placement.resources import Resources


@dataclasses.dataclass(frozen=True)
class DeviceLoads:
    """Loads of the devices of a group, of one placement or, with a dimension before, of several.

    Each array ends with the dimension `[servers + 1]`: the group PSs, and then a trainer.
    """

    processor: np.ndarray  # float64, seconds a step
    network: np.ndarray  # float64, seconds a step
    memory: np.ndarray  # int64, bytes

    @property
    def seconds(self) -> np.ndarray:
        """Seconds that a step takes of each device: of its processor or its network."""
        return np.maximum(self.processor, self.network)

    @property
    def highest(self) -> np.ndarray:
        """Seconds a step of the device with the highest load."""
        return self.seconds.max(-1)


class LoadModel:
    """Computes the loads of placements of one graph on one group."""

    def __init__(self, graph: StepGraph, resources: Resources):
        self.graph = graph
        self.resources = resources
        self.servers = resources.servers
        units = graph.units
        index = {unit.name: u for u, unit in enumerate(units)}
        self.source = np.array([index[edge.source] for edge in graph.edges], np.int64)
        self.target = np.array([index[edge.target] for edge in graph.edges], np.int64)
        self._flops = np.array([unit.flops for unit in units], np.float64)
        self._weights = np.array([unit.parameter_bytes for unit in units], np.int64)
        self._held = np.array([unit.memory for unit in units], np.int64)
        self._activations = np.array([unit.activation_bytes for unit in units], np.int64)
        self._plain = np.array([edge.bytes for edge in graph.edges], np.float64)
        self._sent = np.array(
            [
                edge.forward_bytes * resources.activation_ratio
                + edge.backward_bytes * resources.gradient_ratio
                for edge in graph.edges
            ],
            np.float64,
        )
        # For each device: how often it does what a net does once, and what it does that with.
        nets, servers = resources.nets, resources.servers
        self._times = np.array([nets] * servers + [1], np.float64)
        self._nets = np.array([nets] * servers + [resources.nets_per_trainer], np.int64)
        self._speed = np.array(
            [resources.server_flops_per_second] * servers + [resources.trainer_flops_per_second]
        )
        no_limit = np.iinfo(np.int64).max
        limits = [resources.memory_limit] * servers + [resources.trainer_memory_limit]
        self.limits = np.array([no_limit if m is None else m for m in limits], np.int64)
        self.positions = [self._positions(unit) for unit in units]

    def _positions(self, unit: Unit) -> tuple[int, ...]:
        homes = range(self.servers if unit.parameter_bytes else 1)
        on_servers = () if unit.pinned else range(self.servers)
        return (*on_servers, *(self.servers + home for home in homes))

    def operators(self, positions: np.ndarray) -> np.ndarray:
        """The device of each unit's operator; `servers` stands for the trainers."""
        return np.minimum(positions, self.servers)

    def homes(self, positions: np.ndarray) -> np.ndarray:
        """The server that holds each unit's weights, if it has any."""
        return np.where(positions < self.servers, positions, positions - self.servers)

    def loads(self, positions: np.ndarray, known: np.ndarray | None = None) -> DeviceLoads:
        """The loads of a placement, `[units]`, or of several, `[placements, units]`.

        With `known`, bool `[units]`, only these units count, and the edges between them.
        """
        known = np.ones(len(self.graph.units), bool) if known is None else known
        both = known[self.source] & known[self.target]
        plain, sent = self._plain * both, self._sent * both
        devices = self.servers + 1
        operators, homes = self.operators(positions), self.homes(positions)
        elsewhere = (operators == self.servers) & known
        shape = (*positions.shape[:-1], devices)
        processor, network = np.zeros(shape), np.zeros(shape)
        memory = np.zeros(shape, np.int64)
        for device in range(devices):
            here = (operators == device) * 1.0
            cut = np.abs(here[..., self.source] - here[..., self.target])
            compression = cut @ plain * self.resources.compression_seconds_per_byte
            processor[..., device] = (
                here @ (self._flops * known) / self._speed[device] + compression
            )
            memory[..., device] = (here @ (self._activations * known)) * self._nets[device]
            if device == self.servers:
                pulled = elsewhere
            else:
                pulled = elsewhere & (homes == device)
                memory[..., device] += ((homes == device) & known) @ self._held
            # Weights come, and their gradients go.
            traffic = cut @ sent + 2 * (pulled @ self._weights)
            network[..., device] = traffic / self.resources.bytes_per_second
        return DeviceLoads(processor * self._times, network * self._times, memory)

    def fits(self, loads: DeviceLoads) -> np.ndarray:
        """Whether no device holds more than it may."""
        return (loads.memory <= self.limits).all(-1)

    def lower_bound(self) -> float:
        """Seconds a step below which no placement's highest load can be.

        It is that of processors which share all that may be anywhere evenly, without any traffic.
        """
        trainer, server = self._speed[-1], self._speed[0] / self._times[0]
        pinned = np.array([unit.pinned for unit in self.graph.units])
        alone = self._flops / np.where(pinned, trainer, max(trainer, server))
        return float(
            max(
                self._flops[pinned].sum() / trainer,
                self._flops.sum() / (trainer + self.servers * server),
                alone.max(),
            )
        )

    def unit_seconds(self, positions: np.ndarray) -> np.ndarray:
        """float64 `[units]`: seconds a step that each unit takes of its device's processor."""
        operators = self.operators(positions)
        return self._flops * self._times[operators] / self._speed[operators]

    def traffic(self, positions: np.ndarray) -> np.ndarray:
        """float64 `[units]`: bytes that each unit sends and receives in a step of one net."""
        operators = self.operators(positions)
        cut = (operators[self.source] != operators[self.target]) * self._sent
        count = len(self.graph.units)
        total = np.bincount(self.source, cut, count) + np.bincount(self.target, cut, count)
        return total + np.where(operators == self.servers, 2.0 * self._weights, 0.0)

    def check_units_fit(self) -> None:
        """Raises a ValueError for a unit that fits no device even alone."""
        for unit in self.graph.units:
            activations = unit.activation_bytes
            on_server = unit.memory + self._nets[0] * activations <= self.limits[0]
            on_trainer = (
                unit.memory <= self.limits[0] and self._nets[-1] * activations <= self.limits[-1]
            )
            if not (on_trainer or (on_server and not unit.pinned)):
                raise ValueError(
                    f"unit {unit.name!r} fits no device: its weights and accumulators take "
                    f"{unit.memory} bytes and its activations {activations} bytes for each net, "
                    f"with memory_limit={self.resources.memory_limit} bytes for a group PS and "
                    f"trainer_memory_limit={self.resources.trainer_memory_limit} for a trainer."
                )
