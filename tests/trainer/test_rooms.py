"""There is no import cycle among the trainer's modules or packages, including lazy imports and
imports for types. Settings import no implementations.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import ddpjob_trainer

PACKAGE = "ddpjob_trainer"
ROOT = Path(ddpjob_trainer.__file__).parent

Arrows = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    found = {}
    for path in root.rglob("*.py"):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(root: Path) -> Arrows:
    """Return the imports of each module, including names in strings (importlib, `python -m`)."""
    known, found = modules(root), defaultdict[str, set[str]](set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & known.keys()
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative import"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name].add(inner if inner in known else str(node.module))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[name] |= {text for text in re.findall(r"ddpjob_trainer(?:\.\w+)+", node.value) if text in known}
        found[name] &= known.keys()
        found[name].discard(name)
    return found


def circles(graph: Arrows) -> list[list[str]]:
    """Return the strongly connected components with at least two members (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            members = [stack.pop()]
            while members[-1] != node:
                members.append(stack.pop())
            if len(members) > 1:
                found.append(sorted(members))

    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def rooms(graph: Arrows) -> Arrows:
    found = defaultdict[str, set[str]](set)
    for module, others in graph.items():
        found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


def test_there_are_no_import_cycles_between_modules_or_packages() -> None:
    graph = arrows(ROOT)
    assert len(graph) > 100, "the trainer was found"
    advice = "move what they share into a room below both (the order of the rooms is in pyproject.toml, importlinter)"
    assert circles(graph) == [], f"these modules import each other; {advice}"
    assert circles(rooms(graph)) == [], f"these packages import each other; {advice}"


def test_a_lazy_import_cycle_is_detected(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from ddpjob_trainer import two\n")
    (tmp_path / "two.py").write_text("def f():\n    from ddpjob_trainer.one import g\n")
    (tmp_path / "three.py").write_text("COMMAND = ['-m', 'ddpjob_trainer.two']\n")
    graph = arrows(tmp_path)
    assert circles(graph) == [["ddpjob_trainer.one", "ddpjob_trainer.two"]]
    assert graph["ddpjob_trainer.three"] == {"ddpjob_trainer.two"}


def test_settings_import_no_implementation() -> None:
    outside = {other for module, others in arrows(ROOT).items() if room(module) == "config" for other in others}
    used = {room(other) for other in outside}
    assert used == {"config", "errors"}, (
        "settings are read everywhere, so move the names that they need out of the other packages"
    )


def test_settings_are_declared_in_one_place() -> None:
    classes = [
        (name, node.name)
        for name, path in modules(ROOT).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    ]
    places = {f"{PACKAGE}.config.sections", f"{PACKAGE}.config.config"}
    elsewhere = [(name, kind) for name, kind in classes if name not in places]
    assert elsewhere == [], "move these to config/sections.py, or give them a name that does not end in Config"
