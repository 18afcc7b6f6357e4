"""There are no import cycles, not even through lazy imports or imports for types. A missing package
is reported by its name.
"""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from ddpjob.missing_package import INSTALL


def order(package: str, *more: tuple[str, str]) -> None:
    """Check the order of imports. Raises CycleError, which contains the cycle. `more` are
    additional imports, as (importer, imported).
    """
    graph = grimp.build_graph(package, include_external_packages=False)
    for importer, imported in more:
        graph.add_import(importer=importer, imported=imported)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


@pytest.mark.parametrize(
    "package",
    ["ddpjob", "ddpjob_runtime", "ddpjob_pod", "ddpjob_report", "ddpjob_bucket", "ddpjob_trainer", "benchmarks"],
)
def test_there_is_no_import_cycle(package: str) -> None:
    order(package)


def test_a_deliberate_cycle_is_found() -> None:
    with pytest.raises(CycleError):
        order("ddpjob", ("ddpjob.core.world", "ddpjob.core.decide"))


def completed_later(root: Path) -> list[str]:
    """Return lines that set an attribute of an object after its creator has passed it on."""
    rooms = [*(root / "operator/ddpjob" / room for room in ("core", "controller", "engine", "dashboard"))]
    rooms += [root / "runtime/ddpjob_runtime/coordinator"]
    lines = (line.strip() for room in rooms for path in room.rglob("*.py") for line in path.read_text().splitlines())
    return [line for line in lines if re.search(r"\bself\.\w+\.\w+(?:: [^=]+)? = ", line)]


def test_objects_are_complete_before_they_are_passed_to_others(tmp_path: Path) -> None:
    assert completed_later(Path(__file__).parents[2]) == [], "pass it to the object's constructor"
    (tmp_path / "operator/ddpjob/controller").mkdir(parents=True)
    (tmp_path / "operator/ddpjob/controller/main.py").write_text("self.watch = self.cluster.watch = Watch()\n")
    assert len(completed_later(tmp_path)) == 1


WITHOUT = """
import runpy, sys
missing, program = sys.argv[1:]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
del sys.argv[1:]
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("package", "program", "extra"),
    [
        ("torch", "ddpjob_trainer", "trainer"),
        pytest.param("numpy", "ddpjob_trainer", "trainer", marks=pytest.mark.slow),  # torch is imported first.
        ("kopf", "ddpjob.controller", "operator"),
        ("aiohttp", "ddpjob.dashboard", "cli"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(package: str, program: str, extra: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, package, program], capture_output=True, text=True, check=False
    )
    said = f"{program} needs the package {package}; run {INSTALL.format(extra=extra)}"
    assert ran.returncode and ran.stderr.strip().removeprefix("error: ") == said, ran.stderr
