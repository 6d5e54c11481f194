"""Which lines of the C++ sources belong to which block of an instrumented build.

A block is what begins with a call of __sanitizer_cov_trace_pc and ends at the next one; the
map that record_blocks.cc writes has an index for it. The debug information says which line
each instruction is of.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess

import numpy as np

_CALL = 5  # Bytes of a call instruction: 0xe8 and where to, relative to the next one.
_TRACE = "__sanitizer_cov_trace_pc"

Lines = dict[tuple[str, int], list[int]]  # By file and line, the indices of its blocks.


def read(binary: pathlib.Path, tree: pathlib.Path) -> Lines:
    """The lines below `cc/` of a tree that a library or program has code of."""
    functions, trace = _symbols(binary)
    calls = _calls(binary, trace)
    return lines_of(calls, functions, _rows(binary, tree))


def lines_of(
    calls: np.ndarray, functions: np.ndarray, rows: list[tuple[int, int, str, int]]
) -> Lines:
    """Assigns lines to blocks.

    Args:
      calls: Addresses of the calls that begin blocks, sorted.
      functions: Addresses at which functions begin, sorted.
      rows: (begin, end, file, line) for ranges of instructions.
    """
    found: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for begin, end, file, line in rows:
        first = int(np.searchsorted(calls, begin, "right")) - 1
        index = int(np.searchsorted(functions, begin, "right"))
        function = int(functions[index - 1]) if index else 0
        function_end = int(functions[index]) if index < len(functions) else 1 << 62
        if first < 0 or calls[first] < function:  # What a function does before its first call.
            first += 1
        if first == len(calls) or calls[first] >= function_end:
            continue
        last = max(first + 1, int(np.searchsorted(calls, end, "left")))
        found[file, line].update((calls[first:last] + _CALL) // 4)
    return {key: sorted(int(block) for block in blocks) for key, blocks in found.items()}


def _run(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _symbols(binary: pathlib.Path) -> tuple[np.ndarray, int]:
    functions, trace = set(), None
    for line in _run("nm", "--defined-only", binary).splitlines():
        address, kind, name = line.split(maxsplit=2)
        if kind in "tTwWiu":
            functions.add(int(address, 16))
        if name == _TRACE:
            trace = int(address, 16)
    if trace is None:
        raise ValueError(f"{binary} was not built for recording: it has no {_TRACE}")
    return np.array(sorted(functions)), trace


def _calls(binary: pathlib.Path, trace: int) -> np.ndarray:
    sections = _run("readelf", "--section-headers", "--wide", binary)
    found = re.search(r" \.text +PROGBITS +([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+)", sections)
    address, offset, size = (int(part, 16) for part in found.groups())
    code = np.fromfile(binary, np.uint8, size, offset=offset)
    places = np.nonzero(code[: -_CALL + 1] == 0xE8)[0]
    distance = sum(code[places + 1 + i].astype(np.int64) << (8 * i) for i in range(4))
    distance = np.where(distance >= 1 << 31, distance - (1 << 32), distance)
    return places[places + address + _CALL + distance == trace] + address


def _rows(binary: pathlib.Path, tree: pathlib.Path) -> list[tuple[int, int, str, int]]:
    command = ["objdump", "--wide", "--dwarf=decodedline", binary]
    rows, file, before = [], "", None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            text = text.rstrip("\n")
            if text.endswith(":") or text.endswith(":[++]"):
                path = text.removeprefix("CU: ").removesuffix("[++]").removesuffix(":")
                path = path.removeprefix(f"{tree}/").removeprefix("./")
                file = path if path.startswith("cc/") else ""
                continue
            row = re.match(r"\S+ +(\d+|-) +(0x[0-9a-f]+|0)(?:\[\d+\])?\b", text)
            if row is None:
                continue
            address = int(row[2], 16)
            if before is not None and before[1] and address > before[0]:
                rows.append((before[0], address, before[1], before[2]))
            before = None if row[1] == "-" else (address, file, int(row[1]))
    if process.returncode:
        raise RuntimeError(f"objdump failed with status {process.returncode}")
    return rows
