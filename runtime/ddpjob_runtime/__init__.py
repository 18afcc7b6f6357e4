"""What runs inside the pods of a job, in any image: the coordinator, its store, and the launcher with its workers.

Needs Python 3.9 or later and its standard library; the launcher and the store also need torch. Job pods find the
package in an archive of a ConfigMap that is mounted at /opt/ddpjob. `protocol` is all that coordinator, launcher and
operator share.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
PROGRAM = _PACKAGE if _PACKAGE.is_dir() else _PACKAGE.parent
"""What Python runs: this folder, or in job pods the archive that holds it."""
WORKER = PROGRAM / "worker.py" if PROGRAM == _PACKAGE else PROGRAM.with_name("ddpjob_worker.py")
"""The workers' entry, as a file of its own."""
