"""The operator with deliberate defects.

Reconciling the job `defect` always raises an error, and reconciling `blocks` blocks the event loop
for three seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ddpjob.controller import main
from ddpjob.engine.ports import JobKey
from ddpjob.engine.reconcile import reconcile

JOB = "defect"
BLOCKS = "blocks"


async def _reconcile(cluster: Any, key: JobKey, **others: Any) -> float | None:
    if key.name == JOB:
        raise ZeroDivisionError("a deliberate defect")
    if key.name == BLOCKS:
        time.sleep(3)  # noqa: ASYNC251  # The defect: nothing else can run during the sleep.
    return await reconcile(cluster, key, **others)


if __name__ == "__main__":
    main.reconcile = _reconcile
    sys.exit(main.main())
