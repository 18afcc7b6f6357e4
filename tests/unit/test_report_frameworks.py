"""The real frameworks, if they are installed, resume from memory after a kill and compute the same
results.

Each test has one process. A kill is simulated by an exception, after which all objects are created
again. tests/local/test_process_report.py tests several ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ddpjob_report import Snapshots, link, node_memory
from ddpjob_runtime import protocol, worker

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow
STEPS, DIES = 12, (5, 8, 9)
"""An epoch has 4 steps. The kills are within an epoch, after its last step, and right after the
first step of the next one.
"""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Yield a job of one process. Each call is a restart."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        rounds = iter(range(100))

        def restart() -> None:
            monkeypatch.setenv("DDPJOB_FENCE", f"0.{next(rounds)}")
            monkeypatch.setenv("DDPJOB_SNAPSHOT_FOLDER", place)
            monkeypatch.setenv("DDPJOB_SNAPSHOT_STEPS", "1")
            Snapshots._current = None
            node_memory.FrameworkMemory._at_start = None

        yield restart
        Snapshots._current = None
        node_memory.FrameworkMemory._at_start = None


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Collect the (step, source) reported at each start."""
    said: list[tuple[int, str]] = []

    def post(figures: dict[str, Any]) -> None:
        start = figures.get(protocol.START)
        if start and (start["step"], start["source"]) not in said[-1:]:
            said.append((start["step"], start["source"]))

    monkeypatch.setattr(link, "post", post)
    return said


class Killed(Exception):
    """Raised in place of a kill of the process."""


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([number / 16])
    return x, 3 * x


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))


def survives(
    train: Callable[[Path, int], Any], folder: Path, job: Callable[[], None], starts: list[tuple[int, str]]
) -> None:
    """Check that no kill repeats a complete step, and that the weights match an undisturbed run."""
    undisturbed = train(folder / "undisturbed", -1)
    for dies in DIES:
        job()
        torch.manual_seed(dies)
        with pytest.raises(Killed):
            train(folder / "disturbed", dies)
    job()
    weights = train(folder / "disturbed", -1)
    memory = [(step, protocol.MEMORY) for step in DIES]
    assert starts == [(0, protocol.SCRATCH), *memory]
    assert all(torch.equal(a, b) for a, b in zip(weights, undisturbed, strict=True))
    assert not Path(os.environ["DDPJOB_SNAPSHOT_FOLDER"], "restored").exists(), "the training run has loaded this state"


def test_hugging_faces_trainer_continues_from_memory(
    tmp_path: Path, job: Callable[[], None], starts: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)  # this is not tests/datasets.py
    from ddpjob_report.huggingface import DDPJobCallback, last_checkpoint

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(x)
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    def train(folder: Path, dies: int) -> list[torch.Tensor]:
        class Death(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == dies:
                    raise Killed

        args = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            save_steps=7, eval_steps=2, eval_strategy="steps", logging_steps=1, report_to="none", use_cpu=True,
            disable_tqdm=True, learning_rate=0.05, lr_scheduler_type="cosine",
        )  # fmt: skip
        data = [dict(zip(("x", "labels"), sample(i), strict=True)) for i in range(16)]
        trainer = transformers.Trainer(
            model=Model(), args=args, train_dataset=data, eval_dataset=data[:4], callbacks=[Death(), DDPJobCallback()]
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
        histories.append([{k: v for k, v in each.items() if "eval_" not in k} for each in trainer.state.log_history])
        return [weight.detach() for weight in trainer.model.parameters()]

    histories: list[Any] = []
    survives(train, tmp_path, job, starts)
    losses = [[each["loss"] for each in history if "loss" in each] for history in histories]
    assert losses[0] == losses[-1] and len(losses[0]) == STEPS


class Stateful:
    """A data loader that saves its position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.epoch, self.done, self.begins_at = 0, 0, 0
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        begins_at, self.begins_at = self.begins_at, 0
        order = torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for self.done in range(begins_at + 1, 9):
            yield torch.utils.data.default_collate([sample(i) for i in order[2 * self.done - 2 : 2 * self.done]])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["done"]


def loader_of(kind: str) -> Any:
    if kind == "stateful":
        return Stateful()
    sampler = torch.utils.data.DistributedSampler(range(16), num_replicas=1, rank=0, shuffle=True)
    data, workers = [sample(i) for i in range(16)], int(kind == "process")
    return torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("kind", ["plain", "process", "stateful"])
def test_lightning_continues_from_memory(
    kind: str, tmp_path: Path, job: Callable[[], None], starts: list[tuple[int, str]]
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from ddpjob_report.lightning import DDPJobCallback, last_checkpoint

    def train(folder: Path, dies: int) -> list[torch.Tensor]:
        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.inner = network()

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if self.global_step == dies:
                    raise Killed
                x, y = batch
                return (self.inner(x) - y).square().mean()

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[DDPJobCallback(folder)], enable_checkpointing=False, accumulate_grad_batches=2,
        )  # fmt: skip
        folder.mkdir(exist_ok=True)
        module = Module()
        trainer.fit(module, loader_of(kind), ckpt_path=last_checkpoint(folder))
        assert trainer.global_step == STEPS
        return [weight.detach() for weight in module.parameters()]

    survives(train, tmp_path, job, starts)


def test_lightning_reports_the_loss_even_if_an_epoch_ends_before_its_first_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from ddpjob_report import lightning as callbacks

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return (self.inner(x) - y).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    posted: list[dict[str, Any]] = []
    monkeypatch.setattr(callbacks, "report", lambda **figures: posted.append(figures))
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callbacks.DDPJobCallback()], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), loader_of("plain"))
    assert [figures["step"] for figures in posted if "loss" in figures] == [1, 8, 9, 16]


def test_accelerate_keeps_its_number_of_processes_where_the_step_counter_reads_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    assert worker.ignores_group()


def test_accelerate_continues_from_memory(
    tmp_path: Path, job: Callable[[], None], starts: list[tuple[int, str]]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from ddpjob_report.accelerate import resume, save, take

    def train(folder: Path, dies: int) -> list[torch.Tensor]:
        folder.mkdir(exist_ok=True)
        accelerator = accelerate.Accelerator(cpu=True)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for step in range(resume(accelerator, folder), STEPS):
            if step == dies:
                raise Killed
            x, y = sample(step)
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            take(accelerator, step + 1)
            if step == 1:
                save(accelerator, step + 1, folder)
        return [weight.detach() for weight in model.parameters()]

    survives(train, tmp_path, job, starts)
