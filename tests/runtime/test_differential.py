"""A script notices no difference between torchrun, Standard and Fast, except for those listed in
one table.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import differential
import pytest
from differential_corpus import PROGRAMS
from runtime_harness import SCRIPTS, Job

ROOT = Path(__file__).resolve().parents[2]
PROBE = str(SCRIPTS / "probe.py")
OF_A_RUN = {
    "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "OUT",
}  # fmt: skip
"""Variables whose values belong to a single run."""
OF_THE_LAUNCHER = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_WORKER_IDENTICAL", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}  # fmt: skip
"""Variables for torchrun's agent, which workers inherit."""
DEFECTS = {
    "bytecode": ("worker.py", 'if not path.endswith(".pyc") and not source.startswith(MAGIC_NUMBER):', "if True:"),
    "keyboard_interrupt": ("launcher/forkserver.py", "return -signal.SIGINT", "return 130"),
    "environment": ("launcher/forkserver.py", "        os.environ.update(environment)\n", ""),
    "process": ("launcher/forkserver.py", "os.setsid()", "os.setpgid(0, 0)"),
    "stdout": ("launcher/forkserver.py", "setattr(sys, name, stream)", "pass"),
    "files_left_open": ("launcher/forkserver.py", "        _finalize(shared)\n", ""),
    "torch_variables": ("launcher/late_environment.py", "read_again(changed)\n\n", "pass\n\n"),
    "traceback": ("worker.py", "co_filename == __file__", "co_filename == ''"),
}
"""{the program that finds the defect: (file, original text, replacement)}."""


@pytest.fixture(autouse=True)
def without_nohup() -> Iterator[None]:
    """Reset SIGHUP, which programs inherit as ignored if the tests run under nohup. Containers have
    no such setting.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_modes_differ_from_torchrun_only_as_the_table_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = differential.run_corpus(tmp_path)
    print(differential.table(found))
    assert differential.unexpected(found) == ""


def test_deliberate_defects_are_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    runtime = tmp_path / "runtime"
    shutil.copytree(ROOT / "runtime", runtime, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in DEFECTS.values():
        file = runtime / "ddpjob_runtime" / name
        text = file.read_text()
        assert text.count(before) == 1, before
        file.write_text(text.replace(before, after))
    found = differential.run_corpus(tmp_path, [*DEFECTS, "exit_codes"], runtime)
    differ = {name for name, _ in differential.differences(found)}
    print(differential.table(found))
    assert differ == set(DEFECTS), "each defect is found by its own program and by no other"


def test_every_difference_is_a_row_of_the_table_and_every_row_has_a_program() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = text.partition("<!-- differences: begin -->")[2].partition("<!-- differences: end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    documented = {(row, mode, name) for row, modes, _, names in rows[2:] for mode in modes.split(", ")
                  for name in re.findall(r"`(\w+)`", names)}  # fmt: skip
    known = {(row, mode, name) for name, program in PROGRAMS.items() for mode, row in program.differs.items()}
    assert {entry for entry in documented if entry[2] in PROGRAMS} == known
    others = {name for _, _, name in documented if name not in PROGRAMS}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f"def {name}(" in tests for name in others), "a row is proved by a program or by a test"


# ---- "plain" in the corpus is what torchrun starts


def seen(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    names = content["environment"]
    content["environment"] = {
        n: v for n, v in names.items() if n not in OF_A_RUN | OF_THE_LAUNCHER and not n.startswith("DDPJOB_")
    }
    return content


def test_the_tests_plain_process_and_both_modes_match_torchruns_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = {}
    for mode in ("Standard", "Fast"):
        with contextlib.closing(Job(tmp_path, nodes=1, mode=mode)) as job:
            job.start_coordinator()
            job.start_node(0, PROBE, str(tmp_path / mode), "a", "--b")
            assert job.wait_exit("job-0-0") == 0, job.all_logs()
        found[mode] = seen(tmp_path / mode)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "torchrun.log").open("wb") as log:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", PROBE]
        subprocess.run(
            [*command, str(tmp_path / "torchrun"), "a", "--b"], cwd=tmp_path, env=environment, stdout=log, stderr=log,
            check=True,
        )  # fmt: skip
        command = [sys.executable, "-u", PROBE, str(tmp_path / "plain"), "a", "--b"]
        subprocess.run(
            command, cwd=tmp_path, env={**environment, **differential.TORCHRUN}, stdout=log, stderr=log, check=True,
            start_new_session=True,
        )  # fmt: skip
    by_torchrun = seen(tmp_path / "torchrun")
    plain = seen(tmp_path / "plain")
    assert plain.pop("environment").items() ^ by_torchrun["environment"].items() == set()
    assert {**plain, "environment": by_torchrun["environment"]} == by_torchrun
    stacks = {"descriptors": [*by_torchrun["descriptors"], 3]}  # row "descriptor"
    assert found["Standard"] == {**by_torchrun, **stacks}
    assert found["Fast"] == {**by_torchrun, **stacks}
