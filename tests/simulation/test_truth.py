"""No statement in the status stays untrue for more than two seconds."""

from __future__ import annotations

import asyncio
import random

import pytest
from ddpjob.core.status import conditions, describe

from .story import TAKES, Looks, Story
from .truth import UNKNOWABLE, Truth


def sampled(seed: int) -> Truth:
    """Play a story in a world where changes are reported soon, and sample its status."""
    story = Story(seed)
    story.looks = Looks((0.5, 0.8), (0.02, 0.1))
    story.s.network.pace = TAKES[random.Random(seed).choice(("calm", "quick"))]
    story.left_out = UNKNOWABLE
    truth = Truth(story)
    asyncio.run(story.run())
    assert not truth.failed, truth.failed
    assert truth.samples > 20
    return truth


@pytest.mark.parametrize("seed", range(30))
def test_no_statement_in_the_status_stays_untrue(seed: int) -> None:
    sampled(seed)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (describe, "count_training_nodes", lambda view: view.job.spec.nodes),
        (conditions, "_phase", lambda status: conditions.Phase.STARTING),
    ],
)
def test_deliberate_defects_in_the_status_are_found(
    module: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each defect makes the status display something untrue."""
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(10):
            sampled(seed)
