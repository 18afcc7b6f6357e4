"""Everything that runs inside a job's pods, in any image: coordinator, store, launcher, workers.

The package needs only Python 3.9 or later and its standard library, except that the launcher and
the store also need torch. In job pods, the package is an archive in a ConfigMap, mounted at
/opt/ddpjob. `protocol` is the only module that the operator shares with the coordinator and the
launcher.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
PROGRAM = _PACKAGE if _PACKAGE.is_dir() else _PACKAGE.parent
"""The path to give to Python: this folder or, in job pods, the archive that contains it."""
WORKER = PROGRAM / "worker.py" if PROGRAM == _PACKAGE else PROGRAM.with_name("ddpjob_worker.py")
"""The entry point of workers. In job pods, it is a separate file next to the archive."""
