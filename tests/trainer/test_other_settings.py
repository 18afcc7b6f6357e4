"""A run may continue with a different batch size or number of epochs. Each epoch still takes each
sample once, and the learning rate follows the samples.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpjob_trainer import config
from ddpjob_trainer.checkpoints import torch_file
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.optim.optimizers import Position, learning_rate
from ranks import TINY, good, metrics, run, stop_at

SIZE = 1438


@pytest.mark.parametrize("schedule", ["cosine", "step", "one_cycle", "constant"])
def test_batch_size_ranks_and_epochs_may_change_at_any_resume(schedule: str, tmp_path: Path) -> None:
    """The run starts on 1 rank with batch size 200 and 3 epochs. It continues after 5 steps on 2
    ranks with batch size 99, and after 12 steps on 1 rank with batch size 500 and 4 epochs.
    """
    keys = [*TINY, f"optim.schedule={schedule}", "optim.milestones=1,2.5", f"checkpoint.dir={tmp_path}"]
    keys += ["optim.warmup_epochs=0.5"] if schedule != "one_cycle" else []
    walk = [(1, 200, 3, 5), (2, 99, 3, 12), (1, 500, 4, None)]
    expected: list[tuple[int, int, float]] = []
    consumed = 0
    for world, batch, epochs, stop in walk:
        now = [*keys, f"data.batch={batch}", f"train.epochs={epochs}"]
        ended = run(world, now, prepare=stop_at(stop) if stop else None)
        assert [end.code for end in ended] == [75 if stop else 0] * world, ended
        optim = config.load(None, now).optim
        while consumed < epochs * SIZE and (stop is None or len(expected) < stop):
            rate = learning_rate(optim, Position(consumed, SIZE, batch, epochs))
            consumed += min(batch, SIZE - consumed % SIZE)
            expected.append((len(expected) + 1, batch, rate))
    rows = metrics(tmp_path / "run", "step")
    assert [row["step"] for row in rows] == [step for step, _, _ in expected]
    assert [row["lr"] for row in rows] == pytest.approx([rate for _, _, rate in expected], rel=1e-6)
    assert verify(read([tmp_path / "run"])).epochs == dict.fromkeys(range(1, 5), SIZE)


def test_the_remaining_steps_are_counted_with_the_current_batch_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [end.code for end in run(1, [*TINY, f"checkpoint.dir={tmp_path}"], prepare=stop_at(4))] == [75]
    folders = f"run folder {tmp_path}/run, checkpoints {tmp_path}"
    first = capfd.readouterr().out.splitlines()[0]
    model = "small_cnn with 1,270 parameters, in float32"
    assert first == f"1 rank on cpu, {model}: 16 steps to train; {folders}"
    good(1, [*TINY, "data.batch=400", f"checkpoint.dir={tmp_path}"])
    resumed = capfd.readouterr().out
    assert "resuming after step 4 of 10," in resumed, "4 steps of 200 and 2 of 400 in the first epoch, 4 in the next"
    assert "changed since the checkpoint: data.batch 200 -> 400\n" in resumed
    good(1, [*TINY, "data.batch=400", f"checkpoint.dir={tmp_path}"])
    assert "changed since" not in capfd.readouterr().out
    assert metrics(tmp_path / "run", "end")[0]["step"] == 10


def test_a_run_may_be_resumed_with_fewer_epochs_than_were_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An evaluation that a signal prevented is done later, if the epoch still exists."""
    keys = [*TINY, f"checkpoint.dir={tmp_path}"]
    good(1, [*keys, "train.eval_every=3"])
    capfd.readouterr()
    path = max(tmp_path.glob("step-*.pt"))
    snapshot, metadata = torch_file.decode(path.read_bytes()), torch_file.check(path.read_bytes())
    torch_file.write(path, snapshot | {"epochs_evaluated": 0}, metadata)
    good(1, [*keys, "train.epochs=1"])
    output = capfd.readouterr().out
    assert (
        "nothing is left to train, because the checkpoint of step 16 has 2 complete epoch(s) and train.epochs=1;"
        in output
    )
    assert "resuming" not in output and "epoch 2/2: test" in output and "done: 2 epochs, 16 steps" in output, output


def test_a_run_without_evaluations_ends_successfully(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good(1, [*TINY, "train.eval_every=0", f"checkpoint.dir={tmp_path}"])
    assert metrics(tmp_path / "run", "eval") == []
    assert "done: 2 epochs, 16 steps, " in capfd.readouterr().out and (tmp_path / "step-000000016.pt").exists()


def test_an_epoch_without_evaluation_is_not_evaluated_with_later_weights(tmp_path: Path) -> None:
    keys = [*TINY, "train.epochs=4", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, [*keys, "train.eval_every=4"], prepare=stop_at(20))] == [75]
    good(1, [*keys, "train.eval_every=1"])
    evaluated = [(row["epoch"], row["step"]) for row in metrics(tmp_path / "run", "eval")]
    assert evaluated == [(3, 24), (4, 32)], "with 8 steps per epoch, step 20 is in the third epoch"


def test_a_checkpoint_of_an_earlier_version_continues(tmp_path: Path) -> None:
    """The checkpoint counts the schedule in steps, and lacks keys that were added later."""
    keys = [*TINY, "model.norm=batch", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, keys, prepare=stop_at(5))] == [75]
    path = tmp_path / "step-000000005.pt"
    content = path.read_bytes()
    snapshot, metadata = torch_file.decode(content), torch_file.check(content)
    snapshot["schedule"] = {"steps_per_epoch": 8, "total_steps": 16}
    for key in ("checkpoint.load_average", "model.zero_init_residual"):
        del snapshot["config"][key]
    torch_file.write(path, snapshot, metadata)
    good(2, [*keys, "data.batch=300"])
    assert [row["step"] for row in metrics(tmp_path / "run", "start")] == [0, 5]
    assert verify(read([tmp_path / "run"])).epochs == {1: SIZE, 2: SIZE}
