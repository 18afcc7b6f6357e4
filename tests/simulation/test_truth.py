"""The status is true: no statement in it stays untrue for more than two seconds."""

from __future__ import annotations

import asyncio
import random

import pytest
from ddpjob.core.status import conditions, describe

from .story import TAKES, Looks, Story
from .truth import UNKNOWABLE, Truth


def sampled(seed: int) -> Truth:
    """Sample the status of a story in a world where changes are reported soon."""
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
def test_no_statement_of_the_status_stays_untrue(seed: int) -> None:
    sampled(seed)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (describe, "count_training_nodes", lambda view: view.job.spec.nodes),
        (conditions, "_phase", lambda status: conditions.Phase.STARTING),
    ],
)
def test_an_untrue_status_is_found(module: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate defect in the displayed status."""
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(10):
            sampled(seed)
