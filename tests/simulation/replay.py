"""Runs stories by their seeds.

.venv/bin/python tests/simulation/replay.py --seed 1234 [--trace]    one story; --trace prints it as a time line
.venv/bin/python tests/simulation/replay.py soak --minutes 60        new seeds until the time is over
.venv/bin/python tests/simulation/replay.py run --seeds 0:2000       a range of seeds
.venv/bin/python tests/simulation/replay.py defects                  the first seed that finds each defect
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simulation.defects import DEFECTS, first_that_finds
from simulation.story import KINDS, Story


def play(seed: int, *, trace: bool = False) -> Story:
    """Play one story. Raises AssertionError."""
    story = Story(seed, trace=trace)
    asyncio.run(story.run())
    return story


def replay(seed: int, *, trace: bool, kind: str = "") -> int:
    """Play a story and print it, or only its outcome. `kind` selects the kind of story."""
    story = KINDS[kind](seed, trace=trace)
    failed = ""
    try:
        asyncio.run(story.run())
    except AssertionError:
        failed = traceback.format_exc()
    print(f"seed {seed}: {story.spec}, pace {story.pace}, faults {dict(story.faults)}")
    for line in story.s.story:
        print(line)
    print(
        failed
        or f"ends well after {story.s.now:.1f} s: {story.s.phase}, restarts {story.s.status['restarts']['display']}"
    )
    return 1 if failed else 0


def run(seeds: Iterable[int], until: float = float("inf"), kind: str = "") -> int:
    """Play many stories, and print the replay command of each failure."""
    began, count, failed, faults = time.monotonic(), 0, 0, Counter[str]()
    reconciles, seconds = 0, 0.0
    for seed in seeds:
        if time.monotonic() > until:
            break
        story = KINDS[kind](seed)
        count += 1
        try:
            asyncio.run(story.run())
        except AssertionError as error:
            failed += 1
            print(
                f"seed {seed}: {str(error)[:300]}\n"
                f"    .venv/bin/python tests/simulation/replay.py --seed {seed} --trace"
                + (f" --kind {kind}" if kind else "")
            )
        faults += story.faults
        reconciles += story.reconciles
        seconds += story.s.now
    took = time.monotonic() - began
    print(f"{count} seeds, {failed} failed, in {took:.1f} s ({count / took:.1f} a second); {reconciles} reconciles, "
          f"{seconds:.0f} simulated seconds")  # fmt: skip
    print(", ".join(f"{name} {n}" for name, n in faults.most_common()))
    return 1 if failed else 0


def defects(limit: int = 300) -> int:
    """Find the first seed that detects each deliberate defect, and print its message."""
    missed = 0
    for name, defect in DEFECTS.items():
        seed, found = first_that_finds(defect, limit)
        missed += seed < 0
        print(
            f"{defect.part}: {name}: " + (f"seed {seed}: {found[:100]}" if seed >= 0 else f"not found by {limit} seeds")
        )
    return 1 if missed else 0


def main() -> int:
    """Run the command line in the module's docstring."""
    parser = argparse.ArgumentParser(description="Stories of the simulation by their seeds.")
    parser.add_argument("what", nargs="?", choices=["replay", "run", "soak", "defects"], default="replay")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--kind", choices=KINDS, default="", help="with kubelets that die, or with health agents")
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.what == "replay":
        if arguments.seed is None:
            parser.error("--seed is missing")
        return replay(arguments.seed, trace=arguments.trace, kind=arguments.kind)
    if arguments.what == "defects":
        return defects()
    if arguments.what == "soak":
        first = int(time.time()) * 1000
        print(f"from seed {first} on, for {arguments.minutes:g} minutes")
        return run(range(first, first + 10**9), time.monotonic() + 60 * arguments.minutes, arguments.kind)
    first, _, last = arguments.seeds.partition(":")
    return run(range(int(first), int(last)), kind=arguments.kind)


if __name__ == "__main__":
    sys.exit(main())
