"""Runs the coordinator of one job, which forms rounds of members and reports on them.

    python3 PATH/ddpjob_runtime coordinator --port 29401 --nodes N [--min-nodes M] [--mode Standard|Fast] [--attempt A]
        [--store-port 29400] [--host ADDRESS] [--hang-after SECONDS] [--hangs End|Report]
        [--backoff INITIAL:MAXIMUM]

Environment: DDPJOB_TOKEN, DDPJOB_GENERATION, DDPJOB_RANK_ORDER (1: the operator will send the order
of the ranks), DDPJOB_NO_RESTARTS (1: recovery.maxRestarts is 0), POD_IP.

With --store-port, a child process hosts the c10d store. When that process ends, the coordinator
exits with code 1, or with 78 if torch is unusable. The store listens on one address: --host or, if
that is not set, POD_IP.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from typing import NoReturn

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime import PROGRAM, protocol
from ddpjob_runtime.coordinator.server import Server, log
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.log_lines import divert_loggers
from ddpjob_runtime.open_files import raise_open_files
from ddpjob_runtime.protocol import CoordinatorState, Hangs, IncidentKind, Mode
from ddpjob_runtime.termination_log import write_termination_log

KEPT_OUTPUT = 16 * 1024
"""Number of bytes to keep from the end of the store process's output."""


async def _host_store(server: Server, host: str, port: int) -> int:
    """Run the store process until it exits, and return the exit code for the coordinator."""
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), "store", "--port", str(port), "--host", host,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:  # The process limit has been reached, or memory is exhausted.
        log(f"cannot start the store's process: {error}")
        return 1
    assert child.stdout is not None
    said = bytearray()
    reading = asyncio.ensure_future(_read(child.stdout, said, server))
    code = await child.wait()
    # Child processes of the store may keep its output open, so do not wait for it to close.
    await asyncio.wait([reading], timeout=1.0)
    if code == protocol.EXIT_INIT_FAILURE:
        why = said.decode(errors="replace").strip().rpartition("\n")[2]
        log(why)
        write_termination_log(IncidentKind.INIT_FAILURE, why)
        return code
    log(f"the store's process ended with exit code {code}, so this coordinator exits")
    return 1


async def _read(output: asyncio.StreamReader, said: bytearray, server: Server) -> None:
    """Read all output of the store process, and record that the store is ready once the line `ready
    PORT` appears.

    Keep the last KEPT_OUTPUT bytes in `said`. Code in the image may print other lines of any length
    when Python starts, when torch is imported, or later.
    """
    ready = False
    while piece := await output.read(KEPT_OUTPUT):
        said += piece
        if not ready and (found := re.search(rb"\n(ready \d+)\n", said)):
            ready = True
            server.store_is_ready()
            log(f"store: {found[1].decode()}")
        del said[:-KEPT_OUTPUT]


async def _until_asked(server: Server) -> int:
    """Wait until the coordinator decides to exit (`exit_why`), and return exit code 0."""
    while server.coordinator.exit_why is None:
        await server.wait_for_change()
    log(f"exits: {server.coordinator.exit_why}")
    return 0


async def run(arguments: argparse.Namespace, settings: CoordinatorSettings, token: str) -> NoReturn:
    """Run the coordinator, and end the process with an exit code. Never returns.

    The exit code is 0 if the coordinator was asked to exit, 1 if the store process has ended, and
    78 if torch is unusable. SIGTERM ends the process immediately with exit code 143. If the job has
    succeeded, the exit code is 0 instead, so that the pod is not shown as failed.

    Raises OSError if the coordinator cannot listen on the port.
    """
    server = Server(settings, token, store_ready=arguments.store_port is None)
    rounds = server.coordinator.rounds
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0 if rounds.state == CoordinatorState.SUCCEEDED else 143))
    await server.listen(arguments.host or None, arguments.port)
    what = f"{settings.mode}, generation {settings.generation}, attempt {settings.attempt}"
    log(f"{what}: listening on port {arguments.port} for {settings.min_nodes} to {settings.nodes} nodes")
    server.watch_for_stalls()
    ends = [asyncio.ensure_future(_until_asked(server))]
    if arguments.store_port is not None:
        ends.append(asyncio.ensure_future(_host_store(server, arguments.store_host, arguments.store_port)))
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    code = done.pop().result()
    os._exit(code)  # Exit directly. Since Python 3.12, closing a server would first wait for its open connections.


def backoff(text: str) -> tuple[float, float]:
    """Parse `INITIAL:MAXIMUM`, in seconds."""
    first, colon, last = text.partition(":")
    try:
        initial, maximum = float(first), float(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be INITIAL:MAXIMUM in seconds, such as 1:60, not {text!r}") from None
    if not 0 < initial <= maximum < float("inf"):
        raise argparse.ArgumentTypeError(f"INITIAL must be above 0 and at most MAXIMUM, not {text!r}")
    return initial, maximum


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text!r}")
    return value


def main() -> None:
    """Read the arguments and the environment, and run the coordinator."""
    parser = argparse.ArgumentParser(description="The coordinator of one DDPJob.", allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True, help="port for members and HTTP")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes in a complete group")
    parser.add_argument("--min-nodes", type=int, help="minimum number of nodes to train with (default: --nodes)")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.STANDARD, help="spec.recovery.mode")
    parser.add_argument("--attempt", type=int, default=0, help="number of earlier coordinators of this generation")
    parser.add_argument("--store-port", type=int, help="port of the c10d store (mode Standard only; default: no store)")
    parser.add_argument(
        "--hang-after",
        type=seconds,
        help="consider the group hung after this many seconds without a step (default: never)",
    )
    parser.add_argument("--hangs", type=Hangs, choices=list(Hangs), default=Hangs.END, help="spec.recovery.hangs")
    parser.add_argument(
        "--backoff",
        type=backoff,
        default=(1.0, 60.0),
        help="delays between restarts in a crash loop: INITIAL:MAXIMUM, in seconds",
    )
    parser.add_argument(
        "--host", default="", help="address to listen on (default: all addresses, but POD_IP for the store)"
    )
    arguments = parser.parse_args()
    arguments.store_host = arguments.host or os.environ.get("POD_IP", "")
    settings = read_settings(parser, arguments)
    token = JobEnvironment.read().token
    if not token:
        parser.error("the environment variable DDPJOB_TOKEN is missing or empty: set it to the job's token")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    # SIGTERM was blocked until this handler was set. This process may be PID 1 of its container,
    # and the kernel discards signals for which PID 1 has no handler.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    divert_loggers(log)  # This also diverts the loggers of asyncio.
    # Each pod's connection needs a file descriptor, and so does each connection from an unknown
    # peer.
    raise_open_files()
    try:
        asyncio.run(run(arguments, settings, token))
    except OSError as error:
        sys.exit(f"coordinator: cannot listen on port {arguments.port}: {error}")


def read_settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> CoordinatorSettings:
    """Return the group's settings. If they are invalid, end the process with exit code 2."""
    min_nodes = arguments.nodes if arguments.min_nodes is None else arguments.min_nodes
    if arguments.nodes < 1:
        parser.error("--nodes: must be at least 1")
    if not 1 <= min_nodes <= arguments.nodes:
        parser.error(f"--min-nodes: must be from 1 to --nodes ({arguments.nodes}), not {min_nodes}")
    if arguments.attempt < 0:
        parser.error("--attempt: must not be negative")
    mode: Mode = arguments.mode
    if mode == Mode.FAST and arguments.store_port is not None:
        parser.error("--store-port has no effect with --mode Fast; leave it out")
    job = JobEnvironment.read()
    generation = job.generation or "0"
    if not generation.isdigit():
        parser.error(f"DDPJOB_GENERATION must be a whole number, not {generation!r}")
    initial, maximum = arguments.backoff
    ordered, no_restarts = job.rank_order == "1", job.no_restarts == "1"
    times = arguments.hang_after, initial, maximum
    return CoordinatorSettings(
        arguments.nodes,
        min_nodes,
        int(generation),
        mode,
        arguments.attempt,
        *times,
        ordered,
        no_restarts,
        arguments.hangs,
    )
