"""The documentation agrees with the code.

Generated pages are up to date, every reason that the operator writes is explained, links have
targets, and the paths, make targets and tests that a page names exist.
"""

from __future__ import annotations

import ast
import inspect
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
CLI = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
API = runpy.run_path(str(ROOT / "docs" / "generate_api.py"))
TRAINER = runpy.run_path(str(ROOT / "docs" / "generate_trainer.py"))
CHART = runpy.run_path(str(ROOT / "docs" / "generate_chart_readme.py"))

CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*|OOMKilled")
# CamelCase words in core/ that are not the operator's reasons, but belong to Kubernetes, the
# coordinator or the API.
OTHER_WORDS = {
    *("PreemptionByScheduler", "TerminationByKubelet", "DeletionByTaintManager"),
    *("NodeShutdown", "Shutdown", "Terminated", "Preempting"),
    *("RunContainerError", "ContainerCannotRun", "ContainerStatusUnknown", "Unknown"),
    *("ContainerCreating", "PodInitializing", "Pending", "Running", "Succeeded", "Ready", "True"),
    *("ReadWriteOnce", "ReadWriteOncePod"),
    *("PodsReady", "Started", "WorkloadSliceReplaced"),
    *("NoSchedule", "NoExecute", "Exists", "Equal"),
}


def words_of_core() -> set[str]:
    """Return every CamelCase string in the code of core/."""
    trees = [ast.parse(path.read_text()) for path in CORE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CAMEL.fullmatch(node.value)
    }


def explained() -> set[str]:
    """Return the words in the first column of the page's tables."""
    first_cells = re.findall(r"^\| (`[^|]+) \|", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
    return {word for cell in first_cells for word in re.findall(r"`(\w+)`", cell)}


def test_the_reference_page_is_up_to_date() -> None:
    made = REFERENCE["render"](yaml.safe_load(REFERENCE["CRD"].read_text()))
    assert REFERENCE["PAGE"].read_text() == made, "run: python docs/generate_reference.py"


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    assert CLI["PAGE"].read_text() == CLI["render"](), "run: python docs/generate_cli.py"


def test_the_page_of_the_command_line_has_the_same_defaults_as_the_help() -> None:
    from ddpjob.cli.main import root

    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", CLI["PAGE"].read_text(), flags=re.MULTILINE | re.DOTALL))
    for name, command in root.commands.items():
        shown = [option for option in command.params if getattr(option, "show_default", False)]
        for option in shown:
            assert re.search(rf"^\| `{option.opts[0]}`.* Default: {option.default}\. \|$", sections[name], re.MULTILINE)


def test_the_page_of_the_python_client_is_up_to_date() -> None:
    assert API["file"]("python.md").read_text() == API["made"]("python.md"), "run: python docs/generate_api.py"


def test_the_programs_on_the_page_of_the_python_client_use_existing_names() -> None:
    from ddpjob import Client

    blocks = re.findall(r"^```python\n(.*?)^```", API["file"]("python.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    examples = [block for block in blocks if "client" in block]
    assert len(examples) > 3
    for block in examples:
        for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "client":
                given = {keyword.arg: None for keyword in call.keywords}
                inspect.signature(getattr(Client, call.func.attr)).bind(None, *call.args, **given)


def test_the_pages_of_the_trainer_have_its_keys_and_its_limits() -> None:
    assert TRAINER["KEYS"].read_text() == TRAINER["render_keys"](), "run: python docs/generate_trainer.py"
    page = TRAINER["TRAINER"].read_text()
    assert TRAINER["page"](page) == page, "run: python docs/generate_trainer.py"


def documented_commands(text: str) -> set[str]:
    """Return each `ddpjob COMMAND` in Markdown code and at the beginning of a line of a code
    block.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`((?:kubectl ddp|ddpjob) [^`]*)`", text)
    found = (re.match(r"(?:ddpjob|kubectl ddp) ([a-z]+)", words) for words in [*lines, *spans])
    return {match[1] for match in found if match}


def test_the_search_for_documented_commands_finds_them() -> None:
    text = "`ddpjob get` and\n```\nddpjob logs x   # y\n$ kubectl ddp why x\nabout ddpjob nothing\n```\n"
    assert documented_commands(text) == {"get", "logs", "why"}


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda page: str(page.relative_to(ROOT))
)
def test_documented_commands_exist(page: Path) -> None:
    from ddpjob.cli.main import root

    unknown = documented_commands(page.read_text()) - set(root.commands)
    assert unknown == set(), f"{page.name} names commands that `ddpjob --help` does not list; correct the page"


def test_the_charts_page_is_up_to_date() -> None:
    made = CHART["render"](CHART["PAGE"].read_text(), CHART["VALUES"].read_text())
    assert CHART["PAGE"].read_text() == made, "run: python docs/generate_chart_readme.py"


def test_the_charts_page_has_a_row_with_a_comment_for_every_value() -> None:
    values = "# What a is.\na: 1\n\n# Of b.\nb:\n  # Of c, in\n  # two lines.\n  c: [x]\n  d: {}\n"
    page = "before\n<!-- values: begin -->\nold\n<!-- values: end -->\nafter\n"
    rows = [
        "| value | default | |",
        "| --- | --- | --- |",
        "| `a` | `1` | What a is. |",
        '| `b.c` | `["x"]` | Of b. Of c, in two lines. |',
        "| `b.d` | `{}` | |",
    ]
    assert CHART["render"](page, values) == page.replace("old", "\n".join(rows))


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
        r"^\| `(\w+)`(?: \*\*required\*\*)? \| ([^|]*) \| ([^|]*) \| (.*)$",
        REFERENCE["PAGE"].read_text(),
        flags=re.MULTILINE,
    )
    regenerate = "run: python docs/generate_reference.py (CONTRIBUTING.md, A field of the spec, step 3)"
    assert sorted(row[0] for row in rows) == sorted(name for name, _ in wanted), regenerate
    defaults = sum(field.get("default") not in (None, {}) for _, field in wanted)
    assert sum(bool(row[2].strip()) for row in rows) == defaults > 10


def test_the_crd_names_every_condition() -> None:
    from ddpjob.api.job_status import ConditionType

    [version] = yaml.safe_load(REFERENCE["CRD"].read_text())["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    named = set(re.findall(r"[A-Z]\w+", status["properties"]["conditions"]["description"]))
    silent = {str(each) for each in ConditionType} - named
    assert silent == set(), "name these in the description of status.conditions in the CRD"


def test_rules_on_the_reference_page_are_listed_under_their_field() -> None:
    sections = re.findall(r"^## (\S+)\n\n(.*?)(?=^##)", REFERENCE["PAGE"].read_text(), flags=re.MULTILINE | re.DOTALL)
    rules = {title: re.findall(r"^- (.*)$", text, flags=re.MULTILINE) for title, text in sections}
    assert len(rules["metadata.name"]) == 2
    assert all("name" in rule for rule in rules["metadata.name"])
    assert any(rule.startswith("joinTimeoutSeconds") for rule in rules["spec"])


def test_exactly_the_reasons_in_core_are_explained() -> None:
    in_core, in_page = words_of_core(), explained()
    step = "CONTRIBUTING.md, A cause of failure, step 5"
    silent = in_core - OTHER_WORDS - in_page
    assert silent == set(), f"explain these in {TROUBLESHOOTING.name}, or add them to OTHER_WORDS ({step})"
    assert in_page - in_core == set(), f"remove these from {TROUBLESHOOTING.name}: nothing in core writes them"
    assert OTHER_WORDS - in_core == set(), "remove these from OTHER_WORDS: they are not in core"


def test_no_documented_deletion_of_many_kinds_includes_an_optional_one() -> None:
    """If a cluster lacks one of the kinds, kubectl deletes nothing."""
    everywhere = {"pods", "services", "secrets", "configmaps", "pdb", "networkpolicies"}
    lists = re.findall(r"kubectl delete (\w+(?:,\w+)+)", "".join(page.read_text() for page in pages()))
    assert lists
    assert {kind for kinds in lists for kind in kinds.split(",")} <= everywhere


def test_kueues_workloads_are_named_with_their_group() -> None:
    """Kubernetes 1.36 has its own Workloads if gangs are enabled, and kubectl may list those."""
    assert [page.name for page in pages() if re.search(r"kubectl get workloads(?!\.)", page.read_text())] == []


def test_the_page_states_the_range_of_the_launchers_exit_codes() -> None:
    from ddpjob_runtime import protocol

    own = {code for name, code in vars(protocol).items() if name.startswith("EXIT_") and code}
    [(first, last)] = re.findall(r"With `command` the codes (\d+) to (\d+)", TROUBLESHOOTING.read_text())
    assert (int(first), int(last)) == (min(own), max(own))


def pages() -> list[Path]:
    return sorted(
        page for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "charts/*/*.md") for page in ROOT.glob(pattern)
    )


SITE_WORDS, README_WORDS = 50_000, 1_500
GENERATED_PAGES = {"cli.md", "metrics.md", "reference.md", "trainer-keys.md"}


def count_words(text: str) -> int:
    """Count words as `wc -w` does, without the generated parts."""
    return len(re.sub(r"<!-- ([\w -]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL).split())


def test_the_readme_and_the_site_are_short_enough_to_be_read() -> None:
    """The site's word count covers docs/. README.md counts separately."""
    readme = len((ROOT / "README.md").read_text().split())
    assert readme <= README_WORDS, (
        f"README.md has {readme} words, at most {README_WORDS}: move details to a page in docs/ and link it"
    )
    written = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED_PAGES]
    words = {page.relative_to(ROOT).as_posix(): count_words(page.read_text()) for page in written}
    longest = sorted(words.items(), key=lambda each: -each[1])[:5]
    assert sum(words.values()) <= SITE_WORDS, (
        f"docs/ has {sum(words.values())} words, at most {SITE_WORDS}: remove as many words as you add. Write once "
        f"what two pages repeat, link to it, and shorten the longest pages first: {longest}"
    )


def test_words_are_counted_without_generated_parts() -> None:
    made = "<!-- rows of-a b: begin -->\nnot these\n<!-- rows of-a b: end -->"
    assert count_words(f"one two\n\n{made}\nthree | four\n") == 5
    assert [name for name in GENERATED_PAGES if "edit" not in (ROOT / "docs" / name).read_text()[:600]] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub builds them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_have_existing_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page}: {target} has no target file; correct the link"
        heading = not anchor or anchor in anchors(linked)
        assert heading, f"{page}: {target} is not a heading of {linked.name}; correct the link"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = table.splitlines()
        uneven = [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != rows[0].count("|")]
        assert uneven == [], "give each row as many cells as the head, and write | in a cell as \\|"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_manifests_and_make_targets_on_the_pages_are_valid(page: Path, tmp_path: Path) -> None:
    from ddpjob.client.manifests.manifest_sources import read_job

    text = page.read_text()
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)):
        if "kind: DDPJob" in block:
            path = tmp_path / f"{number}.yaml"
            path.write_text(block)
            read_job(path)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    unknown = set(re.findall(r"`make ([a-z-]+)", text)) - targets
    assert unknown == set(), f"{page.name} names targets that the Makefile does not have; correct the page"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_accepted_by_the_definition_and_the_trainer(example: Path) -> None:
    from ddpjob.client.manifests.manifest_sources import read_job
    from ddpjob_trainer.config.command_line import read_settings

    spec = read_job(example)["spec"]
    if spec.get("module") == "ddpjob_trainer":
        read_settings(spec["args"])
        if "digits" in spec["args"]:
            assert spec["gpusPerNode"] == 0, "these examples need no GPU, because a trial cluster may have none"


def test_the_tests_named_on_the_trainers_page_exist() -> None:
    named = re.findall(r"`(tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "trainer.md").read_text())
    assert len(named) > 30
    for top, path, function in named:
        source = (ROOT / (top or "tests/trainer/") / path).read_text()
        known = not function or f"def {function}(" in source
        assert known, f"docs/trainer.md names {path}::{function}, which does not exist; correct the page"


EXPLAINED = (
    *(
        f"operator/ddpjob/{module}.py"
        for module in (
            *(
                "controller/caches",
                "controller/kube/election",
                "controller/kube/informer",
                "controller/operator_shards",
            ),
            *("controller/report_watch", "controller/kube/workqueue", "core/failures/merge_causes"),
            *("core/failures/classify", "core/failures/liveness", "core/failures/node_health"),
            *("core/failures/policy", "core/plan/gang", "core/plan/queue"),
            *("core/plan/slots", "core/rank_order", "core/status/gpu_seconds", "engine/apply"),
        )
    ),
    *(
        f"runtime/ddpjob_runtime/{module}.py"
        for module in (
            *("coordinator/backoff", "coordinator/first_cause", "coordinator/formation", "coordinator/hang"),
            *("coordinator/round", "coordinator/round_sequence", "coordinator/takeover"),
            *("launcher/forkserver", "launcher/rendezvous"),
        )
    ),
    *(f"runtime/ddpjob_pod/{module}.py" for module in ("own_work", "stragglers")),
    *(
        f"trainer/ddpjob_trainer/{module}.py"
        for module in ("config/strategy_limits", "data/sampler", "model/shared_parts")
    ),
)
"""Modules that hold a policy or an algorithm."""


@pytest.mark.parametrize("module", EXPLAINED)
def test_a_policy_is_explained_in_its_module(module: str) -> None:
    lines = (ast.get_docstring(ast.parse((ROOT / module).read_text())) or "").splitlines()
    remedy = f"open {module} with the problem, the rule and an example, as CONTRIBUTING.md says under Style"
    assert 10 <= len(lines) <= 35, f"its docstring has {len(lines)} lines, not 10 to 35; {remedy}"
    assert max(map(len, lines)) <= 100, f"its docstring is wider than 100 columns; {remedy}"
    assert any(line.startswith(("Example", "    ")) for line in lines), f"no example; {remedy}"


def test_every_decision_record_is_named_by_the_code_that_it_explains() -> None:
    records = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("0*.md")}
    sources = [path for top in ("operator", "runtime", "trainer") for path in (ROOT / top).rglob("*.py")]
    named = {
        number
        for path in sources
        for sentence in re.findall(r"docs/decisions/\d{4}[^.]*", path.read_text())
        for number in re.findall(r"\b\d{4}\b", sentence)
    }
    advice = 'write "Why: docs/decisions/NNNN" into the docstring of the module that carries it out'
    assert records - named == set(), f"no module names these records; {advice}"
    assert named - records == set(), "modules name these records, which do not exist; correct the numbers"


# A path below one of the repository's folders, or of a file next to these folders, in Markdown
# code, in the map, or in prose.
NAMED_PATH = re.compile(
    r"(?:`|^|\s)((?:\.github|benchmarks|charts|docs|examples|operator|runtime|scripts|tests|trainer)/[\w./-]*"
    r"|[A-Z]+\.md|pyproject\.toml|Makefile|Dockerfile)(?=[`\s:,;.)]|$)",
    flags=re.MULTILINE,
)
NAMING_PATHS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


def named_paths(text: str) -> set[str]:
    return {path.rstrip("/.") for path in NAMED_PATH.findall(text)}


@pytest.mark.parametrize("page", NAMING_PATHS, ids=lambda page: page.name)
def test_every_path_that_the_pages_for_contributors_name_exists(page: Path) -> None:
    gone = [path for path in sorted(named_paths(page.read_text())) if not (ROOT / path).exists()]
    assert gone == [], f"{page.name} names paths that do not exist; correct the page"


def test_paths_on_a_page_are_found_in_all_forms() -> None:
    text = "`docs/none.md`: (`tests/no/`)\noperator/none/   a room   trainer/none/\nsee tests/none.py.\nREADME.md"
    assert named_paths(text) == {
        *("docs/none.md", "tests/no", "operator/none", "trainer/none", "tests/none.py", "README.md"),
    }
    assert len(named_paths((ROOT / "CONTRIBUTING.md").read_text())) > 50
