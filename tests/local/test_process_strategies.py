"""`ddpjob run` with strategies of the trainer. One pod of each job is killed, and the job's losses
equal those of one process.

fsdp and deepspeed are tested on real pods in tests/cluster/test_strategies.py.
"""

from __future__ import annotations

import pytest
from ddpjob.client.backends.process_backend import ProcessBackend
from libraries import horovod_site
from process_harness import Machine, manifest
from strategy_jobs import PROBLEM, assert_exact, held, let_go, losses_of_one_process, steps_begun

pytestmark = pytest.mark.slow

STRATEGIES = {
    "pipeline": ("Fast", ["data.micro_batches=4"]),
    "parameter-server": ("Fast", []),
    "horovod": ("Fast", []),
}
"""Recovery mode and settings of each strategy."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses_of_one_process(tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_continues_after_the_loss_of_a_pod(
    name: str, alone: dict[int, float], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, keys = STRATEGIES[name]
    args = [*PROBLEM, f"strategy={name.replace('-', '_')}", *keys]
    env = {"PYTHONPATH": str(horovod_site())} if name == "horovod" else {}
    run = machine.start(manifest(name, **held(args, env), recovery={"mode": mode}))
    run.until(lambda r: steps_begun(r.folder / "checkpoints") >= 8, seconds=600)
    monkeypatch.setenv("DDPJOB_RUNS", str(machine.runs))
    ProcessBackend().kill(f"{name}-{len(name) % 2}-0")
    let_go(run.folder / "checkpoints")
    assert run.wait(900) == 0, run.everything()
    restarts = run.status["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 1), restarts
    assert_exact(run.folder / "checkpoints", alone)
    run.assert_nothing_left()
