"""Runs torchrun under the coordinator's control, as the main process of the trainer container.

    python3 PATH/ddpjob_runtime launcher TORCHRUN_ARGUMENTS

Exit codes:

    0      every node has finished
    76     rendezvous lost
    77     stopped by the coordinator
    78     the entry point cannot start
    79     fenced: the group continued without this node
    80     the node has not passed spec.preflight
    128+N  ended by signal N (143: SIGTERM)

Any other code means that this node failed.

With DDPJOB_RECOVERY=Fast, rounds do not need c10d, and workers are forked from a process that has
imported torch (and the modules in DDPJOB_PRELOAD, if any).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ddpjob_pod.job_environment import JobEnvironment

import ddpjob_runtime
from ddpjob_runtime import lean_torch, protocol
from ddpjob_runtime.launcher import pid1, stacks, torch_parts
from ddpjob_runtime.launcher.check_entrypoint import InitFailure, check_command, check_module, check_script
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.launcher.conduct_preflight import Abandoned, NodePreflight, PreflightSettings
from ddpjob_runtime.launcher.import_torchrun import import_torchrun
from ddpjob_runtime.launcher.keep_log import KeptLog
from ddpjob_runtime.launcher.neighbours import watch_neighbours
from ddpjob_runtime.launcher.round_log import RoundLog
from ddpjob_runtime.launcher.shutdown import Shutdown, die_with_parent, ignore_signal, log, watch_signals
from ddpjob_runtime.log_lines import divert_loggers
from ddpjob_runtime.open_files import raise_open_files
from ddpjob_runtime.protocol import FromMember, Mode

LOST_GRACE = 3.0
"""How many seconds workers get to save their work if the coordinator is gone or this launcher
fails.
"""
REPORT_SECONDS = 15.0
"""How many seconds the launcher waits for the coordinator if the entry point cannot start, in order
to report this failure.
"""
WORKER = str(ddpjob_runtime.WORKER)
REQUIRED = ("coordinator", "token", "pod", "index", "attempt")


def main() -> NoReturn:
    """Run the launcher until the job is done or this node has to exit. Never return."""
    faulthandler.enable()
    raise_open_files()
    kept = KeptLog.prepare()
    if os.getpid() == 1 or kept is not None:
        pid1.become_init(kept)
        die_with_parent()
    shutdown = Shutdown(grace_seconds())
    try:
        mode = recovery_mode()
        client = connect(shutdown, mode)
        settings = PreflightSettings.read()
        data, code = data_to_fetch(), code_to_fetch()
    except InitFailure as error:
        shutdown.exit(protocol.EXIT_INIT_FAILURE, "InitFailure", str(error))
        raise
    # Start the fork server before any thread, because a process with threads must not be forked.
    fork_server, cold = warm_up() if mode == Mode.FAST else (None, "")
    stacks.prepare()
    client.neighbours = watch_neighbours(
        os.environ.get("POD_IP", ""), JobEnvironment.read().token, client.report_neighbour
    )
    preflight = NodePreflight(settings, processes_per_node()) if settings is not None else None
    records = RoundLog()
    client.on_record = records.write

    def clean_up() -> None:
        records.close()
        stacks.remove()
        if preflight is not None:
            preflight.kill()

    shutdown.clean_up = clean_up
    watch_signals(lambda number: on_signal(number, client, shutdown))
    shutdown.close_client = client.close
    # Without this variable, rank 0 would publish its store's address only once, and a replacement
    # node would never find the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["DDPJOB_LAUNCHER_PID"] = str(os.getpid())
    if preflight is not None:
        preflight.begin()
    client.start()
    try:
        torchrun(sys.argv[1:], client, shutdown, mode, fork_server, cold, preflight, data, code)
        if not client.done:
            raise RuntimeError("torchrun gave up before the group finished")
        shutdown.exit(protocol.EXIT_DONE, "Done", "")
    except InitFailure as error:
        if client.wait_welcome(REPORT_SECONDS):
            client.send(FromMember.INIT_FAILURE, message=str(error))
        shutdown.exit(protocol.EXIT_INIT_FAILURE, "InitFailure", str(error))
    except BaseException as error:
        shutdown.block_if_begun()
        if getattr(error, "out_of_memory", False):
            client.ran_out_of_memory(str(error))
        kind, code = classify(error)
        shutdown.exit(code, kind, f"{type(error).__name__}: {error}", traceback.format_exc(), grace=LOST_GRACE)
    raise AssertionError("unreachable")


def grace_seconds() -> float:
    """Return how many seconds workers have between SIGTERM and SIGKILL.

    The launcher itself needs two seconds of the pod's grace period. Workers get the rest.
    """
    text = JobEnvironment.read().grace_seconds or "30"
    try:
        return max(0.5, float(text) - 2.0)
    except ValueError:
        log(f"DDPJOB_GRACE_SECONDS must be a number of seconds, not {text!r}; using 30")
        return 28.0


def recovery_mode() -> Mode:
    """Return the job's recovery mode; Standard if no mode is set."""
    text = JobEnvironment.read().recovery or Mode.STANDARD
    try:
        return Mode(text)
    except ValueError:
        raise InitFailure("DDPJOB_RECOVERY must be {}, not {!r}".format(" or ".join(Mode), text)) from None


def connect(shutdown: Shutdown, mode: Mode) -> MemberClient:
    """Return a client for the coordinator. The client does not connect until it is started."""
    job = JobEnvironment.read()
    missing = [name for name in REQUIRED if not getattr(job, name)]
    if missing:
        raise InitFailure(
            "environment variables are missing: {}; run this in a pod of a DDPJob, where the operator sets them".format(
                ", ".join(f"DDPJOB_{name.upper()}" for name in missing)
            )
        )
    # Workers read this version (docs/protocol.md).
    os.environ["DDPJOB_PROTOCOL"] = str(protocol.VERSION)
    identity: dict[str, Any] = {
        "pod": job.pod,
        "pid": os.getpid(),
    }
    identity["grace"] = shutdown.grace_seconds
    for name in ("index", "attempt", "generation"):
        text = getattr(job, name) or "0"
        if not text.isdigit():
            raise InitFailure(f"DDPJOB_{name.upper()} must be a whole number, not {text!r}")
        identity[name] = int(text)

    def on_end(code: int, kind: str, message: str) -> None:
        grace = shutdown.grace_seconds if code == protocol.EXIT_STOPPED else LOST_GRACE
        shutdown.exit(code, kind, message, grace=grace)

    timeout = re.search(r"\bjoin_timeout=(\d+)", torchrun_options())
    try:
        return MemberClient(
            job.coordinator,
            job.token,
            identity,
            mode,
            float(timeout.group(1)) if timeout else 600.0,
            on_end,
        )
    except ValueError as error:
        raise InitFailure(str(error)) from None


def on_signal(number: signal.Signals, client: MemberClient, shutdown: Shutdown) -> None:
    """End the launcher, because its pod was asked to stop.

    First notify the coordinator. Then give the workers the pod's grace period to end.
    """
    why = f"asked to stop by {number.name}"
    shutdown.exit(
        128 + number,
        "Signal",
        why,
        grace=shutdown.grace_seconds,
        announce=lambda: client.send(FromMember.LEAVING, why=why),
    )


def torchrun(
    arguments: list[str],
    client: MemberClient,
    shutdown: Shutdown,
    mode: Mode,
    fork_server: Any,
    cold: str,
    preflight: NodePreflight | None = None,
    data: Any = None,
    code: Any = None,
) -> None:
    """Run torchrun until all nodes are done, but with the launcher's own agent and entry point."""
    run = require_torchrun()
    divert_loggers(log)
    parsed = parse(run, arguments)
    if not parsed.run_path and code is None:
        check_entry_point(parsed)
    if str(parsed.nproc_per_node).isdigit():
        # All nodes have the same number of workers, so torchrun's agents do not need to exchange
        # these numbers. During such an exchange, a dying node could block the others.
        os.environ.setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    client.wait_welcome()
    if client.done:
        return
    if preflight is not None:
        pass_node(preflight, client, shutdown)
    if code is not None:
        fetch_code(code, client, shutdown)
        if not parsed.run_path:
            check_entry_point(parsed)
    if data is not None:
        fetch_data(data, client, shutdown)
    patch_torch(client, shutdown, mode, preflight)
    if mode == Mode.FAST:
        reported: list[str] = []

        def report_cold(why: str) -> None:
            if why not in reported:
                reported.append(why)
                log(f"workers of this node are not pre-warmed: {why}")
                client.note(protocol.COLD_WORKERS, why)

        cold = cold or why_cold(parsed) or fork_server.why_not() or warm_workers(fork_server, report_cold)
        if cold:
            report_cold(cold)
    run.run(parsed)


def pass_node(preflight: NodePreflight, client: MemberClient, shutdown: Shutdown) -> None:
    """Wait for this node's check, and end the launcher if the check has found a problem."""
    try:
        problem = preflight.node_problem(lambda: shutdown.begun or client.done)
    except Abandoned:
        shutdown.block_if_begun()
        return
    if problem:
        shutdown.exit(protocol.EXIT_UNFIT, "PreflightFailed", problem)


def data_to_fetch() -> Any:
    """Return the settings of storage.data.url; None if it is not set.

    This function removes the bucket's credentials from the environment, so call it before starting
    any other process. Raises InitFailure if the settings are invalid.
    """
    if not JobEnvironment.read().data_url:
        return None
    from ddpjob_runtime.launcher.fetch_data import FetchSettings
    from ddpjob_runtime.launcher.s3_reader import BucketRefusal

    try:
        return FetchSettings.take()
    except BucketRefusal as error:
        raise InitFailure(f"storage.data: {error}") from None


def code_to_fetch() -> Any:
    """Return the settings of code.archive; None if it is not set.

    This function removes the bucket's credentials from the environment, so call it before starting
    any other process. Raises InitFailure if the settings are invalid.
    """
    if not JobEnvironment.read().code_url:
        return None
    from ddpjob_runtime.launcher.fetch_code import CodeSettings
    from ddpjob_runtime.launcher.s3_reader import BucketRefusal

    try:
        return CodeSettings.take()
    except BucketRefusal as error:
        raise InitFailure(f"code.archive: {error}") from None


def fetch_code(code: Any, client: MemberClient, shutdown: Shutdown) -> None:
    """Fetch code.archive into its folder. The launcher looks for the program there afterwards.

    The connection to the coordinator stays open during the fetch.
    """
    from ddpjob_runtime.launcher.fetch_code import CodeFetch

    await_fetch("code.archive", CodeFetch(code, lambda: shutdown.begun or client.done, data_note(client)), shutdown)


def fetch_data(data: Any, client: MemberClient, shutdown: Shutdown) -> None:
    """Fetch storage.data.url into its folder, however long it takes.

    The connection to the coordinator stays open during the fetch.
    """
    from ddpjob_runtime.launcher.fetch_data import Fetch

    await_fetch("storage.data", Fetch(data, lambda: shutdown.begun or client.done, data_note(client)), shutdown)


def data_note(client: MemberClient) -> Callable[[str], None]:
    """Return a function that reports the progress of this node's fetch to the coordinator."""

    def report(text: str) -> None:
        client.note(protocol.DATA, text)

    return report


def await_fetch(field: str, fetch: Any, shutdown: Shutdown) -> None:
    """Run a fetch to completion.

    BucketRefusal becomes an InitFailure, which fails the job. Unfit means that this node's disk
    cannot hold the files, so only this node ends.
    """
    from ddpjob_runtime.launcher.fetch_data import FetchAbandoned, Unfit
    from ddpjob_runtime.launcher.s3_reader import BucketRefusal

    try:
        fetch.run()
    except BucketRefusal as error:
        raise InitFailure(f"{field}: {error}") from None
    except Unfit as error:
        shutdown.exit(protocol.EXIT_UNFIT, "PreflightFailed", f"{field}: {error}")
    except FetchAbandoned:
        shutdown.block_if_begun()


def warm_up() -> tuple[Any, str]:
    """Import torch and start the fork server.

    Return the fork server and an empty string. If workers cannot be forked, return None and the
    reason instead. If the image has no torch, the launcher ends later, when it imports torchrun.
    """
    if "OMP_NUM_THREADS" not in os.environ and processes_per_node() > 1:
        # torchrun also sets this variable, but too late: torch reads it when torch is imported, and
        # that happens below.
        os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(os, "fork"):
        return None, "this system cannot fork"
    from ddpjob_runtime.launcher import forkserver

    try:
        forkserver.preload()
    except Exception as error:
        return None, str(error)
    return forkserver.ForkServer(JobEnvironment.read().preload), ""


def processes_per_node() -> int:
    """Return the number given with --nproc-per-node; 1 if it is not a number."""
    found = re.findall(r"--nproc[-_]per[-_]node[= ](\d+)", torchrun_options())
    return int(found[-1]) if found else 1


def torchrun_options() -> str:
    """Return torchrun's own arguments, which come before `--`.

    The script's arguments come after `--` and are left out, because one of them may have the same
    name as an argument of torchrun.
    """
    options = sys.argv[1:]
    return " ".join(options[: options.index("--")] if "--" in options else options)


def why_cold(parsed: Any) -> str:
    """Return the reason why workers cannot be forked with these arguments; empty if they can be
    forked.
    """
    if parsed.no_python:
        return "with --no-python, every worker starts a separate program; specify a Python script or module"
    if parsed.run_path:
        return "with --run-path, torchrun starts the workers itself; remove --run-path"
    return ""


def warm_workers(fork_server: Any, report_cold: Callable[[str], None]) -> str:
    """Make torchrun get its workers from the fork server.

    If this version of torch makes that impossible, return the reason; otherwise, return an empty
    string.
    """
    from ddpjob_runtime.launcher import forkserver

    if torch_parts.use_worker_handler(lambda base: forkserver.handler_class(base, fork_server, WORKER, report_cold)):
        return ""
    import torch

    return f"torch {torch.__version__} starts workers in an unsupported way; use a different version (2.6 or later)"


def require_torchrun() -> Any:
    """Import and return torch.distributed.run.

    Raises InitFailure if the image has no usable torchrun, because a retry would not help.
    """
    try:
        with lean_torch.for_rendezvous():  # In Fast mode, all of torch was already imported.
            run = import_torchrun()
            lacks = torch_parts.missing()
    # The import can fail in many ways. If a CUDA library is missing, the error is an OSError.
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise  # This node has a temporary problem. An error about a missing library has no errno.
        what = f"{sys.executable} (Python {sys.version.split()[0]}) cannot import torch.distributed.run: {error}"
        raise InitFailure(f"{what}; use an image whose python3 has PyTorch 2.6 or later") from error
    if lacks:
        import torch

        why = f"torch {torch.__version__} is not supported, because it lacks {', '.join(lacks)}"
        raise InitFailure(f"{why}; use an earlier version (2.6 or later), or a later release of DDPJob")
    return run


def parse(run: Any, arguments: list[str]) -> Any:
    """Parse the launcher's arguments as torchrun does.

    Raises InitFailure if torchrun rejects the arguments, because the job's manifest must be
    corrected.
    """
    parser = run.get_args_parser()

    def refuse(message: str) -> NoReturn:
        # Log the arguments here, because they may be too long for the job's status.
        log("arguments of torchrun: {}".format(" ".join(arguments)))
        raise InitFailure(f"torchrun rejects its arguments: {message}; correct spec.torchrunArgs")

    parser.error = refuse
    try:
        return parser.parse_args(arguments)
    except SystemExit:
        raise InitFailure(
            "with these arguments, torchrun only prints a message and exits: {}; correct spec.torchrunArgs".format(
                " ".join(arguments)
            )
        ) from None


def check_entry_point(parsed: Any) -> None:
    """Raise InitFailure if the program that torchrun should run cannot be found."""
    if parsed.no_python:
        check_command(parsed.training_script)
    elif parsed.module:
        check_module(parsed.training_script)
    else:
        check_script(parsed.training_script)


def patch_torch(client: MemberClient, shutdown: Shutdown, mode: Mode, preflight: NodePreflight | None) -> None:
    """Replace torchrun's agent, entry point and signal handler with the launcher's own."""
    from ddpjob_runtime.launcher import agent, rendezvous

    configs: list[Any] = []

    def wrap(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def config_from_args(parsed: Any) -> Any:
            run_worker(parsed)
            try:
                made = configure(parsed)
            except OSError as error:
                remedy = "; give the container a writable /tmp" if "temporary directory" in str(error) else ""
                raise InitFailure(f"torchrun cannot start: {error}{remedy}") from error
            except (ValueError, AssertionError, RuntimeError) as error:
                raise InitFailure(f"torchrun rejects its arguments: {error}") from error
            configs.append(made[0])
            return made

        return config_from_args

    torch_parts.wrap_configuration(wrap)
    torch_parts.use_agent(
        partial(
            agent.CoordinatedAgent, client, shutdown, mode, lambda: agent.rendezvous_parameters(configs[-1]), preflight
        )
    )
    torch_parts.tolerate_error_files()
    torch_parts.use_signal_handler(ignore_signal)  # watch_signals already handles these signals.
    if mode == Mode.FAST:
        rendezvous.register_fast(client, shutdown, preflight)


def run_worker(parsed: Any) -> None:
    """Make torchrun start worker.py, which then starts the program that the arguments name."""
    if not parsed.run_path:
        kind = "--exec" if parsed.no_python else "--module" if parsed.module else "--script"
        parsed.training_script_args = [kind, parsed.training_script, *parsed.training_script_args]
        parsed.training_script, parsed.module, parsed.no_python = WORKER, False, False


def classify(error: BaseException) -> tuple[str, int]:
    """Return (kind, exit code) for an exception that ended torchrun.

    A lost rendezvous is a consequence of a failure elsewhere. Any other exception is a failure of
    this node.
    """
    if "torch.distributed.elastic.rendezvous.api" not in sys.modules:
        # torch has not been imported, so there has been no rendezvous. Importing torch here might
        # raise the same error again.
        return "Error", 1
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if isinstance(error, (RendezvousError, dist.DistNetworkError, dist.DistStoreError)):
        return "RendezvousLost", protocol.EXIT_RENDEZVOUS_LOST
    return "Error", 1
