"""The oldest packages that pyproject.toml allows: who has them installed already keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).parents[2]
JOB = """
apiVersion: ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: first}
spec: {image: image, script: train.py, nodes: 2}
"""

pytestmark = pytest.mark.slow  # They are fetched.


@pytest.mark.parametrize(
    ("extras", "arguments"),
    [
        (["cli"], ["-m", "ddpjob.cli", "submit", "--dry-run", "job.yaml"]),
        (["cli"], ["-c", "import ddpjob.dashboard.__main__"]),
        (["operator", "cli"], ["-c", "import ddpjob.controller.main"]),
    ],
)
def test_they_are_enough(tmp_path: Path, extras: list[str], arguments: list[str]) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("no uv beside this Python: scripts/install.py brings it")
    listed = subprocess.run([*install.PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    environment = {**install.settings(listed), **os.environ}
    environment |= {"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'runtime'}", "KUBECONFIG": "/dev/null"}
    python = tmp_path / "oldest" / "bin" / "python"

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert run(uv, "venv", "--python", sys.executable, "oldest").returncode == 0
    # Not ".[cli]": what an extra asks for would not count as direct.
    chosen = [option for extra in extras for option in ("--extra", extra)]
    lowest = [uv, "pip", "install", "--python", python, "--resolution=lowest-direct"]
    installed = run(*lowest, "--requirements", ROOT / "pyproject.toml", *chosen)
    if "Failed to fetch" in installed.stderr or "Request failed" in installed.stderr:
        pytest.skip(f"the packages cannot be fetched here: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "job.yaml").write_text(JOB)
    done = run(python, *arguments)
    assert done.returncode == 0, done.stderr
