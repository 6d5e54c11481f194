"""The exception that TensorFlow's C++ makes of an error, without Python code of its own.

TensorFlow makes it while it holds a lock of its own. The constructor of its own class is Python
code, in which another thread may get Python's lock: if that one has an error, too, it waits for
TensorFlow's lock and keeps Python's, and the process stands still. Where a server dies, many
threads have errors at the same moment.
"""

from __future__ import annotations

from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import core


class StatusError(core._NotOkStatusException):
    """Like its base class; its arguments are the message, the code and the payloads."""

    # That of C, which runs no Python code.
    __init__ = Exception.__init__

    @property
    def message(self) -> str:
        """What went wrong; TensorFlow adds to it."""
        return self.__dict__.get("message_", self.args[0])

    @message.setter
    def message(self, message: str) -> None:
        self.__dict__["message_"] = message

    @property
    def code(self) -> int:
        """The status's code."""
        return self.args[1]

    @property
    def payloads(self) -> dict[str, bytes]:
        """What the status has besides."""
        return self.args[2]


def register() -> None:
    """Has TensorFlow raise it from now on, in this process."""
    pywrap_tfe.TFE_Py_RegisterExceptionClass(StatusError)
