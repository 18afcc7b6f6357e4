"""An exponential moving average of the weights (Polyak and Juditsky 1992), used in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpjob_trainer.distributed.dtensors import is_sharded, local, spread
from ddpjob_trainer.errors import ConfigError


class MovingAverage:
    """Averages, by name, of the tensors that training changes.

    These tensors are the weights and the running statistics. After each step, average = decay *
    average + (1 - decay) * weights. After the first step, the averages equal the weights, as in
    torch's AveragedModel. Averages are float32, and each rank keeps the averages of the weights (or
    shards of weights) that it holds.

    If a tensor has several names in the model, `others` maps each additional name to the name in
    `tensors`. A checkpoint lists the tensor's average under all of these names, because an average
    replaces the weight that has the same name. Raises ConfigError if `decay` is not between 0 and
    1.
    """

    def __init__(
        self, decay: float, tensors: list[tuple[str, torch.Tensor]], others: Mapping[str, str] | None = None
    ) -> None:
        if not 0 < decay < 1:
            raise ConfigError(
                f"optim.ema_decay={decay}: must be between 0 and 1, for example 0.999, or 0 for no average"
            )
        self._decay, self._updates = decay, 0
        self._names, self._others = [name for name, _ in tensors], others or {}
        self._whole = [tensor.detach().float().clone() for _, tensor in tensors]
        self._averages = [local(average) for average in self._whole]
        self._tensors = [local(tensor.detach()) for _, tensor in tensors]
        self._aside: list[torch.Tensor] | None = None

    def update(self, skipped: bool | torch.Tensor = False) -> None:
        """Update the averages after a step. A skipped step (precision.Update) changes nothing."""
        if isinstance(skipped, torch.Tensor) and self._updates:
            self._update_unless(skipped)
        elif not skipped:
            tensors = [tensor.float() for tensor in self._tensors]
            if self._updates == 0:
                torch._foreach_copy_(self._averages, tensors)
            else:
                torch._foreach_lerp_(self._averages, tensors, 1 - self._decay)
            self._updates += 1

    def _update_unless(self, skipped: torch.Tensor) -> None:
        """Update the averages if `skipped` is false, without waiting for the value of `skipped`."""
        share = ~skipped * (1 - self._decay)
        for device in {average.device for average in self._averages}:
            pairs = [pair for pair in zip(self._averages, self._tensors, strict=True) if pair[0].device == device]
            averages = [average for average, _ in pairs]
            changes = torch._foreach_sub([tensor.float() for _, tensor in pairs], averages)
            torch._foreach_mul_(changes, share.to(device))
            torch._foreach_add_(averages, changes)

    def put_in_place(self) -> None:
        """Replace the weights with their averages before an evaluation."""
        self._aside = [tensor.clone() for tensor in self._tensors]
        if self._updates:
            torch._foreach_copy_(self._tensors, self._averages)

    def put_back(self) -> None:
        """Restore the original weights, if the averages have replaced them."""
        if self._aside is not None:
            torch._foreach_copy_(self._tensors, self._aside)
            self._aside = None

    def state(self) -> dict[str, Any]:
        """Return the state to save: `{"updates": n, "averages": {name: tensor}}`."""
        averages = dict(zip(self._names, self._whole, strict=True))
        shared = {name: averages[known] for name, known in self._others.items() if known in averages}
        return {"updates": self._updates, "averages": averages | shared}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises KeyError or RuntimeError if the state is from a different model.
        """
        for name, average in zip(self._names, self._whole, strict=True):
            local(average).copy_(_shard(state["averages"][name], average))
        self._updates = int(state["updates"])


def _shard(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's shard of `whole` if `like` is a DTensor; otherwise return `whole`."""
    return local(whole if is_sharded(whole) or not is_sharded(like) else spread(whole, like))
