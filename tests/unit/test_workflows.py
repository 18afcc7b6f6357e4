"""The workflows pass actionlint, refer only to files and targets that exist in the repository, and
pin every action to a commit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MODULE = Path(__file__).parent / "actionlint"

# A path in this repository, outside of URLs: a top-level entry, followed by anything up to a space
# or a quote.
TOP = r"\.github|benchmarks|charts|docs|examples|locks|operator|runtime|scripts|tests|trainer"
PATH = re.compile(
    rf"(?<![\w/.:-])(?:\./)?((?:{TOP})/[\w./*-]+|pyproject\.toml|Dockerfile|CONTRIBUTING\.md|CHANGELOG\.md)"
)
PINNED = re.compile(r"uses: (?:\./[\w./-]+|[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d[\w.]*)$")


def texts(node: Any) -> list[str]:
    """Return every string in a document, without keys."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in texts(value)]
    if isinstance(node, list):
        return [text for value in node for text in texts(value)]
    return [node] if isinstance(node, str) else []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def missing_paths(text: str) -> list[str]:
    """Return the paths in a text that the repository does not have. A star matches anything."""
    return [path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/.")))]


def unknown_targets(text: str) -> list[str]:
    """Return the targets of `make` in a text that the Makefile does not have."""
    return sorted(set(re.findall(r"\bmake ([a-z][a-z-]*)", text)) - make_targets())


def refuse(why: str) -> None:
    """Skip the test, or fail it if CI=true."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"CI=true, and actionlint cannot be built: {why}", pytrace=False)
    pytest.skip(f"actionlint cannot be built: {why}")


@pytest.fixture(scope="session")
def actionlint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program from the pinned module. The first build takes half a minute; later builds
    use Go's cache.
    """
    if shutil.which("go") is None:
        refuse("no Go on this machine")
    program = tmp_path_factory.mktemp("actionlint") / "actionlint"
    command = ["go", "build", "-o", str(program), "github.com/rhysd/actionlint/cmd/actionlint"]
    done = subprocess.run(command, cwd=MODULE, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        refuse(done.stderr.strip())
    return program


def findings(actionlint: Path, *files: Path) -> str:
    """Return the findings of actionlint. Its checkers for shell and Python are off, because some
    machines lack them.
    """
    command = [str(actionlint), "-no-color", "-shellcheck=", "-pyflakes=", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False).stdout


@pytest.mark.slow
def test_workflows_pass_actionlint(actionlint: Path) -> None:
    assert findings(actionlint, *WORKFLOWS) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("runs-on: ubuntu-24.04", "runs-on: ubuntu-24.40", 'label "ubuntu-24.40" is unknown'),
        ("needs: [lint, unit]", "needs: [lint, units]", 'job "cluster" needs job "units" which does not exist'),
        ("${{ matrix.python }}", "${{ matrix.pyton }}", 'property "pyton" is not defined'),
        ("fail-fast: false", "fail-fast: maybe", "fail-fast"),
    ],
)
def test_a_mistake_in_a_workflow_is_found(actionlint: Path, tmp_path: Path, old: str, new: str, part: str) -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert old in text
    broken = tmp_path / "ci.yml"
    broken.write_text(text.replace(old, new, 1))
    assert part in findings(actionlint, broken)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_paths_and_targets_that_a_workflow_names_exist(workflow: Path) -> None:
    text = "\n".join(texts(yaml.safe_load(workflow.read_text())))
    assert missing_paths(text) == []
    assert unknown_targets(text) == []


def test_a_path_or_a_target_that_does_not_exist_is_found() -> None:
    assert (
        missing_paths("python scripts/release_notes.py, ./.github/workflows/ci.yml, tests/cluster/binaries/*.sum") == []
    )
    assert missing_paths("hashFiles('tests/nothing/**', 'docs/trainer.md')") == ["tests/nothing/**"]
    assert missing_paths("https://example.org/docs/none") == []
    assert unknown_targets("make lint\nmake demolish") == ["demolish"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_minimal(workflow: Path) -> None:
    """A tag can be moved to different code. Rights are granted per job, only to jobs that
    publish.
    """
    lines = [line.strip().removeprefix("- ") for line in workflow.read_text().splitlines()]
    assert [line for line in lines if line.startswith("uses: ") and not PINNED.match(line)] == []
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


def test_ci_tests_the_oldest_supported_python() -> None:
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    [oldest] = re.findall(r'^requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert ci["jobs"]["unit"]["strategy"]["matrix"]["python"][0] == oldest


@pytest.mark.parametrize("name", ["dependabot.yml", "ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/feature.yml"])
def test_the_issue_forms_are_valid_yaml_and_name_only_existing_files(name: str) -> None:
    text = "\n".join(texts(yaml.safe_load((ROOT / ".github" / name).read_text())))
    assert missing_paths(text) == []


def test_dependabot_sees_every_folder_that_pins_something() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    watched = {
        folder
        for update in updates
        if update["package-ecosystem"] == "gomod"
        for pattern in update["directories"]
        for folder in ROOT.glob(pattern.lstrip("/"))
    }
    assert {path.parent for path in ROOT.glob("tests/**/go.mod")} <= watched


def test_dependabot_proposes_releases_only_after_a_week() -> None:
    """A compromised release is usually detected within days."""
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert [update["cooldown"]["default-days"] for update in updates] == [7] * 5


def test_pre_commit_runs_the_same_actionlint_version() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    [pinned] = [repo["rev"] for repo in hooks if repo["repo"].endswith("/actionlint")]
    assert f"github.com/rhysd/actionlint {pinned} " in (MODULE / "go.mod").read_text()


def test_images_are_pushed_to_lowercase_names_even_if_the_owner_has_capitals() -> None:
    """Otherwise the push ends with "repository name must be lowercase" after all tests."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    for name in ("image", "publish"):
        steps = [text for step in jobs[name]["steps"] for text in texts(step)]
        first = next(number for number, text in enumerate(steps) if "REGISTRY" in text)
        assert steps[first] == 'echo "REGISTRY=${REGISTRY,,}" >> "$GITHUB_ENV"'


RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
READ = {"contents": "read"}
RIGHTS = {
    "ci": READ,
    "notes": READ,
    "package": READ,
    "image": {"contents": "read", "packages": "write"},
    "chart": READ,
    "publish": {"packages": "write", "id-token": "write", "attestations": "write"},
    "pypi": {"id-token": "write"},
    "release": {"contents": "write"},
    "verify": {"contents": "read", "packages": "read", "attestations": "read"},
}


def script_of(job: str, step: str) -> str:
    """Return the commands of a named step."""
    [found] = [one["run"] for one in RELEASE[job]["steps"] if one.get("name") == step]
    return str(found)


def test_each_job_of_a_release_has_only_the_permissions_that_it_needs() -> None:
    assert {name: job.get("permissions", READ) for name, job in RELEASE.items()} == RIGHTS


def test_a_second_persons_approval_can_be_required_for_every_publishing_job() -> None:
    """The environment's settings can require a reviewer."""
    writing = {name for name, rights in RIGHTS.items() if "write" in rights.values()}
    assert {name for name, job in RELEASE.items() if job.get("environment") == "release"} == writing


def test_no_job_with_an_identity_token_runs_the_projects_code() -> None:
    """A dependency that runs during the build could sign or attest anything."""
    for name, rights in RIGHTS.items():
        code = [
            text
            for text in texts(RELEASE[name])
            if re.search(r"actions/checkout|pip install|scripts/|build-push", text)
        ]
        assert not (code and "id-token" in rights), f"{name}: {code}"
    assert "actions/checkout" in str(RELEASE["package"]) and "python -m build --no-isolation" in str(RELEASE["package"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_install_only_packages_from_lock_files(workflow: Path) -> None:
    installs = re.findall(r"^.*\b(?:pip3?|uv|pipx) install\b.*$", workflow.read_text(), flags=re.MULTILINE)
    assert [line for line in installs if not re.search(r"--require-hashes .*-r locks/\w+\.txt", line)] == []
    assert len(installs) == (2 if workflow.stem == "release" else 0)


def git(folder: Path, *words: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True)


def test_a_tag_on_a_commit_outside_of_main_is_not_released(tmp_path: Path) -> None:
    origin, checkout = tmp_path / "origin", tmp_path / "checkout"
    origin.mkdir()
    git(origin, "init")
    for words in (["commit", "--allow-empty", "-m", "a"], ["tag", "v1.0.0"], ["commit", "--allow-empty", "-m", "b"],
                  ["switch", "-c", "other"], ["commit", "--allow-empty", "-m", "c"], ["tag", "v2.0.0"]):  # fmt: skip
        git(origin, *words)
    git(tmp_path, "clone", str(origin), "checkout")
    said = {}
    for tag in ("v1.0.0", "v2.0.0"):
        git(checkout, "checkout", tag)
        command = ["bash", "-e", "-c", script_of("notes", "The tag's commit is on main")]
        ended = subprocess.run(
            command, cwd=checkout, env={**os.environ, "GITHUB_REF_NAME": tag}, capture_output=True, text=True
        )
        said[tag] = ended.returncode, ended.stdout
    assert said["v1.0.0"] == (0, "")
    assert said["v2.0.0"] == (1, "::error::v2.0.0 is not on main; merge its commit first, then tag it there\n")


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1;; esac
case "$*" in
*"release download"*)
  mkdir -p "${7}" && touch "${7}/ddpjob-1.2.3.whl"
  echo bill | tee "${7}/sbom-operator.json" > "${7}/sbom-trainer.json";;
*imagetools*) echo bill;;
esac
"""


def verified(tmp_path: Path, fails: str = "nothing fails") -> tuple[int, list[str]]:
    """Run the workflow's verification with stand-ins for its programs. A stand-in fails if its
    command contains `fails`.
    """
    for name in ("cosign", "gh", "docker"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "verify-a-release.md", tmp_path / "docs")
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "FAILS": fails,
        "GITHUB_REF_NAME": "v1.2.3", "GITHUB_REPOSITORY": "Acme/ddpjob", "REGISTRY": "ghcr.io/Acme",
    }  # fmt: skip
    command = ["bash", "-e", "-o", "pipefail", "-c", script_of("verify", "Verify")]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode, (tmp_path / "log").read_text().splitlines()


def test_a_release_is_verified_with_the_commands_on_the_page(tmp_path: Path) -> None:
    code, ran = verified(tmp_path)
    identity = "https://github.com/Acme/ddpjob/.github/workflows/release.yml@refs/tags/v1.2.3"
    issuer = "https://token.actions.githubusercontent.com"
    expected = []
    for name in ("operator", "trainer", "charts/ddpjob-operator"):
        image = f"ghcr.io/acme/{name}:1.2.3"
        expected += [
            f"cosign verify {image} --certificate-identity {identity} --certificate-oidc-issuer {issuer}",
            f"gh attestation verify oci://{image} --repo Acme/ddpjob --cert-identity {identity}",
        ]
    expected += ["gh release download v1.2.3 --repo Acme/ddpjob --dir ddpjob-1.2.3"]
    for file in ("ddpjob-1.2.3.whl", "sbom-operator.json", "sbom-trainer.json"):
        expected += [f"gh attestation verify ddpjob-1.2.3/{file} --repo Acme/ddpjob --cert-identity {identity}"]
    bills = [
        f"docker buildx imagetools inspect ghcr.io/acme/{name}:1.2.3 --format {{{{ json .SBOM }}}}"
        for name in ("operator", "trainer")
    ]
    assert (code, ran) == (0, [*expected, *bills])
    assert {"publish", "pypi", "release"} <= set(RELEASE["verify"]["needs"]), (
        "the artifacts have been published by then"
    )


@pytest.mark.parametrize("fails", ["verify ghcr.io/acme/trainer", "oci://ghcr.io/acme/operator", ".whl", "inspect"])
def test_a_failed_verification_fails_the_release(tmp_path: Path, fails: str) -> None:
    assert verified(tmp_path, fails)[0] != 0
