"""Proof that the seeds find defects.

For each deliberate defect, a seed must fail with the defect and pass without it.
"""

from __future__ import annotations

import pytest

from .defects import DEFECTS, finds


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_is_found(name: str) -> None:
    defect = DEFECTS[name]
    assert not finds(defect.seed, defect.faults), "the seed fails without the defect"
    with defect.applied():
        assert finds(defect.seed, defect.faults), (
            f"seed {defect.seed} no longer finds it; `replay.py defects` finds one that does"
        )
