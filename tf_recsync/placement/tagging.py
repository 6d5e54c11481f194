"""The first placement, by rules: operators go to their weights, by connected components.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 3.2.1, the rule-based tagging process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import networkx as nx
import numpy as np

from tf_recsync.embedding.packer import Packer
from tf_recsync.placement.graph import StepGraph
from tf_recsync.placement.loads import LoadModel


def tag(model: LoadModel) -> np.ndarray:
    """Places units by the rules, and where these leave too little memory, one after the other.

    1. Weights are on group PSs, and their operators beside them.
    2. Inputs, lookups, interactions, units without parameters outside of components, operations
       outside of layers and the loss are on the trainers.
    3. A connected component of the others is whole on one group PS, if it has parameters.
    4. Components are spread so that the servers hold about the same bytes of weights.

    Units that are divided are on all servers, and in no component.

    Returns:
        int64 `[units]`: positions as in `loads`.

    Raises:
        ValueError: If a unit fits no device, or no placement was found in which all do.
    """
    model.check_units_fit()
    units = model.graph.units
    whole = [u for u, unit in enumerate(units) if unit.name not in model.divided]
    owners = [u for u in whole if units[u].parameter_bytes]
    pinned = {u for u in whole if units[u].pinned}
    parts = [sorted(part) for part in components(model.graph, set(model.divided))]
    attempts = (
        lambda: _spread(model, [*parts, *([u] for u in owners if u in pinned)], pinned),
        lambda: _spread(model, [[u] for u in owners], pinned),
        lambda: _filled_up(model),
        # With their activations on the trainers, servers have most room for weights.
        lambda: _spread(model, [[u] for u in owners], set(whole)),
    )
    for attempt in attempts:
        positions = attempt()
        if positions is not None and model.fits(model.loads(positions)):
            return positions
    largest = max(units, key=lambda unit: unit.memory)
    raise ValueError(
        f"no placement of the {len(units)} units within memory_limit="
        f"{model.resources.memory_limit} bytes for each of {model.servers} group PSs and "
        f"trainer_memory_limit={model.resources.trainer_memory_limit} for a trainer was found; "
        f"the weights and accumulators of the largest, {largest.name!r}, take {largest.memory} "
        "bytes."
    )


def components(graph: StepGraph, without: Collection[str] = ()) -> list[set[int]]:
    """The connected components of what the rules put on group PSs, as numbers of units.

    Args:
        graph: the units.
        without: names of units that are in none, and through which none goes.
    """
    whole = nx.DiGraph()
    whole.add_nodes_from(range(len(graph.units)))
    index = {unit.name: u for u, unit in enumerate(graph.units)}
    whole.add_edges_from((index[edge.source], index[edge.target]) for edge in graph.edges)
    units = graph.units
    owners = {u for u, unit in enumerate(units) if unit.parameter_bytes and not unit.pinned}
    plain = {u for u, unit in enumerate(units) if unit.kind == "layer"} - owners
    # Between parameters: below some and above some, with nothing in between that is on trainers.
    inside = _reached(owners, plain, whole.successors) & _reached(owners, plain, whole.predecessors)
    # An activation that only follows a layer with parameters stays with it.
    while True:
        follow = {
            u
            for u in plain - inside
            if whole.in_degree(u) == 1 and set(whole.predecessors(u)) <= owners | inside
        }
        if not follow:
            break
        inside |= follow
    apart = {index[name] for name in without}
    tagged = whole.subgraph((owners | inside) - apart)
    # What only follows units in pieces has no weights to be beside.
    found = [part for part in nx.weakly_connected_components(tagged) if part & owners]
    return sorted(found, key=min)


def _reached(
    starts: set[int], through: set[int], neighbors: Callable[[int], Iterable[int]]
) -> set[int]:
    """What among `through` is reached from `starts` with nothing but `through` in between."""
    found: set[int] = set()
    stack = list(starts)
    while stack:
        new = {n for n in neighbors(stack.pop()) if n in through} - found
        found |= new
        stack.extend(new)
    return found


def _spread(model: LoadModel, groups: list[list[int]], on_trainers: set[int]) -> np.ndarray | None:
    """Each group on one server, all else on the trainers; None if the memory is too small.

    Of units that are `on_trainers`, only the weights are on the server of their group.
    """
    units, servers, nets = model.graph.units, model.servers, model.resources.nets
    positions = np.full(len(units), servers, np.int64)
    divided = np.array([unit.name in model.divided for unit in units])
    for u in np.flatnonzero(divided).tolist():
        (positions[u],) = model.positions[u]
    if not groups:
        return positions
    limit = model.resources.memory_limit
    if limit is not None:
        limit -= int(model.loads(positions, divided).memory[0])
        if limit < 0:
            return None

    def memory(u: int) -> int:
        return units[u].memory + (0 if u in on_trainers else nets * units[u].activation_bytes)

    weights = [float(sum(units[u].parameter_bytes for u in group)) for group in groups]
    packer = Packer(
        rows=[1] * len(groups),
        costs=[weight / max(weights) for weight in weights],
        row_bytes=[sum(memory(u) for u in group) for group in groups],
        ps=servers,
        memory_limit=limit,
    )
    packing = packer.pack([1] * len(groups))
    if packing is None:
        return None
    for (g, _), server in packing.places.items():
        for u in groups[g]:
            positions[u] = servers + server if u in on_trainers else server
    return positions


def _filled_up(model: LoadModel) -> np.ndarray | None:
    """The units by what they take, each where it fits and the highest load stays lowest."""
    units = model.graph.units
    size = [unit.memory + model.resources.nets * unit.activation_bytes for unit in units]
    positions = np.array([own[-1] for own in model.positions], np.int64)
    known = np.array([unit.name in model.divided for unit in units])
    for u in sorted(np.flatnonzero(~known).tolist(), key=lambda u: -size[u]):
        known[u] = True
        candidates = np.repeat(positions[None], len(model.positions[u]), 0)
        candidates[:, u] = model.positions[u]
        loads = model.loads(candidates, known)
        fits = model.fits(loads)
        if not fits.any():
            return None
        positions[u] = candidates[np.where(fits, loads.highest, np.inf).argmin(), u]
    return positions
