"""The operator with deliberate defects.

Each reconcile of the job `defect` raises an error, and that of `blocks` waits for three seconds,
in which the event loop does nothing else.
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
        time.sleep(3)  # noqa: ASYNC251  # The defect: nothing else runs meanwhile.
    return await reconcile(cluster, key, **others)


if __name__ == "__main__":
    main.reconcile = _reconcile
    sys.exit(main.main())
