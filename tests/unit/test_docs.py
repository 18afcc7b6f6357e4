"""The documentation says what is so: the reference is the CRD, every reason that the operator writes is explained, links lead somewhere."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CORE = ROOT / "operator" / "ddpjob" / "core"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
REFERENCE = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))

CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*|OOMKilled")
# CamelCase words of core/ that are not reasons of the operator's: Kubernetes' own, the coordinator's, values of the API.
OTHER_WORDS = {
    *("PreemptionByScheduler", "TerminationByKubelet", "DeletionByTaintManager"),
    *("NodeShutdown", "Shutdown", "Terminated", "NodeAffinity", "Preempting"),
    *("ContainerCreating", "PodInitializing", "Pending", "Running", "Succeeded", "Forming", "Ready", "True"),
    *("ReadWriteOnce", "ReadWriteOncePod"),
}


def words_of_core() -> set[str]:
    """Every CamelCase string of the decisions, in whatever call it stands."""
    trees = [ast.parse(path.read_text()) for path in CORE.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and CAMEL.fullmatch(node.value)}


def explained() -> set[str]:
    """The words of the first column of the page's tables."""
    first_cells = re.findall(r"^\| (`[^|]+) \|", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
    return {word for cell in first_cells for word in re.findall(r"`(\w+)`", cell)}


def test_the_reference_page_is_the_definition_s() -> None:
    made = REFERENCE["render"](yaml.safe_load(REFERENCE["CRD"].read_text()))
    assert REFERENCE["PAGE"].read_text() == made, "run: python docs/generate_reference.py"


def fields(schema: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    for name, field in (schema.get("properties") or {}).items():  # type: ignore[attr-defined]
        yield name, field
        yield from fields(field)
        yield from fields(field.get("items") or {})


def test_the_reference_page_has_a_row_for_every_field_and_default() -> None:
    [version] = yaml.safe_load(REFERENCE["CRD"].read_text())["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    wanted = [*fields(properties["spec"]), *fields(properties["status"])]
    rows = re.findall(
        r"^\| `(\w+)`(?: \*\*required\*\*)? \| ([^|]*) \| ([^|]*) \| (.*)$", REFERENCE["PAGE"].read_text(), flags=re.MULTILINE
    )
    assert sorted(row[0] for row in rows) == sorted(name for name, _ in wanted)
    defaults = sum(field.get("default") not in (None, {}) for _, field in wanted)
    assert sum(bool(row[2].strip()) for row in rows) == defaults > 10


@pytest.mark.parametrize("reason", sorted(words_of_core() - OTHER_WORDS))
def test_every_reason_is_explained(reason: str) -> None:
    assert reason in explained(), f"{TROUBLESHOOTING.name} does not say what {reason} means (or it is no reason: OTHER_WORDS)"


def test_the_reasons_explained_are_written() -> None:
    assert explained() - words_of_core() == set()
    assert OTHER_WORDS - words_of_core() == set()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page}: {target}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_manifests_and_make_targets_in_the_texts_are_right(page: Path, tmp_path: Path) -> None:
    from ddpjob.cli.run import read_job

    text = page.read_text()
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)):
        if "kind: DDPJob" in block:
            path = tmp_path / f"{number}.yaml"
            path.write_text(block)
            read_job(path)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_accepted_by_the_definition_and_the_trainer(example: Path) -> None:
    from ddpjob.cli.run import read_job
    from ddpjob_trainer.command_line import read_settings

    spec = read_job(example)["spec"]
    if spec.get("module") == "ddpjob_trainer":
        read_settings(spec["args"])


def test_the_tests_named_in_the_trainer_s_page_exist() -> None:
    named = re.findall(r"`(?:tests/(\w+)/)?(test_\w+)\.py(?:::(\w+))?`", (ROOT / "docs" / "trainer.md").read_text())
    assert len(named) > 30
    for folder, module, function in named:
        source = (ROOT / "tests" / (folder or "trainer") / f"{module}.py").read_text()
        assert not function or f"def {function}(" in source, f"{module}.py::{function}"
