"""A checkpoint in either format can be read by every Python that the trainer supports, whichever
Python wrote it.

The other Pythons have torch in the environments of `make matrix`. The matrix row for Debian 12's
Python runs this as well.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import exchange
import pytest
import yaml

from scripts import matrix

ROOT = Path(__file__).parents[3]


def other(name: str) -> str:
    """Return an interpreter with torch. `name` is a version X.Y, or CALLER for the interpreter that
    runs the matrix.
    """
    if name == matrix.CALLER:
        return os.environ.get(name) or pytest.skip("this Python would be compared with itself")
    if name == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("this Python would be compared with itself")
    try:
        return str(matrix.prepare(matrix.Row(name, importlib.metadata.version("torch").partition("+")[0])))
    except matrix.NotHere as why:
        pytest.skip(str(why))


@pytest.mark.slow
@pytest.mark.parametrize("name", [matrix.CALLER, "3.12", "3.13"])
def test_each_python_reads_the_checkpoints_that_the_other_has_written(name: str, tmp_path: Path) -> None:
    python = other(name)
    (tmp_path / "packages").mkdir()
    # The pure Python part of yaml works in all versions.
    (tmp_path / "packages" / "yaml").symlink_to(Path(yaml.__file__).parent)
    places = [ROOT / "trainer", ROOT / "runtime", ROOT / "operator", tmp_path / "packages"]
    environment = {**matrix.clean_environment(), "PYTHONPATH": os.pathsep.join(map(str, places))}

    def there(what: str, folder: Path) -> None:
        command = [python, str(Path(exchange.__file__)), what, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        print(what, done.stdout)

    there("write", tmp_path / "theirs")
    exchange.read(tmp_path / "theirs")
    exchange.write(tmp_path / "ours")
    there("read", tmp_path / "ours")
