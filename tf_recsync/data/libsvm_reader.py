"""Files in LIBSVM's format: a label and `index:value` pairs in each line."""

from __future__ import annotations

import os

import numpy as np

from tf_recsync._checks import check_at_least
from tf_recsync.data import _text


def load_libsvm(
    path: str | os.PathLike[str], features: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""Reads a binary classification task in LIBSVM's format, whole and dense.

    Args:
        path: A file, plain or gzip; a folder (all its files); or a glob pattern. A line is a
            label (-1 or 0, or 1, with or without a sign), then `index:value` pairs with ascending
            indices that begin at 1; what follows a `#` is ignored.
        features: How many features there are; larger indices are errors. None (the default): as
            many as the largest index.

    Returns:
        float32 `[rows, features]` and the labels, float32 `[rows, 1]`, 0 or 1.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is malformed; the message names file, line and field.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".svm") as file:
        ...     _ = file.write("+1 1:0.5 3:2\n-1 2:1\n")
        ...     file.flush()
        ...     x, y = load_libsvm(file.name)
        >>> x.tolist(), y.tolist()
        ([[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]], [[1.0], [0.0]])
    """
    if features is not None:
        check_at_least("features", features, 1)
    labels: list[float] = []
    rows, columns, values = [], [], []
    for name in _text.find_files(path):
        with _text.open_text(name) as file:
            for number, line in enumerate(file, 1):
                fields = line.partition(b"#")[0].split()
                if not fields:
                    continue
                where = f"malformed row in {name}, line {number}"
                labels.append(_label(fields[0], where))
                last = 0
                for field in fields[1:]:
                    index, value = _pair(field, where)
                    if index <= last or (features is not None and index > features):
                        allowed = "" if features is None else f", at most {features}"
                        raise ValueError(
                            f"{where}: the index of {field.decode(errors='replace')!r} must be "
                            f"above {last}{allowed}."
                        )
                    last = index
                    rows.append(len(labels) - 1)
                    columns.append(index - 1)
                    values.append(value)
    width = features or max(columns, default=-1) + 1
    dense = np.zeros((len(labels), width), np.float32)
    dense[rows, columns] = values
    return dense, np.asarray(labels, np.float32).reshape(-1, 1)


def _label(field: bytes, where: str) -> float:
    try:
        label = float(field)
    except ValueError:
        label = None
    if label not in (-1.0, 0.0, 1.0):
        shown = field.decode(errors="replace")
        raise ValueError(f"{where}: the label must be -1, 0 or 1, not {shown!r}.")
    return max(label, 0.0)


def _pair(field: bytes, where: str) -> tuple[int, float]:
    index, _, value = field.partition(b":")
    shown = field.decode(errors="replace")
    try:
        pair = int(index), float(value)
    except ValueError:
        raise ValueError(f"{where}: {shown!r} must be index:value.") from None
    if not abs(pair[1]) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{where}: the value of {shown!r} must be a finite float32.")
    return pair
