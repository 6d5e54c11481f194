"""Right arguments of the ops that share a resource; see fuzz_calls.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from fuzz_stateless import dense_variables, packed_rows, staleness_weights
from fuzz_world import World


def _sharing(argument: str, kind: str, made: Callable[[World], dict]) -> Callable:
    """Makes recipes of ops that take a resource of a kind, by how their arguments are made."""

    def recipe_of(**arguments) -> Callable[[World], dict]:
        def recipe(w: World) -> dict:
            return {argument: w.made(kind, made), **{n: a(w) for n, a in arguments.items()}}

        return recipe

    return recipe_of


def _gradient_buffer(w: World) -> dict:
    return {
        "shared_name": w.shared_name(),
        "capacity": w.small(1, 3),
        "divisor": 2.0,
        "drop_late": w.chance(0.5),
        "dense_size": sum(w.sizes),
        "dense_count": len(w.sizes),
        "table_rows": [rows for rows, _ in w.tables],
        "table_widths": [width for _, width in w.tables],
        **staleness_weights(w),
    }


def _push_to_buffer(w: World) -> dict:
    buffer = w.made("gradient_buffer", _gradient_buffer)
    chosen = [w.small(0, len(w.tables) - 1) for _ in range(w.small(0, 3))]
    rows = {"indices": np.zeros(0, np.int64), "counts": np.zeros(0, np.int64), "vectors": []}
    rows |= {"bags": np.zeros(0, np.int32), "scales": np.zeros(0, np.float32)}
    rows |= {"bag_counts": np.zeros(0, np.int64)}
    tables = [w.tables[t] for t in chosen]
    if tables:
        rows = packed_rows(w, tables, np.int64)
    vectors = rows.pop("vectors")
    size = sum(c * v for (_, c), v in zip(tables, vectors, strict=True))
    dense, versions = w.chance(0.7), w.chance(0.5)
    return {
        "buffer": buffer,
        "token_index": w.small(),
        "token_value": w.small(0, 1),
        "ticket": w.small(),
        "pulled_step": 0,
        "dense": w.floats(sum(w.sizes) if dense else 0),
        "dense_versions": np.zeros(len(w.sizes) if dense and versions else 0, np.int64),
        "gradient": w.floats(size),
        "pulled_versions": np.zeros(len(rows["indices"]) if versions else 0, np.int64),
        "tables": chosen,
        **rows,
    }


def _token_list(w: World) -> dict:
    gate = w.choose(["none", "step", "clock"])
    return {
        "shared_name": w.shared_name(),
        "repeats": w.small(1, 4),
        "gate": gate,
        "clock_bound": w.small() if gate == "clock" else 0,
        "servers": 3,
        "workers": 3,
    }


def _hop_worker(w: World) -> dict:
    mode = w.choose(["tokens", "acks", "plain"])
    senders = [1, 2, 3][: w.small(1, 3)]
    backups = w.small(0, len(senders)) if mode == "tokens" else 0
    return {
        "shared_name": w.shared_name(),
        "in_neighbors": senders,
        "weights": [0.25] * len(senders),
        "out_neighbors": [1, 2, 3][w.small(0, 2) :],
        "max_iteration_gap": w.small(1, 4) if mode == "tokens" else 0,
        "slots": w.small(1, 5),
        "capacity": w.small(1, 12),
        "backup_workers": backups,
        "staleness_bound": w.small(-1, 1) if mode == "acks" else w.small(-1, 3),
        "max_jump": w.small(1, 4) if mode == "tokens" else 1,
        "jump_trigger": w.small(),
        "notify_ack": mode == "acks",
        "gap_bounds": [w.small(-1, 3) for _ in senders] if w.chance(0.5) else [],
    }


def _parameters(w: World) -> np.ndarray:
    return w.floats(sum(w.sizes))


def _ints(least: int = 0, most: int = 5) -> Callable[[World], int]:
    return lambda w: w.small(least, most)


def _next_iteration(w: World) -> int:
    w.iteration += 1
    return w.iteration - 1


def _compress_gradient(w: World) -> dict:
    return {
        "gradient": w.floats(w.small(), w.small()),
        "net": np.int64(w.small()),
        "feedback": w.choose(["", "edge", "another edge"]),
        "T": w.choose([tf.float32, tf.bfloat16]),
        "sparsify": w.choose([0.0, 0.5, 0.9]),
    }


_of_buffer = _sharing("buffer", "gradient_buffer", _gradient_buffer)
_of_tokens = _sharing("list", "token_list", _token_list)
_of_hop = _sharing("worker", "hop_worker", _hop_worker)
_of_log = _sharing("log", "worker_log", lambda w: {})
_of_board = _sharing("board", "worker_board", lambda w: {})
_of_row = _sharing("row", "board_row", lambda w: _of_board(key=_ints())(w))

RECIPES: dict[str, Callable[[World], dict]] = {
    "gradient_buffer": _gradient_buffer,
    "push_to_buffer": _push_to_buffer,
    "flush_buffer": _of_buffer(),
    "buffer_applied": _of_buffer(ready=lambda w: w.chance(0.8), step=_ints(1, 2)),
    "revoke_tickets": _of_buffer(
        tickets=lambda w: np.array([w.small() for _ in range(w.small())], np.int64)
    ),
    "spend_tokens": _of_buffer(
        token_value=_ints(),
        token_indices=lambda w: np.array([w.small() for _ in range(w.small())], np.int64),
        ticket=_ints(),
    ),
    "gradient_buffer_step": _of_buffer(),
    "gradient_buffer_state": _of_buffer(),
    "restore_buffer": _of_buffer(step=_ints()),
    "compress_gradient": _compress_gradient,
    "token_list": _token_list,
    "take_token": _of_tokens(worker=_ints(0, 2)),
    "lose_worker": _of_tokens(worker=_ints(0, 2)),
    "reissue_tokens": _of_tokens(
        indices=lambda w: np.array([w.small() for _ in range(w.small())], np.int64)
    ),
    "leave_tokens": _of_tokens(worker=_ints(0, 2)),
    "report_step": _of_tokens(server=_ints(0, 2), step=_ints()),
    "seek_tokens": _of_tokens(step=_ints()),
    "token_list_state": _of_tokens(),
    "worker_board": lambda w: {},
    "board_row": _of_board(key=_ints()),
    "count_step": _of_row(),
    "read_row": _of_row(),
    "report": _of_row(message=lambda w: np.zeros(w.small(0, 9), np.uint8)),
    "read_board": _of_board(),
    "tell_workers": _of_board(
        **{name: lambda w: np.array([1, 2], np.int64) for name in ("keys", "ends", "known")}
    ),
    "worker_log": lambda w: {},
    "report_is_due": _of_log(seconds=lambda w: w.choose([0.0, 1.5])),
    "note_batch": _of_log(number=_ints()),
    "noted_batches": _of_log(known=_ints(0, 1)),
    "note_events": _of_log(
        iteration=_ints(),
        times=lambda w: np.array([[w.choose([0.0, 1.5, 1e300, np.nan]), 2.0]]),
        activities=lambda w: [w.choose([0, 4, 10, 11])],
    ),
    "take_events": _of_log(),
    "hop_worker": _hop_worker,
    "hop_begin": _of_hop(first=_ints(0, 1)),
    "hop_next": _of_hop(variables=dense_variables, T=lambda w: tf.float32),
    "hop_enter": _of_hop(
        iteration=_next_iteration, update=_parameters, send=lambda w: w.chance(0.6)
    ),
    "hop_send": _of_hop(update=_parameters),
    "hop_receive": _of_hop(
        iteration=_ints(0, 2),
        base=_parameters,
        variables=dense_variables,
        relative=lambda w: w.chance(0.5),
    ),
    "hop_collect": _of_hop(neighbor=_ints(1, 3), T=lambda w: tf.float32),
    "hop_ask": _of_hop(neighbor=_ints(1, 3), number=_ints(), progress=_ints(), iteration=_ints()),
    "hop_deliver": _of_hop(
        neighbor=_ints(1, 3), number=_ints(1, 9), iteration=_ints(0, 3), update=_parameters
    ),
    "hop_carried": _of_hop(
        neighbor=_ints(1, 3), number=_ints(), iteration=_ints(-1), began=_ints()
    ),
    "hop_set_neighbor": _of_hop(
        neighbor=_ints(0, 4),
        since=_ints(),
        until=lambda w: w.choose([-1, w.small(), 2**63 - 1]),
    ),
    "hop_close_outboxes": _of_hop(),
    "hop_hold": _of_hop(held=lambda w: w.chance(0.5)),
    "hop_interrupt": _of_hop(),
    "hop_state": _of_hop(),
    "hop_events": _of_hop(),
}

# Ops that are called one after the other, and at the same time, on the same resources.
FAMILIES = {
    "buffer": ["push_to_buffer"] * 6
    + ["flush_buffer", "buffer_applied", "gradient_buffer_step", "gradient_buffer_state"]
    + ["revoke_tickets", "spend_tokens", "restore_buffer", "gradient_buffer"],
    "feedback": ["compress_gradient"] * 4,
    "tokens": ["take_token"] * 4
    + ["lose_worker", "reissue_tokens", "leave_tokens", "report_step", "report_step", "seek_tokens"]
    + ["token_list_state", "token_list"],
    "hop": [name for name in RECIPES if name.startswith("hop_")]
    + ["hop_deliver", "hop_receive", "hop_next", "hop_enter", "hop_deliver"],
}
