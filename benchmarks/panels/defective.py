"""The operator with a deliberate defect: each reconcile of a job called `defect` raises an error."""

from __future__ import annotations

import sys
from typing import Any

from ddpjob.controller import main
from ddpjob.engine.ports import JobKey
from ddpjob.engine.reconcile import reconcile

JOB = "defect"


async def _reconcile(cluster: Any, key: JobKey, **others: Any) -> float | None:
    if key.name == JOB:
        raise ZeroDivisionError("a deliberate defect")
    return await reconcile(cluster, key, **others)


if __name__ == "__main__":
    main.reconcile = _reconcile
    sys.exit(main.main())
