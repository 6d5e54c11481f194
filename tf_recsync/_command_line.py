"""What the commands of this package, `python -m tf_recsync.<command>`, have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import flags

EXIT_WRONG = 2  # Wrong flags or arguments.


def parser(command: str) -> Callable[[list[str]], list[str]]:
    """What `absl.app.run` parses flags by; wrong ones end the process with EXIT_WRONG.

    Args:
      command: Its name, for the message.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:  # For which absl's own parser has another exit code.
            sys.stderr.write(f"tf_recsync {command}: {error}\n")
            sys.exit(EXIT_WRONG)

    return parse
