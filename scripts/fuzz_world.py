"""What the calls of fuzz_calls.py work on, and other values for their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.ops import library

INTEGERS = [0, 1, -1, 2, 3, 7, 2**20 + 1, 2**31 - 1, 2**31, -(2**31), 2**40, 2**61, 2**62]
INTEGERS += [2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), -float("inf"), float("nan")]


class World:
    """The variables, resources and right arguments of one call, made from its random numbers."""

    def __init__(self, rng: np.random.Generator, name: str):
        self.rng = rng
        self._name = name
        self._kept: list[tf.Variable] = []
        self._resources: dict[str, tf.Tensor] = {}
        self.tables = [(self.small(), self.small()) for _ in range(self.small(1, 3))]
        self.sizes = [self.small(0, 9) for _ in range(self.small(1, 3))]
        self.iteration = 0

    # Numbers.

    def small(self, least: int = 0, most: int = 5) -> int:
        return int(self.rng.integers(least, most + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, values: Sequence):
        return values[int(self.rng.integers(len(values)))]

    def floats(self, *shape: int, dtype=np.float32) -> np.ndarray:
        return self.rng.normal(size=shape).astype(dtype)

    # What the ops work on.

    def variable(self, value: np.ndarray) -> tf.Tensor:
        self._kept.append(tf.Variable(value))
        return self._kept[-1].handle

    def handles(self) -> list[tf.Tensor]:
        """All that there are, an uninitialized one and those of resources among them."""
        missing = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="never_assigned")
        return [v.handle for v in self._kept] + [*self._resources.values(), missing]

    def made(self, kind: str, recipe: Callable[[World], dict]) -> tf.Tensor:
        """The one resource of a kind, which is made with these arguments if it is not there."""
        if kind not in self._resources:
            self._resources[kind] = getattr(library, f"recsync_{kind}")(**recipe(self))
        return self._resources[kind]

    def destroy(self) -> None:
        """Ends the resources, and with them all that wait for them."""
        for handle in self._resources.values():
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def shared_name(self) -> str:
        return self._name

    def gradient_dtype(self):
        return self.choose([tf.float32, tf.float32, tf.float16, tf.bfloat16])


def _other_integer(w: World, value: int) -> int:
    return w.choose([*INTEGERS, value + 1, value - 1, value + w.small(-9, 9)])


def _other_array(w: World, value: np.ndarray) -> np.ndarray:
    """Another shape, or other elements."""
    kind = w.small(0, 6)
    if kind == 0:
        return value[..., None]
    if kind == 1:
        return np.zeros([w.small(0, 3) for _ in range(w.small(0, 3))], value.dtype)
    if kind == 2 and value.ndim:
        return value[: w.small(0, len(value))]
    if kind == 3 and value.ndim:
        return np.concatenate([value, value[: w.small(1, 3)]])
    changed = np.array(value)
    for _ in range(w.small(1, 3)):
        if not changed.size:
            break
        at = tuple(int(w.rng.integers(s)) for s in changed.shape)
        if changed.dtype.kind in "iu":
            limits = np.iinfo(changed.dtype)
            other = _other_integer(w, int(changed[at]))
            changed[at] = min(max(other, limits.min), limits.max)
        elif changed.dtype.kind == "b":
            changed[at] = not changed[at]
        else:
            with np.errstate(over="ignore"):
                changed[at] = w.choose(FLOATS)
    return changed


def _other_list(w: World, value: list) -> list:
    changed = list(value)
    kind = w.small(0, 4)
    if kind == 0 and changed:
        del changed[w.small(0, len(changed) - 1)]
    elif kind == 1 and changed:
        changed.append(w.choose(changed))
    elif kind == 2 and len(changed) > 1:
        changed[0], changed[-1] = changed[-1], changed[0]
    elif changed:
        at = w.small(0, len(changed) - 1)
        changed[at] = other(w, changed[at])
    else:
        changed = [w.choose([0, 1, -1])]
    return changed


def other(w: World, value):
    """Another value for an argument, of its kind mostly."""
    if isinstance(value, tf.DType):
        return w.choose([tf.float32, tf.float64, tf.int64])
    if isinstance(value, tf.Tensor):
        if value.dtype == tf.resource:
            return w.choose(w.handles())
        if value.dtype in (tf.bfloat16, tf.float16):
            changed = _other_array(w, tf.cast(value, tf.float32).numpy())
            return tf.cast(changed, w.gradient_dtype())
        return _other_array(w, value.numpy())
    if isinstance(value, (np.ndarray, np.generic)):
        return _other_array(w, np.asarray(value))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _other_integer(w, value) if w.chance(0.9) else [value] * w.small(0, 2)
    if isinstance(value, float):
        return w.choose(FLOATS)
    if isinstance(value, str):
        return w.choose(["", "none", "sum", "other", value])
    if isinstance(value, list):
        return _other_list(w, value)
    raise TypeError(f"no other value for {value!r}")
