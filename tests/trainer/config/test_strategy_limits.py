"""Each row of the table of limits names exactly the strategies that refuse its setting."""

from __future__ import annotations

import re

import pytest
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.config.strategy_limits import INTEGERS, LIMITS, Limit
from ddpjob_trainer.errors import ConfigError

SET = {
    "model.freeze": "head.*",
    "model.drop_path": "0.1",
    "model.sync_batchnorm": "true",
    "ddp.ordered": "true",
    "ddp.comm_hook": "fp16",
    "train.accumulate": "2",
    "amp.level": "O2",
    "optim.name": "muon",
}
"""A value of each setting that is not supported everywhere."""


@pytest.mark.parametrize("strategy", StrategyName)
@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit is not INTEGERS], ids=lambda limit: limit.key)
def test_exactly_the_strategies_in_a_row_of_the_table_refuse_the_setting(limit: Limit, strategy: StrategyName) -> None:
    arguments = [f"strategy={strategy.value}", f"{limit.key}={SET[limit.key]}"]
    if (why := limit.reasons.get(strategy)) is None:
        assert config.load(None, arguments).strategy is strategy
        return
    others = "ddp( or fsdp)?"
    message = rf"{re.escape(f'{limit.key}: strategy={strategy.value} {why}')}; leave it out, or set strategy={others}$"
    with pytest.raises(ConfigError, match=message) as refused:
        config.load(None, arguments)
    for other in str(refused.value).rpartition("=")[2].split(" or "):
        config.load(None, [f"strategy={other}", arguments[1]])


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.key)
def test_ddp_supports_every_setting_in_the_table(limit: Limit) -> None:
    assert StrategyName.DDP not in limit.reasons and limit.reasons
