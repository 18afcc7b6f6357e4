"""The depth of each parameter in a model, from which optim.layer_decay derives learning rates."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from torch import nn

from ddpjob_trainer.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter by name, from 0 (nearest to the input) without gaps.

    For timm's models, the depth comes from their own `group_matcher`, as in timm's
    param_groups_layer_decay. For other models, the rules follow get_layer_id, which BEiT and MAE
    use for transformers. The stem (tokens, positions, patches, everything registered before the
    first block) has depth 0. Each block in the model's sequences is one deeper than the previous
    block. Parameters between two blocks have the depth of the next block. Parameters after the last
    block (normalization, head) are one deeper than the last block.

    A block is a module that contains other modules and is a member of an nn.Sequential, ModuleList
    or ModuleDict. Examples are a transformer's layer and a ResNet's Bottleneck. In a model without
    blocks, each layer with a matrix or convolution counts as a block. Blocks are ordered by their
    registration in the model, so a head that is registered before the blocks is taken for the stem.

    Raises ConfigError if a model has a `group_matcher` but timm is not installed.
    """
    if matcher := getattr(model, "group_matcher", None):
        try:
            manipulate = importlib.import_module("timm.models._manipulate")
        except ImportError as error:
            raise ConfigError(
                "optim.layer_decay: the model's group_matcher needs timm, which cannot be imported "
                f"({error}); run pip install timm, or set optim.layer_decay=1"
            ) from error
        found: dict[str, int] = manipulate.group_parameters(model, matcher(coarse=False), reverse=True)
        return found
    if blocks := list(_blocks(model, "", inside=False)):
        return _by_block([name for name, _ in model.named_parameters()], blocks)
    return _by_layer(model)


def describe_shares(depths: Mapping[str, int], decay: float) -> str:
    """Describe the parameter groups for the log.

    The text states the number of groups, and the factors that the first and the last group apply to
    optim.lr.
    """
    deepest = max(depths.values())
    ends = [[name for name, depth in depths.items() if depth == end] for end in (0, deepest)]
    first, last = (", ".join(names[:2]) + ", ..." * (len(names) > 2) for names in ends)
    return (
        f"optim.layer_decay={decay}: {deepest + 1} groups, whose learning rates rise from {decay**deepest:.3g} times"
        f" optim.lr ({first}) to optim.lr ({last})"
    )


def _by_layer(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter in a model without blocks.

    Each layer with a matrix is one deeper than the previous layer with a matrix. A normalization
    has the depth of the layer before it.
    """
    found, depth, last = dict[str, int](), -1, None
    for name, weight in model.named_parameters():
        layer = name.rpartition(".")[0]
        if weight.ndim > 1 and layer != last:
            depth, last = depth + 1, layer
        found[name] = max(0, depth)
    return found


def _by_block(names: list[str], blocks: list[str]) -> dict[str, int]:
    """Return the depth of each parameter in a model with blocks.

    `names` are the names of the parameters, and `blocks` the names of the blocks, both in the
    model's order.
    """
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
    """Yield the names of a module's blocks.

    `inside` states whether the module is a sequence of blocks, or part of one.
    """
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
