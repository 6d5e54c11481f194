"""What a placement makes each device of a group compute, send and hold.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 3.2.1: processor, network and memory of a device; and section 4.1, layers in
pieces.

A placement gives each unit a position. With p servers, position j < p has the unit's operator on
server j, with its weights beside it. Position p + k has the operator on the trainers, and the
weights, if there are any, on server k, from where they are pulled; a unit without parameters has
only k = 0. Positions 2 p and 2 p + 1 have a piece of it on each server: some of its columns, or
some of its rows. Devices are the p servers, and after them the trainers as one, since they are
alike.

Of a unit in columns each server takes the whole input and gives its features of the output; in
rows each takes its features of the input and gives a sum as large as the whole output. Trainers
divide inputs and put outputs together, so that what goes from pieces to a server, or from a server
to rows, passes them. Only a whole input goes from server to server, and its gradient if there is
one other server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from tf_recsync.placement.graph import StepGraph, Unit
from tf_recsync.placement.resources import Resources
from tf_recsync.synchronization.divided import How

# Whether what a unit in columns gives stays on the servers: it does not; it does if the target is
# in rows; if it is in columns.
_LEAVES, _TO_ROWS, _TO_COLUMNS = range(3)


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
    """Computes the loads of placements of one graph on one group.

    Args:
        graph: the units.
        resources: the group.
        divided: units that are in pieces in all placements of a search, by their names.

    Attributes:
        positions: for each unit the positions that it may have, those of a search.
    """

    def __init__(
        self, graph: StepGraph, resources: Resources, divided: Mapping[str, How] | None = None
    ):
        self.graph = graph
        self.resources = resources
        self.servers = resources.servers
        self.divided = dict(divided or {})
        units = graph.units
        index = {unit.name: u for u, unit in enumerate(units)}
        self.source = np.array([index[edge.source] for edge in graph.edges], np.int64)
        self.target = np.array([index[edge.target] for edge in graph.edges], np.int64)
        self._flops = np.array([unit.flops for unit in units], np.float64)
        self._weights = np.array([unit.parameter_bytes for unit in units], np.int64)
        self._held = np.array([unit.memory for unit in units], np.int64)
        self._activations = np.array([unit.activation_bytes for unit in units], np.int64)
        plain = [(edge.forward_bytes, edge.backward_bytes) for edge in graph.edges]
        self._plain = np.array(plain, np.float64).reshape(-1, 2)
        self._sent = self._plain * (resources.activation_ratio, resources.gradient_ratio)
        # For each device: of how many nets it holds and sends what it does; how often it computes
        # what a net does once, with its own speed, which a trainer has for each of its nets.
        nets, servers = resources.nets, resources.servers
        self._nets = np.array([nets] * servers + [resources.nets_per_trainer], np.int64)
        self._times = np.array([nets] * servers + [1], np.float64)
        self._speed = np.array(
            [resources.server_flops_per_second] * servers + [resources.trainer_flops_per_second]
        )
        no_limit = np.iinfo(np.int64).max
        limits = [resources.memory_limit] * servers + [resources.trainer_memory_limit]
        self.limits = np.array([no_limit if m is None else m for m in limits], np.int64)
        self.columns, self.rows = 2 * servers, 2 * servers + 1
        self.positions = [self._positions(unit) for unit in units]
        # For each operator as `operators` has them, what part of it each device has.
        whole, part = np.eye(servers + 1), np.ones((2, servers + 1)) / servers
        part[:, servers] = 0
        self._parts = np.concatenate([whole, part])
        ends = zip(self.source.tolist(), self.target.tolist(), strict=True)
        self._joints = np.array([_joint(units[s], units[t]) for s, t in ends], np.int64)
        # [direction, operators of both ends and fit, devices]
        ways = [self._transferred(is_backward) for is_backward in (False, True)]
        self._transfers = np.stack(ways).reshape(2, -1, servers + 1)

    def _positions(self, unit: Unit) -> tuple[int, ...]:
        if unit.name in self.divided:
            return (self.position_of(self.divided[unit.name]),)
        homes = range(self.servers if unit.parameter_bytes else 1)
        on_servers = () if unit.pinned else range(self.servers)
        return (*on_servers, *(self.servers + home for home in homes))

    def position_of(self, how: How) -> int:
        """The position of a unit in pieces."""
        return self.columns if how == "columns" else self.rows

    def _transferred(self, backward: bool) -> np.ndarray:
        """float64 `[operators, operators, 3, devices]`: how often a tensor passes each device.

        The operators are those of an edge's source and its target, and the third dimension says
        whether what columns give stays on the servers.

        Args:
            backward: whether it is the gradient.
        """
        servers = self.servers
        trainers, columns, rows = range(servers, servers + 3)
        device = np.eye(servers + 1)
        each = 1.0 - device[trainers]
        given = [device[j] + device[trainers] for j in range(servers)]  # To the trainers.
        given += [0 * each, each / servers + device[trainers], each + servers * device[trainers]]
        taken = [*given[:columns], given[rows], given[columns]]
        passed = np.zeros((servers + 3, servers + 3, 3, servers + 1))
        for source in range(servers + 3):
            for target in range(servers + 3):
                passed[source, target] = given[source] + taken[target]
        for one in range(servers):
            others = each - device[one]
            for other in range(servers):
                passed[one, other] = device[one] + device[other] if one != other else 0
            passed[one, columns] = others + (servers - 1) * device[one]
            if backward and servers > 2:  # Of several parts of the sum trainers make one.
                passed[one, columns] = others + servers * device[trainers] + device[one]
        passed[trainers, trainers] = 0
        passed[columns, rows, _TO_ROWS] = 0
        passed[columns, columns, _TO_COLUMNS] = 0
        return passed

    def operators(self, positions: np.ndarray) -> np.ndarray:
        """The device of each unit's operator; `servers` stands for the trainers.

        `servers + 1` stands for columns on all servers, and `servers + 2` for rows.
        """
        in_pieces = positions - self.columns + self.servers + 1
        return np.where(positions < self.columns, np.minimum(positions, self.servers), in_pieces)

    def homes(self, positions: np.ndarray) -> np.ndarray:
        """The server that holds each unit's weights, if it has any; -1 if all hold pieces."""
        homes = np.where(positions < self.servers, positions, positions - self.servers)
        return np.where(positions < self.columns, homes, -1)

    def loads(self, positions: np.ndarray, known: np.ndarray | None = None) -> DeviceLoads:
        """The loads of a placement, `[units]`, or of several, `[placements, units]`.

        With `known`, bool `[units]`, only these units count, and the edges between them.
        """
        known = np.ones(len(self.graph.units), bool) if known is None else known
        both = (known[self.source] & known[self.target])[:, None]
        # For each edge and direction, the bytes that travel, and those that are compressed.
        amounts = np.stack([self._sent * both, self._plain * both])
        devices = self.servers + 1
        operators, homes = self.operators(positions), self.homes(positions)
        elsewhere = (operators == self.servers) & known
        in_pieces = (homes < 0) & known
        has_pieces = bool(in_pieces.any())
        passed = self._passed(operators)
        shape = (*positions.shape[:-1], devices)
        processor, network = np.zeros(shape), np.zeros(shape)
        memory = np.zeros(shape, np.int64)
        for device in range(devices):
            there = self._transfers[:, :, device]
            moved = there[0][passed] @ amounts[:, :, 0].T + there[1][passed] @ amounts[:, :, 1].T
            compression = moved[..., 1] * self.resources.compression_seconds_per_byte
            computed = self._parts[:, device][operators] @ (self._flops * known)
            processor[..., device] = computed / self._speed[device] + compression
            pulled = elsewhere
            memory[..., device] = (operators == device) @ (self._activations * known)
            if has_pieces and device < self.servers:
                memory[..., device] += self._given_by_pieces(operators, known)
            memory[..., device] *= self._nets[device]
            if device == self.servers:
                pulled = elsewhere
            else:
                pulled = elsewhere & (homes == device)
                memory[..., device] += ((homes == device) & known) @ self._held
                if has_pieces:
                    memory[..., device] += in_pieces @ self._piece_of(self._held)
            # Weights come, and their gradients go.
            traffic = moved[..., 0] + 2 * (pulled @ self._weights)
            network[..., device] = traffic / self.resources.bytes_per_second
        return DeviceLoads(processor * self._times, network * self._nets, memory)

    def _passed(self, operators: np.ndarray) -> np.ndarray:
        """For each edge where `_transfers` has how often it passes the devices."""
        kinds = self.servers + 3
        ends = operators[..., self.source] * kinds + operators[..., self.target]
        return ends * 3 + self._joints

    def _piece_of(self, size: np.ndarray) -> np.ndarray:
        """The bytes that the largest of the servers' pieces has."""
        return -(-size // self.servers)

    def _given_by_pieces(self, operators: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Bytes of what pieces on one server give: columns some features, rows a sum of all."""
        given = self._activations * known
        by_columns, by_rows = (operators == self.servers + 1 + n for n in range(2))
        return by_columns @ self._piece_of(given) + by_rows @ given

    def fits(self, loads: DeviceLoads) -> np.ndarray:
        """Whether no device holds more than it may."""
        return (loads.memory <= self.limits).all(-1)

    def lower_bound(self) -> float:
        """Seconds a step below which no placement's highest load can be.

        It is that of processors which share all that may be anywhere evenly, without any traffic.
        """
        trainer, server = self._speed[-1], self._speed[0] / self._times[0]
        pinned = np.array([unit.pinned for unit in self.graph.units])
        fastest = np.where(pinned, trainer, max(trainer, server))
        in_pieces = [unit.name in self.divided for unit in self.graph.units]
        alone = self._flops / np.where(in_pieces, self.servers * server, fastest)
        return float(
            max(
                self._flops[pinned].sum() / trainer,
                self._flops.sum() / (trainer + self.servers * server),
                alone.max(),
            )
        )

    def unit_seconds(self, positions: np.ndarray) -> np.ndarray:
        """float64 `[units, devices]`: seconds a step that each unit takes of the processors."""
        parts = self._parts[self.operators(positions)]
        return self._flops[:, None] * parts * self._times / self._speed

    def traffic(self, positions: np.ndarray) -> np.ndarray:
        """float64 `[units]`: bytes that travel on each unit's edges in a step of one net."""
        passed = self._passed(self.operators(positions))
        # Each byte that travels is sent by one device and received by another.
        travels = self._transfers.sum(-1)[:, passed].T / 2
        cut = (travels * self._sent).sum(-1)
        count = len(self.graph.units)
        total = np.bincount(self.source, cut, count) + np.bincount(self.target, cut, count)
        elsewhere = self.operators(positions) == self.servers
        return total + np.where(elsewhere, 2.0 * self._weights, 0.0)

    def check_units_fit(self) -> None:
        """Raises a ValueError for a unit that fits no device even alone.

        Units that are `divided` have a piece on each server.
        """
        for u, unit in enumerate(self.graph.units):
            if self.fits_alone(u):
                continue
            of = self.resources
            if unit.name in self.divided:
                reason = f"not even a piece of it on each of {of.servers} servers does"
            elif fits_in_pieces(unit, of):
                reason = "it would, divided among the servers, with splits=True"
            elif unit.can_be_divided:
                reason = f"not even divided among {of.servers} servers it would"
            else:
                reason = f"it can't be divided{unit.why_whole and ': it '}{unit.why_whole}"
            raise ValueError(
                f"unit {unit.name!r} fits no device: its weights and accumulators take "
                f"{unit.memory} bytes and its activations {unit.activation_bytes} bytes for each "
                f"net, with memory_limit={of.memory_limit} bytes for a group PS and "
                f"trainer_memory_limit={of.trainer_memory_limit} for a trainer; {reason}."
            )

    def fits_alone(self, unit: int) -> bool:
        """Whether there is a place where the unit of this number fits without others."""
        known = np.arange(len(self.graph.units)) == unit
        positions = np.array([own[0] for own in self.positions], np.int64)
        candidates = np.repeat(positions[None], len(self.positions[unit]), 0)
        candidates[:, unit] = self.positions[unit]
        return bool(self.fits(self.loads(candidates, known)).any())


def how_to_divide(unit: Unit, servers: int) -> How | None:
    """How servers divide a unit: so that what they give or take in parts is the smaller side.

    Returns:
        "columns" if it gives more features than it takes, else "rows"; None if it can't be divided
        among so many.
    """
    if not unit.can_be_divided or servers < 2:
        return None
    how: How = "columns" if unit.features_out > unit.features_in else "rows"
    return how if unit.features(how) >= servers else None


def fits_in_pieces(unit: Unit, resources: Resources) -> bool:
    """Whether a unit can be divided so that its pieces fit the servers."""
    how = how_to_divide(unit, resources.servers)
    return how is not None and LoadModel(StepGraph([unit]), resources, {unit.name: how}).fits_alone(
        0
    )


def goes_on_in_pieces(unit: Unit) -> bool:
    """Whether a unit without parameters works on pieces as it does on the whole."""
    return unit.elementwise and unit.kind == "layer" and not unit.parameter_bytes


def _joint(source: Unit, target: Unit) -> int:
    """Whether what the first gives in columns stays there, and for a target in rows or columns."""
    if not source.elementwise:
        return _LEAVES
    if target.can_be_divided:
        return _TO_ROWS
    return _TO_COLUMNS if goes_on_in_pieces(target) else _LEAVES
