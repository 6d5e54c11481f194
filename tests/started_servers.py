"""Servers that a test starts by hand, without a LocalCluster."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

from helpers import wait_until
from programs import ROOT

from tf_recsync.cluster import server_process


class Server(server_process.ServerProcess):
    """Forked from the process that has imported TensorFlow, as those of a LocalCluster are.

    It is killed at the end of a `with` block.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        cluster: Mapping[str, Sequence[str]],
        job: str,
        index: int,
        *flags: str,
    ):
        """Starts it.

        Args:
          folder: Gets a file with its output.
          cluster: That of TF_CONFIG.
          job: Its job there.
          index: Its number there.
          *flags: Of the server.
        """
        self._path = folder / f"{uuid.uuid4().hex}.log"
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        # As a LocalCluster has it, so that the same process forks both.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._flags = flags
        super().__init__(f"{job}:{index}", flags, self._environment, self._path, 200.0)
        self.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()

    def says(self, text: str) -> bool:
        """Whether its output has a text, or gets it."""
        return wait_until(lambda: text in self.output(), 200.0)

    def output(self) -> str:
        """What it has written until now."""
        return self._path.read_text()

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it does not end within so many seconds."""
        wait_until(lambda: self.exit_code is not None, seconds)
        return self.exit_code


class OwnServer(Server):
    """The same, as users start it: `python -m tf_recsync.server`."""

    def start(self) -> None:
        """See the base class."""
        with open(self._path, "wb") as log:
            self._own = subprocess.Popen(
                [sys.executable, "-m", "tf_recsync.server", *self._flags],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """See the base class."""
        return self._own.pid

    @property
    def exit_code(self) -> int | None:
        """See the base class."""
        return self._own.poll()

    def send_signal(self, number: int) -> None:
        """See the base class."""
        self._own.send_signal(number)

    def kill(self) -> None:
        """See the base class."""
        self._own.kill()
        self._own.wait(10.0)
