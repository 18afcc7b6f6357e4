"""strategy=dp: one process, the batch scattered over all its devices by nn.DataParallel."""

from __future__ import annotations

from torch import nn

from ddpjob_trainer.strategies.single import Single


class Dp(Single):
    """Without a GPU, or with one, DataParallel passes the batch through."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on every visible device."""
        return nn.DataParallel(model)
