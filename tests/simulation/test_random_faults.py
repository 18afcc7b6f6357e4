"""Jobs under random faults. Each seed is a separate world; invariants.py and the end of story.py
state what must hold.

The environment variable DDPJOB_SEEDS sets the number of seeds (300 by default). In a twentieth of
them, kubelets die, and in another twentieth, health agents report nodes. If there are few seeds,
some tests run no story.
"""

from __future__ import annotations

import asyncio
import os
import traceback

import pytest

from .story import KINDS

SEEDS = int(os.environ.get("DDPJOB_SEEDS", "300"))
PARTS = 40
"""Tests among which the seeds are divided, so that workers share them."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_invariants_hold_under_random_faults(part: int, kind: str) -> None:
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
