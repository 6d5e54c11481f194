"""Graphs of workers: their edges, weights, spectral gaps and bounds."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync import topology
from tf_recsync.topology import Topology

NAMED = [
    topology.ring(1),
    topology.ring(2),
    topology.ring(7),
    topology.ring_based(2),
    topology.ring_based(8),
    topology.double_ring(4),
    topology.double_ring(16),
    topology.complete(5),
    topology.star(6),
    topology.exponential(1),
    topology.exponential(6),
    topology.exponential(16),
    topology.grid(3, 4),
    topology.grid(1, 1),
    topology.hierarchical([3, 3, 2]),
    topology.hierarchical([4]),
    topology.hierarchical([4, 2, 2], gateways=1),
]


@pytest.mark.parametrize("graph", NAMED, ids=lambda graph: f"{graph.name}-{graph.size}")
def test_weights_are_doubly_stochastic_positive_on_edges_and_loops_only(graph):
    weights = graph.weights
    np.testing.assert_allclose(weights.sum(0), 1, atol=1e-9)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-9)
    named = {(i, j) for i, j in zip(*np.nonzero(weights), strict=True) if i != j}
    assert set(graph.edges) == named
    assert (np.diag(weights) > 0).all()
    for worker in range(graph.size):
        assert set(graph.out_neighbors(worker)) == {j for i, j in named if i == worker}
        assert set(graph.in_neighbors(worker)) == {i for i, j in named if j == worker}


def test_named_graphs_have_the_edges_of_the_paper():
    assert topology.ring(5).out_neighbors(0) == (1, 4)
    assert topology.ring_based(16).out_neighbors(3) == (2, 4, 11)
    double = topology.double_ring(16)
    assert double.out_neighbors(0) == (1, 4, 7, 8)
    assert double.out_neighbors(9) == (1, 8, 10, 13)
    assert topology.exponential(8).out_neighbors(6) == (0, 2, 7)
    assert topology.star(4).in_neighbors(0) == (1, 2, 3)
    assert topology.grid(2, 3).out_neighbors(4) == (1, 3, 5)
    # Machines of 3, 2 and 1 workers: all to all inside, a ring between.
    machines = topology.hierarchical([3, 2, 1])
    assert machines.out_neighbors(0) == (1, 2, 5)
    assert machines.out_neighbors(2) == (0, 1, 3)
    assert machines.out_neighbors(5) == (0, 4)
    one = topology.hierarchical([3, 2, 1], gateways=1)
    assert one.out_neighbors(0) == (1, 2, 3, 5)
    assert one.out_neighbors(2) == (0, 1)
    assert one.out_neighbors(5) == (0, 3)


@pytest.mark.parametrize(
    ("graph", "gap"),
    [
        (topology.ring_based(8), 0.6667),
        (topology.hierarchical([4, 2, 2], gateways=1), 0.2682),
        (topology.hierarchical([4, 2, 2]), 0.2688),
    ],
)
def test_the_gaps_of_neighbors_are_those_of_figure_21(graph, gap):
    assert round(graph.spectral_gap_of_neighbors, 4) == gap


def test_gaps_of_neighbors_are_those_of_the_closed_forms():
    # Without its loops, the complete graph has the eigenvalues 1 and -1 / (n - 1).
    for workers in (2, 3, 9):
        gap = topology.complete(workers).spectral_gap_of_neighbors
        assert gap == pytest.approx(1 + 1 / (workers - 1))
    for workers in (4, 5, 12):
        gap = topology.ring(workers).spectral_gap_of_neighbors
        assert gap == pytest.approx(1 - math.cos(2 * math.pi / workers))
    # A circle in one direction: the eigenvalues are the roots of one.
    circle = topology.from_edges(5, [(i, (i + 1) % 5) for i in range(5)])
    assert circle.spectral_gap_of_neighbors == pytest.approx(1 - math.cos(2 * math.pi / 5))
    assert topology.ring(1).spectral_gap_of_neighbors == 1


@pytest.mark.parametrize("gateways", [0, 3, True, "1"])
def test_other_numbers_of_gateways_are_refused(gateways):
    with pytest.raises(ValueError, match=f"gateways must be 1 or 2, not {gateways!r}"):
        topology.hierarchical([2, 2], gateways=gateways)


@pytest.mark.parametrize("workers", [3, 4, 5, 8, 16])
def test_spectral_gaps_are_those_of_the_closed_forms(workers):
    assert topology.complete(workers).spectral_gap == pytest.approx(1)
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / workers)) / 3 for k in range(workers)]
    second = sorted(map(abs, eigenvalues))[-2]
    assert topology.ring(workers).spectral_gap == pytest.approx(1 - second)


def test_spectral_gaps_of_directed_and_single_graphs():
    assert topology.ring(1).spectral_gap == 1
    # A directed circle: the eigenvalues are (1 + w) / 2 for the n-th roots of unity w.
    circle = topology.from_edges(6, [(i, (i + 1) % 6) for i in range(6)])
    assert circle.spectral_gap == pytest.approx(1 - abs(1 + np.exp(2j * np.pi / 6)) / 2)


def test_unequal_directed_graphs_get_weights_that_are_doubly_stochastic():
    edges = [(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)]
    graph = topology.from_edges(4, edges)
    np.testing.assert_allclose(graph.weights.sum(0), 1, atol=1e-9)
    np.testing.assert_allclose(graph.weights.sum(1), 1, atol=1e-9)
    assert set(graph.edges) == set(edges)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_any_connected_graph_gets_weights(workers, seed):
    random = np.random.default_rng(seed)
    circle = random.permutation(workers)
    edges = {(int(circle[i - 1]), int(circle[i])) for i in range(workers)}
    for _ in range(random.integers(0, 2 * workers)):
        i, j = random.integers(0, workers, 2)
        edges.add((int(i), int(j)))
    graph = topology.from_edges(workers, edges)
    np.testing.assert_allclose(graph.weights.sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(graph.weights.sum(1), 1, atol=1e-6)
    assert set(graph.edges) == {(i, j) for i, j in edges if i != j}
    expected = dict(nx.all_pairs_shortest_path_length(graph.to_networkx()))
    lengths = graph.path_lengths()
    assert all(lengths[i, j] == expected[i][j] for i in expected for j in expected[i])


def test_networkx_graphs_come_and_go():
    graph = topology.from_networkx(nx.cycle_graph(6), name="cycle")
    np.testing.assert_array_equal(graph.weights, topology.ring(6).weights)
    again = topology.from_networkx(graph.to_networkx())
    np.testing.assert_array_equal(again.weights, graph.weights)
    assert again.name == "cycle"
    letters = nx.DiGraph([("b", "a"), ("a", "b")])
    assert topology.from_networkx(letters).edges == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology([[1, 0], [0, 1]]), "connected; nothing gets from worker 0 to 1"),
        (lambda: topology.from_edges(2, [(0, 1)]), "nothing gets from worker 1 to 0"),
        (lambda: Topology([[0.5, 0.5], [0.4, 0.6]]), "doubly stochastic.*column 0 has 0.9"),
        (lambda: Topology([[0.5, 0.4], [0.5, 0.6]]), "doubly stochastic.*row 0 has 0.9"),
        (lambda: Topology([[0.0, 1.0], [1.0, 0.0]]), r"self-loop.*\[0, 0\] is 0"),
        (lambda: Topology([[1.5, -0.5], [-0.5, 1.5]]), r"at least 0; \[0, 1\] is -0.5"),
        (lambda: Topology([[1.0]] * 2), r"square matrix, not of shape \(2, 1\)"),
        (lambda: Topology([[math.nan]]), r"finite .* \[0, 0\] is nan"),
        (lambda: topology.ring(0), "workers must be an integer of at least 1, got 0"),
        (lambda: topology.ring(2.0), "workers must be an integer of at least 1, got 2.0"),
        (lambda: topology.ring_based(5), "workers must be even, got 5"),
        (lambda: topology.double_ring(6), "workers must be a multiple of 4, not 6"),
        (lambda: topology.hierarchical([2, 0]), "machines must be .* at least 1, got 0"),
        (
            lambda: topology.from_edges(3, [(0, 1.9)]),
            r"edges=\(0, 1.9\): must have integers",
        ),
        (lambda: topology.from_edges(3, [0, 1]), r"each of edges=0: must be a sequence"),
        (lambda: topology.from_edges(3, [(0, 1, 2)]), r"each of edges must be a pair"),
        (
            lambda: topology.ring(4).in_neighbors(-1),
            "worker must be .* 0 to 3, got -1",
        ),
        (lambda: topology.ring(4).out_neighbors(9), "worker must be an integer from 0 to 3, got 9"),
        (lambda: topology.hierarchical(4), "machines=4: must be a sequence of integers"),
        (lambda: topology.hierarchical([]), "machines must name at least one"),
        (
            lambda: topology.from_edges(2, [(0, 2)]),
            r"a worker of \(0, 2\) in edges must be .* got 2",
        ),
        (
            lambda: topology.from_edges(2, [(0, 1), (1, 0)], np.full((3, 3), 1 / 3)),
            r"weights must be \[2, 2\]",
        ),
        (
            lambda: topology.from_edges(3, [(0, 1), (1, 2), (2, 0)], np.full((3, 3), 1 / 3)),
            r"exactly on the edges; edge \(0, 2\) has the weight 0.333",
        ),
    ],
)
def test_wrong_graphs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def bounds_by_hand(graph, gap, ahead, backups, notify_ack):
    """Table 1 along paths in one direction only, as the paper has it."""
    lengths = graph.path_lengths()
    found = np.zeros((graph.size, graph.size))
    for i in range(graph.size):
        for j in range(graph.size):
            there, back = lengths[i, j], lengths[j, i]
            bound = math.inf if backups else ahead * back
            if notify_ack:
                bound = min(bound, 2 * there)
            elif gap is not None:
                bound = min(bound, gap * there)
            found[i, j] = bound
    return found


@pytest.mark.parametrize(
    ("gap", "options", "by_hand"),
    [
        (None, {}, (1, 0, False)),
        (3, {}, (1, 0, False)),
        (4, {"staleness_bound": 2}, (3, 0, False)),
        (2, {"backup_workers": 1}, (1, 1, False)),
        (3, {"backup_workers": 1, "staleness_bound": 1}, (2, 1, False)),
        (None, {"notify_ack": True}, (1, 0, True)),
    ],
)
@pytest.mark.parametrize(
    "graph", [topology.ring(6), topology.star(5), topology.exponential(7)], ids=lambda g: g.name
)
def test_bounds_are_those_of_table_1_or_tighter(graph, gap, options, by_hand):
    bounds = topology.gap_bounds(graph, gap, **options)
    paper = bounds_by_hand(graph, gap, *by_hand)
    # Where paths need not turn, both are the same; where they may, ours are tighter.
    assert (bounds <= paper).all()
    if graph.name == "ring":
        np.testing.assert_array_equal(bounds, paper)


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for graph in (topology.double_ring(16), topology.exponential(8)):
        path = tmp_path / f"{graph.name}.png"
        graph.plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
