"""A server of a cluster: `python -m tf_recsync.server`.

Starts the TensorFlow server of one worker or parameter server, or of several with
`--tasks`, with the ops of this package in it, and runs until it is killed. A reader
runs tf.data's service instead. The cluster and the task come from the environment
variable `TF_CONFIG`:

    TF_CONFIG='{"cluster": {"chief": ["10.0.0.1:4711"], "worker": ["10.0.0.2:4711"],
                            "ps": ["10.0.0.3:4711"]},
                "task": {"type": "worker", "index": 0}}' \
        python -m tf_recsync.server --bind_address=10.0.0.2

When it is ready, it prints one line for each task:

    tf_recsync server worker:0 listening on 10.0.0.2:4711

The port has no authentication, and whoever reaches it can run code in the server: keep
it inside a trusted network, and name that network's interface with `--bind_address`.

Exit codes: 0 after SIGTERM or SIGINT, or when the parent of `--exit_with_parent` has
ended; 2 for bad flags or a bad TF_CONFIG; 98 if the port is taken; 1 if it can't listen for another
reason.
"""

import contextlib
import errno
import faulthandler
import functools
import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from absl import app, flags, logging

from tf_recsync import _command_line
from tf_recsync.cluster import tf_config, transports

_MODULE = "tf_recsync.server"
EXIT_BAD_CONFIGURATION = _command_line.EXIT_WRONG
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
        "Threads that run ops, for each task; every remote call that waits in an op holds one. "
        "Default: twice the number of cores, at least 16, and, up to 64, 4 more than twice the "
        "number of workers.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "intra_op_threads",
        None,
        "Threads that one op may use. Default: TensorFlow's, the number of cores.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "transport",
        transports.DEFAULT,
        transports.TRANSPORTS,
        "How this task fetches tensors from others: recsync, over connections of this package, "
        "from those that offer it, or grpc, by TensorFlow's calls.",
    )
    flags.DEFINE_string("job_name", None, "Overrides the task's type in TF_CONFIG.")
    flags.DEFINE_integer(
        "task_index", None, "Overrides the task's index in TF_CONFIG.", lower_bound=0
    )
    flags.DEFINE_list(
        "tasks",
        None,
        "Tasks to host in this process, like worker:0,worker:1, in place of the one in "
        "TF_CONFIG: they start faster than in processes of their own, and end together.",
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
    flags.DEFINE_boolean(
        "has_told", False, "Used by the server itself: --ready_fd was told before it began anew."
    )
    flags.DEFINE_integer(
        "parent", None, "Used by the server itself: its parent's process id before it began anew."
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


def _fail(message: str, exit_code: int) -> int:
    sys.stderr.write(f"tf_recsync server: {message}\n")
    return exit_code


def _read_tasks(args: flags.FlagValues) -> list[tf_config.TFConfig]:
    """What TF_CONFIG says of each task that this process is to host.

    Raises:
      ValueError: TF_CONFIG or a flag is wrong.
    """
    chosen = [(args.job_name, args.task_index)]
    if args.tasks is not None:
        if args.job_name is not None or args.task_index is not None:
            raise ValueError("--tasks can't be used with --job_name and --task_index")
        pairs = [task.rpartition(":") for task in args.tasks]
        if not pairs or len(set(pairs)) < len(pairs) or not all(p[2].isdecimal() for p in pairs):
            raise ValueError(
                f"--tasks must be different tasks like worker:0,worker:1, got {args.tasks}"
            )
        chosen = [(job, int(index)) for job, _, index in pairs]
    configs = [
        tf_config.parse_tf_config(os.environ, job_name=job, task_index=index)
        for job, index in chosen
    ]
    are_readers = [config.task_type == tf_config.READER for config in configs]
    if any(are_readers) and not all(are_readers):
        raise ValueError(f"--tasks must have readers among themselves, got {args.tasks}")
    if any(config.task_type == "chief" for config in configs):
        raise ValueError(
            "the chief is the program that calls cluster_from_tf_config(); the task's type "
            "must be 'worker', 'ps' or 'reader', got 'chief'"
        )
    return configs


def _loopback_address(configs: list[tf_config.TFConfig]) -> str | None:
    """The loopback address of the tasks in TF_CONFIG, if they have one.

    Raises:
      ValueError: They have different ones, or some have none.
    """
    found = {tf_config.loopback_address(config.own_address) for config in configs}
    if len(found) > 1:
        addresses = [config.own_address for config in configs]
        raise ValueError(
            f"the tasks of one process listen on one address; name it with --bind_address: "
            f"TF_CONFIG has {addresses}"
        )
    return found.pop()


class _Anew:
    """Replaces this process by a new one that does the same; call it to do so.

    Attributes:
      has_told: Whether `--ready_fd` has been told.
    """

    def __init__(self, arguments: list[str], parent: int):
        """Notes what the new process needs.

        Args:
          arguments: This server's.
          parent: The process id of the parent of `--exit_with_parent`.
        """
        self.has_told = False
        self._arguments = arguments
        self._parent = parent

    def __call__(self) -> None:
        own = [f"--parent={self._parent}", *(["--has_told"] if self.has_told else [])]
        command = [sys.executable, "-m", _MODULE, *self._arguments, *own]
        with contextlib.suppress(OSError, ValueError):  # Nobody may be reading.
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            os.execv(command[0], command)
        finally:
            os._exit(1)  # It could not.


def _start(
    config: tf_config.TFConfig,
    pool_threads: int,
    intra_op_threads: int | None,
    transport: str,
    begin_anew: Callable[[], None] | None,
) -> object:
    """Starts the server of a task, which lives as long as what is returned."""
    from tf_recsync.cluster import data_service, hosted_servers

    if config.task_type == tf_config.READER:
        readers = config.cluster[tf_config.READER]
        return data_service.Reader(readers, config.task_index, begin_anew)
    task = (config.task_type, config.task_index)
    return hosted_servers.start_server(
        config.servers, task, pool_threads, transport, intra_op_threads
    )


def _refused(where: str, refusal: OSError) -> int:
    if refusal.errno == errno.EADDRINUSE:
        return _fail(f"{where}: another process has the port", EXIT_PORT_TAKEN)
    return _fail(f"{where}: {refusal.strerror}", 1)


def _place_of(config: tf_config.TFConfig, bind_address: str | None) -> str:
    """Where a task listens: its address, and that of `--bind_address` if it is another one."""
    if bind_address in (None, tf_config.split_address(config.own_address)[0]):
        return config.own_address
    return f"{config.own_address} (--bind_address={bind_address})"


def _name_of(config: tf_config.TFConfig) -> str:
    return f"{config.task_type}:{config.task_index}"


def main(
    argv: list[str], arguments: list[str], begin_anew: Callable[[], None] | None = None
) -> int:
    """Runs the server; returns the exit code if it could not start.

    Args:
      argv: The command line's positional arguments, the program first; no others allowed.
      arguments: The whole command line without the program.
      begin_anew: See `run`.

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
    parent = os.getppid() if args.parent is None else args.parent
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    anew = _Anew(arguments, parent)
    try:
        configs = _read_tasks(args)
        bind_address = args.bind_address or _loopback_address(configs)
    except ValueError as error:
        return _fail(str(error), EXIT_BAD_CONFIGURATION)

    import tensorflow as tf

    from tf_recsync.cluster import hosted_servers, proxies, redirections

    transports.load(args.transport)
    addresses = configs[0].cluster.values()
    proxies.go_around(itertools.chain.from_iterable(addresses), bind_address)
    if bind_address:
        try:
            redirections.confine_listeners(bind_address)
        except ValueError as error:
            return _fail(f"cannot listen on {bind_address}: {error}", EXIT_BAD_CONFIGURATION)
    else:
        logging.warning(
            "%s listens on all interfaces, without authentication: whoever reaches port %s "
            "can run code here. Name one interface with --bind_address.",
            ", ".join(map(_name_of, configs)),
            ", ".join(str(tf_config.split_address(c.own_address)[1]) for c in configs),
        )
    inter_op_threads = args.inter_op_threads or hosted_servers.default_threads(
        len(configs[0].cluster.get("worker", []))
    )
    has_first_reader = any(c.task_type == tf_config.READER and not c.task_index for c in configs)
    servers = []  # Keeps them referenced.
    # Other readers wait for the first one.
    for config in sorted(configs, key=lambda c: (c.task_type == tf_config.READER, c.task_index)):
        where = f"{_name_of(config)} cannot listen on {_place_of(config, args.bind_address)}"
        # tf.data's service would share the port with another one.
        port = tf_config.split_address(config.own_address)[1]
        is_reader = config.task_type == tf_config.READER
        if is_reader and (refusal := redirections.refusal_to_listen(port)):
            return _refused(where, refusal)
        try:
            servers.append(
                _start(
                    config,
                    len(configs) * inter_op_threads,
                    args.intra_op_threads,
                    args.transport,
                    None if has_first_reader else begin_anew or anew,
                )
            )
        except (tf.errors.OpError, RuntimeError) as error:
            if refusal := redirections.refusal_to_listen(port):
                return _refused(where, refusal)
            # The data service raises RuntimeErrors.
            return _fail(f"{where}: {getattr(error, 'message', error)}", 1)
    for config in configs:
        sys.stdout.write(
            f"tf_recsync server {_name_of(config)} listening on "
            f"{_place_of(config, args.bind_address)}\n"
        )
    sys.stdout.flush()
    if args.ready_fd is not None and not args.has_told:
        anew.has_told = True
        # After it has begun anew, nobody may want to know.
        with contextlib.suppress(BrokenPipeError):
            os.write(args.ready_fd, b"ready\n")
        os.close(args.ready_fd)
    while servers:
        os.read(signal_fd, 4096)  # Returns after a signal; its handler ends the process.
    return 0


def run(argv: list[str] | None = None, begin_anew: Callable[[], None] | None = None) -> None:
    """Parses the flags and runs `main`; does not return.

    Args:
      argv: The command line, the program first. Default None: that of this process.
      begin_anew: Ends this process and starts another one that does the same, for a reader
        whose first one has ended. Default None: this process is replaced by Python's, which
        imports TensorFlow again.
    """
    _define_flags()
    arguments = (sys.argv if argv is None else argv)[1:]
    app.run(
        functools.partial(main, arguments=arguments, begin_anew=begin_anew),
        argv=argv,
        flags_parser=_command_line.parser("server"),
    )


if __name__ == "__main__":
    run()
