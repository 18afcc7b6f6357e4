"""The strategies, one file each; `contrib` contains the strategies with less support.

A new strategy is a subclass of `strategy.Strategy`, a name in `config.sections.StrategyName` and a
line in `registry`.
"""

from ddpjob_trainer.strategies.registry import enter, open_strategy

__all__ = ["enter", "open_strategy"]
