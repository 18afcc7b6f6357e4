"""`submit --git URL@REF`: the commit that is written into the manifest, and refused arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob.api.job_spec import GitCode
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.build_manifest import JobRequest, build
from ddpjob.client.manifests.git_commit import resolve
from ddpjob.local.clone_code import CloneError, clone
from git_server import GitServer, commit, git, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with serving(tmp_path) as running:
        yield running


def test_branches_tags_and_commits_are_resolved_to_a_commit(server: GitServer) -> None:
    repository, url = server.root / "p", f"{server.url}/p"
    first = commit(repository, {"train.py": "1"})
    git(repository, "tag", "light")
    git(repository, "tag", "-am", "x", "v1.0")
    git(repository, "branch", "old/main")
    second = commit(repository, {"train.py": "2"})
    for ref, expected in {"main": second, "old/main": first, "light": first, "v1.0": first, "HEAD": second}.items():
        assert resolve(f"{url}@{ref}") == {"url": url, "ref": ref, "commit": expected}
    assert resolve(url)["commit"] == second
    assert resolve(f"{url}@{first}") == {"url": url, "commit": first}
    [job] = build(JobRequest(program="src/train.py", git=f"{url}@v1.0", image="a", name="j"), local=False)
    assert job["spec"]["code"] == {"git": {"url": url, "ref": "v1.0", "commit": first}}
    assert job["spec"]["script"] == "src/train.py"
    for local in (False, True):
        request = JobRequest(program="pkg.train", git=url, image="a", settings={"code.git.secretName": "t"})
        [job] = build(request, local=local)
        assert job["spec"]["module"] == "pkg.train" and job["spec"]["code"]["git"]["secretName"] == "t"


def test_output_of_git_that_is_not_utf_8_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nprintf 'fatal: \\351chec\\n' >&2\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Mistake, match="fatal: \ufffdchec"):
        resolve("https://example.com/p@main")
    with pytest.raises(CloneError, match="fatal: \ufffdchec"):
        clone(GitCode(url="https://example.com/p", commit="0" * 40), tmp_path / "code")


def test_an_unresolvable_ref_is_refused_without_showing_a_password(server: GitServer) -> None:
    commit(server.root / "p", {"train.py": "1"})
    for text, said in (
        (f"{server.url}/p@gone", "has no branch or tag gone; write a branch"),
        (f"{server.url}/none", r"git \(--git\) http.*/none: .*"),
        ("git@github.com:me/p", "write https://HOST/PATH"),
        ("file:///tmp/p", "write https://HOST/PATH"),
        (f"{server.url}/p@--upload-pack=x", "REF must be a branch"),
        ("https://me:geheim@host/p", r"//\.\.\.@host/p: write https://HOST/PATH"),
    ):
        with pytest.raises(Mistake, match=said) as refused:
            resolve(text)
        assert "geheim" not in str(refused.value)
    with pytest.raises(Mistake, match=r"cannot be used with git \(--git\)"):
        build(JobRequest(program="train.py", git="https://h/p", entry="x", image="a"), local=False)
