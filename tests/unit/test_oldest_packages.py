"""The oldest packages that pyproject.toml allows, which some users have installed, and the newest
packages that are compatible with each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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

pytestmark = pytest.mark.slow  # The packages are downloaded.
Uv = Callable[..., str]
"""uv's arguments -> its output."""


@pytest.fixture
def uv(tmp_path: Path) -> Uv:
    """Run uv in `tmp_path` with pip's settings. The test is skipped without uv or without a package
    index.
    """
    program = Path(sys.executable).with_name("uv")
    if not program.exists():
        pytest.skip("uv is not installed next to this Python; scripts/install.py installs it")
    listed = subprocess.run([*install.PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    environment = {**install.settings(listed), **os.environ}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if "Failed to fetch" in done.stderr or "Request failed" in done.stderr:
            pytest.skip(f"the packages cannot be fetched here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("extras", "arguments"),
    [
        (["cli"], ["-m", "ddpjob.cli", "submit", "--dry-run", "job.yaml"]),
        (["cli"], ["-c", "import ddpjob.dashboard.__main__"]),
        (["operator", "cli"], ["-c", "import ddpjob.controller.main"]),
    ],
)
def test_the_oldest_allowed_packages_are_sufficient(
    uv: Uv, tmp_path: Path, extras: list[str], arguments: list[str]
) -> None:
    python = tmp_path / "oldest" / "bin" / "python"
    uv("venv", "--python", sys.executable, "oldest")
    # ".[cli]" would not do, because requirements of an extra do not count as direct.
    chosen = [option for extra in extras for option in ("--extra", extra)]
    requirements = ["--requirements", str(ROOT / "pyproject.toml")]
    uv("pip", "install", "--python", str(python), "--resolution=lowest-direct", *requirements, *chosen)
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'runtime'}", "KUBECONFIG": "/dev/null",
    }  # fmt: skip
    done = subprocess.run(
        [python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_all_extras_can_be_installed_together(uv: Uv) -> None:
    found = uv("pip", "compile", "--all-extras", "--no-header", str(ROOT / "pyproject.toml")).splitlines()
    assert any(line.startswith("kubernetes==37.") for line in found)
    assert any(line.startswith("s3fs==20") for line in found)
