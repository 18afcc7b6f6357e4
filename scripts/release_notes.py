"""Prints a release's notes from CHANGELOG.md if all files agree with the tag's version.

    python scripts/release_notes.py v1.2.3 [--registry ghcr.io/OWNER]

Otherwise it prints every disagreement to stderr, and exits with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("charts/ddpjob-operator")


def problems(root: Path, tag: str, registry: str | None = None) -> list[str]:
    """Describe each file below `root` that does not agree with `tag`, with the remedy.

    `registry` is where this release's images are pushed, so the chart must pull the operator from
    it.
    """
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"{tag}: a release's tag must be v and three numbers, such as v0.1.0"]
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    versions = {
        "pyproject.toml: project.version": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"],
        f"{CHART}/Chart.yaml: version": chart["version"],
        f"{CHART}/Chart.yaml: appVersion": chart["appVersion"],
    }
    found = [f"{field} is {value}; set it to {version}" for field, value in versions.items() if value != version]
    repository = yaml.safe_load((root / CHART / "values.yaml").read_text())["image"]["repository"]
    if registry is not None and repository != f"{registry.lower()}/operator":
        found.append(
            f"{CHART}/values.yaml: image.repository is {repository}, but this release pushes to {registry}/operator"
        )
    base = re.search(r"^FROM (\S+) AS base$", (root / "Dockerfile").read_text(), flags=re.MULTILINE)
    if base is None or "@sha256:" not in base[1]:
        found.append(
            "Dockerfile: the stage base refers to an image by a tag, which can move; write FROM"
            " IMAGE:TAG@DIGEST AS base,"
            " with the digest that `docker buildx imagetools inspect IMAGE:TAG` shows first"
        )
    heading, notes = _section(root, version)
    if not re.search(r" - \d{4}-\d{2}-\d{2}$", heading):
        found.append(f"CHANGELOG.md: needs a heading '## [{version}] - YYYY-MM-DD', not {heading or 'none'!r}")
    elif not notes:
        found.append(f"CHANGELOG.md: no text under '{heading}'")
    return found


def notes(root: Path, tag: str) -> str:
    """Return the text under the version's heading in CHANGELOG.md.

    Each item becomes one line, because GitHub keeps the line breaks of release notes.
    """
    return re.sub(r"\n +(?=\S)", " ", _section(root, tag.removeprefix("v"))[1])


def _section(root: Path, version: str) -> tuple[str, str]:
    """Return (heading, text) of a version; both are empty if CHANGELOG.md does not have it."""
    for section in re.split(r"^(?=## )", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        if heading.startswith(f"## [{version}]"):
            return heading, text.strip()
    return "", ""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Print a release's notes from CHANGELOG.md.")
    parser.add_argument("tag", help="v and the version, such as v0.1.0")
    parser.add_argument("--registry", help="where the release pushes images, such as ghcr.io/OWNER")
    arguments = parser.parse_args()
    found = problems(ROOT, arguments.tag, arguments.registry)
    if found:
        sys.exit("\n".join(found))
    print(notes(ROOT, arguments.tag))


if __name__ == "__main__":
    main()
