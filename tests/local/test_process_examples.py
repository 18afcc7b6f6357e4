"""The examples with their own training loop, under `ddpjob run`. Each loses a pod and ends with the
same weights as one process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob_trainer.commands.check_ledger import read, verify
from machine import free_port
from process_harness import ENDLESS, SCRIPTS, Machine, Run, manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD = str(SCRIPTS / "held_script.py")
TOLERANCE = 1e-4
"""Tolerance of every weight, for float32 sums in a different order. The largest difference seen was
1e-5.
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setenv("DDPJOB_RUNS", str(machine.runs))
    yield machine
    machine.close()


def alone(folder: Path, example: str, *arguments: str) -> Path:
    """Return the checkpoints of one process that runs without interruption and without `ddpjob`."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **ranks, "DDPJOB_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    subprocess.run(command, env=env, check=True, timeout=600)
    return folder


def begin(machine: Machine, name: str, held: str, *args: str, **spec: Any) -> Run:
    """Start the example as a job in Fast mode. Its steps in `held` wait (see held_script.py)."""
    env = [{"name": "HELD", "value": held}, {"name": "OMP_NUM_THREADS", "value": "1"}]
    words = [str(EXAMPLES / args[0]), *args[1:]]
    return machine.start(manifest(name, script=HELD, args=words, env=env, recovery={"mode": "Fast"}, **spec))


def lose_a_pod(run: Run, step: int) -> None:
    """Kill a pod while `step` waits, then let the step continue."""
    run.until(lambda r: has_begun(r, step), seconds=300)
    ProcessBackend().kill(f"{run.job}-1-0")
    go(run, step)


def has_begun(run: Run, step: int) -> bool:
    """Return whether all ranks' ledgers contain the step."""
    return any(
        f'"step": {step},' in path.read_text() for path in run.folder.glob("checkpoints/run/ledger/rank-*.jsonl")
    )


def go(run: Run, step: int) -> None:
    (run.folder / "checkpoints" / f"go-{step}").touch()


def weights(checkpoints: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(max(checkpoints.glob("step-*.pt")), weights_only=True)["model"]
    return found


def distance(one: Path, other: Path) -> float:
    """Return the greatest difference between the final weights of two runs."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    worst = max(float((a[name] - b[name]).abs().max()) for name in a)
    print(f"largest difference of a weight {worst:.1e}")
    return worst


def test_a_custom_loop_is_exact_despite_a_lost_pod_and_a_changed_number_of_nodes(
    machine: Machine, tmp_path: Path
) -> None:
    expected = alone(tmp_path / "alone", "own_loop.py", "4")
    run = begin(machine, "own", "30,60", "own_loop.py", "4", elastic={"minNodes": 1})
    lose_a_pod(run, 30)
    run.until(lambda r: has_begun(r, 60), seconds=300)
    asked = run.everything().count("SIGTERM: rank")
    assert machine.command("scale", "own", "1").returncode == 0

    def scaled(run: Run) -> bool:
        """Return whether the group has been notified of its new size, or the only node has trained
        alone since the loss.
        """
        heard = run.everything().count("SIGTERM: rank") > asked or read([run.folder / "checkpoints"])[-1].world == 1
        return heard and bool(run.record["spec"]["nodes"] == 1)

    run.until(scaled, seconds=300)
    go(run, 60)
    assert run.wait(600) == 0, run.everything()
    incarnations = read([run.folder / "checkpoints"])
    assert verify(incarnations).epochs == dict.fromkeys(range(1, 5), 1200)
    assert incarnations[0].world == 2 and incarnations[-1].world == 1
    assert distance(expected, run.folder / "checkpoints") < TOLERANCE
    assert "100 steps, test accuracy" in run.everything()
    run.assert_nothing_left()


def test_a_language_model_is_fine_tuned_exactly_despite_the_loss_of_a_pod(machine: Machine, tmp_path: Path) -> None:
    base = max(alone(tmp_path / "base", "language_model.py", "--epochs=2").glob("step-*.pt"))
    arguments = ["language_model.py", f"--base={base}", "--epochs=2"]
    expected = alone(tmp_path / "alone", *arguments)
    run = begin(machine, "language", "8", *arguments)
    lose_a_pod(run, 8)
    assert run.wait(600) == 0, run.everything()
    incarnations = read([run.folder / "checkpoints"])
    assert verify(incarnations).epochs == {1: 197, 2: 197} and len(incarnations) == 2
    assert distance(expected, run.folder / "checkpoints") < TOLERANCE
    assert distance(base.parent, expected) > 0.01, "fine-tuning must have changed the weights"
    run.assert_nothing_left()


def test_a_script_with_three_added_lines_repeats_at_most_one_step(machine: Machine) -> None:
    job = yaml.safe_load((EXAMPLES / "snapshots.yaml").read_text())
    job["spec"] |= {"script": str(EXAMPLES / "snapshots.py"), "args": ENDLESS}
    job["spec"]["recovery"]["mode"] = "Fast"
    run = machine.start(job)
    for lost in (1, 0):
        losses = 2 - lost
        run.until(lambda r, pod=f"snapshots-{lost}-": is_training(r, losses, pod), seconds=300)  # noqa: B023
        ProcessBackend().kill(next(pod for pod in run.pods() if pod.startswith(f"snapshots-{lost}-")))
        run.until(lambda r, number=losses: len(from_memory(r)) == number, seconds=300)
    assert all(restart.get("repeatedSteps", 0) <= 1 for restart in from_memory(run)), run.status["restarts"]
    assert machine.command("stop", "--now", "snapshots").returncode == 0


def is_training(run: Run, losses: int, pod: str) -> bool:
    step = run.status.get("progress", {}).get("step") or 0
    return step > 20 * losses and any(name.startswith(pod) for name in run.pods())


def from_memory(run: Run) -> list[dict[str, Any]]:
    restarts = run.status.get("restarts", {}).get("recent", ())
    return [restart for restart in restarts if restart.get("continuedFrom") == "memory"]


def test_the_script_in_the_tutorial_trains_on_two_nodes(machine: Machine) -> None:
    """The test does what a reader does: it runs the page's second script with the manifest that
    `ddpjob init` writes.
    """
    page = (EXAMPLES.parent / "docs" / "one-gpu-to-two-nodes.md").read_text()
    _, script = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (machine.folder / "train.py").write_text(script)
    made = machine.command("init", "train.py", "--name=tutorial")
    assert "forms a group (init_process_group)" in made.stdout
    run = machine.run(yaml.safe_load((machine.folder / "job.yaml").read_text()))
    assert run.process.returncode == 0, run.output
    assert (machine.folder / "model.pt").exists() and run.condition("Running").get("reason") != "NoGroup"
    assert not any(key.startswith("module.") for key in torch.load(machine.folder / "model.pt", weights_only=True))
