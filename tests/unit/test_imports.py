"""No module imports itself through others: not lazily, and not for types alone."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def order(package: str, *more: tuple[str, str]) -> None:
    """Raises CycleError, which names the circle. `more`: imports to add, as (importer, imported)."""
    graph = grimp.build_graph(package, include_external_packages=False)
    for importer, imported in more:
        graph.add_import(importer=importer, imported=imported)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


@pytest.mark.parametrize("package", ["ddpjob", "ddpjob_runtime", "ddpjob_report", "ddpjob_bucket", "ddpjob_trainer"])
def test_no_import_circle(package: str) -> None:
    order(package)


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        order("ddpjob", ("ddpjob.core.world", "ddpjob.core.decide"))
