"""The coordinator's state machines. Each object changes only its own state, and code and
documentation match the tables of transitions.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from ddpjob_runtime.coordinator import states
from ddpjob_runtime.coordinator.states import IllegalTransition, RoundState, State
from ddpjob_runtime.protocol import CoordinatorState, MemberState

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = ROOT / "runtime" / "ddpjob_runtime" / "coordinator"
TABLES = {
    "coordinator": states.COORDINATOR_TRANSITIONS,
    "round": states.ROUND_TRANSITIONS,
    "member": states.MEMBER_TRANSITIONS,
}


def foreign_assignments(tree: ast.AST) -> list[int]:
    """Return the lines on which a class assigns or deletes an attribute of an object other than
    `self`.
    """
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    attributes = [node for scope in classes for node in ast.walk(scope) if isinstance(node, ast.Attribute)]
    changed = [node for node in attributes if isinstance(node.ctx, (ast.Store, ast.Del))]
    return [n.lineno for n in changed if not (isinstance(n.value, ast.Name) and n.value.id == "self")]


@pytest.mark.parametrize("path", sorted(COORDINATOR.glob("*.py")), ids=lambda path: path.name)
def test_every_class_assigns_only_its_own_attributes(path: Path) -> None:
    lines = foreign_assignments(ast.parse(path.read_text()))
    assert lines == [], f"in these lines of {path.name} call a method of the object that owns the attribute"


@pytest.mark.parametrize("line", ["other.x = 1", "self.x.y = 1", "a, other.x = 1, 2", "other.x += 1", "del other.x"])
def test_the_check_finds_an_assignment_to_another_object(line: str) -> None:
    assert foreign_assignments(ast.parse(f"class A:\n def f(self, other):\n  self.x = 1\n  {line}\n")) == [4]


@pytest.mark.parametrize("kind", [CoordinatorState, MemberState, RoundState])
def test_every_state_has_a_row_in_the_table(kind: type) -> None:
    [table] = [table for table in TABLES.values() if type(next(iter(table))) is kind]
    missing = set(kind) ^ set(table)  # type: ignore[call-overload]
    assert missing == set(), (
        "give each state a row in ddpjob_runtime/coordinator/states.py; a final state has an empty row"
    )


def test_a_transition_that_is_not_in_the_table_raises_an_error() -> None:
    state = State(CoordinatorState.FORMING, states.COORDINATOR_TRANSITIONS)
    state.become(CoordinatorState.FORMING)
    state.become(CoordinatorState.STOPPED)
    with pytest.raises(IllegalTransition, match="CoordinatorState: Stopped -> Running"):
        state.become(CoordinatorState.RUNNING)
    assert state.now is CoordinatorState.STOPPED


@pytest.mark.parametrize("name", TABLES)
def test_the_state_diagram_matches_the_table(name: str) -> None:
    """docs/protocol.md draws each table; `State.become` enforces it."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    [drawing] = re.findall(rf"<!-- states: {name} -->\n```mermaid\nstateDiagram-v2\n(.*?)```", page, re.S)
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)", drawing, re.M))
    table = {(a.value, b.value) for a, row in TABLES[name].items() for b in row}
    assert drawn - table == set(), f"docs/protocol.md, states: {name}: remove these arrows, or add them to states.py"
    assert table - drawn == set(), f"docs/protocol.md, states: {name}: draw these arrows, which states.py has"
