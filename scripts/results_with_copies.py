"""Figures of the papers on training with copies, simulated: Hop, ShadowSync, hierarchical training.

    python scripts/results_with_copies.py --output=docs/results

writes a JSON file and a picture for each module of scripts/results; everything in them is
simulated. Each says what was fitted to the paper, and what the simulation predicts with that.
`--seeds` are averaged; a part that is there already is not computed again, unless it is removed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).resolve().parents[:2]]

import kept_results  # noqa: E402
from results import (  # noqa: E402
    hierarchical,
    hierarchical_easgd,
    hop,
    hop_graphs,
    hop_servers,
    shadowsync,
    shadowsync_quality,
)
from results.parts import PROGRAM  # noqa: E402

PARTS: dict[str, kept_results.Part] = {
    "hop": (hop.compute, hop.draw),
    "hop_servers": (hop_servers.compute, hop_servers.draw),
    "hop_graphs": (hop_graphs.compute, hop_graphs.draw),
    "shadowsync": (shadowsync.compute, shadowsync.draw),
    "shadowsync_quality": (shadowsync_quality.compute, shadowsync_quality.draw),
    "hierarchical": (hierarchical.compute, hierarchical.draw),
    "hierarchical_easgd": (hierarchical_easgd.compute, hierarchical_easgd.draw),
}


def main() -> None:
    """Writes what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=300, help="Of each of Hop's workers.")
    kept_results.write(parser, PROGRAM, PARTS)


if __name__ == "__main__":
    main()
