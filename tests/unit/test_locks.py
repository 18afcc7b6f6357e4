"""The lock files in locks/ satisfy pyproject.toml and have hashes, and CI tests the versions that
are shipped.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
SHIPPED = ("operator.txt", "torch.txt", "trainer.txt")
LOCKS = ("dev.txt", *SHIPPED, "build.txt")


def asked(*extras: str) -> list[Requirement]:
    """Return the requirements of the package with these extras, including extras that refer to
    other extras.
    """
    found = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    for requirement in (Requirement(text) for extra in extras for text in EXTRAS[extra]):
        found += asked(*requirement.extras) if requirement.name == "ddpjob" else [requirement]
    return found


def unmet(requirements: list[Requirement], *names: str) -> list[str]:
    """Return the requirements that these lock files do not contain, or contain in a version that is
    not allowed.
    """
    held = {package: versions for name in names for package, versions in lock.pins(name).items()}
    return [
        str(requirement)
        for requirement in requirements
        if not (versions := held.get(canonicalize_name(requirement.name)))
        or not all(requirement.specifier.contains(version) for version in versions)
    ]


@pytest.mark.parametrize(
    ("extras", "names"),
    [(("dev",), ("dev.txt",)), (("operator",), ("operator.txt",)), (("trainer", "s3"), ("torch.txt", "trainer.txt"))],
    ids=lambda value: value[0],
)
def test_a_lock_file_satisfies_its_extras(extras: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert unmet(asked(*extras), *names) == [], "pyproject.toml has changed: run `make locks`"


@pytest.mark.parametrize("names", [("dev.txt",), ("operator.txt",), ("torch.txt", "trainer.txt")], ids=lambda n: n[0])
def test_a_lock_file_satisfies_the_requirements_of_its_packages(names: tuple[str, ...]) -> None:
    """The test runs if the environment has the locked versions. Images install with --no-deps."""
    held = {package: versions for name in names for package, versions in lock.pins(name).items()}
    lacking = []
    for package, versions in held.items():
        try:
            found = distribution(package)
        except PackageNotFoundError:
            continue
        if found.version in versions:
            needed = [Requirement(text) for text in found.requires or ()]
            names_of_needed = {
                canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({"extra": ""})
            }
            lacking += [f"{package} needs {name}" for name in names_of_needed - held.keys()]
    assert lacking == [], f"{names} do not match: they were edited by hand, or a package has changed; run `make locks`"


def test_the_lock_file_for_builds_contains_the_build_tools() -> None:
    group = [Requirement(text) for text in PYPROJECT["dependency-groups"]["build"]]
    backend = [Requirement(text) for text in PYPROJECT["build-system"]["requires"]]
    assert unmet([*group, *backend, *asked()], "build.txt") == [], "pyproject.toml has changed: run `make locks`"


def test_an_unmet_requirement_is_found() -> None:
    assert unmet([Requirement("kopf>=2"), Requirement("nothing-of-this-name")], "operator.txt") == [
        "kopf>=2",
        "nothing-of-this-name",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_versions_are_the_versions_that_ci_tests(name: str) -> None:
    """The images contain the versions that CI tests."""
    tested = lock.pins("dev.txt")
    differ = {package: versions for package, versions in lock.pins(name).items() if versions != tested[package]}
    assert differ == {}, f"locks/{name} has other versions than locks/dev.txt: run `make locks`"


def test_no_package_of_the_trainer_is_in_two_lock_files() -> None:
    """Otherwise, the second lock file would replace the torch from TORCH_INDEX_URL with the CUDA
    build.
    """
    assert not lock.pins("torch.txt").keys() & lock.pins("trainer.txt").keys()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_hashes_for_every_version_and_names_no_index(name: str) -> None:
    """An index in the file would apply to everybody who installs from the file."""
    text = (lock.LOCKS / name).read_text()
    first, *requirements = re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)
    assert requirements and "--hash" not in first
    hashed = re.compile(r"[a-z0-9-]+==[^\n]+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
    assert [block for block in requirements if not hashed.fullmatch(block)] == []
    assert "://" not in text


def test_only_wheels_are_locked_for_images() -> None:
    """A source distribution is built during installation, with tools that no lock file contains."""
    assert not {package for name in (*SHIPPED, "build.txt") for package in lock.pins(name)} & {*lock.FROM_SOURCE}
