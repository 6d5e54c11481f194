"""Calls of the custom ops with arguments that are mostly right; fuzz_ops.py runs this.

Usage: fuzz_calls.py SEED FIRST CALLS [--verbose]

Makes the calls FIRST to FIRST + CALLS - 1 of a seed. Before each it writes a line with its number
and its op to the standard output, after the last one "end". A call depends on the seed and its
number alone: it makes its own variables and resources. It begins as a right one, and in most of
them arguments are then replaced by others: other shapes, other types, numbers that are no rows or
sizes, other handles or one twice. An error is what may come of it; a process that ends, or a call
that does not, is what fuzz_ops.py looks for.
"""

from __future__ import annotations

import argparse
import inspect
import resource
import sys
import threading
from collections.abc import Callable

import fuzz_resources
import fuzz_stateless
import numpy as np
import tensorflow as tf
from fuzz_world import World, other
from tensorflow.python.eager import cancellation
from tensorflow.python.framework import op_def_registry

from tf_recsync.ops import library

# What may be allocated beside what TensorFlow takes: more is refused to us, not taken from others.
MEMORY = 1 << 30
# Longer than any wait that nobody ends: whoever is still there then hangs.
PATIENCE = 600.0
MOST_OUTPUTS = 100
WAITING = {"delay", "transfer", "computed", "take_token", "hop_next", "hop_enter", "hop_send"}
WAITING |= {"hop_receive", "hop_collect"}
FAMILIES = fuzz_resources.FAMILIES
STATELESS = list(fuzz_stateless.RECIPES)
RECIPES = fuzz_stateless.RECIPES | fuzz_resources.RECIPES


def ops() -> list[str]:
    """The names of all ops of the library, as its functions are called without `recsync_`."""
    names = [n.removeprefix("recsync_") for n in dir(library) if n.startswith("recsync_")]
    return sorted(n for n in names if not n.endswith("_eager_fallback"))


def arguments_of(w: World, name: str) -> dict:
    """Arguments of an op, some of them wrong in most calls."""
    arguments = RECIPES[name](w)
    if w.chance(0.3):
        return arguments
    names = [n for n in arguments if n != "shared_name"]
    for _ in range(w.choose([1, 1, 1, 2, 3])):
        if names:
            changed = w.choose(names)
            arguments[changed] = other(w, arguments[changed])
    return _bounded(arguments)


def _bounded(arguments: dict) -> dict:
    """Without a million outputs, of which TensorFlow itself dies, of its own ops as well."""
    counts = {n: arguments[n] for n in ("N", "P") if isinstance(arguments.get(n), int)}
    return arguments | {n: min(count, MOST_OUTPUTS) for n, count in counts.items()}


def _definition(name: str):
    return op_def_registry.get("Recsync" + "".join(part.title() for part in name.split("_")))


def _tensors(name: str, arguments: dict) -> dict:
    """The inputs among the arguments of an op, as tensors."""
    tensors = {}
    for argument in _definition(name).input_arg:
        dtype = tf.as_dtype(argument.type) if argument.type else None

        def convert(value, dtype=dtype):
            return tf.convert_to_tensor(value, dtype=dtype)

        value = arguments[argument.name]
        is_list = argument.number_attr and isinstance(value, list)
        tensors[argument.name] = [convert(v) for v in value] if is_list else convert(value)
    return tensors


_functions: dict[str, Callable] = {}


def _traced(function: Callable, tensors: dict, others: dict) -> Callable:
    """A function that calls an op; the same for the same, as tracing it takes long."""
    key = repr((function.__name__, tensors, others))
    if key not in _functions:

        def body(tensors):
            result = function(**tensors, **others)
            return None if isinstance(result, tf.Operation) else result

        concrete = tf.function(body, autograph=False).get_concrete_function(tensors)
        if len(_functions) > 500:
            _functions.clear()
        _functions[key] = concrete
    return _functions[key]


class Calls:
    """The calls of one number: what they are, and making them."""

    def __init__(self, seed: int, number: int):
        self._w = w = World(np.random.default_rng([seed, number]), f"fuzz_{seed}_{number}")
        family = w.choose([*["stateless"] * 4, "buffer", "tokens", "hop", "feedback"])
        if family == "stateless":
            # Of some arguments there are two calls at a time, on the same variables.
            names = [w.choose(STATELESS)] * w.choose([1, 1, 1, 2])
        else:
            names = [w.choose(FAMILIES[family]) for _ in range(w.small(1, 6))]
        self.title = " ".join(names)
        self._names = names
        self._together = w.chance(0.2) and len(names) > 1
        self._seconds = w.choose([0.0, 0.0, 0.002, 0.02])
        self._cancels = w.chance(0.5)
        self._traced = w.chance(0.1)
        self._unexpected: list[BaseException] = []

    def run(self, verbose: bool) -> None:
        w = self._w
        waits, managers = [], []
        made: list[tuple[str, dict]] = []
        try:
            for i, name in enumerate(self._names):
                if i and made and name == made[0][0] and name in STATELESS:
                    again = dict(made[0][1])  # the same variables, in another order perhaps
                    changed = w.choose(list(again))
                    again[changed] = other(w, again[changed])
                    made.append((name, _bounded(again)))
                else:
                    made.append((name, arguments_of(w, name)))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            if verbose:
                sys.stderr.write(f"not made: {error}\n")
        for name, arguments in made:
            if verbose:
                sys.stderr.write(f"{name}({arguments})\n")
            manager = cancellation.CancellationManager()
            call = self._call_of(name, arguments, manager)
            if name in WAITING or self._together:
                managers.append(manager)
                waits.append(threading.Thread(target=self._make, args=(call, verbose)))
                waits[-1].start()
            else:
                self._make(call, verbose)
        for thread in waits:
            thread.join(self._seconds)
        if self._cancels:
            for manager in managers:
                manager.start_cancel()
        w.destroy()
        for manager in managers:  # What does not wait for a resource, too.
            manager.start_cancel()
        for thread in waits:
            thread.join(PATIENCE)
        if self._unexpected:
            raise self._unexpected[0]

    def _call_of(self, name: str, arguments: dict, manager) -> Callable[[], object]:
        function = getattr(library, f"recsync_{name}")
        if name not in WAITING and not self._traced:
            return lambda: function(**arguments)

        def traced():
            # An eager op can't be cancelled; nor can one that a function calls with constants
            # alone, which is called while the function is optimized.
            tensors = _tensors(name, arguments)
            others = {n: a for n, a in arguments.items() if n not in tensors}
            specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), tensors)
            concrete = _traced(function, specs, others)
            return manager.get_cancelable_function(concrete)(tensors)

        return traced

    def _make(self, call: Callable[[], object], verbose: bool) -> None:
        try:
            call()
            said = "fine"
        except (tf.errors.OpError, ValueError, TypeError, OverflowError) as error:
            said = str(error)
        except SystemError as error:
            # An int too large for TensorFlow's conversion of an attribute, as CPython puts it.
            if not isinstance(error.__cause__, OverflowError):
                self._unexpected.append(error)
            said = repr(error)
        except BaseException as error:  # noqa: BLE001  (raised by the main thread)
            self._unexpected.append(error)
            said = repr(error)
        if verbose:
            sys.stderr.write(f"  {said}\n")


def limit_memory() -> None:
    """Has this process refused what would take more than MEMORY beside what it has."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def uncovered() -> list[str]:
    """Ops of the library, or inputs and attributes of theirs, that no call has."""
    missing = [name for name in ops() if name not in RECIPES]
    for name in set(ops()) & set(RECIPES):
        given = inspect.signature(getattr(library, f"recsync_{name}")).parameters
        arguments = set()
        for seed in range(30):
            world = World(np.random.default_rng(seed), f"cover_{name}_{seed}")
            arguments |= set(RECIPES[name](world))
            world.destroy()
        # Others are what the inputs say; a container is a name as another.
        missing += [f"{name}: {a}" for a in given if a not in arguments | {"name", "container"}]
        missing += [f"{name}: no argument {a}" for a in sorted(arguments - set(given))]
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("calls", type=int)
    parser.add_argument("--verbose", action="store_true")
    flags = parser.parse_args()
    tf.constant(1) + 1  # TensorFlow's threads are there, and count as its own memory.
    Calls(0, 0).run(verbose=False)
    limit_memory()
    for number in range(flags.first, flags.first + flags.calls):
        calls = Calls(flags.seed, number)
        sys.stdout.write(f"{number} {calls.title}\n")
        sys.stdout.flush()
        calls.run(flags.verbose)
    sys.stdout.write("end\n")


if __name__ == "__main__":
    main()
