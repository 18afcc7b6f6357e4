"""Custom components for the built-in trainer, each with the key that selects it.

PYTHONPATH=examples python -m ddpjob_trainer optim.name=own_parts:optimizer ...
"""

import torch
from sklearn.datasets import load_digits
from torch import nn


# optim.name=own_parts:optimizer
def optimizer(groups, lr, weight_decay):
    """Return any torch.optim.Optimizer; a class such as torch.optim:Adagrad needs no function."""
    return torch.optim.RMSprop(groups, lr=lr, weight_decay=weight_decay, momentum=0.9, eps=1e-3)


# optim.schedule=own_parts:schedule
def schedule(epoch, epochs):
    """Return a factor for optim.lr that rises for one epoch and then falls linearly."""
    return min(1.0, epoch + 0.1) * (1 - epoch / epochs)


# data.name=own_parts:images data.shift=1
def images(folder):
    """Return uint8 images (n, height, width), which the device shifts, mirrors and normalizes."""
    digits = load_digits()
    pixels, labels = (15 * digits.images).astype("uint8"), digits.target
    return (pixels[:1438], labels[:1438]), (pixels[1438:], labels[1438:]), 10


# data.batch_transform=own_parts:blend
def blend(images, labels, generator):
    """Mix each image and its label with those of another image, each in its own proportion."""
    share = torch.rand(len(labels), 1, generator=generator, device=labels.device)
    partner = torch.randperm(len(labels), generator=generator, device=labels.device)
    classes = nn.functional.one_hot(labels, 10).float()
    mixed = torch.lerp(images, images[partner], share[:, :, None, None])
    return mixed, torch.lerp(classes, classes[partner], share)


# train.callbacks=own_parts:PrecisionOfThree,own_parts:EarlyStopping
class PrecisionOfThree:
    """A metric: the share of the test images classified as 3 that really are a 3."""

    def on_test_batch(self, scores, targets):
        guessed = scores.argmax(1) == 3
        return torch.stack([(guessed & (targets == 3)).sum(), guessed.sum()])

    def on_test_end(self, sums):
        return {"precision_of_3": sums[0] / sums[1].clamp(min=1)}


class EarlyStopping:
    """End training after two evaluations in a row without a lower loss."""

    best, waited = float("inf"), 0

    def on_epoch_end(self, epoch, metrics):
        self.waited = 0 if metrics["loss"] < self.best else self.waited + 1
        self.best = min(self.best, metrics["loss"])
        return self.waited == 2

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]
