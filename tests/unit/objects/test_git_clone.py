"""code.git in the built pods, and the script of their init container with a real git over http."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from built import container, environment, node
from ddpjob.api.job_spec import GitCode, Json
from ddpjob.controller.operator_settings import Settings
from ddpjob.objects import git_clone
from ddpjob.objects.git_clone import SCRIPT, build_clone
from ddpjob.objects.platform import Platform
from git_server import PASSWORD, GitServer, commit, git, serving

COMMIT = "0123456789" * 4
GIT = {"url": "https://git.example.com/me/project.git", "ref": "main", "commit": COMMIT}


def clone_of(pod: Json) -> Json:
    [found] = pod["spec"]["initContainers"]
    assert isinstance(found, dict)
    return found


def test_a_restricted_init_container_clones_into_the_folder_of_the_code() -> None:
    pod = node(code={"git": GIT})
    made = clone_of(pod)
    assert made["securityContext"] == {
        "runAsUser": 65532, "runAsGroup": 65532, "runAsNonRoot": True, "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert made["image"] == "docker.io/alpine/git:2.49.1" and made["resources"]["limits"]
    assert {"name": "ddpjob-code", "emptyDir": {}} in pod["spec"]["volumes"]
    assert made["volumeMounts"] == [{"name": "ddpjob-code", "mountPath": "/ddpjob-code"}]
    assert made["volumeMounts"][0] in container(pod)["volumeMounts"]
    assert container(pod)["workingDir"] == "/ddpjob-code" and "DDPJOB_CODE_URL" not in environment(pod)


def test_only_the_init_container_refers_to_a_password() -> None:
    pod = node(code={"git": {**GIT, "secretName": "git-login"}}, env=[{"name": "HTTPS_PROXY", "value": "http://p:1"}])
    variables = {variable["name"]: variable for variable in clone_of(pod)["env"]}
    assert variables["DDPJOB_GIT_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "git-login"
    assert variables["DDPJOB_GIT_USER"]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert variables["HTTPS_PROXY"]["value"] == "http://p:1"
    assert "git-login" not in str(container(pod))
    assert "$(" not in SCRIPT and "$$" not in SCRIPT, "the kubelet would expand references in these values"


def test_the_chart_and_the_operator_have_the_same_default_git_image() -> None:
    values = Path(__file__).parents[3] / "charts" / "ddpjob-operator" / "values.yaml"
    assert yaml.safe_load(values.read_text())["codeImage"] == Platform.git_image
    environment = {"DDPJOB_OPERATOR_KEY": "x" * 16, "DDPJOB_OPERATOR_CODE_IMAGE": "mirror/git:1"}
    assert Settings.from_environment(environment).code_image == "mirror/git:1"


# --- the script


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with serving(tmp_path / "root") as running:
        yield running


def run(folder: Path, code: GitCode, secret: str = "") -> subprocess.CompletedProcess[str]:
    """Run the init container as a kubelet would start it, with only its own variables."""
    folder.mkdir(exist_ok=True)
    made = build_clone(code, "image", {"name": "c", "mountPath": str(folder)}, ())
    values = {v["name"]: v["value"] for v in made["env"] if "value" in v}
    values |= {"DDPJOB_GIT_PASSWORD": secret} if secret else {}
    return subprocess.run(
        made["command"], env={"PATH": os.environ["PATH"], **values}, capture_output=True, text=True, check=False
    )


def test_the_named_commit_is_cloned_without_history_although_the_branch_has_moved(
    server: GitServer, tmp_path: Path
) -> None:
    first = commit(server.root / "p", {"train.py": "1", "lib/a.py": "1", "run.sh": ""})
    (server.root / "p" / "run.sh").chmod(0o755)
    second = commit(server.root / "p", {"train.py": "2"})
    commit(server.root / "p", {"train.py": "3"})
    for number, wanted in enumerate((first, second)):
        folder = tmp_path / str(number)
        done = run(folder, GitCode(url=f"{server.url}/p", commit=wanted, ref="main"))
        assert done.returncode == 0, done.stderr
        assert (folder / "train.py").read_text() == str(number + 1) and (folder / "lib" / "a.py").exists()
        assert git(folder, "rev-list", "--count", "HEAD") == "1" and git(folder, "rev-parse", "HEAD") == wanted
        assert (folder / "train.py").stat().st_mode & 0o022, "the job's own user may write there"
    (folder / "train.py").write_text("edited")
    asked = len(server.requests)
    assert run(folder, GitCode(url=f"{server.url}/p", commit=second, ref="main")).returncode == 0
    assert len(server.requests) == asked and (folder / "train.py").read_text() == "edited"


def test_the_branch_is_fetched_if_a_server_cannot_send_single_commits(server: GitServer, tmp_path: Path) -> None:
    """Some mirrors serve git's files with a plain web server (git's dumb protocol)."""
    wanted = commit(server.root / "p", {"train.py": "1"})
    commit(server.root / "p", {"train.py": "2"})
    git(server.root / "p", "update-server-info")
    folder = tmp_path / "c"
    plain = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(server.root)))
    threading.Thread(target=plain.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{plain.server_port}/p/.git"
    try:
        done = run(folder, GitCode(url=url, commit=wanted, ref="main"))
    finally:
        plain.shutdown()
        plain.server_close()
    assert done.returncode == 0 and (folder / "train.py").read_text() == "1", done.stderr


def test_a_password_is_sent_only_to_the_repository_and_is_not_stored(server: GitServer, tmp_path: Path) -> None:
    wanted = commit(server.root / "p", {"train.py": "1"})
    server.private = True
    code = GitCode(url=f"{server.url}/p", commit=wanted, secret_name="s")
    done = run(tmp_path / "c", code, PASSWORD)
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    kept = [path for path in (tmp_path / "c").rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert not kept


def test_a_commit_that_cannot_be_cloned_is_reported(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(server.root / "p", {"train.py": "1"})
    monkeypatch.setattr(git_clone, "PAUSES", "0 0")
    done = run(tmp_path / "a", GitCode(url=f"{server.url}/p", commit=COMMIT, ref="main"))
    assert done.returncode == 78 and f"has no commit {COMMIT} in main" in done.stderr
    done = run(tmp_path / "b", GitCode(url=f"{server.url}/none", commit=COMMIT))
    assert done.returncode == 1 and "/none cannot be fetched; check url, ref and secretName" in done.stderr
    server.private = True
    done = run(tmp_path / "c", GitCode(url=f"{server.url}/p", commit=COMMIT))
    assert done.returncode == 1 and "cannot be fetched" in done.stderr


def test_values_from_the_spec_are_never_taken_for_options_or_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_clone, "PAUSES", "0")
    evil = GitCode(url="--upload-pack=touch pwned", commit="$(touch pwned)", ref="; touch pwned")
    done = run(tmp_path / "c", evil)
    assert done.returncode == 1 and not list(tmp_path.rglob("pwned"))
    for protocol in ("file://" + str(tmp_path), "ext::touch pwned"):
        assert run(tmp_path / "d", GitCode(url=protocol, commit=COMMIT)).returncode == 1
    assert not list(tmp_path.rglob("pwned"))
