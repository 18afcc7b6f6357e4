"""Training with custom optimizers, schedules, batch transforms, uint8 images and callbacks is
exact, also across a stop and on any number of ranks.

These are from examples/own_parts.py, which docs/trainer.md shows.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.commands import evaluate_checkpoint
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.data import batch_transform
from ddpjob_trainer.errors import ConfigError, TrainerError
from ddpjob_trainer.own_functions import load_function
from ranks import TINY, good, metrics, run, stop_at

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_parts.py"
PARTS = [
    *TINY,
    "data.name=own_parts:images",
    "data.shift=1",
    "data.batch_transform=own_parts:blend",
    "optim.name=own_parts:optimizer",
    "optim.schedule=own_parts:schedule",
    "optim.groups=head.*=3,*.bias=2/0",
    "optim.lr=0.002",
    "train.callbacks=own_parts:PrecisionOfThree,own_parts:EarlyStopping",
]
EXACT = [*PARTS, "ddp.ordered=true", "data.micro_batches=4", "train.epochs=3"]

SOURCE = """
import os
import random

import torch


class Impatient:
    def on_epoch_end(self, epoch, metrics):
        return epoch == 2


class Broken:
    def on_step(self, step, loss):
        raise ValueError("no such thing\\nand more")


class Growing:
    def on_test_batch(self, scores, targets):
        self.count = getattr(self, "count", 0) + 1
        return torch.ones(self.count)

    def on_test_end(self, sums):
        return {}


class OfRank:
    def on_test_batch(self, scores, targets):
        return torch.ones(1 + int(os.environ["RANK"]))

    def on_test_end(self, sums):
        return {}


class Ambiguous:
    def on_epoch_end(self, epoch, metrics):
        return torch.ones(2)


class InTorch:
    def on_step(self, step, loss):
        torch.nn.Linear(2, 3)(torch.ones(1, 1))


class Renamed:
    def on_epoch_ends(self, epoch, metrics):
        pass


class Taken:
    name = "step"

    def on_test_batch(self, scores, targets):
        return 1.0

    def on_test_end(self, sums):
        return {self.name: sums[0]}


class Long(Taken):
    name = 101 * "x"


class Idle:
    pass


class Half:
    def on_test_batch(self, scores, targets):
        return scores.sum()


class Unsaved(Impatient):
    def state_dict(self):
        return {"object": object()}

    def load_state_dict(self, state):
        pass


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] /= self.steps
        super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data += 0.01 * torch.randn_like(weight)


def nothing(groups, lr, weight_decay):
    return 3


def some(groups, lr, weight_decay):
    return torch.optim.SGD(groups[0]["params"][:1], lr=lr)


def infinite(epoch, epochs):
    return 1 / (epochs - epoch - 1) if epoch != epochs - 1 else float("inf")


def negative(epoch, epochs):
    return -1


def random_factor(epoch, epochs):
    return random.random()


def of_rank(epoch, epochs):
    return 1 + int(os.environ["RANK"])


def labels_from_one(images, labels, generator):
    return images, labels + 1


def ignored(images, labels, generator):
    return images, torch.full_like(labels, -100)


def shares_of_three(images, labels, generator):
    return images, torch.ones(len(labels), 3)


def shorter(images, labels, generator):
    return images[1:], labels


def halves(images, labels, generator):
    return images.half(), labels
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "wrong_parts.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    yield
    for name in ("wrong_parts", "own_parts"):
        sys.modules.pop(name, None)


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's weights, optimizer state and callback states as one flat
    mapping.
    """
    found = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    moments = {f"{name}/{key}": it for name, kept in found["optimizer"]["state"].items() for key, it in kept.items()}
    stopping = found["callbacks"]["own_parts:EarlyStopping"]
    return {**found["model"], **moments, **{key: torch.tensor(value) for key, value in stopping.items()}}


def draws_of_the_process(rank: int) -> None:
    """Deliberate defect: a transform draws from a generator that is seeded by the rank."""
    batch_transform.derive = lambda key, stream: rank  # type: ignore[assignment]


def test_runs_with_custom_parts_are_bit_identical_across_a_stop_and_on_two_ranks(tmp_path: Path) -> None:
    for folder, world, stops in (("alone", 1, ()), ("walk", 2, (11,)), ("defect", 2, ())):
        keys = [*EXACT, f"checkpoint.dir={tmp_path / folder}"]
        for stop in stops:
            ended = run(world, keys, prepare=stop_at(stop))
            assert [end.code for end in ended] == [75] * world, ended
        good(world, keys, prepare=draws_of_the_process if folder == "defect" else None)
    alone, walk, defect = (final(tmp_path / folder) for folder in ("alone", "walk", "defect"))
    assert alone.keys() == walk.keys() and any("square_avg" in name for name in alone)
    assert [name for name in alone if not torch.equal(alone[name], walk[name])] == []
    assert not all(torch.equal(alone[name], defect[name]) for name in alone), "the comparison detects a defect"
    rows = [metrics(tmp_path / folder / "run", "eval")[-1] for folder in ("alone", "walk")]
    assert rows[0]["precision_of_3"] == rows[1]["precision_of_3"] > 0.5


def test_training_that_a_callback_has_ended_stays_ended_after_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [*TINY, "train.epochs=5", "train.callbacks=wrong_parts:Impatient", f"checkpoint.dir={tmp_path}"]
    good(2, keys)
    assert "wrong_parts:Impatient ends training after epoch 2" in capfd.readouterr().out
    assert len(metrics(tmp_path / "run", "step")) == 16
    assert verify(read([tmp_path / "run"])).epochs == {1: 1438, 2: 1438}
    good(1, keys)
    assert len(metrics(tmp_path / "run", "step")) == 16, "a restart does not continue training"
    good(1, [*keys, "train.callbacks=[]"])
    assert len(metrics(tmp_path / "run", "step")) == 40, "without the callback, training continues"


def test_only_the_callback_that_ended_the_training_keeps_it_ended(tmp_path: Path) -> None:
    keys = [*TINY, "train.epochs=3", "checkpoint.every_epochs=0", f"checkpoint.dir={tmp_path}"]
    both = "train.callbacks=wrong_parts:Impatient,own_parts:EarlyStopping"
    for callbacks, steps in ((both, 16), (both, 16), ("train.callbacks=own_parts:EarlyStopping", 24)):
        train.run(config.load(None, [*keys, callbacks]))
        assert len(metrics(tmp_path / "run", "step")) == steps, callbacks


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optim.schedule=wrong_parts:of_rank", r"of_rank returns different factors on ranks 0 and 1; compute factors"),
        ("train.callbacks=wrong_parts:OfRank", r"OfRank: on_test_batch returned 1 and 2 sums for different parts"),
    ],
)
def test_custom_parts_that_differ_between_ranks_are_named_on_each_rank(key: str, message: str, tmp_path: Path) -> None:
    for end in run(2, [*TINY, key, "train.epochs=1", "train.timeout_seconds=20", f"checkpoint.dir={tmp_path}"]):
        assert re.search(message, end.error), end


def test_the_command_evaluate_reports_the_metrics_of_callbacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(1, [*PARTS, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    evaluate_checkpoint.main([str(tmp_path), "-o", str(tmp_path / "out")])
    (row,) = metrics(tmp_path / "run", "eval")
    assert f"precision_of_3 {row['precision_of_3']:.6f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["optim.name=:sgd"], r"optim.name=:sgd: must be package.module:name"),
        (["optim.name=torch.optim:Muonn"], r"torch.optim has no function 'Muonn'; did you mean torch.optim:Muon"),
        (["optim.name=wrong_parts:nothing"], r"the call name\(groups, lr=.*\) returned int; return a torch.optim.Opt"),
        (["optim.name=wrong_parts:some"], r"param_groups must contain each given parameter once"),
        (["optim.name=wrong_parts:Counting"], r"step 8 differs after a checkpoint of step 7 is loaded"),
        (["optim.name=wrong_parts:Noisy"], r"step 8 differs .*do not draw random numbers"),
        (
            ["optim.name=torch.optim:LBFGS"],
            r"torch.optim:LBFGS: the call .* raised TypeError in .*weight_d",
        ),
        (["optim.schedule=wrong_parts:infinite"], r"returned inf for epoch=1, epochs=2; return a finite number"),
        (["optim.schedule=wrong_parts:negative"], r"returned -1.0 for epoch=0"),
        (["optim.schedule=wrong_parts:random_factor"], r"returns different factors for the same epoch"),
        (["optim.groups=haed.*=3"], r"optim.groups: no parameter of small_cnn matches 'haed.\*'; use, .*head.bias"),
        (["optim.groups=head.*=3,*.bias=2,head.bias=1"], r"earlier patterns select all parameters that 'head.bias'"),
        (["optim.groups=head.*"], r"optim.groups=head.\*: must be PATTERN=RATE or PATTERN=RATE/DECAY"),
        (["optim.groups=head.*=-1"], r"with numbers of at least 0"),
        (["data.batch_transform=wrong_parts:shorter"], r"must return \(images, labels\) for the same 200 samples"),
        (["data.batch_transform=wrong_parts:halves"], r"with images of torch.float32 on cpu"),
        (
            ["data.batch_transform=wrong_parts:labels_from_one"],
            r"labels from 1 to 10; return class numbers \(n,\) from 0 to 9",
        ),
        (["data.batch_transform=wrong_parts:ignored"], r"returned labels from -100 to -100; return class numbers"),
        (
            ["data.batch_transform=wrong_parts:shares_of_three"],
            r"labels of shape \(200, 3\); .*class probabilities \(n, 10\)",
        ),
        (["data.batch_transform=own_parts:blend", "data.mixup=0.2"], r"cannot be combined with data.mixup"),
        (
            ["data.batch_transform=own_parts:blend", "model.sync_batchnorm=true"],
            r"batch_transform needs fixed",
        ),
        (["train.callbacks=wrong_parts:Renamed"], r"Renamed has on_epoch_ends; the methods are on_train_begin, "),
        (["train.callbacks=wrong_parts:Idle"], r"Idle has no method of a callback; the methods are"),
        (["train.callbacks=wrong_parts:Half"], r"on_test_batch and on_test_end belong together"),
        (["train.callbacks=wrong_parts:Unsaved"], r"has a builtins.object at state\['callbacks'\]"),
        (
            ["train.callbacks=wrong_parts:Broken"],
            r"on_step raised ValueError in wrong_parts.py, line 15: no such",
        ),
        (["train.callbacks=wrong_parts:InTorch"], r"on_step raised RuntimeError in wrong_parts.py, line 42: .*mat1"),
        (
            ["train.callbacks=wrong_parts:Ambiguous", "checkpoint.every_epochs=0"],
            r"converting the result of on_epoch_end to bool raised RuntimeError",
        ),
        (
            ["train.callbacks=wrong_parts:Growing", "train.eval_batch=200", "checkpoint.every_epochs=0"],
            r"callbacks=wrong_parts:Growing: on_test_batch returned 1 and 2 sums for .*torch.bincount\(..., minlength=",
        ),
        (
            ["train.callbacks=wrong_parts:Taken", "checkpoint.every_epochs=0"],
            r"wrong_parts:Taken: on_test_end returned step; return .*, under unused names of at most 100 characters",
        ),
        (["train.callbacks=wrong_parts:Long", "checkpoint.every_epochs=0"], r"Long: on_test_end returned xxx"),
        (
            ["train.callbacks=wrong_parts:Impatient", "train.eval_every=0"],
            r"Impatient: with train.eval_every=0, on_epoch_end is never called; set train.eval_every=1",
        ),
        (["train.callbacks=Broken"], r"train.callbacks: 'Broken': must be package.module:name"),
        (["data.flip=true"], r"data.flip has no effect with data.name=digits"),
        (["model.pretrained=default"], r"only models of torchvision and timm have weights by name"),
        (["model.pretrained=a", "checkpoint.load=b"], r"checkpoint.load=b replaces all weights; leave out one"),
    ],
)
def test_mistakes_in_custom_parts_are_reported_before_the_first_checkpoint(
    keys: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainerError, match=message):
        train.run(config.load(None, [*TINY, *keys, f"checkpoint.dir={tmp_path}"]))
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "optim.name=adamv",
            r"optim.name: 'adamv' is unknown; use sgd, .*package.module:function; did you mean 'adamw'",
        ),
        ("optim.schedule=cosin", r"optim.schedule: 'cosin' is unknown; .*did you mean 'cosine'"),
    ],
)
def test_a_misspelled_name_is_refused_before_any_data_is_read(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(None, [key])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", r"importing broken_part raised SyntaxError in broken_part.py, line 1: invalid syntax"),
        ("\nlimit = nothing\n", r"raised NameError in broken_part.py, line 2: name 'nothing' is not defined; correct"),
        ("from torch import nothing\n", r"raised ImportError in broken_part.py, line 1: cannot import name 'nothing'"),
        ("import nothing.at_all\n", r"raised ModuleNotFoundError in broken_part.py, line 1: No .* 'nothing'; correct"),
        (None, r"optim.loss=broken_part:f: No module named 'broken_part'; put the module's folder on PYTHONPATH"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    source: str | None, message: str, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "broken_part.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=message):
        load_function("optim.loss", "broken_part:f")


def test_a_different_custom_optimizer_is_refused_at_a_resume(tmp_path: Path) -> None:
    keys = [*TINY, "optim.name=own_parts:optimizer", "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    train.run(config.load(None, keys))
    with pytest.raises(TrainerError, match=r"the optimizer was own_parts:optimizer, but is now torch.optim:Adagrad"):
        train.run(config.load(None, [*keys, "optim.name=torch.optim:Adagrad"]))


def test_a_checkpoint_without_a_callbacks_state_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = [*TINY, f"checkpoint.dir={tmp_path}"]
    train.run(config.load(None, [*keys, "train.epochs=1"]))
    train.run(config.load(None, [*keys, "train.callbacks=own_parts:EarlyStopping"]))
    assert "own_parts:EarlyStopping starts from scratch" in capfd.readouterr().out
    train.run(config.load(None, [*keys, "train.epochs=3"]))
    assert "the checkpoint's state of own_parts:EarlyStopping is not used" in capfd.readouterr().out


def test_the_examples_are_short_and_the_page_shows_them() -> None:
    source = EXAMPLE.read_text()
    for part in ast.parse(source).body:
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            assert part.end_lineno is not None and part.end_lineno - part.lineno < 15, part.name
    page = (ROOT / "docs" / "trainer.md").read_text()
    shown = re.search(r"<!-- own parts: begin -->\n```python\n(.*?)```\n<!-- own parts: end -->", page, re.DOTALL)
    assert shown and shown[1] == source.partition('"""\n\n')[2], "copy examples/own_parts.py to the page"
