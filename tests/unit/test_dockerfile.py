"""The Dockerfile, parsed as Docker does. tests/cluster/test_images.py checks the contents of the
images.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCKERFILE = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", " ")
STAGES = {
    stage.splitlines()[0].rpartition(" AS ")[2]: stage
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
}
INSTALLS = re.findall(r"pip (?:\S+ )*?install [^&;\n]*", DOCKERFILE)


def test_images_install_packages_by_hash_and_build_only_the_project() -> None:
    """The exception is torch from an index that the builder chooses, because no lock file can
    contain its hashes.
    """
    from_an_index = [install for install in INSTALLS if "--no-index" not in install]
    own_index = [install for install in from_an_index if "--index-url" in install]
    by_hash = [install for install in from_an_index if "--require-hashes" in install]
    assert sorted(own_index + by_hash) == sorted(from_an_index) and len(own_index) == 1
    assert [install for install in from_an_index if "--only-binary=:all:" not in install] == []
    assert {lock for install in by_hash for lock in re.findall(r"-r /locks/(\S+)", install)} == {
        "build.txt",
        "operator.txt",
        "torch.txt",
        "trainer.txt",
    }
    assert all("--no-build-isolation" in wheel for wheel in re.findall(r"pip wheel [^&;\n]*", DOCKERFILE))


def test_the_base_image_is_named_where_dependabot_finds_it() -> None:
    """Dependabot reads FROM lines and does not resolve ARG in them."""
    assert re.match(r"\S+:\S+ AS base\n", STAGES["base"]) and "ARG BASE_IMAGE=base\n" in DOCKERFILE
    assert {stage.partition(" ")[0] for name, stage in STAGES.items() if name != "base"} == {"${BASE_IMAGE}"}


def test_no_downloads_of_pip_remain_in_an_image() -> None:
    """The tests' own builds mount a folder over pip's cache, so they would not notice leftovers."""
    for name in ("operator", "trainer"):
        setting = re.search(r"^ARG PIP_NO_CACHE_DIR=1$", STAGES[name], flags=re.MULTILINE)
        for install in re.finditer(r"pip install [^&\n]*", STAGES[name]):
            kept = not re.search("--no-cache-dir|--no-index", install[0])
            assert not kept or (setting and setting.start() < install.start()), f"{name}: {install[0]}"
