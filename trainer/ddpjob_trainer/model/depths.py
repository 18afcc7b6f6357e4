"""How deep in a model each parameter is, for learning rates that fall from layer to layer (optim.layer_decay)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from torch import nn

from ddpjob_trainer.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def depths(model: nn.Module) -> dict[str, int]:
    """The depth of each parameter by name, from 0 (nearest to the input) without gaps.

    timm's models: their own `group_matcher`, as timm's param_groups_layer_decay takes it. Others, as BEiT's and MAE's
    get_layer_id for a transformer: the stem (tokens, positions, patches, all that is registered before the first
    block) is 0, each block of the model's sequences is one more, what is between two blocks belongs to the next, and
    what comes after the last (normalization, head) is one more than it. A block is a member of an nn.Sequential,
    ModuleList or ModuleDict that is itself made of modules, such as a transformer's layer or a ResNet's Bottleneck. In
    a model without any, each layer with a matrix or convolution counts as one. Order is that of registration: a head
    that the model registers before its blocks is taken for the stem.

    Raises ConfigError where a model has a `group_matcher`, and timm is not installed.
    """
    if matcher := getattr(model, "group_matcher", None):
        try:
            manipulate = importlib.import_module("timm.models._manipulate")
        except ImportError as error:
            raise ConfigError(
                f"optim.layer_decay: the model has a group_matcher, which timm applies, and timm cannot be imported"
                f" ({error}); pip install timm, or set optim.layer_decay=1"
            ) from error
        found: dict[str, int] = manipulate.group_parameters(model, matcher(coarse=False), reverse=True)
        return found
    if blocks := list(_blocks(model, "", inside=False)):
        return _by_block([name for name, _ in model.named_parameters()], blocks)
    return _by_layer(model)


def shares(depths: Mapping[str, int], decay: float) -> str:
    """For people: how many groups there are, and of the first and of the last which part of optim.lr they get."""
    deepest = max(depths.values())
    ends = [[name for name, depth in depths.items() if depth == end] for end in (0, deepest)]
    first, last = (", ".join(names[:2]) + ", ..." * (len(names) > 2) for names in ends)
    return (
        f"optim.layer_decay={decay}: {deepest + 1} groups, from {decay**deepest:.3g} of optim.lr ({first}) to all of it"
        f" ({last})"
    )


def _by_layer(model: nn.Module) -> dict[str, int]:
    """A normalization belongs to the layer before it."""
    found, depth, last = dict[str, int](), -1, None
    for name, weight in model.named_parameters():
        layer = name.rpartition(".")[0]
        if weight.ndim > 1 and layer != last:
            depth, last = depth + 1, layer
        found[name] = max(0, depth)
    return found


def _by_block(names: list[str], blocks: list[str]) -> dict[str, int]:
    """`names` and `blocks` in the model's order."""
    owners = [next((block for block in blocks if name.startswith(f"{block}.")), None) for name in names]
    found, depth, last = dict[str, int](), 0, None
    coming = list[str]()
    for name, block in zip(names, owners, strict=True):
        if block is None:
            coming.append(name)
            continue
        if block != last and (last is not None or coming):
            depth += 1
        between = depth if last is not None else depth - 1
        found |= dict.fromkeys(coming, between)
        found[name], last, coming = depth, block, []
    return found | dict.fromkeys(coming, depth + (last is not None))


def _blocks(module: nn.Module, name: str, *, inside: bool) -> Iterator[str]:
    """Names of the blocks in a module; `inside`: it is, or stands in, a sequence."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if not any(True for _ in child.children()):
            continue
        chain = isinstance(child, _CONTAINERS) and any(
            any(True for _ in member.children()) for member in child.children()
        )
        if chain:
            yield from _blocks(child, path, inside=True)
        elif inside:
            yield path
        else:
            yield from _blocks(child, path, inside=False)
