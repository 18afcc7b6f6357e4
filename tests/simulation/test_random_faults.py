"""Jobs under random faults, each seed a world of its own; what must hold is in invariants.py and at
the end of story.py.

The environment variable DDPJOB_SEEDS says how many seeds are played (300 without it); a twentieth with kubelets that
die, and one with health agents that speak against nodes, so that of few seeds some parts play none.
"""

from __future__ import annotations

import asyncio
import os
import traceback

import pytest

from .story import KINDS

SEEDS = int(os.environ.get("DDPJOB_SEEDS", "300"))
PARTS = 40
"""Tests that the seeds are dealt to, so that workers share them."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults(part: int, kind: str) -> None:
    for seed in range(part, SEEDS // 20 if kind else SEEDS, PARTS):
        story = KINDS[kind](seed)
        try:
            asyncio.run(story.run())
        except Exception:
            pytest.fail(
                f"{traceback.format_exc()}\n\nTo see what happened:\n"
                f"    .venv/bin/python tests/simulation/replay.py --seed {seed} --trace"
                + (f" --kind {kind}" if kind else ""),
                pytrace=False,
            )
