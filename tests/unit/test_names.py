"""The names under which the project publishes. Each is defined in one place, and other texts repeat
it.

| name | its place |
| --- | --- |
| how the package is installed | `INSTALL` in operator/ddpjob/missing_package.py |
| the registry of images and chart | image.repository in the chart's values.yaml |
| the repository | metrics.rules.runbooks there |
| the version | project.version in pyproject.toml |

If one of them changes, these tests list the texts that must change with it.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from ddpjob.missing_package import INSTALL

ROOT = Path(__file__).parents[2]
VALUES = yaml.safe_load((ROOT / "charts" / "ddpjob-operator" / "values.yaml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
REGISTRY = VALUES["image"]["repository"].removesuffix("/operator")
REPOSITORY = VALUES["metrics"]["rules"]["runbooks"].partition("/blob/")[0]

BY_NAME = re.compile(r"\b(?:pip|uv|pipx|uvx)\b[^\n`]{0,40}?[ '\"]ddpjob(?:\[[\w,]*\])?(?:[=<>~]=[^ ]*)?(?=['\"`\s]|$)")
"""An installation of the package from an index."""
OURS = re.compile(r"\b(?:[\w.-]+\.io|docker\.io)/[\w.-]+/(?:(?:operator|trainer)\b(?::[\w.]+)?|charts/ddpjob-operator)")
URL = re.compile(r"https://github\.com/[\w-]+/ddpjob\b")
MADE_UP = ("registry.example", "ghcr.io/other", "ghcr.io/Owner", "ghcr.io/acme", "github.com/Acme", "github.com/me/")
"""Names that only tests use."""
OF_A_RELEASE = ("scripts/krew_plugin.py", "tests/unit/test_krew_plugin.py", "CHANGELOG.md", "tests/unit/test_names.py")
"""The plugin is made for a release, whose package is on the index."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield path and content of every text file of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        path = ROOT / name
        if name in OF_A_RELEASE or path.suffix in (".png", ".js", ".sum", "") or not path.is_file():
            continue
        yield name, path.read_text()


def different(pattern: re.Pattern[str], right: tuple[str, ...]) -> list[str]:
    """Return the places where a text matches the pattern, but not with one of the right
    spellings.
    """
    return [
        f"{name}: {found[0]}"
        for name, text in texts()
        for found in pattern.finditer(text)
        if found[0] not in right and not any(made_up in found[0] for made_up in MADE_UP)
    ]


def test_no_page_installs_the_package_by_a_name_that_is_not_reserved() -> None:
    """Anybody who registers the name would run code on the machine of each reader."""
    is_published = "ddpjob[" in INSTALL
    assert is_published or different(BY_NAME, ()) == [], f"write the command in INSTALL: {INSTALL}"


def test_an_installation_by_name_is_found_in_any_form() -> None:
    for text in (
        *(
            "pip install 'ddpjob[cli]'",
            "`pip install ddpjob`",
            'pip install -U "ddpjob[s3,cli]"\n',
            "pip install ddpjob",
        ),
        *("uvx --from 'ddpjob[cli]' x", "pip install 'ddpjob[cli]==0.1.0'", "pipx install ddpjob"),
    ):
        assert BY_NAME.search(text), text
    for text in ("`pip install '.[cli]'` brings ddpjob", "`pip install .` brings `ddpjob`", "pip install ddpjob-other"):
        assert not BY_NAME.search(text), text


def test_images_and_the_chart_have_one_registry_and_this_version() -> None:
    names = [f"{REGISTRY}/{name}" for name in ("operator", "trainer")]
    right = (*names, *(f"{name}:{VERSION}" for name in names), f"{REGISTRY}/charts/ddpjob-operator")
    assert different(OURS, right) == [], f"write one of {right}, or change all of them; see this module's docstring"
    assert OURS.findall(f"image: docker.io/else/trainer:0.1.0 oci://{REGISTRY}/charts/ddpjob-operator") == [
        "docker.io/else/trainer:0.1.0",
        f"{REGISTRY}/charts/ddpjob-operator",
    ]


def test_all_links_lead_to_the_same_repository() -> None:
    assert different(URL, (REPOSITORY,)) == [], (
        f"write {REPOSITORY}, or change it everywhere; see this module's docstring"
    )


def test_the_limitations_say_that_the_names_are_not_reserved() -> None:
    limits = (ROOT / "README.md").read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert "ddpjob[" in INSTALL or ("not reserved" in limits and REGISTRY in limits and "`ddpjob` on PyPI" in limits)


def test_the_page_about_verification_uses_the_same_names() -> None:
    page = (ROOT / "docs" / "verify-a-release.md").read_text()
    chosen = (
        f"${{VERSION:-{VERSION}}}",
        f"${{REPOSITORY:-{REPOSITORY.partition('.com/')[2]}}}",
        f"${{REGISTRY:-{REGISTRY}}}",
    )
    assert all(name in page for name in chosen)
