"""The strategies, one file each; `contrib` contains the strategies with less support.

To add a strategy, write a subclass of `strategy.Strategy`, add its name to
`config.sections.StrategyName`, and add a line to `registry`.
"""

from ddpjob_trainer.strategies.registry import enter, open_strategy

__all__ = ["enter", "open_strategy"]
