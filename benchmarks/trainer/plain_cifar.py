"""CIFAR-10 as in tutorials: torchvision's data set, PIL transforms, a DataLoader with workers."""

from __future__ import annotations

import torchvision
import torchvision.transforms as transforms

from benchmarks.trainer.models_of_cases import model_of
from benchmarks.trainer.plain_loop import loader, options, train


class Cifar10(torchvision.datasets.CIFAR10):
    """CIFAR-10 without verifying checksums, which generated data does not have."""

    def _check_integrity(self) -> bool:
        return True

    def _load_meta(self) -> None:
        self.classes = [str(number) for number in range(10)]


def main() -> None:
    """Train for one epoch."""
    given = options()
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ]
    )
    data = Cifar10(str(given.data), train=True, transform=transform)
    train(model_of(given.model, (3, 32, 32), 10), loader(data, given), given)


if __name__ == "__main__":
    main()
