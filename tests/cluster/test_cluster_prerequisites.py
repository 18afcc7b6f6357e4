"""A machine that cannot run the cluster reports the reason. The tests are skipped, or fail if
CI=true.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from testcluster import processes
from testcluster.settings import Settings

HERE = Path(__file__).parent
WITHOUT_RIGHTS = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_admin,-net_admin"]
SAMPLE = f"{HERE}/test_cluster_itself.py::test_nodes_are_ready_and_have_the_pinned_version"


def run_sample(words: list[str], **env: str) -> str:
    command = [*words, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", SAMPLE]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env={**os.environ, "CI": "", **env}, text=True, capture_output=True, check=False
    )
    return done.stdout


def test_tests_are_skipped_with_the_reason_if_rights_are_missing(cluster_machine: Settings) -> None:
    output = run_sample(WITHOUT_RIGHTS)
    assert "1 skipped" in output
    assert re.search(
        r"this machine cannot run the test cluster: cannot make network namespaces, links or mounts: .*not permitted",
        output,
    )


def test_tests_fail_if_rights_are_missing_and_ci_is_true(cluster_machine: Settings) -> None:
    output = run_sample(WITHOUT_RIGHTS, CI="true")
    assert "1 error" in output
    assert "CI=true, and this machine cannot run the test cluster" in output


@pytest.mark.parametrize(
    ("name", "said"),
    [("DDPJOB_CLUSTER_BIN", "lacks pause, etcd, .*unset it to have them built"), ("PATH", "no Go to build")],
)
def test_missing_binaries_are_reported(cluster_machine: Settings, tmp_path: Path, name: str, said: str) -> None:
    found = {
        "DDPJOB_CLUSTER_BIN": {"DDPJOB_CLUSTER_BIN": str(tmp_path)},
        "PATH": {"PATH": "/usr/sbin", "DDPJOB_CLUSTER_CACHE": str(tmp_path)},
    }[name]
    paths = os.pathsep.join((str(HERE), str(HERE.parent)))
    env = {**os.environ, "PYTHONPATH": paths, "DDPJOB_CLUSTER_SLOT": "15", **found}
    done = subprocess.run(
        [sys.executable, "-m", "testcluster", "up"], env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert not list(tmp_path.iterdir())


def test_the_limit_of_inotify_watches_is_raised_but_never_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "max_user_instances"
    monkeypatch.setattr(processes, "WATCHES", limit)
    for before, after in (("128\n", "1024"), ("8192\n", "8192\n")):
        limit.write_text(before)
        processes.allow_watches()
        assert limit.read_text() == after
