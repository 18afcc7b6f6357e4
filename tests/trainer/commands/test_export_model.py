"""`python -m ddpjob_trainer export`: other programs can read the exported files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer.checkpoints import torch_file
from ddpjob_trainer.commands.export_model import main, save_safetensors
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.errors import CheckpointError, TrainingError
from ddpjob_trainer.model.models import build_model
from ranks import good
from safetensors import safe_open
from safetensors.torch import load_file

SETTINGS = [
    *("data.name=imagefolder", "data.image_size=16", "data.test_image_size=24", "data.workers=0", "data.batch=6"),
    *("model.width=4", "model.channels_last=true", "optim.ema_decay=0.8", "train.epochs=1", "eval.pictures=false"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two classes of images, and return the checkpoints' folder."""
    folder = tmp_path_factory.mktemp("trained")
    write_image_folder(folder / "images")
    good(1, [*SETTINGS, f"data.dir={folder / 'images'}", f"checkpoint.dir={folder / 'checkpoints'}"])
    return folder / "checkpoints"


def test_a_checkpoint_holds_the_classes_and_the_image_shape_of_the_data(trained: Path) -> None:
    content = torch_file.decode(max(trained.glob("step-*.pt")).read_bytes())
    assert (content["config"]["data.classes"], content["config"]["data.shape"]) == (2, [3, 16, 16])
    assert content["data"]["names"] == ["n01440764", "n01443537"]


def test_the_exported_files_give_the_outputs_of_the_trained_model(trained: Path, tmp_path: Path) -> None:
    assert main([str(trained), "-o", str(tmp_path)]) == 0
    average = torch_file.decode(max(trained.glob("step-*.pt")).read_bytes())["average"]["averages"]
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == average.keys()
    assert all(torch.equal(weights[name], average[name]) for name in average)

    extra = {"metadata.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    model = build_model(ModelConfig(width=4), (3, 16, 16), 2, 0).eval()
    model.load_state_dict(average)
    inputs = torch.randn(5, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for batch in (inputs, inputs[:1]):
            torch.testing.assert_close(program.module()(batch), model(batch))

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    facts = json.loads(extra["metadata.json"])
    names = ["n01440764", "n01443537"]
    assert {
        "model": "small_cnn",
        "step": 2,
        "classes": names,
        "size": [3, 24, 24],
        "scale": 255.0,
    }.items() <= facts.items()
    assert facts["mean"] == [0.485, 0.456, 0.406]
    in_text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    assert metadata == {"format": "pt", **in_text}


def test_the_safetensors_library_reads_every_kind_of_tensor(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([True, False, True]),
        "b": torch.tensor(3),
        "c": torch.randn(2, 3).bfloat16(),
        "d": torch.randn(4, 2).T,
        "e": torch.empty(0, 2),
    }
    save_safetensors(tensors, {}, tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype, name


@pytest.mark.parametrize("kind", [torch.complex64, torch.float8_e4m3fn])
def test_a_tensor_of_an_unsupported_type_is_named(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {"head.phase": torch.zeros(2).to(kind), "weight": torch.ones(2)}
    with pytest.raises(
        TrainingError, match=rf"a.safetensors was not written: head.phase has the unsupported type {kind}; use one"
    ):
        save_safetensors(tensors, {}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_weights_of_a_model_that_cannot_be_traced_are_exported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_values(self: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        return images if images.sum() > 0 else -images

    monkeypatch.setattr("ddpjob_trainer.model.models.SmallCnn.forward", by_values)
    with pytest.raises(TrainingError, match=r"model.pt2 was not written: torch.export cannot trace model.name=small_c"):
        main([str(trained), "-o", str(tmp_path)])
    assert load_file(tmp_path / "model.safetensors") and not (tmp_path / "model.pt2").exists()


def test_exporting_a_plain_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "plain.pt")
    with pytest.raises(
        CheckpointError, match=r"plain.pt does not contain a configuration of this trainer; export a checkpoint"
    ):
        main([str(tmp_path / "plain.pt"), "-o", str(tmp_path)])
