"""A server of a cluster: `python -m tf_recsync.server`.

Starts the TensorFlow server of one worker or parameter server, with the ops of this
package in it, and runs until it is killed. The cluster and the task come from the
environment variable `TF_CONFIG`:

    TF_CONFIG='{"cluster": {"chief": ["10.0.0.1:4711"], "worker": ["10.0.0.2:4711"],
                            "ps": ["10.0.0.3:4711"]},
                "task": {"type": "worker", "index": 0}}' \
        python -m tf_recsync.server --bind_address=10.0.0.2

When it is ready, it prints one line:

    tf_recsync server worker:0 listening on 10.0.0.2:4711

The port has no authentication, and whoever reaches it can run code in the server: keep
it inside a trusted network, and name that network's interface with `--bind_address`.

Exit codes: 0 after SIGTERM or SIGINT, or when the parent of `--exit_with_parent` has
ended; 2 for bad flags or a bad TF_CONFIG; 98 if the port is taken.
"""

import errno
import faulthandler
import os
import select
import signal
import socket
import sys
import threading

from absl import app, flags, logging

from tf_recsync.cluster import tf_config

EXIT_BAD_CONFIGURATION = 2
EXIT_PORT_TAKEN = 98
_PARENT_POLL_SECONDS = 1.0


def _define_flags() -> None:
    flags.DEFINE_string(
        "bind_address",
        None,
        "Numeric address to listen on; 0.0.0.0 for all interfaces. Default: the host of this "
        "task's address in TF_CONFIG if it is a loopback address, else all interfaces.",
    )
    flags.DEFINE_integer(
        "inter_op_threads",
        None,
        "Threads that run ops; every remote call that waits in an op holds one. Default: "
        "twice the number of cores, at least 16.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "intra_op_threads",
        None,
        "Threads that one op may use. Default: TensorFlow's, the number of cores.",
        lower_bound=1,
    )
    flags.DEFINE_string("job_name", None, "Overrides the task's type in TF_CONFIG.")
    flags.DEFINE_integer(
        "task_index", None, "Overrides the task's index in TF_CONFIG.", lower_bound=0
    )
    flags.DEFINE_boolean(
        "exit_with_parent",
        False,
        "Exit when standard input reaches its end, or when the parent process has ended: "
        "a parent that holds the other end of a pipe takes the server with it however it ends.",
    )
    flags.DEFINE_integer(
        "ready_fd",
        None,
        "File descriptor to write a line to, and to close, when the server is ready.",
        lower_bound=0,
    )


def _exit_on_signal(unused_signal: int, unused_frame: object) -> None:
    # Not sys.exit: TensorFlow's server has no clean shutdown and can block there.
    os._exit(0)


def _exit_with_parent(parent: int) -> None:
    """Ends this process at the end of its standard input or of process `parent`."""
    while os.getppid() == parent:
        # The second condition of the loop covers a pipe whose other end was inherited by
        # another child of the parent.
        readable, _, _ = select.select([0], [], [], _PARENT_POLL_SECONDS)
        if readable and not os.read(0, 4096):
            break
    os._exit(0)


def _port_is_taken(address: str) -> bool:
    host, port = tf_config.split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _fail(message: str, exit_code: int) -> int:
    sys.stderr.write(f"tf_recsync server: {message}\n")
    return exit_code


def main(argv: list[str]) -> int:
    """Runs the server; returns the exit code if it could not start.

    Args:
      argv: The command line's positional arguments, the program first; no others allowed.

    Returns:
      An exit code, see the module's documentation.
    """
    args = flags.FLAGS
    faulthandler.enable()
    # Python runs a handler between two steps of the main thread. A signal just before a
    # wait would be seen only after it, so signals also write to a pipe, which is waited on.
    signal_fd, wakeup_fd = os.pipe()
    os.set_blocking(wakeup_fd, False)
    signal.set_wakeup_fd(wakeup_fd)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, _exit_on_signal)
    if len(argv) > 1:
        return _fail(f"unexpected arguments {argv[1:]}", EXIT_BAD_CONFIGURATION)
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        config = tf_config.parse_tf_config(
            os.environ, job_name=args.job_name, task_index=args.task_index
        )
    except ValueError as error:
        return _fail(str(error), EXIT_BAD_CONFIGURATION)
    if config.task_type == "chief":
        return _fail(
            "the chief is the program that calls cluster_from_tf_config(); the task's type "
            "must be 'worker' or 'ps', got 'chief'",
            EXIT_BAD_CONFIGURATION,
        )

    # A call between servers fails at once when the other one is gone.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    import tensorflow as tf

    from tf_recsync import _engine
    from tf_recsync import ops as _  # noqa: F401  Makes the custom ops exist here.

    name = f"{config.task_type}:{config.task_index}"
    bind_address = args.bind_address or tf_config.loopback_address(config.own_address)
    if bind_address:
        try:
            _engine.confine_listeners(bind_address)
        except ValueError as error:
            return _fail(f"--bind_address: {error}", EXIT_BAD_CONFIGURATION)
    else:
        logging.warning(
            "%s listens on all interfaces, without authentication: whoever reaches port %d "
            "can run code here. Name one interface with --bind_address.",
            name,
            tf_config.split_address(config.own_address)[1],
        )
    try:
        server = tf.distribute.Server(
            config.cluster,
            job_name=config.task_type,
            task_index=config.task_index,
            config=tf.compat.v1.ConfigProto(
                inter_op_parallelism_threads=args.inter_op_threads
                or max(16, 2 * (os.cpu_count() or 1)),
                intra_op_parallelism_threads=args.intra_op_threads or 0,
                # A server waits often and shortly, and threads that spin
                # meanwhile take the cores from its neighbours.
                experimental=tf.compat.v1.ConfigProto.Experimental(disable_thread_spinning=True),
            ),
        )
    except tf.errors.OpError as error:
        if _port_is_taken(config.own_address):
            return _fail(
                f"{name} cannot listen on {config.own_address}: another process has the port",
                EXIT_PORT_TAKEN,
            )
        return _fail(f"{name} cannot listen on {config.own_address}: {error.message}", 1)
    sys.stdout.write(f"tf_recsync server {name} listening on {config.own_address}\n")
    sys.stdout.flush()
    if args.ready_fd is not None:
        os.write(args.ready_fd, b"ready\n")
        os.close(args.ready_fd)
    while server is not None:  # Keeps it referenced.
        os.read(signal_fd, 4096)  # Returns after a signal; its handler ends the process.
    return 0


def run() -> None:
    """Parses the flags and runs `main`."""
    _define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
