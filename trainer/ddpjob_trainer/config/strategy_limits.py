"""The settings that strategies do not support, in one table for error messages and documentation.

Problem: if a strategy ignored a setting, the run would not match its configuration. Such a run must
be refused, with a message that names a strategy that supports the setting. If each strategy checked
for itself, the checks would be scattered, and the documentation would have to repeat them.

Rule: `LIMITS` has a row for each setting that some strategy does not support, with the reason.
`config.load` calls `check`, so a launcher refuses the run before it starts any rank. A row without
`is_set` depends on the data, so `run_plan` checks that row once the data is open. Every strategy
supports the settings that have no row, and `ddp` supports all settings. Limits that depend on the
model or on a strategy's own settings, such as deepspeed.stage, are checked by that strategy.

Example: `strategy=fsdp model.freeze=head.*` fails with

    model.freeze: strategy=fsdp always trains all parameters; leave it out, or set strategy=ddp

and `docs/trainer.md` has the row `model.freeze | fsdp, pipeline, ... | always trains all
parameters` (docs/generate_trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ddpjob_trainer.config.sections import AmpLevel, CommHook, OptimizerName, StrategyName
from ddpjob_trainer.errors import ConfigError

_SINGLE, _DP, _FSDP, _PIPELINE = StrategyName.SINGLE, StrategyName.DP, StrategyName.FSDP, StrategyName.PIPELINE
_DDP_MP, _SERVER = StrategyName.DDP_MP, StrategyName.PARAMETER_SERVER
_HOROVOD, _DEEPSPEED = StrategyName.HOROVOD, StrategyName.DEEPSPEED


@dataclass(frozen=True)
class Limit:
    """A key that some strategies support only in part or not at all.

    `reasons` maps each such strategy to its reason, worded to follow "strategy=NAME". `is_set`
    returns whether a value of the key is unsupported, or is None if that depends on the data.
    `values` lists the unsupported values for the documentation, or is empty if only the default is
    supported.
    """

    key: str
    reasons: Mapping[StrategyName, str]
    is_set: Callable[[Any], bool] | None = bool
    values: str = ""


INTEGERS = Limit(
    "inputs that are integers", dict.fromkeys((_PIPELINE, _DDP_MP), "needs a model with float inputs"), None
)
LIMITS = (
    Limit(
        "model.freeze",
        dict.fromkeys((_FSDP, _PIPELINE, _DDP_MP, _HOROVOD, _DEEPSPEED, _SERVER), "always trains all parameters"),
    ),
    Limit(
        "model.drop_path",
        dict.fromkeys((_PIPELINE, _DDP_MP), "splits the model, so its parts would draw different random numbers"),
    ),
    Limit(
        "model.sync_batchnorm",
        {
            _PIPELINE: "computes different layers and micro-batches on each rank",
            _SERVER: "uses one rank as a server, which gets no samples",
        },
    ),
    Limit(
        "ddp.ordered",
        {
            _FSDP: "adds gradients up inside its collectives",
            _PIPELINE: "has no rank that holds all gradients",
            _DDP_MP: "has no device that holds all gradients",
            **dict.fromkeys((_HOROVOD, _DEEPSPEED, _SERVER), "adds gradients up by rank"),
        },
    ),
    Limit(
        "ddp.comm_hook",
        dict.fromkeys((_SINGLE, _DP, _FSDP, _PIPELINE, _HOROVOD, _DEEPSPEED, _SERVER), "does not use DDP"),
        lambda hook: hook is not CommHook.NONE,
    ),
    Limit("train.accumulate", {_PIPELINE: "uses pipeline.micro_batches instead"}, lambda number: number > 1),
    Limit(
        "amp.level",
        {_DEEPSPEED: "keeps weights in float32"},
        lambda level: level in (AmpLevel.O2, AmpLevel.O3),
        "O2, O3",
    ),
    Limit(
        "optim.name",
        {_FSDP: "shards matrices, but muon needs whole matrices"},
        lambda name: name == OptimizerName.MUON,
        "muon",
    ),
    INTEGERS,
)


def check(config: object, strategy: StrategyName) -> None:
    """Raise ConfigError if the configuration has a setting that the strategy does not support."""
    for limit in LIMITS:
        if strategy not in limit.reasons or limit.is_set is None:
            continue
        value: Any = reduce(getattr, limit.key.split("."), config)
        if limit.is_set(value):
            others = "ddp" if _FSDP in limit.reasons else "ddp or fsdp"
            raise ConfigError(
                f"{limit.key}: strategy={strategy.value} {limit.reasons[strategy]}; leave out "
                f"{limit.key}, or set strategy={others}"
            )
