"""Whether a server of a cluster answers: `python answers.py HOST:PORT`.

For probes of liveness. Servers speak HTTP/2, and whoever serves that answers a greeting; a process
that stands still does not, though the system accepts connections for it. Of Python's own library
only: a probe runs every few seconds, and to import TensorFlow takes some.

Exit codes: 0 if it answers within `--seconds`, 1 if it does not, 2 for wrong arguments.
"""

import argparse
import socket
import sys

# What a client of HTTP/2 begins with: a fixed text and empty settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def answers(host: str, port: int, seconds: float) -> bool:
    """Whether something that speaks HTTP/2 answers in time.

    Args:
        host: a name or a numeric address.
        port: from 1 to 65535.
        seconds: how long to wait for the connection, and then for the answer.
    """
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            connection.sendall(_GREETING)
            return bool(connection.recv(1))
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address", metavar="HOST:PORT", help="of the server, [IPv6]:PORT too")
    parser.add_argument("--seconds", type=float, default=5.0, help="to wait (default: 5)")
    args = parser.parse_args(arguments)
    host, _, port = args.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        parser.error(f"the address must be HOST:PORT with a port from 1 to 65535: {args.address}")
    if not 0 < args.seconds < float("inf"):
        parser.error(f"--seconds must be positive, not {args.seconds}")
    if answers(host, int(port), args.seconds):
        return 0
    sys.stderr.write(f"{args.address} does not answer\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
