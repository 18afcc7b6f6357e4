"""Jobs whose only permanent checkpoints are in a bucket, on a real S3 server that is partitioned
while disks are lost.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob_bucket import Bucket
from process_harness import FAST, SCRIPTS, Json, Machine, Run, manifest
from ranks import final_losses, metrics
from s3_server import BUCKET, Server, SlowLine, serving
from strategy_jobs import held

pytest.importorskip("obstore", reason="pip install obstore")
STEPS = 60


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "server") as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def storage(port: int) -> Json:
    return {
        "checkpoints": {
            "url": f"s3://{BUCKET}/runs",
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "secretName": "keys",
        }
    }


def copies(server: Server) -> Bucket:
    """Return the only folder that the job has created in the bucket."""
    [folder] = (server.folder / "runs").glob("local.*/*")
    return Bucket.open(f"s3://{BUCKET}/{folder.relative_to(server.folder)}")


def copied(run: Run) -> float:
    return float(run.status.get("progress", {}).get("metrics", {}).get("copyStep", -1))


def lose_the_disk(run: Run) -> None:
    for name in ("state.json", ".ddpjob-fetched.json"):
        (run.folder / "checkpoints" / name).unlink(missing_ok=True)


def value(steps: int, ranks: int = 2) -> int:
    """Return the result of report_bucket.py after this many steps."""
    found = 1
    for _ in range(steps):
        found = sum(found * (rank + 3) % 1009 for rank in range(ranks)) % 1009
    return found


def test_a_script_continues_from_the_bucket_after_its_pod_and_disk_are_lost(server: Server, machine: Machine) -> None:
    line = SlowLine(server.port)
    job = manifest(
        script=str(SCRIPTS / "report_bucket.py"), args=[f"--steps={STEPS}"], recovery=FAST,
        storage=storage(line.port),
    )  # fmt: skip
    run = machine.start(job)
    checkpoints = run.folder / "checkpoints"
    run.until(lambda r: copied(r) >= 15, seconds=180)
    with run.frozen():
        lose_the_disk(run)
        assert machine.command("kill", "job-0-0").returncode == 0
    run.until(lambda r: r.status["restarts"].get("total"))
    run.until(lambda r: "job-0-1" in r.pods() and "begins at step" in r.log("job-0-1"), seconds=180)
    run.until(lambda r: r.log("job-1-0").count("begins at step") == 2)
    line.cut = True
    (checkpoints / "go-30").touch()
    made = checkpoints / "ledger-1"
    run.until(lambda r: made.read_text().split()[-1] == "45", seconds=180)  # rank 1 waits in this step
    run.until(lambda r: any("training continues" in r.log(pod) for pod in r.pods()), seconds=180)
    line.cut = False
    (checkpoints / "go-45").touch()
    assert run.wait(seconds=240) == 0, run.everything()
    begun = [int(text.split()[0]) for text in run.log("job-1-0").split("begins at step ")[1:]]
    assert begun[0] == 0 and begun[1] >= 15 and begun[1] % 5 == 0 and len(begun) == 2, begun
    assert "from s3://" in run.log("job-0-1") + run.log("job-1-0")
    assert any(f"rank 0 ends with {value(STEPS)}" in run.log(pod) for pod in run.pods()), run.everything()
    assert [entry.step for entry in copies(server).entries()] == [60, 55], "copy_checkpoint's keep"
    run.assert_nothing_left()
    line.close()


def test_the_built_in_trainer_takes_the_bucket_from_the_manifest(
    server: Server, machine: Machine, tmp_path: Path
) -> None:
    small = ["data.name=digits", "data.batch=100", "model.width=16", "train.epochs=4", "train.log_every=1",
             "train.threads=1", "checkpoint.every_steps=5", "checkpoint.every_seconds=0", "checkpoint.keep=2",
             "train.ledger=true", "eval.pictures=false"]  # fmt: skip
    args = [*small, f"train.run_dir={tmp_path / 'a'}"]
    plain = machine.run(manifest("plain", module="ddpjob_trainer", args=args, recovery=FAST))
    assert plain.process.returncode == 0, plain.everything()
    again = [*small, f"train.run_dir={tmp_path / 'b'}"]
    job = manifest("digits", module="ddpjob_trainer", args=again, storage=storage(server.port))
    run = machine.start(manifest("digits", **held(again, {}), storage=storage(server.port), recovery=FAST))
    run.until(lambda r: copied(r) >= 5, seconds=180)
    machine.command("stop", "--now", "digits")
    run.wait()
    left = copies(server).entries()[0].step
    shutil.rmtree(run.folder / "checkpoints")
    run = machine.run(job, seconds=240)
    assert run.process.returncode == 0, run.everything()
    assert any(f"resuming after step {left} of" in run.log(pod) for pod in run.pods()), run.everything()
    assert final_losses(tmp_path / "b") == final_losses(tmp_path / "a"), "bit-identical"
    ledger = [sys.executable, "-m", "ddpjob_trainer", "ledger", str(tmp_path / "b")]
    assert subprocess.run(ledger, capture_output=True, check=False).returncode == 0
    entries = copies(server).entries()
    assert len(entries) == 2 and entries[0].step == len(final_losses(tmp_path / "b"))
    refused = machine.command("run", "digits.yaml", "--fresh")
    assert refused.returncode == 2 and "would still resume from copies of its checkpoints in s3://" in refused.stderr


def test_no_job_starts_without_credentials_for_its_bucket(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    run = machine.run(manifest(storage=storage(1)))
    assert run.process.returncode == 2
    assert "secretName: Secret keys cannot be read on this machine; export AWS_ACCESS_KEY_ID and" in run.output


def test_a_job_survives_the_loss_of_a_node_that_has_its_ranks_parts(
    server: Server, machine: Machine, tmp_path: Path
) -> None:
    """Each pod has its own disk, so no node ever has a complete checkpoint."""
    small = ["data.name=digits", "data.batch=200", "data.micro_batches=4", "ddp.ordered=true", "model.width=16",
             "train.epochs=6", "train.log_every=1", "train.threads=1", "checkpoint.every_steps=4",
             "checkpoint.every_seconds=0", "checkpoint.keep=2", "eval.pictures=false"]  # fmt: skip
    plain = [*small, f"train.run_dir={tmp_path / 'plain'}"]
    assert machine.run(manifest("plain", nodes=1, module="ddpjob_trainer", args=plain)).process.returncode == 0
    script = str(SCRIPTS / "node_disks.py")
    job = manifest(script=script, args=[*small, "checkpoint.format=dcp"], storage=storage(server.port))
    run = machine.start(job)
    run.until(lambda r: copied(r) >= 4, seconds=240)  # this is known although no more steps are taken
    with run.frozen():
        assert machine.command("kill", "job-1-0").returncode == 0
    assert run.wait(seconds=300) == 0, run.everything()
    disks = run.folder / "checkpoints"
    records = disks / "job-0-0" / "run"
    begun = [row["step"] for row in metrics(records, "start")]
    assert len(begun) == 2 and begun[1] >= 4, run.everything()
    assert final_losses(records) == final_losses(tmp_path / "plain"), "bit-identical"
    entries = copies(server).entries()
    assert len(entries) == 2 and entries[0].step == 48, (
        "checkpoint.keep holds, and the final checkpoint is in the bucket"
    )
    newest = max((disks / "job-1-1").glob("step-*.dcp"))
    assert [path.name for path in newest.glob("__*")] == ["__1_0.distcp"], "each pod has its own disk"
