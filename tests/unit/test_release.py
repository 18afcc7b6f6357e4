"""A release is published only if the tag, the package, the chart and the changelog agree
(`scripts/release_notes.py`).
"""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))
CHART = "charts/ddpjob-operator/Chart.yaml"
VALUES = "charts/ddpjob-operator/values.yaml"
CHANGELOG = """\
# Changelog

## [9.9.0] - unreleased

- Later.

## [9.8.7] - 2026-12-24

### Added

- Snow, in
  large flakes.
- Ice.

## [9.8.6] - 2026-12-01
"""
REGISTRY = "ghcr.io/ddpjob"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DIGEST = f"@sha256:{'0' * 64}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that contain the version, and replace it with 9.8.7."""
    for name in ("pyproject.toml", "Dockerfile", CHART, VALUES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    replace(tmp_path / "pyproject.toml", f'\nversion = "{version}"', '\nversion = "9.8.7"')
    replace(tmp_path / CHART, f"\nversion: {version}", "\nversion: 9.8.7")
    replace(tmp_path / CHART, f'appVersion: "{version}"', 'appVersion: "9.8.7"')
    dockerfile = re.sub(r"^FROM ([^\s@]+)\S* AS base$", rf"FROM \1{DIGEST} AS base", DOCKERFILE, flags=re.MULTILINE)
    (tmp_path / "Dockerfile").write_text(dockerfile)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer has {old!r}"
    path.write_text(text.replace(old, new))


def test_the_release_notes_are_the_changelogs_section_of_the_version(checkout: Path) -> None:
    assert SCRIPT["problems"](checkout, "v9.8.7", REGISTRY) == []
    assert SCRIPT["notes"](checkout, "v9.8.7") == "### Added\n\n- Snow, in large flakes.\n- Ice."


@pytest.mark.parametrize(
    ("name", "old", "new", "part"),
    [
        ("pyproject.toml", 'version = "9.8.7"', 'version = "9.8.6"', "project.version is 9.8.6; set it to 9.8.7"),
        (CHART, "\nversion: 9.8.7", "\nversion: 9.8.6", "version is 9.8.6"),
        (CHART, 'appVersion: "9.8.7"', 'appVersion: "1"', "appVersion is 1"),
        (VALUES, REGISTRY, "ghcr.io/other", "image.repository is ghcr.io/other/operator"),
        ("Dockerfile", DIGEST, "", "write FROM IMAGE:TAG@DIGEST AS base"),
        ("CHANGELOG.md", "2026-12-24", "unreleased", "needs a heading '## [9.8.7] - YYYY-MM-DD'"),
        ("CHANGELOG.md", "## [9.8.7]", "## [9.8.8]", "needs a heading"),
        ("CHANGELOG.md", "### Added\n\n- Snow, in\n  large flakes.\n- Ice.\n", "", "no text under"),
    ],
)
def test_files_whose_versions_differ_are_reported(checkout: Path, name: str, old: str, new: str, part: str) -> None:
    replace(checkout / name, old, new)
    [problem] = SCRIPT["problems"](checkout, "v9.8.7", REGISTRY)
    assert part in problem


@pytest.mark.parametrize("tag", ["9.8.7", "v9.8", "v9.8.7-rc.1", "main"])
def test_a_tag_that_is_not_v_followed_by_three_numbers_is_refused(checkout: Path, tag: str) -> None:
    [problem] = SCRIPT["problems"](checkout, tag)
    assert "three numbers" in problem


def test_all_files_have_the_same_version_and_the_changelog_has_its_section() -> None:
    """This holds at any time, not only on the day of a release. Only the date and the base image's
    digest may be missing.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [p for p in SCRIPT["problems"](ROOT, f"v{version}", REGISTRY) if not re.search("YYYY-MM-DD|DIGEST", p)] == []
    assert SCRIPT["notes"](ROOT, f"v{version}")
