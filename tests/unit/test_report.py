"""`ddpjob_report` in one process: outside of a job, with invalid arguments, without a coordinator,
and with frameworks.
"""

from __future__ import annotations

import datetime
import errno
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ddpjob_report
import pytest
from ddpjob.client.texts.metric_series import read_metrics
from ddpjob_pod.metrics_log import METRICS
from ddpjob_pod.outbox import merged
from ddpjob_pod.sigterm import SigtermFlag
from ddpjob_report import curve_file, link, node_memory, resume, stop
from ddpjob_runtime import protocol


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the reports that `report` would send."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(link, "post", sent.append)
    return sent


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear earlier requests to stop, and restore the SIGTERM handler afterwards."""
    monkeypatch.setattr(stop, "_State", type("_State", (), dict(vars(stop._State))))
    monkeypatch.setattr(stop._State, "flag", SigtermFlag(stop._say_asked))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Scalar:
    """A stand-in for a one-element tensor with the methods that are used here."""

    def __init__(self, value: float, elements: int = 1) -> None:
        self.value, self.elements = value, elements

    def __float__(self) -> float:
        if self.elements != 1:
            raise RuntimeError("a Tensor with 3 elements cannot be converted to Scalar")
        return self.value

    def detach(self) -> Scalar:
        return self


def test_reported_figures_are_sent_under_the_protocols_names(posted: list[dict[str, Any]]) -> None:
    ddpjob_report.report(
        epoch=2, epochs=9, step=7, steps=70, loss=Scalar(0.25), accuracy=Decimal("0.5"), samples_per_second=3, eta=1.5,
        learning_rate=1e-3,
    )  # fmt: skip
    [figures] = posted
    assert figures == {
        "epoch": 2, "epochs": 9, "step": 7, "steps": 70, "loss": 0.25, "samplesPerSecond": 3, "eta": 1.5,
        "metrics": {"accuracy": 0.5, "learning_rate": 1e-3},
    }  # fmt: skip
    from ddpjob_runtime.coordinator import progress

    assert progress.check(json.loads(json.dumps(figures))) == figures


def test_numbers_that_a_status_cannot_hold_are_unknown(posted: list[dict[str, Any]]) -> None:
    ddpjob_report.report(loss=float("nan"), step=10**400, accuracy=float("inf"), epoch=None, other=2.0**63)
    assert posted == [{"loss": None, "step": None}]
    ddpjob_report.report(accuracy=float("nan"))
    ddpjob_report.report()
    assert len(posted) == 1, "there is nothing to send"


@pytest.mark.parametrize("value", ["0.5", b"1", True, [1.0], {}, object(), Scalar(1.0, elements=3), 1j])
@pytest.mark.parametrize("name", ["loss", "accuracy", "learning_rate"])
def test_the_error_about_a_value_that_is_not_a_number_names_the_argument(
    name: str, value: Any, posted: list[dict[str, Any]]
) -> None:
    with pytest.raises(TypeError, match=rf"^ddpjob_report\.report: {name} must be a number or a tensor of one element"):
        ddpjob_report.report(**{name: value})
    assert not posted


def test_the_number_of_metrics_is_bounded(posted: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="at most 100 metrics are allowed, not 101"):
        ddpjob_report.report(**{f"m{i}": i for i in range(101)})
    with pytest.raises(ValueError, match="the name of a metric must have at most 100 characters, not 101: nnn"):
        ddpjob_report.report(**{"n" * 101: 1})
    ddpjob_report.report(**{"n" * 100: 1})
    assert len(posted) == 1


@pytest.mark.slow
def test_tensors_with_one_element_are_accepted_as_figures(posted: list[dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    loss = (torch.ones(1, requires_grad=True) * 0.5).sum()
    ddpjob_report.report(loss=loss, step=torch.tensor(3), accuracy=torch.tensor([0.25], dtype=torch.float16))
    assert posted == [{"loss": 0.5, "step": 3, "metrics": {"accuracy": 0.25}}]
    assert isinstance(posted[0]["step"], int)
    with pytest.raises(TypeError, match="loss must be a number or a tensor of one element, not a Tensor"):
        ddpjob_report.report(loss=torch.zeros(3))


def test_arrays_with_one_element_are_accepted_as_figures(posted: list[dict[str, Any]]) -> None:
    numpy = pytest.importorskip("numpy")
    ddpjob_report.report(loss=numpy.array([0.5]), step=numpy.array([[3]]), accuracy=numpy.float32(0.25))
    assert posted == [{"loss": 0.5, "step": 3, "metrics": {"accuracy": 0.25}}]
    with pytest.raises(TypeError, match="loss must be a number or a tensor of one element, not a ndarray"):
        ddpjob_report.report(loss=numpy.zeros(3))


def test_newer_figures_replace_older_figures_of_the_same_name() -> None:
    older = {"epoch": 1, "loss": 2.0, "metrics": {f"m{i}": i for i in range(99)}}
    both = merged(older, {"loss": 1.0, "metrics": {"m0": 7, "a": 1, "b": 2}})
    assert (both["epoch"], both["loss"], len(both["metrics"])) == (1, 1.0, protocol.MAX_FIGURES)
    assert (both["metrics"]["m0"], both["metrics"]["b"]) == (7, 2) and "m1" not in both["metrics"]


def program(text: str, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, *words, str(path)], capture_output=True, text=True, cwd=folder, timeout=120, check=False,
        env={**{k: v for k, v in os.environ.items() if k not in ("RANK", "DDPJOB_COORDINATOR")}, **env},
    )  # fmt: skip


def test_report_has_no_effect_outside_of_a_job(tmp_path: Path) -> None:
    text = """
import signal, sys, threading
import ddpjob_report
ddpjob_report.report(epoch=1, loss=0.5, accuracy=0.1)
print(ddpjob_report.checkpoint_dir(), ddpjob_report.checkpoint_dir("a/b").is_dir(), ddpjob_report.should_stop())
print(threading.active_count(), [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "yaml")])
signal.raise_signal(signal.SIGTERM)
print(ddpjob_report.should_stop())
ddpjob_report.saved_and_leave()
"""
    done = program(text, tmp_path)
    assert done.stdout == "checkpoints True False\n1 []\nTrue\n"
    assert done.returncode == protocol.EXIT_STEPPED_ASIDE
    what = "was asked to stop; it will save at its next call to should_stop(), if there is time"
    assert done.stderr == f"ddpjob_report: SIGTERM: rank 0 {what}\n"


@pytest.mark.slow
def test_without_its_coordinator_training_is_not_delayed(tmp_path: Path) -> None:
    """The coordinator accepts connections but never answers. Exiting waits two seconds for it, and
    steps never wait.
    """
    import socket

    text = """
import time, ddpjob_report
began = time.monotonic()
for step in range(2000):
    ddpjob_report.report(step=step, loss=1.0)
print(time.monotonic() - began)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = program(text, tmp_path, DDPJOB_COORDINATOR=address, DDPJOB_TOKEN="token", RANK="0")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert float(done.stdout) < 20, (
        "if each of the 2,000 steps waited for the coordinator, they would take more than an hour"
    )
    for address in ("no port", "::1:x", "127.0.0.1:1"):
        done = program(text, tmp_path, DDPJOB_COORDINATOR=address, DDPJOB_TOKEN="token", RANK="0")
        assert (done.returncode, done.stderr) == (0, "")


def test_the_checkpoint_folder_of_a_job_is_not_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path / "unmounted"))
    assert ddpjob_report.checkpoint_dir() == tmp_path / "unmounted" and not any(tmp_path.iterdir())


@pytest.mark.usefixtures("fresh")
def test_a_frameworks_sigterm_handler_is_replaced_and_child_processes_still_exit() -> None:
    called: list[int] = []
    assert not ddpjob_report.should_stop()
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    assert not ddpjob_report.should_stop()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    assert ddpjob_report.should_stop() and not called


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("given", "taken"), [(180, 180), (1, 30)])
def test_ranks_wait_for_an_answer_for_the_time_that_the_script_sets(given: int, taken: int) -> None:
    """The other ranks wait in should_stop() while rank 0 evaluates for an hour. Values below
    torch's default are not used.
    """
    distributed = pytest.importorskip("torch.distributed")
    minutes = datetime.timedelta(minutes=given)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=minutes)
    try:
        backend = stop.gloo_group(distributed)._get_backend(sys.modules["torch"].device("cpu"))
        assert backend.options._timeout == datetime.timedelta(minutes=taken)
        del backend
    finally:
        distributed.destroy_process_group()
    assert stop._State.group() is None, "otherwise its threads would be stopped in the middle of Python's shutdown"


@pytest.mark.usefixtures("fresh")
def test_a_call_from_another_thread_reports_that_it_cannot_handle_sigterm(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[bool] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: answers.append(ddpjob_report.should_stop()))
        thread.start()
        thread.join()
    assert answers == [False, False]
    assert capsys.readouterr().err.count("call should_stop() in the main thread") == 1


def test_a_call_from_another_thread_cannot_end_the_process() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="must be called in the main thread"):
        pool.submit(ddpjob_report.saved_and_leave).result()


def test_training_resumes_from_the_newest_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-200", "checkpoint-x", "epoch=0-step=30.ckpt"):
        (tmp_path / name).mkdir()
    paths = [*tmp_path.iterdir()]
    assert resume.newest(paths, lambda path: "200" not in path.name) == tmp_path / "epoch=0-step=30.ckpt"
    assert (
        resume.newest(tmp_path.glob("checkpoint-*"), lambda path: "200" not in path.name) == tmp_path / "checkpoint-10"
    )
    assert resume.newest(paths, lambda path: False) is None
    versions = [Path(f"epoch=0-step={name}.ckpt") for name in ("9", "30-v2", "30", "30-v10", "7-v50")]
    assert resume.newest(versions, lambda path: True) == Path("epoch=0-step=30-v10.ckpt")
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "0")
    assert resume.newest(paths, Path.is_dir) == tmp_path / "checkpoint-200", "a single node has only one folder"
    monkeypatch.setenv("DDPJOB_NODES", "2")
    assert resume.newest(paths, Path.is_dir) is None
    assert "set spec.storage.checkpoints to a volume that every node sees" in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["lightning", "huggingface"])
@pytest.mark.parametrize("call", ["listdir", "open", "read"])
def test_an_unreadable_checkpoint_does_not_cause_a_start_from_an_older_one(
    framework: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: errors of the file system were taken for a missing or incomplete checkpoint."""
    if framework == "lightning":
        module, newest = imitated_lightning(monkeypatch), tmp_path / "step=200.ckpt"
        for path in (tmp_path / "step=100.ckpt", newest):
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("weights", "1")
        (tmp_path / "step=300.ckpt").mkdir()
        (tmp_path / "step=400.ckpt").write_text("incomplete")
        (tmp_path / "step=500.ckpt").symlink_to("deleted")
    else:
        module = imitated(monkeypatch, "huggingface", "transformers:TrainerCallback")
        newest = tmp_path / "checkpoint-200" / "trainer_state.json"
        for step in (100, 200, 300):
            (tmp_path / f"checkpoint-{step}").mkdir()
        for step in (100, 200):
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        (tmp_path / "checkpoint-400").touch()
    assert module.last_checkpoint(tmp_path / "none") is None
    found = module.last_checkpoint(tmp_path)
    assert found == str(newest if framework == "lightning" else newest.parent)

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path != newest:
            return opens(path, *args, **kwargs)
        if call == "open":
            stale()
        file = MagicMock(wraps=opens(path, "rb"))
        file.__enter__.return_value = file
        file.read.side_effect = stale
        return file

    opens = Path.open
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "read_text", lambda path: opened(path).read())
    if call == "listdir":
        refuse_listing(monkeypatch)
    with pytest.raises(OSError, match="Permission denied" if call == "listdir" else f"Stale file handle: '{newest}'"):
        module.last_checkpoint(tmp_path)


def stale(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


def refuse_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refused)


def test_numbers_are_read_from_what_a_framework_logs() -> None:
    logged = {"loss": Scalar(0.5), "mode": "text", "flag": True, "many": Scalar(1.0, elements=3), "n" * 200: 1}
    assert resume.figures(logged) == {"loss": 0.5, "n" * 100: 1}
    assert len(resume.figures({str(i): i for i in range(1000)})) < protocol.MAX_FIGURES


@pytest.mark.parametrize(("name", "needs"), [("huggingface", "transformers"), ("accelerate", "accelerate")])
def test_importing_a_callback_without_its_framework_names_the_missing_package(
    name: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.setitem(sys.modules, f"{needs}.tracking", None)
    monkeypatch.delitem(sys.modules, f"ddpjob_report.{name}", raising=False)
    with pytest.raises(ImportError, match=needs):
        importlib.import_module(f"ddpjob_report.{name}")


def forget_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that Lightning's packages and the callback were imported."""
    for name in [key for key in sys.modules if key.split(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ddpjob_report.lightning", raising=False)


def imitated_lightning(monkeypatch: pytest.MonkeyPatch, top: str = "lightning") -> ModuleType:
    """Return the callback's module, with a fake Lightning under this name that has only the base
    class.
    """
    forget_lightning(monkeypatch)
    inner = "lightning.pytorch" if top == "lightning" else top
    callbacks = ModuleType(f"{inner}.callbacks")
    callbacks.Callback = type("Callback", (), {"of": top})  # type: ignore[attr-defined]
    for name in {top, inner}:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, callbacks.__name__, callbacks)
    importlib.import_module("ddpjob_report.lightning")
    return sys.modules.pop("ddpjob_report.lightning")


def test_the_callback_works_with_both_names_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import lightning` and `import pytorch_lightning` have different classes, which are not
    related.
    """
    for top in ("lightning", "pytorch_lightning"):
        assert imitated_lightning(monkeypatch, top).DDPJobCallback.of == top


@pytest.mark.parametrize("installed", [["lightning"], ["pytorch_lightning"], ["lightning", "pytorch_lightning"]])
def test_the_installed_lightning_is_used_if_none_was_imported_yet(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_lightning(monkeypatch)
    for top in installed:
        inner = tmp_path / ("lightning/pytorch" if top == "lightning" else top)
        inner.mkdir(parents=True)
        (tmp_path / top / "__init__.py").touch()
        (inner / "__init__.py").touch()
        (inner / "callbacks.py").write_text(f"class Callback:\n    of = {top!r}\n")
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.endswith("lightning") and name not in installed else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert importlib.import_module("ddpjob_report.lightning").DDPJobCallback.of == installed[0]
    finally:
        for name in [key for key in sys.modules if "lightning" in key.split(".")]:
            del sys.modules[name]


class Trainer:
    """A stand-in for Lightning's Trainer with the attributes that the callback reads. It has
    training data only during `fit`.
    """

    sanity_checking, max_epochs, current_epoch, global_step, world_size = False, 2, 1, 45, 2
    train_dataloader, fit_loop = None, SimpleNamespace()

    def __init__(self, doing: str, steps: float) -> None:
        self.state, self.steps = SimpleNamespace(fn=doing), steps
        self.callback_metrics = {"val_acc": Scalar(0.5)}

    @property
    def estimated_stepping_batches(self) -> float:
        if self.state.fn != "fit":
            raise ValueError("`train_dataloader` must be implemented to be used with the Lightning Trainer")
        return self.steps


class LightningModule:
    """A stand-in for LightningModule with the attributes that the callback reads."""

    def __init__(self, automatic: bool = True) -> None:
        self.automatic_optimization = automatic


def test_a_separate_validation_by_lightning_is_not_reported_as_progress(
    posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = imitated_lightning(monkeypatch).DDPJobCallback()
    callback.on_validation_end(Trainer("validate", 100), None)
    assert not posted
    callback.on_validation_end(Trainer("fit", 100), None)
    metrics = {"val_acc": 0.5, "accuracy": 0.5}
    assert posted == [{"epoch": 2, "epochs": 2, "step": 45, "steps": 100, "metrics": metrics}]


@pytest.mark.parametrize(("url", "copied"), [("s3://models/runs", [("stopped-step=45.ckpt", 45)]), ("", [])])
def test_a_checkpoint_that_lightning_saves_on_sigterm_is_copied_to_the_bucket(
    url: str, copied: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pod's disk is lost with the pod, and none of the script's code runs after the save to
    copy the checkpoint.
    """
    copies: list[tuple[str, int]] = []
    monkeypatch.setenv("DDPJOB_CHECKPOINT_URL", url)
    monkeypatch.setattr(ddpjob_report, "should_stop", lambda: True)
    monkeypatch.setattr(ddpjob_report, "copy_checkpoint", lambda path, step, keep: copies.append((path.name, step)))
    module, trainer = imitated_lightning(monkeypatch), Trainer("fit", 100)
    trainer.log_every_n_steps, trainer.is_global_zero = 0, True  # type: ignore[attr-defined]
    trainer.save_checkpoint = Path.touch  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match="75"):
        module.DDPJobCallback(tmp_path).on_train_batch_end(trainer, LightningModule(), None, None, 0)
    assert copies == copied


def test_lightning_stops_only_between_optimizer_steps(
    posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Checkpoints do not contain partly accumulated gradients."""
    asked: list[int] = []
    monkeypatch.setattr(ddpjob_report, "should_stop", lambda: asked.append(trainer.global_step))
    trainer = Trainer("fit", 100)
    trainer.log_every_n_steps = 0  # type: ignore[attr-defined]
    callback = imitated_lightning(monkeypatch).DDPJobCallback(tmp_path)
    callback.on_train_start(trainer, LightningModule())
    for batch, step in enumerate([45, 45, 46, 46, 47]):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, LightningModule(), None, None, batch)
    assert asked == [46, 47] and len(posted) == 5
    trainer.global_step = 0  # a custom loop may step optimizers that Lightning does not count
    callback.on_train_batch_end(trainer, LightningModule(False), None, None, 0)
    callback.on_train_batch_end(trainer, LightningModule(False), None, None, 1)
    assert asked == [46, 47, 0, 0]


@pytest.mark.parametrize(("size", "left"), [(3, [6, 7, 8]), (None, [*range(9)])])
def test_a_batch_sampler_without_a_fixed_size_does_not_fail_a_restart(
    size: int | None, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a batch sampler that has a sampler but no `batch_size` failed each restart."""
    batches = SimpleNamespace(sampler=range(9), **({} if size is None else {"batch_size": size}))
    trainer = Trainer("fit", 100)
    trainer.train_dataloader = SimpleNamespace(batch_sampler=batches)  # type: ignore[assignment]
    trainer.num_training_batches = 3  # type: ignore[attr-defined]
    progress = SimpleNamespace(current=SimpleNamespace(processed=2))
    trainer.fit_loop = SimpleNamespace(_data_fetcher=[], epoch_loop=SimpleNamespace(batch_progress=progress))
    imitated_lightning(monkeypatch).DDPJobCallback()._continue_data(trainer)
    assert [*batches.sampler] == left


@pytest.mark.parametrize(("room", "name"), [(1 << 30, "restored"), (1 << 20, "ddpjob-u-0")])
def test_a_restored_checkpoint_is_not_written_to_memory_that_the_container_lacks(
    room: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the free space of the tmpfs counted, so the container was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_memory, "tensors_of", lambda tree: [SimpleNamespace(nbytes=1 << 20)])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    monkeypatch.setattr(node_memory, "free_memory", lambda: room, raising=False)
    (tmp_path / "memory").mkdir()
    job = SimpleNamespace(snapshot_folder=str(tmp_path / "memory"), uid="u", index=0)
    assert node_memory._folder_for(job, SimpleNamespace(tree={})).name == name


@pytest.mark.parametrize("steps", [-1, float("inf")])
def test_no_total_of_steps_is_reported_if_lightning_does_not_know_the_length(
    steps: float, posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of an IterableDataset is -1."""
    imitated_lightning(monkeypatch).DDPJobCallback().on_validation_end(Trainer("fit", steps), None)
    assert posted[0].keys() == {"epoch", "epochs", "step", "metrics"}


def measured(*reports: dict[str, Any]) -> dict[str, Any]:
    """Send reports one second apart, and return the last one as it was sent."""
    sender, seconds = link.Link("127.0.0.1:1", "token"), iter(range(1000))
    sent = list[dict[str, Any]]()

    def post(report: dict[str, Any]) -> tuple[int, str]:
        sent.append(report)
        return 200, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
        patch.setattr(sender._poster, "post", post)
        for figures in reports:
            sender._note_step(figures)
            assert sender._send(figures)
    return sent[-1]


def test_additional_figures_of_a_step_do_not_change_its_speed() -> None:
    """Additional metrics may arrive at any time between two steps. The time before they arrive must
    count too, or the speed would be too high.
    """
    first, second = {"step": 10, "steps": 100}, {"step": 20, "steps": 100}
    assert measured(first, {"step": 10, "loss": 0.5}, second)["metrics"][protocol.COUNTED_SPEED] == 5.0
    assert measured(first, {"step": 10, "loss": 0.5}) == {"step": 10, "loss": 0.5}


def test_without_steps_no_remaining_time_is_reported() -> None:
    assert measured({"step": 10, "steps": 100}, {"step": 20, "steps": 100})["eta"] == 8.0
    for steps in (0, -1, None):
        assert "eta" not in measured({"step": 10, "steps": steps}, {"step": 20, "steps": steps})


def test_the_added_speed_does_not_count_against_the_limit_of_metrics() -> None:
    full = {f"m{i}": 0.5 for i in range(protocol.MAX_FIGURES)}
    assert measured({"step": 10, "metrics": full}, {"step": 20, "metrics": full})["metrics"] == full
    del full["m0"]
    assert measured({"step": 10, "metrics": full}, {"step": 20, "metrics": full})["metrics"] == {
        **full,
        protocol.COUNTED_SPEED: 10.0,
    }


def imitated(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> ModuleType:
    """Return a callback's module, with a fake framework that has only the base class
    `module:class`.
    """
    inner, _, kind = base.partition(":")
    for each in {inner.split(".")[0], inner}:
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    setattr(sys.modules[inner], kind, type(kind, (), {}))
    monkeypatch.delitem(sys.modules, f"ddpjob_report.{name}", raising=False)
    importlib.import_module(f"ddpjob_report.{name}")
    return sys.modules.pop(f"ddpjob_report.{name}")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("done", "shown"), [(0.01, 1), (1.0, 1), (1.01, 2), (2.5, 3), (None, 1)])
def test_the_running_epoch_is_shown_until_it_ends(
    done: float | None, shown: int, posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's Trainer counts completed epochs. The last epoch may be incomplete."""
    callback = imitated(monkeypatch, "huggingface", "transformers:TrainerCallback").DDPJobCallback()
    args, state = SimpleNamespace(num_train_epochs=2.5, max_steps=-1), SimpleNamespace(global_step=7, max_steps=20)
    state.epoch = done
    callback.on_step_end(args, state, SimpleNamespace())
    assert posted == [{"epoch": shown, "epochs": 3, "step": 7, "steps": 20}]


@pytest.mark.parametrize(
    ("max_steps", "epoch", "warned"), [(5000, 5.0, "2.50"), (1250, 5.0, "10.00"), (2505, 5.0, ""), (2500, 4.998, "")]
)
def test_a_trainer_that_continues_in_a_different_epoch_reports_it(
    max_steps: int, epoch: float, warned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer divides its step count by the current number of steps per epoch, which depends on
    the ranks. It skips or repeats the rest.
    """
    callback = imitated(monkeypatch, "huggingface", "transformers:TrainerCallback").DDPJobCallback()
    args = SimpleNamespace(num_train_epochs=10, max_steps=-1, world_size=2)
    state = SimpleNamespace(global_step=1250, max_steps=max_steps, epoch=epoch, is_world_process_zero=True)
    callback.on_train_begin(args, state, None)
    said = capsys.readouterr().err
    assert f"at epoch 5.00, but training continues at epoch {warned} of 10" in said if warned else not said
    callback.on_train_begin(SimpleNamespace(num_train_epochs=10, max_steps=3000, world_size=2), state, None)
    state.global_step, state.epoch = 0, 0
    callback.on_train_begin(args, state, None)
    assert not capsys.readouterr().err


def test_the_trainers_last_evaluation_is_recorded_in_the_curves(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no later step that would record it. An evaluation before the first step has no step
    to be recorded with.
    """
    callback = imitated(monkeypatch, "huggingface", "transformers:TrainerCallback").DDPJobCallback()
    callback.on_log(None, SimpleNamespace(global_step=0), None, {"eval_accuracy": 0.1})
    for logs in ({"loss": 0.5, "epoch": 2.0}, {"eval_accuracy": 0.75, "epoch": 2.0}):
        callback.on_log(None, SimpleNamespace(global_step=20), None, logs)
    curve_file.close()
    series = read_metrics(curves.read_text())
    assert series.steps["loss"] == {20: 0.5} and series.evaluations["accuracy"] == {20: 0.75}


class Accelerator:
    """A stand-in for a single-process Accelerator with the methods that are used here."""

    is_main_process, num_processes = True, 1

    def __init__(self, own_names: bool = False) -> None:
        self.project_configuration = SimpleNamespace(automatic_checkpoint_naming=own_names)
        self.distributed_type = SimpleNamespace(value="NO")
        self._models = self._optimizers = self._schedulers = self._dataloaders = self._custom_objects = ()
        self.loaded = ""

    def wait_for_everyone(self) -> None:
        """Return immediately, because there is only one process."""

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir()

    def load_state(self, folder: str) -> None:
        self.loaded = Path(folder).name


def test_accelerates_checkpoints_are_distinguished_from_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, accelerator = imitated(monkeypatch, "accelerate", "accelerate.tracking:GeneralTracker"), Accelerator()
    others = {
        "accelerate-step-10.bak",
        "accelerate-step-x",
        "accelerate-step-50-copy60",
    }
    for name in others:
        (tmp_path / name).mkdir()
    for step in (9, 10, 20):
        module.save(accelerator, step, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "accelerate-step-10", "accelerate-step-20"}
    assert module.resume(accelerator, tmp_path) == 20 and accelerator.loaded == "accelerate-step-20"
    with monkeypatch.context() as patch:
        refuse_listing(patch)
        with pytest.raises(PermissionError):
            module.resume(accelerator, tmp_path)
    monkeypatch.setattr(Path, "is_dir", os.path.isdir)  # as in Python 3.14
    monkeypatch.setattr(os, "stat", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        module.resume(accelerator, tmp_path)


def test_ranks_that_would_each_train_a_separate_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate (and so Hugging Face's Trainer) forms no group on CPUs unless it is configured to,
    and Lightning none on nodes with one device each. All ranks would then save under the same
    names, and the job would be Complete.
    """
    accelerate = imitated(monkeypatch, "accelerate", "accelerate.tracking:GeneralTracker")
    trainer = imitated(monkeypatch, "huggingface", "transformers:TrainerCallback").DDPJobCallback()
    lightning, alone = imitated_lightning(monkeypatch).DDPJobCallback(tmp_path), Trainer("fit", 100)
    alone.world_size = 1
    args, state = SimpleNamespace(world_size=1, max_steps=1), SimpleNamespace(global_step=0)
    calls: list[tuple[str, Callable[[], object]]] = [
        (r"Accelerator\(cpu=True\)", lambda: accelerate.resume(Accelerator(), tmp_path)),
        (r"Accelerator\(cpu=True\)", lambda: accelerate.save(Accelerator(), 1, tmp_path)),
        (r"use_cpu=True", lambda: trainer.on_train_begin(args, state, None)),
        (r'strategy="ddp"', lambda: lightning.on_train_start(alone, None)),
    ]
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for remedy, call in calls:
        with pytest.raises(RuntimeError, match=rf"job's 2 ranks would train a separate model; .*{remedy}"):
            call()
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")
    for _, call in calls:
        call()
    monkeypatch.delenv("DDPJOB_COORDINATOR")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _, call in calls:
        call()


def test_the_next_save_removes_leftovers_of_a_killed_accelerate_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is killed while it saves leaves a folder as large as a checkpoint, each time for a
    different step.
    """
    module, accelerator = imitated(monkeypatch, "accelerate", "accelerate.tracking:GeneralTracker"), Accelerator()
    for step in (13, 70):
        (tmp_path / f"accelerate-step-{step}.unfinished").mkdir()
    assert module.resume(accelerator, tmp_path) == 0
    module.save(accelerator, 20, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["accelerate-step-20"]


def test_accelerate_must_not_choose_a_different_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imitated(monkeypatch, "accelerate", "accelerate.tracking:GeneralTracker")
    named = pytest.raises(ValueError, match="set automatic_checkpoint_naming=False in ProjectConfiguration")
    with named:
        module.save(Accelerator(own_names=True), 1, tmp_path)
    with named:
        module.resume(Accelerator(own_names=True), tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield rank 0's file of curves, in a job whose coordinator is unreachable."""
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(link, "post", lambda figures: None)
    monkeypatch.setattr(link, "is_reporting", lambda: True)
    monkeypatch.setattr(curve_file, "_file", None)
    monkeypatch.setattr(curve_file, "SHORTEST_PAUSE", 0.0)
    yield tmp_path / curve_file.FOLDER / METRICS
    curve_file.close()


def written(path: Path) -> list[dict[str, Any]]:
    curve_file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def test_reported_metrics_are_kept_as_curves(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ddpjob_report.report(step=7.0, steps=70, epoch=1, loss=0.5, accuracy=0.25, event=9, lr=0.1, samples_per_second=30)
    assert written(curves) == [
        {"event": "start", "step": 7, "world": 3},
        {"event": "step", "step": 7, "epoch": 1, "loss": 0.5, "lr": 0.1, "samplesPerSecond": 30},
        {"event": "eval", "step": 7, "accuracy": 0.25},
    ]
    # after a kill in the middle of a line
    with curves.open("a") as file:
        file.write('{"event": "step", "st')
    monkeypatch.setattr(curve_file, "_file", None)
    ddpjob_report.report(step=8, loss=float("nan"))
    curve_file.close()
    series = read_metrics(curves.read_text())
    assert series.starts == [7, 8] and series.steps["loss"] == {7: 0.5} and series.evaluations["accuracy"] == {7: 0.25}
    assert len(curves.read_text().splitlines()) == 6


def test_figures_without_a_step_are_kept_until_a_step_is_reported(curves: Path) -> None:
    ddpjob_report.report(loss=1)
    ddpjob_report.report(accuracy=0.5)
    time.sleep(0.05)
    assert not curves.exists() or curves.read_text() == ""
    ddpjob_report.report(step=1)
    assert written(curves)[1:] == [
        {"event": "step", "step": 1, "loss": 1},
        {"event": "eval", "step": 1, "accuracy": 0.5},
    ]


def test_a_script_that_runs_for_a_long_time_writes_fewer_lines(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_file, "LINES_PER_LIFE", 1e-9)
    for step in range(100):
        ddpjob_report.report(step=step, loss=step)
        time.sleep(0.001)
    rows = [row for row in written(curves) if row["event"] == "step"]
    assert len(rows) <= 2


def test_an_unwritable_folder_costs_only_the_curves(
    curves: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    curves.parent.write_text("a file of the script's own")
    ddpjob_report.report(step=1, loss=1)
    curve_file.close()
    assert "no curves are kept" in capfd.readouterr().err
    monkeypatch.setattr(curve_file, "_file", None)
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(curves.parent.parent / "not mounted"))
    ddpjob_report.report(step=1, loss=1)
    curve_file.close()
    assert not (curves.parent.parent / "not mounted").exists()


@pytest.mark.parametrize("reporting", [True, False])
def test_report_does_not_wait_for_the_checkpoint_volume(
    reporting: bool, curves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "is_reporting", lambda: reporting)
    is_dir, callers = Path.is_dir, list[threading.Thread]()

    def spied(path: Path) -> bool:
        callers.append(threading.current_thread())
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", spied)
    ddpjob_report.report(step=1, loss=1)
    curve_file.close()
    assert threading.current_thread() not in callers and curves.exists() is reporting
