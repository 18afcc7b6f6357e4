"""scripts/install.py: pip's settings also apply to uv, and pip replaces uv if uv fails."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.py"
INSTALL = runpy.run_path(str(SCRIPT))
PIP_CONF = """
[global]
index-url = http://mirror.example/simple
extra-index-url =
    http://one.example/simple
    http://two.example/simple
timeout = 3
[install]
find-links = /wheels /more
"""


def test_uv_uses_the_package_index_of_pips_settings(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}

    def found(**variables: str) -> dict[str, str]:
        environment = {**bare, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}
        command = [*INSTALL["PIP"], "config", "list"]
        listed = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout
        return dict(INSTALL["settings"](listed))

    assert {name: value for name, value in found().items() if name.startswith("UV_")} == {
        "UV_DEFAULT_INDEX": "http://mirror.example/simple",
        "UV_INDEX": "http://one.example/simple http://two.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
    }
    assert found(PIP_INDEX_URL="http://own.example/simple")["UV_DEFAULT_INDEX"] == "http://own.example/simple"
    assert found(PIP_CERT="/own.pem")["SSL_CERT_FILE"] == "/own.pem"


@pytest.mark.parametrize(
    ("uv", "pip", "says", "code"),
    [
        ("exit 0", "exit 9", "uv pip install --python", 0),
        ("exit 2", "exit 0", "uv failed; trying pip\n", 0),
        ("exit 2", "exit 1", "uv failed; trying pip\n", 1),
        ("", "exit 0", "uv cannot be installed here; using pip instead\n", 0),
    ],
)
def test_pip_is_used_only_if_uv_fails_or_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    uv: str,
    pip: str,
    says: str,
    code: int,
) -> None:
    """Both are stand-ins. The pip that would install a missing uv fails."""
    programs = {"python": f'case "$*" in *--quiet*) exit 1;; *config*) exit 0;; *) echo "$@"; {pip};; esac'}
    programs |= {"uv": f'echo "uv $@"; {uv}'} if uv else {}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert runpy.run_path(str(SCRIPT))["main"](["six"]) == code
    out, err = capfd.readouterr()
    assert says in out + err
    assert ("-m pip --disable-pip-version-check install --no-compile six\n" in out) == (uv != "exit 0")
