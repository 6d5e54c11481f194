"""What this package changes about TensorFlow in this process, and the switch that turns it off.

TensorFlow's servers listen on all interfaces, and its calls to servers hold Python's lock while
they wait. No parameter changes that, so this package redirects the functions that TensorFlow's
libraries import (`cc/engine/import_table.h`). The environment variable
`TF_RECSYNC_REDIRECT_CALLS=0` leaves them as they are.
"""

from __future__ import annotations

import functools
import os
import socket

from absl import logging

from tf_recsync import _engine
from tf_recsync.ops import _library

VARIABLE = "TF_RECSYNC_REDIRECT_CALLS"
_VALUES = {"": True, "1": True, "0": False}


def are_on() -> bool:
    """Whether calls may be redirected.

    Raises:
      ValueError: The environment variable has a value of no meaning.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in _VALUES:
        raise ValueError(f"the environment variable {VARIABLE} must be 0 or 1, got {value!r}")
    return _VALUES[value]


def filter_logs() -> None:
    """Keeps out what TensorFlow logs about servers that are lost.

    Raises:
      ValueError: The environment variable is malformed.
    """
    if are_on():
        _library.filter_logs()


def confine_listeners(address: str) -> None:
    """Has TensorFlow's servers in this process listen on one address only.

    Args:
      address: A numeric address of this machine. "0.0.0.0": all interfaces.

    Raises:
      ValueError: The address, or the environment variable, is malformed.
      RuntimeError: No library could be confined.
    """
    if are_on():
        _engine.confine_listeners(address)
    else:
        _warn_of_listeners()


def refusal_to_listen(port: int) -> OSError | None:
    """What keeps a server of this process from listening on a port; None if nothing does.

    Args:
      port: The port, at the address to which listeners are confined, or on all interfaces.
    """
    address = _engine.confined_address()
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            # As servers do: not even the connections of one that has ended keep a port then.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen()
    except OSError as error:
        return error
    return None


def keep_python_running(*, connected: bool) -> None:
    """Has TensorFlow wait for servers without Python's lock.

    Args:
      connected: See `_engine.keep_python_running`.

    Raises:
      ValueError: The environment variable is malformed.
      RuntimeError: TensorFlow's calls could not be redirected.
    """
    if are_on():
        _engine.keep_python_running(connected=connected)
    else:
        _warn_of_lock()


@functools.cache
def _warn_of_listeners() -> None:
    logging.warning(
        "%s=0: TensorFlow's servers in this process listen on all interfaces, without "
        "authentication: whoever reaches their ports can run code here.",
        VARIABLE,
    )


@functools.cache
def _warn_of_lock() -> None:
    logging.warning(
        "%s=0: a server that does not answer stops all threads of this program, also those that "
        "watch for servers that don't.",
        VARIABLE,
    )
