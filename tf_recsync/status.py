"""What a run does at the moment: `python -m tf_recsync.status`.

Shows the progress of a program that trains, the state of each server of its cluster, and who waits
for whom, as a table that is shown anew every two seconds, until Ctrl-C or the end of the program.
The program has to give `recsync.callbacks.Status()` to `fit`, and to run on this machine as the
same user.

    python -m tf_recsync.status              # of all programs that run
    python -m tf_recsync.status --pid=4711   # of one of them
    python -m tf_recsync.status --once       # once, for a log or another program
    python -m tf_recsync.status --path=FILE  # of a file that Status(path=FILE) writes

Exit codes: 0; 1 if there is no such program; 2 for wrong flags.
"""

from __future__ import annotations

import pathlib
import sys
import time

from absl import app, flags

from tf_recsync import _command_line
from tf_recsync.run_status import RunStatus, is_there, running, status_folder

_CLEAR = "\x1b[H\x1b[2J"


def _define_flags() -> None:
    flags.DEFINE_integer("pid", None, "The process of the program; default: all.", lower_bound=1)
    flags.DEFINE_string("path", None, "The file of Status(path=...), in place of a process.")
    flags.DEFINE_float("every", 2.0, "Seconds until it is shown anew.", lower_bound=0.1)
    flags.DEFINE_boolean("once", False, "Show it once.")


def _paths(args: flags.FlagValues) -> list[pathlib.Path]:
    if args.path is not None:
        return [pathlib.Path(args.path)]
    if args.pid is None:
        return running()
    return [path for path in running() if path.name.startswith(f"{args.pid}-")]


def _statuses(args: flags.FlagValues) -> list[RunStatus]:
    """Those of all programs that are asked for."""
    found = []
    for path in _paths(args):
        try:
            found.append(RunStatus.read(path))
        except FileNotFoundError:
            continue  # It has ended meanwhile.
    return found


def main(argv: list[str]) -> int:
    """Runs the command; returns the exit code."""
    args = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}", _command_line.EXIT_WRONG)
    if args.path is not None and args.pid is not None:
        raise app.UsageError("--path can't be used with --pid", _command_line.EXIT_WRONG)
    shown: set[int] = set()  # The processes of what was shown.
    try:
        while True:
            statuses = _statuses(args)
            shown.update(status.pid for status in statuses)
            text = "\n\n".join(status.table(time.time()) for status in statuses)
            if not statuses:
                # A program may call `fit` again.
                if args.path is not None or not any(map(is_there, shown)):
                    break
                text = "No program trains at the moment."
            if args.once:
                sys.stdout.write(f"{text}\n")
                return 0
            sys.stdout.write(f"{_CLEAR}{text}\n")
            sys.stdout.flush()
            # The file of Status(path=...) stays, and the process may be one of another machine.
            if args.path is not None and all(status.has_ended for status in statuses):
                break
            time.sleep(args.every)
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        sys.stderr.write(f"tf_recsync status: {error}\n")
        return 1
    if shown:
        sys.stdout.write("The program has ended.\n")
        return 0
    what = f"no file {args.path}" if args.path else "no program of yours gives a status"
    what += f" in process {args.pid}" if args.pid else ""
    advice = (
        "" if args.path else (f" (in {status_folder()}): give recsync.callbacks.Status() to fit")
    )
    sys.stderr.write(f"tf_recsync status: {what}{advice}\n")
    return 1


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=_command_line.parser("status"))
