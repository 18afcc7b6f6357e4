"""The module `ddpjob_report.py` in job pods, which loads the real package from the archive.

A program whose PYTHONPATH contains this file's folder gets this module from `import ddpjob_report`.
The module then replaces itself with the package.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

archive = str(Path(__file__).with_name("ddpjob_runtime"))
sys.path.append(archive)
spec = PathFinder.find_spec(__name__, [archive])
assert spec is not None and spec.loader is not None
sys.modules[__name__] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
