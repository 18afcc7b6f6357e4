"""Selects parameter names by a pattern in the configuration."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from ddpjob_trainer.errors import ConfigError


def select(key: str, pattern: str, names: Iterable[str], of: str) -> list[str]:
    """Return the parameter `names` that match `pattern`, in which * and ? are wildcards.

    Error messages mention `of`, the name of the model, and `key`, the configuration key that
    contains the pattern. If no name matches, raises a ConfigError that suggests the most similar
    names.
    """
    names = list(names)
    found = fnmatch.filter(names, pattern)
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:1]
        raise ConfigError(f"{key}: no parameter of {of} matches {pattern!r}; use, for example, {', '.join(near)}")
    return found
