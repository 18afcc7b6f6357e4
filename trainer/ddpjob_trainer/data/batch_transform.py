"""The user's own transform of training batches on the device (`data.batch_transform`).

`function(images, labels, generator)` gets one micro-batch, and returns (images, labels). The
micro-batch's key seeds `generator` and the global generators of Python, numpy and torch. The
function therefore draws the same numbers on any number of ranks. Because it may mix the samples of
the micro-batch, ranks take whole micro-batches (see `run_plan.Division`). With data.exact=false,
each rank transforms its own share instead, and the result depends on the number of ranks.
"""

from __future__ import annotations

import torch

from ddpjob_trainer.data.dataset import UNREADABLE, Batch
from ddpjob_trainer.data.randomness import derive, seed_draws, seed_torch
from ddpjob_trainer.errors import TrainingError
from ddpjob_trainer.own_functions import explain, load_function

_STREAM = 0x626174


class BatchTransform:
    """Applies the user's function that `data.batch_transform` names."""

    def __init__(self, name: str, device: torch.device, classes: int = 0) -> None:
        """Load the function. Raises ConfigError.

        If `classes` is not 0, each call checks that the function's labels are valid for that many
        classes.
        """
        self._classes, self._name, self._function = classes, name, load_function("data.batch_transform", name)
        self._generator = torch.Generator(device)

    def __call__(self, batch: Batch, key: int) -> Batch:
        """Return the micro-batch as transformed by the function.

        Unreadable images are not passed to the function. Raises TrainingError if the function's
        result is invalid.
        """
        if len(batch.labels) == batch.unreadable:
            return batch
        if not batch.unreadable:
            return Batch(*self._transform(batch.images, batch.labels, key))
        readable = batch.labels != UNREADABLE
        images, labels = self._transform(batch.images[readable], batch.labels[readable], key)
        count, fill = len(readable), 0 if labels.is_floating_point() else UNREADABLE
        whole = images.new_zeros(count, *images.shape[1:]), labels.new_full((count, *labels.shape[1:]), fill)
        whole[0][readable], whole[1][readable] = images, labels
        return Batch(*whole, batch.unreadable)

    def _transform(self, images: torch.Tensor, labels: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = derive(key, _STREAM)
        with explain("data.batch_transform", self._name, "the function", TrainingError), seed_draws(seed):
            seed_torch(seed, images.device)
            found = self._function(images, labels, self._generator.manual_seed(seed))
        fits = (
            isinstance(found, tuple | list)
            and len(found) == 2
            and all(isinstance(it, torch.Tensor) and it.shape[:1] == labels.shape[:1] for it in found)
            and (found[0].dtype, found[0].device) == (images.dtype, images.device)
        )
        if not fits:
            raise TrainingError(
                f"data.batch_transform={self._name}: must return (images, labels) for the same {len(labels)} samples,"
                f" with images of {images.dtype} on {images.device}"
            )
        self._check_labels(found[1])
        return found[0], found[1]

    def _check_labels(self, labels: torch.Tensor) -> None:
        shares, classes = labels.is_floating_point(), self._classes
        wrong = classes and labels.shape[1:] != ((classes,) if shares else ())
        # Check the values only on the CPU. On any other device, the check would have to wait for
        # the device.
        if classes and not wrong and not shares and labels.device.type == "cpu":
            wrong = not 0 <= int(labels.min()) <= int(labels.max()) < classes
        if wrong:
            found = (
                f"of shape {tuple(labels.shape)}"
                if shares or labels.ndim > 1
                else f"from {labels.min()} to {labels.max()}"
            )
            raise TrainingError(
                f"data.batch_transform={self._name} returned labels {found}; return class numbers "
                f"(n,) from 0 to {classes - 1}, or class probabilities (n, {classes})"
            )
