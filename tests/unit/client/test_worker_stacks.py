"""`ddpjob stacks` in a pod: only the stacks of that pod's workers, however the workers were
started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob.client.backends.backend import Mistake, PodLine
from ddpjob.client.logs.worker_stacks import PROBE, stacks
from ddpjob_runtime.launcher.stacks import PREFIX

WORKER = """
import ctypes, faulthandler, os, signal, sys, time
def train():
    if os.fork():
        print(os.getpid(), flush=True)
        time.sleep(60)
    load()
def load():  # like a DataLoader process, it inherits the worker's open files
    time.sleep(60)
if sys.argv[1] != "started":
    if os.fork():
        os.wait()
    os.environ["RANK"] = "3"
if sys.argv[1] == "titled":  # as setproctitle does it
    begin, end = (int(field) for field in open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)
file = open(os.path.join(os.environ["FOLDER"], "3.txt"), "w")
faulthandler.register(signal.SIGRTMIN + 7, file=file)
train()
"""


def test_stacks_end_with_the_script_and_not_with_the_runtime() -> None:
    frames = [
        '"/code/train.py", line 8 in step',
        '"/code/train.py", line 12 in <module>',
        '"<frozen runpy>", line 88 in _run',
        '"/opt/ddpjob/ddpjob_runtime/worker.py", line 435 in run_script',
        '"<frozen importlib._bootstrap>", line 9 in f',
    ]
    text = "rank 0, process 7:\n" + "".join(f"  File {frame}\n" for frame in frames) + "rank 1, process 8:\n"

    class OnePod:
        def run_in(self, pod: PodLine, code: str) -> str:
            return text

    ((_, shown),) = stacks(OnePod(), [PodLine("j-0-0", "node", 0, "Running")])  # type: ignore[arg-type]
    script = [f"  File {frame}" for frame in frames[:2]]
    assert shown.splitlines() == ["rank 0, process 7:", *script, "rank 1, process 8:"]


def test_stacks_that_cannot_be_read_from_any_pod_are_an_error() -> None:
    """Regression: a user without the right to run commands in pods got exit code 0."""

    class NoRights:
        def run_in(self, pod: PodLine, code: str) -> str:
            if pod.name in readable:
                return "rank 1, process 7:"
            raise Mistake(f"pod {pod.name}: you may not create pods/exec")

    pods, readable = [PodLine(f"j-{n}-0", "node", n, "Running") for n in (0, 1)], {"j-1-0"}
    texts = [text for _, text in stacks(NoRights(), pods)]  # type: ignore[arg-type]
    assert texts == ["pod j-0-0: you may not create pods/exec", "rank 1, process 7:"]
    readable.clear()
    with pytest.raises(Mistake, match="pod j-0-0: you may not"):
        stacks(NoRights(), pods)  # type: ignore[arg-type]
    assert stacks(NoRights(), []) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["started", "forked", "titled"])
def test_the_stack_of_a_worker_is_shown_without_those_of_its_children(tmp_path: Path, how: str) -> None:
    folder = tmp_path / (PREFIX + "abc")
    folder.mkdir()
    marks = {"FOLDER": str(folder), "DDPJOB_STACKS_DIR": str(folder), "DDPJOB_UID": f"uid-{os.getpid()}"}
    marks |= {"DDPJOB_POD": "job-0-0", **({"RANK": "3"} if how == "started" else {})}
    pod = subprocess.Popen(
        [sys.executable, "-c", WORKER, how], env={**os.environ, **marks}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert pod.stdout is not None
        pid = int(pod.stdout.readline())
        assert f"rank 3, process {pid}:" in (shown := probe("job-0-0")) and " in train\n" in shown
        assert " in load\n" not in shown
        assert "no worker in this pod" in probe("job-1-0")
    finally:
        os.killpg(pod.pid, 9)
        pod.wait()


def probe(pod: str) -> str:
    environment = {**os.environ, "DDPJOB_STACKS_POD": pod, "DDPJOB_STACKS_UID": f"uid-{os.getpid()}"}
    ran = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr
