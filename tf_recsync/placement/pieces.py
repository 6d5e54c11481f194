"""Which units of a step are divided among the servers of a group.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 4.1: vertical and horizontal splits, and co-partitioning of two in a row.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from tf_recsync.placement.graph import StepGraph, Unit
from tf_recsync.placement.loads import LoadModel, fits_in_pieces, goes_on_in_pieces, how_to_divide
from tf_recsync.placement.resources import Resources
from tf_recsync.synchronization.divided import How


def large_units(graph: StepGraph, resources: Resources) -> dict[str, How]:
    """The units that are divided, and those without parameters that go on with their pieces.

    Divided is what has more than one server's part of the weights, or fits no device whole. Of two
    in a row that go up and down again the first is divided by columns and the second by rows, so
    that they fit together.
    """
    total, servers = graph.parameter_bytes, resources.servers
    found: dict[str, How] = {}
    for unit in graph.units:
        how = how_to_divide(unit, servers)
        if how is None:
            continue
        is_large = unit.parameter_bytes * servers > total
        fits_whole = LoadModel(StepGraph([unit]), resources).fits_alone(0)
        if is_large or (not fits_whole and fits_in_pieces(unit, resources)):
            found[unit.name] = how
    return {**found, **followers(graph, found)}


def followers(graph: StepGraph, divided: Mapping[str, How]) -> dict[str, How]:
    """What acts on each element of what units in columns give, and so goes on with the pieces."""
    units = {unit.name: unit for unit in graph.units}
    sources: dict[str, list[str]] = collections.defaultdict(list)
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
    found: dict[str, How] = {}

    def follows(unit: Unit) -> bool:
        if not goes_on_in_pieces(unit) or len(sources[unit.name]) != 1:
            return False
        (source,) = sources[unit.name]
        how = divided.get(source, found.get(source))
        return how == "columns" and units[source].elementwise

    while True:
        new = [unit.name for unit in graph.units if unit.name not in found and follows(unit)]
        if not new:
            return found
        found.update(dict.fromkeys(new, "columns"))
