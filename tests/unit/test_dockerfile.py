"""The Dockerfile, as docker reads it. What the images hold when the tests build them: tests/cluster/test_images.py."""

from __future__ import annotations

import re
from pathlib import Path

DOCKERFILE = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", " ")
STAGES = {
    stage.splitlines()[0].rpartition(" AS ")[2]: stage
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
}


def test_no_download_of_pip_stays_in_an_image() -> None:
    """The tests' own builds mount a folder at pip's cache, and so cannot see it."""
    for name in ("operator", "trainer"):
        setting = re.search(r"^ARG PIP_NO_CACHE_DIR=1$", STAGES[name], flags=re.MULTILINE)
        for install in re.finditer(r"pip install [^&\n]*", STAGES[name]):
            kept = not re.search("--no-cache-dir|--no-index", install[0])
            assert not kept or (setting and setting.start() < install.start()), f"{name}: {install[0]}"
