"""Writes the lock files in locks/: `make locks`, or `python -m scripts.lock [OPTIONS OF uv pip compile]`.

Each lock file lists every package that an installation needs, on any platform and any Python that
pyproject.toml allows, with one version and the SHA-256 of each of its files. Lock files do not name
an index.

    dev.txt       what CI tests with (`LOCKED=1`); its versions match the files below
    operator.txt  the operator's image
    torch.txt     the trainer's image: torch, torchvision and what they need, in a layer of their own.
                  If TORCH_INDEX_URL is set, they are installed from that index
    trainer.txt   the trainer's image: everything else
    build.txt     what builds the package, the images and the release's notes

The newest versions that are at least a week old are chosen, because malicious releases are usually
found within days. To use a fix immediately, run `python -m scripts.lock --upgrade-package=NAME
--exclude-newer-package=NAME=DATE`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from scripts import install

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
OPTIONS = ("--universal", "--python-version=3.11", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links",
           "--no-annotate", "--only-binary=:all:", "--custom-compile-command=make locks")  # fmt: skip
FROM_SOURCE = ("deepspeed",)
"""Packages without wheels. Building a package during installation needs a build environment, which
would not be locked, so images do not contain such packages.
"""
PINNED = re.compile(r"^([a-z0-9][a-z0-9-]*)==([^ ;\\]+)", re.MULTILINE)
"""Name and version at the beginning of a requirement. If no single version suits all Pythons, a
package has several requirements with markers.
"""


def pins(name: str) -> dict[str, set[str]]:
    """Return the versions of each package in the lock file with this name."""
    found: dict[str, set[str]] = {}
    for package, version in PINNED.findall((LOCKS / name).read_text()):
        found.setdefault(package, set()).add(version)
    return found


def compile_lock(name: str, words: Iterable[str], requirements: Iterable[str] = ()) -> None:
    """Write one lock file for `requirements`, or for the extras and groups listed in `words`."""
    listed = subprocess.run([*install.PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", *OPTIONS]
    command += [f"--no-binary={package}" for package in FROM_SOURCE]
    command += ["-" if requirements else "pyproject.toml", *words, f"--output-file={LOCKS / name}"]
    subprocess.run(
        command, cwd=ROOT, env={**install.settings(listed), **os.environ}, text=True, input="\n".join(requirements),
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Write all lock files. `arguments` are passed to uv instead of --upgrade."""
    LOCKS.mkdir(exist_ok=True)
    chosen = ["--exclude-newer=7 days", *(arguments or ["--upgrade"])]
    tested = [*chosen, f"--constraint={LOCKS / 'dev.txt'}"]
    trainer = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainer"]
    compile_lock("dev.txt", ["--extra=dev", *chosen])
    compile_lock("operator.txt", ["--extra=operator", *tested])
    compile_lock("torch.txt", tested, [requirement for requirement in trainer if requirement.startswith("torch")])
    others = [f"--no-emit-package={package}" for package in pins("torch.txt")]
    compile_lock("trainer.txt", ["--extra=trainer", "--extra=s3", *others, *tested])
    compile_lock("build.txt", ["--group=build", *tested], [])


if __name__ == "__main__":
    main(sys.argv[1:])
