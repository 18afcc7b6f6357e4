"""Computes a job's expected weights by undisturbed training with the same ranks per step.

When the number of ranks changes, float32 sums are computed in a different order from then on, and
training amplifies the difference. An elastic job therefore cannot be compared with a run on a fixed
number of ranks. It is, however, bit-identical to a run whose number of ranks changes at the same
steps.

    python replay.py FOLDER WORLD:STEP [WORLD:STEP ...] -- ARGUMENTS_OF_THE_TRAINER

WORLD ranks train until after STEP; the last WORLD trains to the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ddpjob_trainer.commands.check_ledger import Incarnation

Segments = tuple[tuple[int, int], ...]
"""(ranks, last step)"""


def segments(incarnations: list[Incarnation]) -> Segments:
    """Return the segments of a ledger's final history: how many ranks took which steps."""
    worlds: dict[int, int] = {}
    for incarnation in incarnations:
        worlds = {step: world for step, world in worlds.items() if step <= incarnation.start}
        worlds.update(dict.fromkeys(incarnation.parts, incarnation.world))
    found: list[tuple[int, int]] = []
    for step, world in sorted(worlds.items()):
        if found and found[-1][0] == world:
            found.pop()
        found.append((world, step))
    return tuple(found)


def replay(folder: Path, parts: Segments, arguments: list[str]) -> Path:
    """Train unless an earlier call did so. Return the checkpoint folder.

    Raises CalledProcessError.
    """
    own = folder / ("replay-" + "-".join(f"{world}x{step}" for world, step in parts))
    if not own.exists():
        words = [f"{world}:{step}" for world, step in parts]
        command = [sys.executable, __file__, str(own), *words, "--", *arguments]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return own


# ---- The program. It imports torch once and forks the ranks.


def main() -> int:
    """Run the replay, and return its exit code."""
    from ddpjob_trainer.distributed.init_method import free_port

    mark = sys.argv.index("--")
    folder, parts = sys.argv[1], [tuple(map(int, word.split(":"))) for word in sys.argv[2:mark]]
    arguments, done = [*sys.argv[mark + 1 :], f"checkpoint.dir={folder}"], 0
    for number, (world, last) in enumerate(parts, 1):
        expected = 0 if number == len(parts) else 75
        port = free_port()
        stop = None if number == len(parts) else last - done
        ranks = [
            fork(lambda rank=rank, world=world, port=port, stop=stop: run_rank(rank, world, port, stop, arguments))
            for rank in range(world)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if codes != [expected] * world:
            print(
                f"replay of steps {done + 1} to {last} on {world} ranks ended with {codes} instead of {expected}",
                file=sys.stderr,
            )
            return 1
        done = last
    return 0


def fork(run: Callable[[], NoReturn]) -> int:
    """Fork a child that calls `run`. Return its process id."""
    child = os.fork()
    if child == 0:
        run()
    return child


def run_rank(rank: int, world: int, port: int, stop: int | None, arguments: list[str]) -> NoReturn:
    """Run one rank, which is asked to stop during step number `stop`."""
    import traceback

    from ddpjob_trainer import config, train
    from ddpjob_trainer.lifecycle import signals

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    begin, asked = signals.StopRequest.agreement, [0]

    def agreement(self: signals.StopRequest, save_due: bool) -> signals.Agreement:
        asked[0] += 1
        if asked[0] == stop:
            self._requested.set()
        return begin(self, save_due)

    signals.StopRequest.agreement = agreement  # type: ignore[method-assign]
    signals.PACE_SECONDS = 0.0  # Agree at each step.
    try:
        code = train.run(config.load(None, arguments))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    import torch  # noqa: F401 (imported once for all ranks)

    sys.exit(main())
