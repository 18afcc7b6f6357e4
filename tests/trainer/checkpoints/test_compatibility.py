"""A checkpoint of a different model is reported as such. checkpoint.load can start from the weights
in other files.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import compatibility, torch_file
from ddpjob_trainer.checkpoints.compatibility import list_differences, load_weights, read_whole, weights_in
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.commands import evaluate_checkpoint
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.data.sampler import ElasticSampler
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError
from ranks import TINY, good, metrics, run
from slow_storage import Slow

ONE_EPOCH = [*TINY, "train.epochs=1"]


def refused(message: str, *arguments: str) -> None:
    (end,) = run(1, [*ONE_EPOCH, *arguments])
    assert end.code == 1 and re.search("CheckpointError: " + message, end.error), end


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield a folder with the checkpoint of an epoch (model.width=4), marked as best."""
    folder = tmp_path_factory.mktemp("trained")
    good(1, [*ONE_EPOCH, "checkpoint.keep_best=1", f"checkpoint.dir={folder}"])
    return folder


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return found


def test_differences_between_models_are_listed_by_tensor() -> None:
    saved = {"a": torch.zeros(2, 3), "old": torch.zeros(()), "same": torch.zeros(1)}
    wanted = {"a": torch.zeros(3, 2), "new": torch.zeros(4), "same": torch.ones(1)}
    assert list_differences(saved, wanted) == [
        "a is (2, 3) in the checkpoint and (3, 2) in the model",
        "new (4,) is not in the checkpoint",
        "old () is not in the model",
    ]


def test_a_different_model_is_reported_with_its_tensors_and_the_keys_to_set(trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.glob("*.pt")}
    message = (
        r"the checkpoint of step 8 in .* was made with a different model: features.0.weight is \(4, 1, 3, "
        r"3\) in the checkpoint and"
        r" \(8, 1, 3, 3\) in the model; .*; and \d+ more\. To resume, use the original settings model.width=4;"
        r" to start from scratch, set checkpoint.dir to a different folder"
    )
    folder = f"checkpoint.dir={trained}"
    refused(message, folder, "model.width=8")
    refused(
        r".* the optimizer was sgd, but is now adamw\. To resume, use the original settings optim.name=sgd",
        folder,
        "optim.name=adamw",
    )
    refused(r"checkpoint.resume=false, but .* has a checkpoint of step 8", folder, "checkpoint.resume=false")
    assert {path: path.read_bytes() for path in trained.glob("*.pt")} == before


def test_a_resume_with_a_different_seed_is_refused(trained: Path) -> None:
    """Otherwise, the sample order would follow the checkpoint's seed, and the augmentation the
    configuration's.
    """
    message = r"the checkpoint of step 8 in .* was made with data.seed=0, but data.seed is now 3\. .* To resume,"
    refused(message, f"checkpoint.dir={trained}", "data.seed=3")


def test_a_checkpoint_of_a_custom_loop_is_refused(tmp_path: Path) -> None:
    snapshot = {"step": 3, "model": {}, "optimizer": {}, "sampler": ElasticSampler(10, 4).state_dict()}
    torch_file.write(tmp_path / "step-000000003.pt", snapshot, Metadata(3))
    message = (
        r"the newest checkpoint in .* has no config, because your own training loop saved it; .* to a different folder"
    )
    refused(message, f"checkpoint.dir={tmp_path}")


def test_every_rank_exits_with_the_message_about_a_different_model(trained: Path) -> None:
    ends = run(2, [*ONE_EPOCH, f"checkpoint.dir={trained}", "model.width=8"])
    assert [end.code for end in ends] == [1, 1]
    assert all("was made with a different model" in end.error for end in ends)


@pytest.mark.parametrize("source", ["file", "best", "folder", "plain", "wrapped", "compiled"])
def test_training_starts_from_the_weights_of_a_file(source: str, trained: Path, tmp_path: Path) -> None:
    """The weights are compared after one step with a learning rate of zero, on 2 ranks. Momentum
    and the step count start afresh.
    """
    known = weights(trained / "best.pt")
    path = {"file": trained / "step-000000008.pt", "best": trained / "best.pt", "folder": trained}.get(
        source, tmp_path / "plain.pt"
    )
    if source == "plain":
        torch.save(known, path)
    if source == "wrapped":  # like torch.save of a DistributedDataParallel, in a dictionary as in the examples
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in known.items()}}, path)
    if source == "compiled":  # a compiled model with a compiled submodule, saved with its arguments as timm does
        inner = {name.replace("features.", "features._orig_mod.", 1): tensor for name, tensor in known.items()}
        state = {f"module._orig_mod.{name}": tensor for name, tensor in inner.items()}
        torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1)}, path)
    good(
        2,
        [
            *ONE_EPOCH,
            "optim.lr=0",
            "optim.weight_decay=0",
            f"checkpoint.load={path}",
            f"checkpoint.dir={tmp_path / 'new'}",
        ],
    )
    assert [line["step"] for line in metrics(tmp_path / "new" / "run", "start")] == [0]
    found = weights(tmp_path / "new" / "step-000000008.pt")
    for name, tensor in known.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(found[name], tensor), name


def test_a_restart_continues_training_and_does_not_load_the_weights_again(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "start.pt"
    torch.save(weights(trained / "best.pt"), copy)
    good(1, [*ONE_EPOCH, f"checkpoint.load={copy}", f"checkpoint.dir={tmp_path / 'new'}"])
    copy.unlink()
    good(1, [*TINY, f"checkpoint.load={copy}", f"checkpoint.dir={tmp_path / 'new'}"])
    assert [line["step"] for line in metrics(tmp_path / "new" / "run", "start")] == [0, 8]


def test_parameters_that_match_load_except_keep_their_initial_values(trained: Path) -> None:
    known = weights(trained / "best.pt")
    model = {**known, "head.weight": torch.full((7, 32), 5.0), "head.bias": torch.full((7,), 5.0)}
    message = r"do not fit the model: head.weight is \(10, 32\) .*checkpoint.load_except=head.weight,head.bias"
    with pytest.raises(CheckpointError, match=message):
        load_weights(trained, (), model, Group())
    found = load_weights(trained, ("head.*",), model, Group())
    assert found.keys() == model.keys()
    assert torch.equal(found["head.bias"], torch.full((7,), 5.0)) and torch.equal(
        found["features.0.weight"], known["features.0.weight"]
    )


def test_a_pattern_that_no_tensor_matches_is_refused(trained: Path) -> None:
    """With a typo in the pattern, the tensors that should keep their initial values would be
    loaded.
    """
    model = weights(trained / "best.pt")
    with pytest.raises(
        CheckpointError, match=r"load_except: 'haed\.\*' matches no tensor .*; use names such as features"
    ):
        load_weights(trained, ("features.0.*", "haed.*"), model, Group())
    with pytest.raises(ConfigError, match=r"checkpoint.load_except=head\.\* has no effect without checkpoint.load"):
        CheckpointConfig(load_except=("head.*",)).check()


def test_weights_of_a_diverged_run_are_refused(trained: Path, tmp_path: Path) -> None:
    """Otherwise, steps would be skipped, with advice to lower the learning rate. Infinity is
    allowed, because it may be intended, as in a mask.
    """
    model = weights(trained / "best.pt")
    broken = {**model, "head.bias": model["head.bias"].clone(), "features.0.weight": model["features.0.weight"] * 1e30}
    broken["head.bias"][3] = float("nan")
    torch.save(broken, tmp_path / "nan.pt")
    with pytest.raises(CheckpointError, match=r"load: 1 of the \d+ tensors in .*nan.pt .*head.bias.*earlier"):
        load_weights(tmp_path / "nan.pt", (), model, Group())
    broken["head.bias"][3] = float("-inf")
    torch.save(broken, tmp_path / "inf.pt")
    assert load_weights(tmp_path / "inf.pt", (), model, Group())["head.bias"][3] == -torch.inf


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with a moving average of the weights, and return the folder."""
    folder = tmp_path_factory.mktemp("averaged")
    good(1, [*ONE_EPOCH, "optim.ema_decay=0.9", f"checkpoint.dir={folder}"])
    return folder


@pytest.mark.parametrize("average", [True, False])
def test_training_starts_from_the_average_that_was_evaluated(
    average: bool, averaged: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [*ONE_EPOCH, "optim.lr=0", "optim.weight_decay=0", f"checkpoint.load={averaged}"]
    keys += [] if average else ["checkpoint.load_average=false"]
    good(1, [*keys, f"checkpoint.dir={tmp_path}"])
    saved = torch.load(averaged / "step-000000008.pt", weights_only=True)
    name = "features.0.weight"
    raw, mean = saved["model"][name], saved["average"]["averages"][name]
    found = weights(tmp_path / "step-000000008.pt")[name]
    assert torch.equal(found, mean if average else raw) and not torch.equal(raw, mean)
    kind = "the moving average of the weights (used for evaluations" if average else "the weights from"
    assert f"checkpoint.load: loaded {kind}" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["timm", "torchvision"])
def test_averages_in_files_of_other_trainers_are_loaded(kind: str, trained: Path, tmp_path: Path) -> None:
    known = weights(trained / "best.pt")
    mean = {name: tensor + 1 for name, tensor in known.items()}
    torchs = {"n_averaged": torch.tensor(3), **{f"module.{name}": tensor for name, tensor in mean.items()}}
    content = {"state_dict": known, "state_dict_ema": mean} if kind == "timm" else {"model": known, "model_ema": torchs}
    torch.save({**content, "args": argparse.Namespace(model_ema=True)}, tmp_path / "x.pt")
    for average, expected in ((True, mean), (False, known)):
        found = load_weights(tmp_path / "x.pt", (), known, Group(), average=average)
        assert found.keys() == known.keys() and all(torch.equal(found[name], expected[name]) for name in known)


def test_the_ranks_agree_to_wait_longer_while_rank_0_reads(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the others waited in a collective, so with a large file on a slow disk, every
    attempt to start timed out.
    """
    slow = Slow(monkeypatch)
    monkeypatch.setattr(compatibility, "read_whole", slow(compatibility.read_whole))
    load_weights(trained, (), weights(trained / "best.pt"), Group(), alive=slow.alive)
    assert slow.ended == 1 and slow.reported >= 2
    evaluate_checkpoint._read(trained, Group())
    assert slow.ended == 2


def test_a_missing_best_checkpoint_is_reported(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_bytes((trained / "best.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"best\.json names step-000000008\.pt, which has been deleted; choose a different"
    ):
        read_whole(tmp_path)


def test_with_an_unsuitable_file_every_rank_exits_before_training(tmp_path: Path) -> None:
    ends = run(2, [*ONE_EPOCH, f"checkpoint.load={tmp_path / 'none.pt'}", f"checkpoint.dir={tmp_path}"])
    assert all(end.code == 1 and "none.pt cannot be read (No such file" in end.error for end in ends), ends


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", r"is damaged, or was not written by torch.save"),
        (b'{"a": 1}', r"is damaged, or was not written by torch.save$"),
        ([1, 2], r"does not contain a state dict"),
        ({"model": {"a": 1}}, r"does not contain a state dict"),
        ("folder", r"is a folder without a checkpoint"),
        ("broken", r"is corrupt \(its checksum does not match\)"),
    ],
)
def test_a_file_that_is_not_a_checkpoint_is_refused(content: Any, message: str, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    match content:
        case bytes():
            path.write_bytes(content)
        case "folder":
            path.mkdir()
        case "broken":
            damaged = bytearray((trained / "step-000000008.pt").read_bytes())
            damaged[2000] ^= 1
            path.write_bytes(damaged)
        case _:
            torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        weights_in(read_whole(path), path, average=True)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(
        CheckpointError,
        match=r"evil.pt contains a posix.mkdir, .*; use a file that contains only the state dict",
    ):
        read_whole(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


def test_a_very_long_word_in_a_file_does_not_slow_down_the_check(tmp_path: Path) -> None:
    """torch itself would search this file for minutes to write its message."""
    pickled = b"\x80\x02c" + b"a" * 100_000 + b"\nb\n."
    torch.save({}, tmp_path / "long.pt")
    with zipfile.ZipFile(tmp_path / "long.pt") as whole, zipfile.ZipFile(tmp_path / "words.pt", "w") as made:
        for name in whole.namelist():
            made.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(CheckpointError, match=r"words.pt contains a a{500}") as caught:
        read_whole(tmp_path / "words.pt")
    assert len(str(caught.value)) < 2000
