"""Tests of the runtime alone. They need only pytest, or torch for real workers, and run on Python
3.9 or later.

`make matrix MATRIX="--python 3.9 --torch none"` runs them without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "runtime"), str(ROOT / "tests")]
