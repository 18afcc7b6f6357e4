"""The user's own learning-rate schedule (`optim.schedule=package.module:function`).

`function(epoch, epochs)` returns a factor by which optim.lr is multiplied. `epoch` is the number of
complete epochs plus a fraction, such as 2.5, and is computed from the samples consumed. The
schedule therefore continues where it stopped, even if the batch or the number of ranks changes.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence

from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.own_functions import explain, load_function

_MOST_STEPS = 100_000
"""Maximum number of steps whose rates are checked before training. In a longer run, only every k-th
step is checked.
"""


def own_factor(name: str, epoch: float, epochs: int) -> float:
    """Return the factor for optim.lr at a position in training.

    Raises ConfigError unless the factor is finite and at least 0.
    """
    function = load_function("optim.schedule", name)
    with explain("optim.schedule", name, f"calling it with epoch={epoch:g}, epochs={epochs}"):
        factor = float(function(epoch, epochs))
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"optim.schedule={name} returned {factor} for epoch={epoch:g}, epochs={epochs}; return a "
            "finite number of at least 0, by which optim.lr is multiplied"
        )
    return factor


def check_own(name: str, rate: Callable[[int], float], steps: Sequence[int], group: Group) -> str:
    """Check the user's schedule, and return a description of it for the log.

    `rate` returns the learning rate for a step, given the number of samples consumed before the
    step. `steps` contains this number for each step. Raises ConfigError if a rate is invalid, or if
    the rate differs between two calls or between ranks. All ranks must call this together.
    """
    checked = [*steps[:: max(1, len(steps) // _MOST_STEPS)], steps[-1]]
    rates = [rate(consumed) for consumed in checked]
    if rates[::-1] != [rate(consumed) for consumed in checked[::-1]]:
        raise ConfigError(
            f"optim.schedule={name} returns different factors for the same epoch; compute factors "
            "only from the function's arguments, because a restart repeats only some of the calls"
        )
    digest = hashlib.sha256(array("d", rates)).digest()
    digests = group.gather(int.from_bytes(digest[:7], "big"))
    if len(set(digests)) > 1:
        other = next(rank for rank, found in enumerate(digests) if found != digests[0])
        raise ConfigError(
            f"optim.schedule={name} returns different factors on ranks 0 and {other}; compute factors "
            "only from the function's arguments, without RANK, hash() or the machine's files"
        )
    top = max(range(len(rates)), key=rates.__getitem__)
    return (
        f"optim.schedule={name}: learning rate {rates[0]:.3g} at first, {rates[top]:.3g} at most (step"
        f" {steps.index(checked[top]) + 1} of {len(steps)}), {rates[-1]:.3g} at the end"
    )
