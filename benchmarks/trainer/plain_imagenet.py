"""ImageNet as in the official example: ImageFolder, PIL transforms, DataLoader."""

from __future__ import annotations

from torchvision import datasets, transforms

from benchmarks.trainer.models_of_cases import model_of
from benchmarks.trainer.plain_loop import loader, options, train


def main() -> None:
    """Train for one epoch."""
    given = options()
    data = datasets.ImageFolder(
        str(given.data / "train"),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        ),
    )
    train(model_of(given.model, (3, 224, 224), len(data.classes)), loader(data, given), given)


if __name__ == "__main__":
    main()
