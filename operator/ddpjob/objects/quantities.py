"""Kubernetes quantities, such as 500m or 2Gi, as numbers."""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)([KMGTPE]i|[numkMGTPE])?")


def amount(quantity: object) -> float | None:
    """Return the number that a Kubernetes quantity stands for, or None for any other value."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or isinstance(quantity, bool):
        return None
    unit = found[2] or ""
    power = "kMGTPE".find(unit[:1].replace("K", "k")) + 1 if unit else 0
    scale = {"n": 1e-9, "u": 1e-6, "m": 1e-3}.get(unit) or (1024.0 if unit[1:] else 1000.0) ** power
    try:
        return float(found[1]) * scale
    except OverflowError:
        return None
