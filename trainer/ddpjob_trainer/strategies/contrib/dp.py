"""strategy=dp: one process, with the batch scattered over all its devices by nn.DataParallel."""

from __future__ import annotations

import torch
from torch import nn

from ddpjob_trainer.data.randomness import derive, seed_torch
from ddpjob_trainer.optim.precision import Autocasting
from ddpjob_trainer.strategies.single import Single


class Dp(Single):
    """Wraps the model in nn.DataParallel, which divides each batch among the GPUs.

    With several GPUs, batch normalization uses separate statistics for each device's part of a
    micro-batch, and keeps the first device's statistics. Dropout draws its random numbers
    separately on each device. This is therefore the only strategy whose results depend on the
    number of devices.
    """

    compiles_step = False

    def seed(self, key: int) -> None:
        """Seed the random generators of all devices that this process uses."""
        super().seed(key)
        for number in range(1, torch.cuda.device_count() if self.device.type == "cuda" else 0):
            seed_torch(derive(key, number), torch.device("cuda", number))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DataParallel.

        DataParallel's threads do not inherit the autocast context, so `Autocasting` enters it.
        """
        casting = Autocasting(model, self.precision)
        # DataParallel would use the machine's GPUs even if training is meant to run on the CPU
        # (train.backend=gloo).
        return casting if self.device.type == "cpu" else nn.DataParallel(casting)
