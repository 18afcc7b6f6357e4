"""Each row of the table of limits names exactly the strategies that refuse its setting."""

from __future__ import annotations

import re

import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.config.strategy_limits import INTEGERS, LIMITS, Limit
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.run_plan import note_choices
from ddpjob_trainer.strategies import open_strategy

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
    message = re.escape(f"{limit.key}: strategy={strategy.value} {why}; leave out {limit.key}, or set ")
    with pytest.raises(ConfigError, match=rf"{message}strategy={others}$") as refused:
        config.load(None, arguments)
    for other in str(refused.value).rpartition("=")[2].split(" or "):
        config.load(None, [f"strategy={other}", arguments[1]])


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.key)
def test_ddp_supports_every_setting_in_the_table(limit: Limit) -> None:
    assert StrategyName.DDP not in limit.reasons and limit.reasons


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (["ddp.ordered=true"], "ddp.ordered=true"),
        (["strategy=dp"], "strategy=dp"),
        (["strategy=fsdp", "fsdp.recompute=true"], ""),
    ],
)
def test_the_log_says_where_a_division_by_ranks_has_no_effect(keys: list[str], cause: str) -> None:
    given = config.load(None, ["data.exact=false", *keys])
    notes = note_choices(given, open_strategy(given, Group(), torch.device("cpu")), [], range(0), [], 0.0)
    wanted = f"data.exact=false has no effect with {cause}, because ranks take whole micro-batches"
    assert [note for note in notes if "data.exact" in note] == [wanted] * bool(cause)
