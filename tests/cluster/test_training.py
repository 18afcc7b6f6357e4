"""The project's own trainer with images from a volume. test_example.py tests its exactness on a
cluster.
"""

from __future__ import annotations

from pathlib import Path

import datasets
from jobs import Jobs, training_job


def test_a_folder_of_images_trains_on_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    data, checkpoints = tmp_path / "data", tmp_path / "checkpoints"
    data.mkdir()
    checkpoints.mkdir()
    datasets.write_image_folder(data)
    keys = ["data.name=imagefolder", "data.batch=4", "data.image_size=32", "model.name=torchvision:resnet18"]
    storage = {"data": {"hostPath": str(data)}, "checkpoints": {"hostPath": str(checkpoints), "shared": True}}
    jobs.apply(training_job("images", *keys, "train.epochs=1", storage=storage))
    jobs.wait_phase("images", "Complete", timeout=120)
    progress = jobs.status("images")["progress"]
    assert progress["step"] >= 3 and progress["loss"] > 0
    assert list(checkpoints.glob("step-*.pt"))
