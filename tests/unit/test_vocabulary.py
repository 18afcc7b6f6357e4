"""One vocabulary: unwanted words must not return, each name of a module or class has one meaning,
every module is in the map, and figures agree.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(
        "operator/ddpjob",
        "runtime/ddpjob_runtime",
        "runtime/ddpjob_pod",
        "runtime/ddpjob_report",
        "runtime/ddpjob_bucket",
    ),
    "trainer/ddpjob_trainer",
)
MAP = runpy.run_path(str(ROOT / "docs" / "generate_map.py"))

UNWANTED = {
    "told, tells": (r"(?:told|tells)(?! apart)", "reported, notified, logged, shows"),
    "anew": (r"anew", "again, a new ..."),
    "goes on": (r"go(?:es|ing)? on|went on|gone on", "continues"),
    "mended": (r"mend(?:s|ed|ing)?", "repaired, fixed"),
    "life": (r"li(?:fe|ves) of (?:the|a) job", "incarnation"),
    "buries": (r"bur(?:y|ies|ied)", "reaps"),
    "otherwise than": (r"otherwise than", "differently from"),
    "is no": (r"(?<!here )(?:is|are|was|were) no (?!longer|more)\w+", "is not a"),
    "British spelling": (
        r"(?:normal|synchron|initial|serial|minim|maxim|optim)is(?:e|ed|es|ing|ation)",
        "-ize, as in torch",
    ),
}
"""Name of a rule: (unwanted pattern, words to use instead)."""
SHARED_NAMES = {"__init__", "__main__", "main"}
"""Module names whose meaning is the same in every package."""
SHARED_CLASSES = {
    "DDPJobCallback": "a script imports that of its framework, Hugging Face's or Lightning's",
    "Member": "a member as the coordinator knows it, and as its report has it",
    "Recovery": "spec.recovery, and the report's part about the last recovery",
}
"""Class names with several meanings, and why."""


LONGEST_NAME = 80
"""Maximum length of a test's name."""


PREPOSITIONS = (
    *("About", "After", "Among", "As", "At", "Before", "Behind", "Beside", "Between", "Beyond", "By", "During", "For"),
    *("From", "In", "Into", "Like", "Of", "On", "Over", "Through", "To", "Under", "Until", "With", "Within", "Without"),
)
COLUMNS = 100
UNCHECKED = (
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/cli.md",
    "docs/metrics.md",
    "docs/python.md",
    "docs/reference.md",
    "docs/trainer-keys.md",
)
WIDE = {
    "SECURITY.md": 9,
    "docs/pod-security.md": 1,
    "examples/language_model.py": 4,
    "examples/own_loop.py": 2,
    "operator/ddpjob/controller/job_cache.py": 8,
    "runtime/ddpjob_pod/__init__.py": 1,
    "runtime/ddpjob_pod/job_environment.py": 2,
    "runtime/ddpjob_pod/posting.py": 4,
    "runtime/ddpjob_report/__init__.py": 1,
    "runtime/ddpjob_report/accelerate.py": 2,
    "runtime/ddpjob_report/huggingface.py": 1,
    "runtime/ddpjob_report/lightning.py": 1,
    "runtime/ddpjob_runtime/coordinator/__main__.py": 1,
    "runtime/ddpjob_runtime/launcher/fetch_data.py": 2,
    "runtime/ddpjob_runtime/worker.py": 1,
    "trainer/ddpjob_trainer/checkpoints/manifest.py": 5,
    "trainer/ddpjob_trainer/config/sections.py": 124,
    "trainer/ddpjob_trainer/data/cifar_batch.py": 6,
    "trainer/ddpjob_trainer/lifecycle/signals.py": 4,
    "trainer/ddpjob_trainer/preflight/command.py": 1,
    "trainer/ddpjob_trainer/preflight/peers.py": 1,
    "trainer/ddpjob_trainer/reporting/flops.py": 1,
    "trainer/ddpjob_trainer/reporting/ledger.py": 5,
    "trainer/ddpjob_trainer/reporting/sinks/background.py": 1,
    "trainer/ddpjob_trainer/train.py": 2,
}
"""Number of docstring, comment and text lines over 100 columns that may remain per file. It may
only fall.
"""


def sources() -> list[Path]:
    """Return all texts that a user or a contributor reads."""
    code = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    chart = [path for path in (ROOT / "charts").rglob("*") if path.suffix in (".yaml", ".txt", ".json", ".tpl")]
    return sorted(set(code + pages + chart + list((ROOT / "examples").iterdir())))


def unwanted(text: str) -> list[str]:
    """Return each line with an unwanted word, with its number and the word to use instead."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for name, (pattern, instead) in UNWANTED.items():
            if re.search(rf"\b(?:{pattern})\b", line, re.IGNORECASE):
                found.append(f"{number}: {line.strip()[:90]!r}: {name}; write: {instead}")
    return found


def test_the_check_finds_unwanted_words() -> None:
    assert len(unwanted("it is told\nand goes on\nNormalised anew\nfine")) == 4


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_unwanted_words_do_not_return(path: Path) -> None:
    found = unwanted(path.read_text())
    assert not found, "\n".join([str(path.relative_to(ROOT)), *found])


ALONE = re.compile(r"(?<!Kubernetes )(?<![\w./-])[Nn]odes?(?![\w.(-])")
"""The word "node" for a training pod; a machine is a "Kubernetes node" (docs/glossary.md)."""
TRAINING_PODS = (
    *("all nodes have", "the node has finished", " nodes have finished", "every node in the group"),
    *(" nodes at once", "watch on nodes"),
)
"""Parts of messages in which "node" means a training pod, or is a word of Kubernetes itself."""


def machines(text: str) -> bool:
    """Return whether a message calls a machine just "node"."""
    for part in TRAINING_PODS:
        text = text.replace(part, "")
    return ALONE.search(text) is not None and text.strip() not in ("node", "nodes")


def test_messages_say_kubernetes_node_for_a_machine() -> None:
    assert machines("the node is gone") and not machines("Kubernetes node n1 is gone; all nodes have finished")
    found = []
    for path in (ROOT / "operator" / "ddpjob" / "core").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
        found += [f"{path.name}: {text}" for text in texts if isinstance(text, str) and machines(text)]
    assert found == [], 'write "Kubernetes node" for a machine; if pods are meant, add the words to TRAINING_PODS'


def docstrings(code: str) -> list[tuple[int, int, str]]:
    """Return (first line, last line, text) of each docstring, including those of attributes."""
    expressions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Expr))
    return [
        (node.lineno, node.end_lineno or node.lineno, node.value.value)
        for node in expressions
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def begun_by_prepositions(code: str) -> list[str]:
    return [
        f"{line}: {text.strip()[:60]!r}: begin with a verb or with what it is"
        for line, _, text in docstrings(code)
        if text.split() and text.split()[0] in PREPOSITIONS
    ]


def wide_code(code: str) -> list[int]:
    """Return the lines of docstrings and comments over 100 columns, except rulers and comments
    after code.
    """
    lines = code.splitlines()
    prose = {number for first, last, _ in docstrings(code) for number in range(first, last + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    prose |= {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip()[0] == "#"}
    wide = (number for number in sorted(prose) if len(lines[number - 1]) > COLUMNS)
    return [number for number in wide if not lines[number - 1].endswith("---")]


def wide_text(page: str) -> list[int]:
    """Return the lines of a page over 100 columns, except code, tables, lines with links, and
    generated text.
    """
    left_out = r"^```.*?^```|<!-- ([\w -]+): begin -->.*?<!-- \1: end -->"
    without_code = re.sub(left_out, lambda part: "\n" * part[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return [
        number
        for number, line in enumerate(without_code.splitlines(), 1)
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and "](" not in line and "://" not in line
    ]


def test_the_checks_find_leading_prepositions_and_wide_lines() -> None:
    planted = f'''"""Of a job."""\n\nSIZE = 1\n"""{"Bytes " * 20}"""\n# {"why " * 30}\nTEXT = "{"x" * 120}"\n'''
    assert len(begun_by_prepositions(planted)) == 1 and wide_code(planted) == [4, 5]
    assert wide_text(f"short\n{'long ' * 30}\n| {'cell ' * 30}\n```\n{'code ' * 30}\n```\n{'more ' * 30}") == [2, 7]
    assert len(unwanted("3 is no share\nit is no longer\nthere is no job")) == 1


@pytest.mark.parametrize("top", PACKAGES)
def test_docstrings_begin_with_a_verb_or_a_noun(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in sorted((ROOT / top).rglob("*.py"))
        for fault in begun_by_prepositions(path.read_text())
    ]
    assert found == []


def test_prose_has_at_most_100_columns() -> None:
    wide = {}
    for path in sources():
        name = str(path.relative_to(ROOT))
        if name not in UNCHECKED and path.suffix in (".md", ".py"):
            wide[name] = len((wide_code if path.suffix == ".py" else wide_text)(path.read_text()))
    grown = {name: count for name, count in wide.items() if count > WIDE.get(name, 0)}
    assert grown == {}, "wrap docstrings, comments and text at 100 columns"


def test_no_two_modules_have_the_same_name() -> None:
    places = defaultdict(list)
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*.py"):
            if path.stem not in SHARED_NAMES:
                places[path.stem].append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert shared == {}, "rename all but one of these modules to show how they differ"


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*.py"):
            for name in re.findall(r"^ *class (\w+)", path.read_text(), flags=re.MULTILINE):
                places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 400, "the classes were found"
    shared = {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED_CLASSES}
    assert shared == {}, "rename all but the most central of these classes to show how they differ"
    unused = {name for name in SHARED_CLASSES if len(places[name]) < 2}
    assert unused == set(), "remove these names from SHARED_CLASSES, because each belongs to only one class now"


def test_the_names_of_tests_are_not_too_long() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    names = {name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, flags=re.MULTILINE)}
    assert len(names) > 2000, "the tests were found"
    long = {name for name in names if len(name) > LONGEST_NAME}
    assert long == set(), f"shorten these to {LONGEST_NAME} characters; put details into the docstring"


def test_every_module_is_in_the_map() -> None:
    assert MAP["PAGE"].read_text() == MAP["page"](MAP["PAGE"].read_text()), "run: python docs/generate_map.py"


def test_every_module_states_its_purpose() -> None:
    silent = re.findall(r"^- `(\S+)`: $", MAP["render"](), flags=re.MULTILINE)
    assert silent == [], "begin these modules with a docstring: one line that says what the module is for"
    without = re.findall(r"^### (.*)\n\n\n", MAP["render"](), flags=re.MULTILINE)
    assert without == [], "give the __init__.py of these packages a docstring that says what they contain and import"


CASES = {
    "fast-spare": "DDPJob `Fast`, a spare takes over",
    "fast-shrink": "DDPJob `Fast`, continues with fewer nodes",
    "fast-replaced": "DDPJob `Fast`, the pod is replaced",
    "standard-replaced": "DDPJob `Standard`, the pod is replaced",
}
"""Case in docs/recovery.md: row in README.md."""


def test_the_readme_has_the_same_figures_as_the_recovery_page() -> None:
    measured = (ROOT / "docs" / "recovery.md").read_text().partition("<!-- cluster: begin -->")[2]
    readme = (ROOT / "README.md").read_text()
    for case, row in CASES.items():
        match = re.search(rf"^\| {case} \| cluster \|.*?\| \d+ \| ([\d.]+) \| ([\d.]+) \|", measured, re.MULTILINE)
        assert match, (
            f"docs/recovery.md has no row for {case}; correct CASES here, or write the row with benchmarks.recovery"
        )
        shown = [f"{float(text):.2f} s" if float(text) < 1 else f"{float(text):.1f} s" for text in match.groups()]
        line = f"| {row} | {shown[0]} | {shown[1]} |"
        assert line in readme, f"the figures in README.md differ from docs/recovery.md; write in README.md: {line}"
