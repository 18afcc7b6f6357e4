"""torchrun with a coordinator: the trainer container's main process.

    python3 launcher.py TORCHRUN_ARGUMENTS

Exit codes: 0 every node has finished; 76 rendezvous lost; 77 stopped by the coordinator; 78 the entry point cannot start; 128+N ended by
signal N (143: SIGTERM); 79 fenced, the group went on without this node; anything else is a failure of this node.

DDPJOB_RECOVERY=Fast: rounds without c10d, and workers forked from a process that has imported torch (DDPJOB_PRELOAD names more modules).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent

import reaper  # noqa: E402
import stacks  # noqa: E402
import wire  # noqa: E402
from departure import Departure, die_with_parent, ignore_signal, say, watch_signals  # noqa: E402
from entrypoint import InitFailure, check_command, check_module, check_script  # noqa: E402
from link import Link  # noqa: E402

LOST_GRACE = 3.0  # for workers when the coordinator is gone: time to save if they know how
REPORT_SECONDS = 15.0  # how long a node that cannot start waits to tell the coordinator so
COLD_WORKERS = "ColdWorkers"  # of a note: why workers of this node are not pre-warmed
REQUIRED = ("DDPJOB_COORDINATOR", "DDPJOB_TOKEN", "DDPJOB_POD", "DDPJOB_INDEX", "DDPJOB_ATTEMPT")


def main() -> NoReturn:
    """Run until the job is done or this node has to end; never returns."""
    faulthandler.enable()
    if os.getpid() == 1:
        reaper.become_init()
        die_with_parent()
    departure = Departure(grace_seconds())
    mode = os.environ.get("DDPJOB_RECOVERY", wire.STANDARD)
    try:
        link = connect(departure, mode)
    except InitFailure as error:
        departure.leave(wire.EXIT_INIT_FAILURE, "InitFailure", str(error))
        raise
    stacks.prepare()
    nursery, cold = warm_up() if mode == wire.FAST else (None, "")  # before any thread is started
    watch_signals(lambda number: on_signal(number, link, departure))
    departure.close_link = link.close
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a replaced node never learns of rank 0's store
    os.environ["DDPJOB_LAUNCHER_PID"] = str(os.getpid())
    link.start()
    try:
        torchrun(sys.argv[1:], link, departure, mode, nursery, cold)
        departure.leave(wire.EXIT_DONE, "Done", "")
    except InitFailure as error:
        if link.wait_welcome(REPORT_SECONDS):
            link.send("init_failure", message=str(error))
        departure.leave(wire.EXIT_INIT_FAILURE, "InitFailure", str(error))
    except BaseException as error:
        departure.park_if_leaving()
        kind, code = classify(error)
        departure.leave(code, kind, f"{type(error).__name__}: {error}", traceback.format_exc(), grace=LOST_GRACE)
    raise AssertionError("unreachable")


def grace_seconds() -> float:
    """Time for workers between SIGTERM and SIGKILL: the pod's grace less what the launcher needs itself."""
    text = os.environ.get("DDPJOB_GRACE_SECONDS", "30")
    try:
        return max(0.5, float(text) - 2.0)
    except ValueError:
        say(f"DDPJOB_GRACE_SECONDS must be a number of seconds, not {text!r}; takes 30")
        return 28.0


def connect(departure: Departure, mode: str) -> Link:
    """The link to the coordinator, not started yet."""
    if mode not in wire.RECONNECT_SECONDS:
        raise InitFailure("DDPJOB_RECOVERY must be {}, not {!r}".format(" or ".join(wire.RECONNECT_SECONDS), mode))
    missing = [name for name in REQUIRED if not os.environ.get(name)]
    if missing:
        raise InitFailure("environment variables missing: {}; the launcher is started by the operator".format(", ".join(missing)))
    identity: dict[str, Any] = {"token": os.environ["DDPJOB_TOKEN"], "pod": os.environ["DDPJOB_POD"], "pid": os.getpid()}
    identity["grace"] = departure.grace_seconds
    for name in ("INDEX", "ATTEMPT", "GENERATION"):
        text = os.environ.get("DDPJOB_" + name, "0")
        if not text.isdigit():
            raise InitFailure(f"DDPJOB_{name} must be a whole number, not {text!r}")
        identity[name.lower()] = int(text)

    def on_end(code: int, kind: str, message: str) -> None:
        grace = departure.grace_seconds if code == wire.EXIT_STOPPED else LOST_GRACE
        departure.leave(code, kind, message, grace=grace)

    timeout = re.search(r"\bjoin_timeout=(\d+)", " ".join(sys.argv[1:]))
    try:
        return Link(os.environ["DDPJOB_COORDINATOR"], identity, mode, float(timeout.group(1)) if timeout else 600.0, on_end)
    except ValueError as error:
        raise InitFailure(str(error)) from None


def on_signal(number: signal.Signals, link: Link, departure: Departure) -> None:
    """Say at once that this node leaves, then give the workers the pod's grace."""
    why = f"told to end by {number.name}"
    departure.leave(128 + number, "Signal", why, grace=departure.grace_seconds, announce=lambda: link.send("leaving", why=why))


def hide_siblings() -> None:
    """From now on torch and the user's modules are found as if this file's folder did not exist."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]


def torchrun(arguments: list[str], link: Link, departure: Departure, mode: str, nursery: Any, cold: str) -> None:
    """torch.distributed.run's `main` with this launcher's agent and entry point; returns when every node has finished."""
    hide_siblings()
    run = import_torchrun()
    parsed = parse(run, arguments)
    if not parsed.run_path:
        check_entry_point(parsed)
    if str(parsed.nproc_per_node).isdigit():
        os.environ.setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")  # all nodes alike: no exchange of sizes that a dying node could block
    link.wait_welcome()
    if link.done:
        return
    patch_torch(run, link, departure, mode)
    if mode == wire.FAST:
        cold = cold or why_cold(parsed) or warm_workers(nursery)
        if cold:
            say(f"workers of this node are not pre-warmed: {cold}")
            link.send("note", kind=COLD_WORKERS, why=cold)
    run.run(parsed)


def warm_up() -> tuple[Any, str]:
    """(the process that forks workers, why there is none). An image without torch is told of where torchrun is imported."""
    if "OMP_NUM_THREADS" not in os.environ and processes_per_node() > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # torchrun's own rule; read when torch is imported, which is now
    if not hasattr(os, "fork"):
        return None, "this system cannot fork"
    import warm

    hide_siblings()
    try:
        warm.preload(os.environ.get("DDPJOB_PRELOAD", ""))
    except ImportError as error:
        return None, str(error)
    return warm.Nursery(), ""


def processes_per_node() -> int:
    """As torchrun's arguments say; 1 where they name a kind of device."""
    found = re.findall(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(sys.argv[1:]))
    return int(found[-1]) if found else 1


def why_cold(parsed: Any) -> str:
    """Why the arguments do not allow workers to be forked; empty when they do."""
    if parsed.no_python:
        return "with --no-python the program is started anew for every worker; name a Python script or module instead"
    if parsed.run_path:
        return "with --run-path torchrun starts the workers itself; remove it"
    return ""


def warm_workers(nursery: Any) -> str:
    """Have torchrun take its workers from the nursery; returns why that cannot be, for a torch that does not have the seam."""
    import torch
    import torch.distributed.elastic.multiprocessing.api as processes
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    base = getattr(subprocess_handler, "SubprocessHandler", None)
    if not hasattr(processes, "get_subprocess_handler") or not hasattr(base, "_popen"):
        return f"torch {torch.__version__} starts its workers in a way that is not known here; use another version from 2.6 on"
    import warm

    warm_handler = warm.handler_class(base, nursery, str(HERE / "entry.py"))
    processes.get_subprocess_handler = lambda *args, **kwargs: warm_handler(*args, **kwargs)
    return ""


def import_torchrun() -> Any:
    """torch.distributed.run; an image that cannot import it cannot run the job, however often it is tried."""
    try:
        from torch.distributed import run
    except ImportError as error:
        what = f"{sys.executable} (Python {sys.version.split()[0]}) cannot import torch.distributed.run: {error}"
        raise InitFailure(f"{what}; use an image whose python3 has PyTorch 2.6 or later") from error
    return run


def parse(run: Any, arguments: list[str]) -> Any:
    """torchrun's own parsing; what it refuses is a mistake in the job's manifest."""
    parser = run.get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise InitFailure("torchrun refuses its arguments: {} (arguments: {})".format(message, " ".join(arguments)))

    parser.error = refuse
    try:
        return parser.parse_args(arguments)
    except SystemExit:
        raise InitFailure("torchrun arguments that only print something cannot run a job: {}".format(" ".join(arguments))) from None


def check_entry_point(parsed: Any) -> None:
    """Raises InitFailure when what shall run cannot be found."""
    if parsed.no_python:
        check_command(parsed.training_script)
    elif parsed.module:
        check_module(parsed.training_script)
    else:
        check_script(parsed.training_script)


def patch_torch(run: Any, link: Link, departure: Departure, mode: str) -> None:
    """Put the agent, the entry point and the signal handling of this launcher in place of torchrun's."""
    sys.path.insert(0, str(HERE))
    import agent
    import rounds

    sys.path.remove(str(HERE))
    import torch.distributed.elastic.multiprocessing.api as processes
    import torch.distributed.launcher.api as launcher_api

    configs: list[Any] = []
    launcher_api.LocalElasticAgent = agent.agent_class(link, departure, mode, lambda: agent.rendezvous_parameters(configs[-1]))
    if mode == wire.FAST:
        rounds.register_fast(link, departure)
    processes._terminate_process_handler = ignore_signal  # set by torchrun for the signals that watch_signals has seen already
    configure = run.config_from_args

    def config_from_args(parsed: Any) -> Any:
        if not parsed.run_path:
            kind = "--exec" if parsed.no_python else "--module" if parsed.module else "--script"
            parsed.training_script_args = [kind, parsed.training_script, *parsed.training_script_args]
            parsed.training_script, parsed.module, parsed.no_python = str(HERE / "entry.py"), False, False
        try:
            made = configure(parsed)
            configs.append(made[0])
            return made
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise InitFailure(f"torchrun refuses its arguments: {error}") from error

    run.config_from_args = config_from_args


def classify(error: BaseException) -> tuple[str, int]:
    """(kind, exit code) of an exception that ended torchrun: a lost rendezvous is a consequence, anything else a failure of this node."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if isinstance(error, (RendezvousError, dist.DistNetworkError, dist.DistStoreError)):
        return "RendezvousLost", wire.EXIT_RENDEZVOUS_LOST
    return "Error", 1


if __name__ == "__main__":
    main()
