"""The documentation site: every page is in the navigation, and a strict build finds no broken links
or anchors.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chromium import browser_page

ROOT = Path(__file__).parents[2]
HOOKS = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))


class Loader(yaml.SafeLoader):
    """A YAML loader that ignores mkdocs' own tags."""


Loader.add_multi_constructor("", lambda loader, tag, node: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def named(nav: Any) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from named(below)


def test_every_page_is_in_the_navigation_exactly_once() -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named(CONFIG["nav"])) == sorted([*pages, *HOOKS["PAGES"]]), "name each page once in nav of mkdocs.yml"
    assert [next(iter(entry)) for entry in CONFIG["nav"][1:]] == ["Start", "Train", "Platform", "Understand"]


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("index.md", "[a](docs/cli.md#b)", "[a](cli.md#b)"),
        ("index.md", "![a](docs/images/demo.png)", "![a](images/demo.png)"),
        ("index.md", "[a](#b) and [c](https://d/e.md)", "[a](#b) and [c](https://d/e.md)"),
        ("cli.md", "[a](../README.md#b)", "[a](index.md#b)"),
        ("cli.md", "[a](../examples/x.yaml)", "a (`examples/x.yaml`)"),
        ("index.md", "[examples/x.yaml](examples/x.yaml)", "examples/x.yaml"),
        ("decisions/README.md", "[a](../cli.md)", "[a](../cli.md)"),
        ("decisions/0001.md", "[a](../../SECURITY.md)", "[a](../security.md)"),
        ("benchmarks.md", "[a](../docs/cli.md)", "[a](cli.md)"),
        ("benchmarks.md", "[a](recovery/steps.py)", "a (`benchmarks/recovery/steps.py`)"),
    ],
)
def test_links_to_pages_in_the_repository_lead_to_the_site(page: str, link: str, on_the_site: str) -> None:
    assert HOOKS["rewritten"](link, page, "") == on_the_site


def test_links_to_other_files_work_if_the_repositorys_address_is_known() -> None:
    made = HOOKS["rewritten"]("[a](../examples/x.yaml)", "cli.md", "https://host/me/ddpjob/")
    assert made == "[a](https://host/me/ddpjob/blob/main/examples/x.yaml)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site and return its folder."""
    for package in ("mkdocs", "material"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("mkdocs and mkdocs-material are not installed; they are in the extra dev")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_a_strict_build_reports_no_problems(site: Path) -> None:
    assert "<h1" in (site / "first-job-on-kind.html").read_text()
    assert "helm show crds" in (site / "chart.html").read_text()
    foreign = re.compile(r"""\bsrc=["']?(?:https?:)?//""")
    assert [page.name for page in site.rglob("*.html") if foreign.search(page.read_text())] == []


@pytest.fixture
def diagrams(site: Path) -> dict[Path, int]:
    """Return the number of diagrams on each page that has any."""
    counted = {page: page.read_text().count('class="mermaid"') for page in site.rglob("*.html")}
    return {page: number for page, number in counted.items() if number}


async def test_diagrams_are_drawn_without_requests_to_other_servers(diagrams: dict[Path, int]) -> None:
    """The test needs a real browser, because the HTML does not show what scripts load later."""
    assert {page.name for page in diagrams} >= {"architecture.html", "protocol.html"}
    async with browser_page() as tab:
        await tab.size(1400)
        for page, number in diagrams.items():
            await tab.open(page.as_uri())
            drawn = "[...document.querySelectorAll('div.mermaid')].filter((d) => d.offsetHeight > 20).length"
            await tab.until(f"{drawn} === {number}")
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "about:"))] == []
