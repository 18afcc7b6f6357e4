"""`ddpjob_report` in jobs that lose pods: a script with its own loop, and the callbacks of three
frameworks.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from process_harness import SCRIPTS, Json, Machine, Run, manifest

STEPS = 60


def job(script: str, *args: str) -> Json:
    recovery = {"mode": "Fast", "snapshots": "1"}
    return manifest(script=str(SCRIPTS / script), args=list(args), recovery=recovery)


def made(run: Run, rank: int) -> list[int]:
    """Return the steps that a rank has started, in order."""
    path = run.folder / "checkpoints" / f"ledger-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def shown(run: Run) -> Json:
    progress: Json = run.status.get("progress", {})
    return progress


def pod(run: Run, index: int) -> str:
    return next(name for name in run.pods() if name.startswith(f"job-{index}-"))


def ask_to_end(run: Run, name: str) -> None:
    """Send SIGTERM to the pod's main process, the launcher, as the kubelet does."""
    [launcher] = [p for p in run.processes() if is_launcher(p, name)]
    os.kill(launcher, signal.SIGTERM)


def is_launcher(process: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        parents = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has just ended
        return False
    pod = f"DDPJOB_POD={name}".encode()
    return b"launcher" in words and pod in variables and pod not in parents


def reasons(run: Run) -> list[str]:
    return [entry["reason"] for entry in run.status["restarts"].get("recent", ())]


def go(run: Run, step: int) -> None:
    """Let rank 1 finish this step."""
    (run.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run.folder / "checkpoints" / f"go-{step}").touch()


def lose_by_sigterm(run: Run, step: int) -> None:
    """Terminate the second pod with SIGTERM while its rank is in the step and the other ranks are
    in a collective.
    """
    run.until(lambda r: made(r, 1)[-1:] == [step])
    name = pod(run, 1)
    ask_to_end(run, name)
    run.until(lambda r: "SIGTERM: rank 1 was asked to stop" in r.log(name))
    go(run, step)


def test_a_script_saves_before_its_pod_ends_and_continues(machine: Machine) -> None:
    """Loader processes must survive SIGTERM until the step is done."""
    run = machine.start(job("report_plain.py", f"--steps={STEPS}", "--loaders=1"))
    go(run, 30)
    run.until(lambda r: shown(r).get("step") == 45)
    progress = shown(run)
    assert progress["display"] == "epoch 1/1 75 %" and progress["metrics"]["accuracy"] == 0.5, progress
    assert progress["lossDisplay"] == "0.02222", progress
    lose_by_sigterm(run, 45)
    assert run.wait() == 0, run.everything()
    assert shown(run)["step"] == STEPS
    assert [made(run, rank) for rank in (0, 1)] == [list(range(STEPS))] * 2, "no step is lost or repeated"
    run.assert_nothing_left()


@pytest.mark.parametrize("name", ["huggingface", "lightning", "accelerate"])
def test_a_frameworks_callback_resumes_after_the_loss_of_a_pod(machine: Machine, name: str) -> None:
    """All ranks save when a pod is asked to stop, and no step is repeated. Only Accelerate also
    loses a pod without notice before that, because the other frameworks take seconds to import
    whenever a worker starts.
    """
    package = {"huggingface": "transformers"}.get(name, name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[dev]'")
    run = machine.start(job(f"report_{name}.py", f"--steps={STEPS}"))
    begins = [0]
    if name == "accelerate":
        run.until(lambda r: made(r, 1)[-1:] == [30], seconds=180)
        run.until(lambda r: machine.command("kill", pod(r, 1)).returncode == 0)
        begins = [*range(31), 30]  # the other pod's memory has the steps since its checkpoint of step 20
        run.until(lambda r: reasons(r) == ["Deleted"])
    go(run, 30)
    run.until(lambda r: made(r, 1)[-1:] == [45] and shown(r).get("lossDisplay"), seconds=180)
    lose_by_sigterm(run, 45)
    rank0 = pod(run, 0)
    assert run.wait(seconds=240) == 0, run.everything()
    progress = shown(run)
    assert (progress["step"], progress["percent"]) == (STEPS, 100) and progress["loss"] >= 0, progress
    assert [made(run, rank) for rank in (0, 1)] == [[*begins, *range(begins[-1] + 1, STEPS)]] * 2
    assert f"ends at step {STEPS}" in run.log(rank0)
    run.assert_nothing_left()
