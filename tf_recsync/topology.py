"""Who sends to whom in decentralized training, and with which weights (Hop, section 3.1).

>>> import tf_recsync as recsync
>>> ring = recsync.topology.ring(4)
>>> ring.in_neighbors(0), ring.out_neighbors(0)
((1, 3), (1, 3))
>>> ring.weights[0].round(3).tolist()
[0.333, 0.333, 0.0, 0.333]
>>> round(ring.spectral_gap, 3)
0.667
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Hashable, Iterable, Sequence
from numbers import Integral
from typing import Any

import networkx as nx
import numpy as np

from tf_recsync._checks import check_at_least, integer, list_of
from tf_recsync._figures import new_figure

__all__ = [
    "Topology",
    "complete",
    "double_ring",
    "exponential",
    "from_edges",
    "from_networkx",
    "gap_bounds",
    "grid",
    "hierarchical",
    "ring",
    "ring_based",
    "star",
]

_TOLERANCE = 1e-6  # Of sums of weights, which users may give as float32.
_SINKHORN_ROUNDS = 100_000


class Topology:
    """A directed graph of workers with a self-loop at each, and a weight for every edge.

    An edge (i, j) says that worker i sends its parameters to worker j, where they have
    the weight `weights[i, j]`: worker j's average is sum_i weights[i, j] x_i. The graph is
    strongly connected and the weights are doubly stochastic, without which decentralized
    training does not converge to one model.

    Make one with the functions of this module, or from a matrix.

    Args:
        weights: [n, n], floats of at least 0, whose rows and columns sum to 1 (within
            1e-6). Positive where there is an edge, and on the diagonal.
        name: for messages and plots. Defaults to "custom".

    Raises:
        ValueError: if the matrix is not square, has a negative or non-finite weight or a
            zero on the diagonal, is not doubly stochastic, or if some worker can't be
            reached from another one.

    Example:

    >>> from tf_recsync.topology import Topology
    >>> pair = Topology([[0.75, 0.25], [0.25, 0.75]])
    >>> pair.size, pair.spectral_gap
    (2, 0.5)
    """

    def __init__(self, weights: Any, name: str = "custom"):
        matrix = np.array(weights, np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
            raise ValueError(f"weights must be a square matrix, not of shape {matrix.shape}")
        _check_weights(matrix)
        _check_connected(matrix)
        matrix.setflags(write=False)
        self._weights = matrix
        self._name = name
        off_diagonal = (matrix > 0) & ~np.eye(len(matrix), dtype=bool)
        self._out = tuple(tuple(np.flatnonzero(row).tolist()) for row in off_diagonal)
        self._in = tuple(tuple(np.flatnonzero(column).tolist()) for column in off_diagonal.T)

    def __repr__(self) -> str:
        return f"<Topology {self._name}: {self.size} workers, {len(self.edges)} edges>"

    @property
    def name(self) -> str:
        """What it is called in messages and plots."""
        return self._name

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self._weights)

    @property
    def weights(self) -> np.ndarray:
        """float64 [n, n], read-only: `weights[i, j]` of what i sends to j."""
        return self._weights

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (sender, receiver), without the self-loops."""
        return tuple((i, j) for i, out in enumerate(self._out) for j in out)

    def in_neighbors(self, worker: int) -> tuple[int, ...]:
        """Who sends to a worker, ascending, without itself."""
        return self._in[integer("worker", worker, 0, self.size - 1)]

    def out_neighbors(self, worker: int) -> tuple[int, ...]:
        """To whom a worker sends, ascending, without itself."""
        return self._out[integer("worker", worker, 0, self.size - 1)]

    @property
    def spectral_gap(self) -> float:
        """The largest minus the second largest modulus of the weights' eigenvalues.

        From 0 to 1; the larger, the faster information spreads.
        """
        if self.size == 1:
            return 1.0
        moduli = np.sort(np.abs(np.linalg.eigvals(self._weights)))
        return float(moduli[-1] - moduli[-2])

    @property
    def spectral_gap_of_neighbors(self) -> float:
        """The spectral gap that the paper of Hop gives for its graphs (figure 21).

        It is that of another matrix: a worker has no self-loop there, and each of its n
        in-neighbors the weight 1 / n. The gap is the largest minus the second largest eigenvalue,
        whose sign counts (of complex ones the real part). From 0 to 2.

        Example:

        >>> from tf_recsync import topology
        >>> round(topology.ring_based(8).spectral_gap_of_neighbors, 4)
        0.6667
        """
        if self.size == 1:
            return 1.0
        adjacency = ((self._weights > 0) & ~np.eye(self.size, dtype=bool)).astype(np.float64)
        values = np.sort(np.linalg.eigvals(adjacency / adjacency.sum(0)).real)
        return float(values[-1] - values[-2])

    def path_lengths(self) -> np.ndarray:
        """int64 [n, n]: the number of edges of the shortest path from i to j."""
        lengths = np.zeros((self.size, self.size), np.int64)
        for i, found in nx.all_pairs_shortest_path_length(_graph_of(self._weights)):
            for j, length in found.items():
                lengths[i, j] = length
        return lengths

    def to_networkx(self) -> nx.DiGraph:
        """The graph with its self-loops; edges have the attribute `weight`."""
        graph = _graph_of(self._weights)
        graph.name = self._name
        return graph

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the graph into a picture; needs matplotlib (the extra `plot`).

        Args:
            path: of the file; its ending (".png") tells the format.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        side = max(4.0, 0.35 * self.size)
        figure = new_figure(side, side, "Topology.plot")
        axes = figure.add_subplot()
        graph = _graph_of(self._weights)
        graph.remove_edges_from(nx.selfloop_edges(graph))
        # An edge in one direction has an arrow; one in both is a line.
        one_way = [(i, j) for i, j in graph.edges if not graph.has_edge(j, i)]
        both = [(i, j) for i, j in graph.edges if i < j and graph.has_edge(j, i)]
        at = nx.circular_layout(graph)
        nx.draw_networkx_nodes(graph, at, ax=axes, node_color="#dbe7f5", edgecolors="#33556b")
        nx.draw_networkx_labels(graph, at, ax=axes, font_size=9)
        nx.draw_networkx_edges(graph, at, both, ax=axes, arrows=False, edge_color="#33556b")
        nx.draw_networkx_edges(graph, at, one_way, ax=axes, arrows=True, edge_color="#b3541e")
        axes.set_title(f"{self._name}, {self.size} workers, spectral gap {self.spectral_gap:.4f}")
        axes.set_aspect("equal")
        axes.axis("off")
        figure.savefig(path, dpi=120)


def ring(workers: int) -> Topology:
    """A circle: every worker sends to the next and to the one before (figure 11, 1).

    Args:
        workers: at least 1.

    Returns:
        The graph, with equal weights.

    Raises:
        ValueError: if there are too few workers.

    Example:

    >>> from tf_recsync import topology
    >>> topology.ring(4).out_neighbors(0)
    (1, 3)
    """
    _check_size("workers", workers, 1)
    return _symmetric(workers, _ring_edges(range(workers)), "ring")


def ring_based(workers: int) -> Topology:
    """A ring in which every worker also sends to the most distant one (figure 11, 2).

    Args:
        workers: even, at least 2.

    Returns:
        The graph, with doubly stochastic weights.

    Raises:
        ValueError: if `workers` is odd or too small.

    Example:

    >>> from tf_recsync import topology
    >>> topology.ring_based(6).out_neighbors(0)
    (1, 3, 5)
    """
    _check_size("workers", workers, 2, even=True)
    return _symmetric(workers, _ring_based_edges(range(workers)), "ring_based")


def double_ring(workers: int) -> Topology:
    """Two ring-based graphs, connected worker to worker (figure 11, 3).

    Args:
        workers: a multiple of 4.

    Returns:
        The graph, with doubly stochastic weights.

    Raises:
        ValueError: if `workers` is no multiple of 4.

    Example:

    >>> from tf_recsync import topology
    >>> topology.double_ring(8).out_neighbors(0)
    (1, 2, 3, 4)
    """
    _check_size("workers", workers, 4)
    if workers % 4:
        raise ValueError(f"workers must be a multiple of 4, not {workers}")
    half = workers // 2
    edges = _ring_based_edges(range(half)) + _ring_based_edges(range(half, workers))
    edges += [(i, i + half) for i in range(half)]
    return _symmetric(workers, edges, "double_ring")


def complete(workers: int) -> Topology:
    """Everybody sends to everybody.

    Args:
        workers: at least 1.

    Returns:
        The graph, with equal weights.

    Raises:
        ValueError: if there are too few workers.

    Example:

    >>> from tf_recsync import topology
    >>> topology.complete(4).out_neighbors(0)
    (1, 2, 3)
    """
    _check_size("workers", workers, 1)
    edges = [(i, j) for i in range(workers) for j in range(i)]
    return _symmetric(workers, edges, "complete")


def star(workers: int) -> Topology:
    """Worker 0 exchanges with all others, and these with it only.

    Args:
        workers: at least 1.

    Returns:
        The graph, with doubly stochastic weights.

    Raises:
        ValueError: if there are too few workers.

    Example:

    >>> from tf_recsync import topology
    >>> topology.star(4).out_neighbors(2)
    (0,)
    """
    _check_size("workers", workers, 1)
    return _symmetric(workers, [(0, i) for i in range(1, workers)], "star")


def exponential(workers: int) -> Topology:
    """Worker i sends to the workers i + 1, i + 2, i + 4, ..., modulo their number; directed.

    Args:
        workers: at least 1.

    Returns:
        The graph, with equal weights.

    Raises:
        ValueError: if there are too few workers.

    Example:

    >>> from tf_recsync import topology
    >>> topology.exponential(8).out_neighbors(0)
    (1, 2, 4)
    """
    _check_size("workers", workers, 1)
    hops = [2**p for p in range(max(workers - 1, 0).bit_length())]
    edges = [(i, (i + hop) % workers) for i in range(workers) for hop in hops]
    return _directed(workers, edges, "exponential")


def grid(rows: int, columns: int) -> Topology:
    """A rectangle: worker r * columns + c exchanges with those above, below, left and right.

    Args:
        rows: at least 1.
        columns: at least 1.

    Returns:
        The graph, with doubly stochastic weights.

    Raises:
        ValueError: if there are too few rows or columns.

    Example:

    >>> from tf_recsync import topology
    >>> topology.grid(2, 3).out_neighbors(0)
    (1, 3)
    """
    _check_size("rows", rows, 1)
    _check_size("columns", columns, 1)
    edges = [
        (r * columns + c, r * columns + c + 1) for r in range(rows) for c in range(columns - 1)
    ]
    edges += [(i, i + columns) for i in range((rows - 1) * columns)]
    return _symmetric(rows * columns, edges, "grid")


def hierarchical(machines: Sequence[int], gateways: int = 2) -> Topology:
    """Everybody to everybody inside a machine, a ring between the machines (figure 21).

    The workers of a machine have consecutive numbers. The last worker of each machine
    exchanges with the first worker of the next one (figure 21 c); or, with one gateway, the first
    worker of each machine with the first one of the next (figure 21 b).

    Args:
        machines: the number of workers of each machine, each at least 1.
        gateways: how many workers of a machine exchange with other machines: 1 or 2, the
            default.

    Returns:
        The graph, with doubly stochastic weights.

    Raises:
        ValueError: if no machine is named, or one has no worker, or `gateways` is neither 1 nor 2.

    Example:

    >>> from tf_recsync import topology
    >>> topology.hierarchical([2, 2]).out_neighbors(1)
    (0, 2)
    >>> topology.hierarchical([2, 2], gateways=1).out_neighbors(0)
    (1, 2)
    """
    machines = list_of("machines", machines, Integral)
    if not machines:
        raise ValueError("machines must name at least one machine")
    if isinstance(gateways, bool) or gateways not in (1, 2):
        raise ValueError(f"gateways must be 1 or 2, not {gateways!r}")
    edges, starts, start = [], [], 0
    for count in machines:
        _check_size("machines", count, 1)
        starts.append(start)
        edges += [(start + i, start + j) for i in range(count) for j in range(i)]
        start += count
    for a, b in _ring_edges(range(len(machines))):
        last = machines[a] - 1 if gateways == 2 else 0
        edges.append((starts[a] + last, starts[b]))
    return _symmetric(start, edges, "hierarchical" if gateways == 2 else "hierarchical_one_gateway")


def from_edges(
    workers: int,
    edges: Iterable[tuple[int, int]],
    weights: Any = None,
    name: str = "custom",
) -> Topology:
    """Any directed graph.

    Args:
        workers: how many, at least 1.
        edges: pairs (sender, receiver) of workers. Self-loops need not be named.
        weights: [n, n] as for `Topology`, positive exactly on the edges and the diagonal.
            By default the weights are equal where that is doubly stochastic, Metropolis's
            where all edges go both ways, and else scaled to be doubly stochastic.
        name: as for `Topology`.

    Returns:
        The graph.

    Raises:
        ValueError: if an edge names a worker that there is not, the graph is not strongly
            connected, or the weights don't fit the edges or are not doubly stochastic.

    Example:

    >>> from tf_recsync import topology
    >>> topology.from_edges(3, [(0, 1), (1, 2), (2, 0)]).out_neighbors(0)
    (1,)
    """
    _check_size("workers", workers, 1)
    named = set()
    for edge in edges:
        if len(list_of("each of edges", edge, Integral)) != 2:
            raise ValueError(f"each of edges must be a pair of workers, not {edge!r}")
        sender, receiver = (
            integer(f"a worker of {edge!r} in edges", end, 0, workers - 1) for end in edge
        )
        if sender != receiver:
            named.add((sender, receiver))
    if weights is None:
        return _directed(workers, named, name)
    topology = Topology(weights, name)
    if topology.size != workers:
        raise ValueError(f"weights must be [{workers}, {workers}], not {topology.weights.shape}")
    if set(topology.edges) != named:
        odd = sorted(set(topology.edges) ^ named)[0]
        raise ValueError(
            f"weights must be positive exactly on the edges; edge {odd} has the weight "
            f"{topology.weights[odd]:g}"
        )
    return topology


def from_networkx(graph: nx.Graph, name: str | None = None) -> Topology:
    """A networkx graph, directed or not; its nodes become workers in their order.

    Args:
        graph: its edges' attribute `weight` is used if all have one, those of self-loops
            included; else weights are chosen as `from_edges` does.
        name: as for `Topology`. Defaults to the graph's, if it has one.

    Returns:
        The graph.

    Raises:
        ValueError: as `from_edges`.

    Example:

    >>> import networkx as nx
    >>> from tf_recsync import topology
    >>> topology.from_networkx(nx.petersen_graph()).out_neighbors(0)
    (1, 4, 5)
    """
    worker: dict[Hashable, int] = {node: i for i, node in enumerate(graph)}
    directed = graph.to_directed()
    edges = [(worker[i], worker[j]) for i, j in directed.edges()]
    given = [data.get("weight") for _, _, data in directed.edges(data=True)]
    name = name or graph.name or "custom"
    if not given or any(weight is None for weight in given):
        return from_edges(len(worker), edges, name=name)
    weights = np.zeros((len(worker), len(worker)))
    for edge, weight in zip(edges, given, strict=True):
        weights[edge] = weight
    return from_edges(len(worker), edges, weights, name)


def gap_bounds(
    topology: Topology,
    max_iteration_gap: int | None = None,
    *,
    backup_workers: int | Sequence[int] = 0,
    staleness_bound: int | None = None,
    notify_ack: bool = False,
) -> np.ndarray:
    """How far workers can be apart (Hop, table 1).

    Args:
        topology: the graph.
        max_iteration_gap: of the token queues; None without.
        backup_workers: of all or of each worker.
        staleness_bound: None if every update must be of the receiver's iteration.
        notify_ack: whether a worker waits for acknowledgements instead of tokens.

    Returns:
        float64 [n, n]: the largest possible Iter(i) - Iter(j), infinite if unbounded.

    >>> from tf_recsync import topology
    >>> topology.gap_bounds(topology.ring(4), 5)[0].tolist()
    [0.0, 1.0, 2.0, 1.0]
    >>> topology.gap_bounds(topology.ring(4), 5, backup_workers=1)[0].tolist()
    [0.0, 5.0, 10.0, 5.0]
    """
    ahead = 1.0 if staleness_bound is None else staleness_bound + 1.0
    backups = np.broadcast_to(np.asarray(backup_workers), topology.size)
    # How far a worker can be ahead of one that it receives from. With backup workers it
    # need not be any one of them that it has received from.
    steps = [math.inf if backups[i] else ahead for i in range(topology.size)]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    bounds = np.full((topology.size, topology.size), math.inf)
    controlled = 2.0 if notify_ack else max_iteration_gap
    for i, j in topology.edges:
        # An edge (i, j) keeps j from being ahead of i, and with tokens i of j.
        _tighten(graph, j, i, steps[j])
        if controlled is not None:
            _tighten(graph, i, j, float(controlled))
    for i, found in nx.all_pairs_dijkstra_path_length(graph):
        for j, bound in found.items():
            bounds[i, j] = bound
    return bounds


def _tighten(graph: nx.DiGraph, ahead: int, behind: int, bound: float) -> None:
    """Notes that Iter(ahead) - Iter(behind) is at most a finite bound."""
    if bound < graph.get_edge_data(ahead, behind, {"weight": math.inf})["weight"]:
        graph.add_edge(ahead, behind, weight=bound)


def _check_size(name: str, value: int, least: int, even: bool = False) -> None:
    check_at_least(name, value, least)
    if even and value % 2:
        raise ValueError(f"{name} must be even, got {value}")


def _check_weights(matrix: np.ndarray) -> None:
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        i, j = np.argwhere(~np.isfinite(matrix) | (matrix < 0))[0]
        raise ValueError(f"weights must be finite and at least 0; [{i}, {j}] is {matrix[i, j]}")
    for i in np.flatnonzero(np.diag(matrix) == 0):
        raise ValueError(
            f"every worker needs a self-loop, a positive weight for itself; [{i}, {i}] is 0"
        )
    for axis, kind in ((1, "row"), (0, "column")):
        sums = matrix.sum(axis)
        for i in np.flatnonzero(np.abs(sums - 1) > _TOLERANCE):
            raise ValueError(
                f"weights must be doubly stochastic, each row and column with the sum 1; "
                f"{kind} {i} has {sums[i]:g}"
            )


def _check_connected(matrix: np.ndarray) -> None:
    graph = _graph_of(matrix)
    reached = nx.descendants(graph, 0) | {0}
    if len(reached) < len(matrix):
        lost = min(set(range(len(matrix))) - reached)
        raise ValueError(f"the graph must be connected; nothing gets from worker 0 to {lost}")
    reaching = nx.ancestors(graph, 0) | {0}
    if len(reaching) < len(matrix):
        lost = min(set(range(len(matrix))) - reaching)
        raise ValueError(f"the graph must be connected; nothing gets from worker {lost} to 0")


def _graph_of(matrix: np.ndarray) -> nx.DiGraph:
    return nx.from_numpy_array(matrix, create_using=nx.DiGraph)


def _ring_edges(workers: Sequence[int]) -> list[tuple[int, int]]:
    return [(workers[i - 1], worker) for i, worker in enumerate(workers) if len(workers) > 1]


def _ring_based_edges(workers: Sequence[int]) -> list[tuple[int, int]]:
    half = len(workers) // 2
    return _ring_edges(workers) + [(workers[i], workers[i + half]) for i in range(half)]


def _symmetric(workers: int, edges: Iterable[tuple[int, int]], name: str) -> Topology:
    edges = list(edges)
    return _directed(workers, edges + [(j, i) for i, j in edges], name)


def _directed(workers: int, edges: Collection[tuple[int, int]], name: str) -> Topology:
    """With weights that are doubly stochastic."""
    adjacency = np.eye(workers)
    for i, j in edges:
        adjacency[i, j] = 1
    _check_connected(adjacency)
    received, sent = adjacency.sum(0), adjacency.sum(1)
    if (received == received[0]).all() and (sent == sent[0]).all():
        return Topology(adjacency / received, name)  # Eq. 1
    if (adjacency == adjacency.T).all():
        weights = adjacency / np.maximum.outer(received, received)  # Metropolis and Hastings
        np.fill_diagonal(weights, 0)
        return Topology(weights + np.diag(1 - weights.sum(1)), name)
    return Topology(_doubly_stochastic(adjacency), name)


def _doubly_stochastic(matrix: np.ndarray) -> np.ndarray:
    """Scales rows and columns until all sums are 1 (Sinkhorn and Knopp).

    With self-loops in a strongly connected graph every edge is on a cycle, so this has a
    limit with all edges.
    """
    scaled = matrix / matrix.sum(1, keepdims=True)
    for _ in range(_SINKHORN_ROUNDS):
        scaled /= scaled.sum(0, keepdims=True)
        rows = scaled.sum(1, keepdims=True)
        if np.abs(rows - 1).max() < 1e-12:
            break
        scaled /= rows
    return scaled
