"""`Client.train(packages=...)`: accepted requirements, and their installation by the real pip."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from ddpjob import Client, Mistake
from ddpjob.client.manifests import packages_in_pod
from ddpjob.client.manifests.function_source import MOST_PACKAGES, script_of


def fit() -> None:
    import small_thing  # type: ignore[import-not-found]

    print("answer", small_thing.ANSWER, small_thing.__file__)


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"ANSWER = {version!r}\n")
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def run(script: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a function, with an index of the wheels in its folder."""
    script.parent.mkdir(exist_ok=True)
    script.write_text(script_of(fit, {}, packages))
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(script.parents[1] / "wheels")}
    environment = {**os.environ, **index, "TMPDIR": str(script.parents[1])}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)


def test_packages_are_installed_once_in_a_folder_of_the_job(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "small_thing", "1.2", needs="pytest")  # pytest is in the image already
    script = tmp_path / "code" / "function.py"
    first = run(script, "small-thing>=1,<2")
    assert first.returncode == 0, first.stdout + first.stderr
    said = first.stdout.splitlines()
    assert said[:2] == ["installing packages: small-thing>=1,<2", "installed packages: small_thing==1.2"]
    assert said[2].startswith(f"answer 1.2 {script.parent}/packages-")
    second = run(script, "small-thing>=1,<2")
    assert second.stdout.splitlines() == said[2:], "an in-place restart installs nothing"


def test_packages_are_installed_in_the_temporary_folder_if_the_script_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Path]()

    def install(requirements: list[str], folder: Path) -> None:
        folder.mkdir()
        made.append(folder)

    monkeypatch.setattr(packages_in_pod, "install_missing", install)
    monkeypatch.setattr(packages_in_pod.os, "access", lambda folder, mode: False)
    monkeypatch.setattr(sys, "path", ["script"])
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        packages_in_pod.install_packages(["a"], "/ddpjob-code/function.py")
    assert len(made) == 1 and made[0].parent == tmp_path and sys.path[:2] == ["script", str(made[0])]
    assert os.environ["PYTHONPATH"].endswith(f"{made[0]}:before"), "for processes that the function starts"


def test_an_error_of_pip_is_reported_as_the_jobs_error(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "small_thing", "1.2")
    ran = run(tmp_path / "code" / "function.py", "small_thing>=9")
    assert ran.stderr.splitlines()[-1].startswith("ValueError: packages: ERROR: Could not find a version")
    assert "answer" not in ran.stdout and not list(tmp_path.glob("code/packages-????????????????"))


def test_packages_never_replace_the_torch_of_the_image(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "small_thing", "1.2", needs="torch>=99")
    make_wheel(tmp_path / "wheels", "torch", "99.0")
    ran = run(tmp_path / "code" / "function.py", "small_thing")
    assert "installing these would replace the image's torch with torch==99.0; use an image with this" in ran.stderr


def test_a_missing_package_fails_the_job_and_an_outage_of_the_index_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    for output, kind in (("ERROR: no matching distribution", ValueError), ("WARNING: Retrying (x)", ConnectionError)):
        ran = subprocess.CompletedProcess([], 1, f"{output}\nERROR: none")
        monkeypatch.setattr(subprocess, "run", lambda *_, ran=ran, **__: ran)
        with pytest.raises(kind, match=r"^packages: .*ERROR: none") as caught:
            packages_in_pod.run_pip(["a"])
        assert getattr(caught.value, "ddpjob_refusal", False) is (kind is ValueError)


@pytest.mark.parametrize("good", ["einops", "einops==0.8.1", "timm[x,y]>=1.0, <2", "a.b_c-d ~=2.0", "torch===2.6+cu1"])
def test_requirements_with_names_and_versions_are_accepted(good: str) -> None:
    assert repr(good) in script_of(fit, {}, [good])


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "-r a.txt", "--index-url=http://a", "./a", "a @ http://b", "git+https://a", "a; os_name=='x'"),
        *("a\n-e b", "a b", "a\n", "a" * 201, 3),
    ],
)
def test_other_requirements_are_refused_before_the_job_is_created(wrong: object) -> None:
    with pytest.raises(Mistake, match=r"packages: .* is not a valid requirement"):
        script_of(fit, {}, [wrong])  # type: ignore[list-item]


def test_the_list_of_packages_is_bounded_and_only_for_functions() -> None:
    for wrong in ("einops", ["a"] * (MOST_PACKAGES + 1)):
        with pytest.raises(Mistake, match="must be a list of at most"):
            script_of(fit, {}, wrong)
    with pytest.raises(Mistake, match="packages: allowed only for a function"):
        Client("local").train(__file__, packages=["einops"])


def test_the_installation_works_on_the_oldest_supported_python() -> None:
    tree = ast.parse(Path(packages_in_pod.__file__).read_text(), feature_version=(3, 9))
    modules = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert modules <= sys.stdlib_module_names
