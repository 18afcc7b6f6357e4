"""Code archives: they contain the files that git would select, are reproducible, and check limits
before reading files.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests import code_archive
from ddpjob.client.manifests.build_manifest import MOST_BYTES, JobRequest, build
from ddpjob.client.manifests.code_archive import find_files, pack


def write(folder: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def large(folder: Path) -> None:
    write(folder, {"train.py": "print()", "lib/model.py": "x" * MOST_BYTES})


# --- which files


def test_caches_outputs_and_gitignored_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(
        ("train.py", ".hidden", ".git/config", "__pycache__/a.pyc", "runs/1", "wandb/x", "data/big.bin", "lib/a.py",
         "lib/out/a", "lib/keep.log", "a.log", "sub/.git/HEAD", "sub/a.py"), ""))  # fmt: skip
    write(tmp_path, {".gitignore": "/data\n*.log\n", "lib/.gitignore": "out/\n!keep.log\n"})
    assert list(find_files(tmp_path).files) == ["lib/a.py", "lib/keep.log", "sub/a.py", "train.py"]


def test_ddpjobignore_replaces_gitignore_and_its_exceptions_are_sent(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(("train.py", "data/a", "notes/b", "certs/ca.pem", "certs/key.pem", ".config"), ""))
    write(tmp_path, {".gitignore": "data\n", ".ddpjobignore": "notes/\n!certs/ca.pem\n!.config\n!.git\n"})
    write(tmp_path, {".git/config": ""})
    found = find_files(tmp_path)
    assert list(found.files) == [".config", "certs/ca.pem", "data/a", "train.py"]
    assert found.secrets == ("certs/key.pem",)


@pytest.mark.parametrize("name", [".ddpjobignore", ".gitignore"])
def test_an_ignore_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(name)  # A link to itself, because root may read every file.
    with pytest.raises(Mistake, match=rf"{name}: Too many levels of symbolic links; make it readable"):
        find_files(tmp_path)


def test_files_like_secrets_are_left_out_with_a_note(tmp_path: Path) -> None:
    secrets = (".env", ".env.local", "deploy/id_rsa", "tls.key", "tls.pem", ".aws/credentials", "kubeconfig", ".netrc")
    write(tmp_path, dict.fromkeys((*secrets, "train.py", "environment.py", "keys.py", "monkey.keys"), ""))
    found = find_files(tmp_path)
    assert list(found.files) == ["environment.py", "keys.py", "monkey.keys", "train.py"]
    assert found.secrets == tuple(sorted(name if name[:4] != ".aws" else ".aws" for name in secrets))
    [note] = found.notes()
    assert (
        ".aws, .env, .env.local" in note
        and "and 3 more" in note
        and "to send one, add `!NAME` to .ddpjobignore" in note
    )


def test_links_to_files_are_sent_as_files_and_links_to_folders_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write(tmp_path, {"outside/a.py": "a", "project/train.py": ""})
    (folder / "a.py").symlink_to(tmp_path / "outside" / "a.py")
    (folder / "outside").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    found = find_files(folder)
    assert list(found.files) == ["a.py", "train.py"]
    assert [*found.notes()] == ["skipped links to folders: loop, outside"]


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")
def test_random_patterns_select_the_files_that_git_selects(tmp_path: Path) -> None:
    """Half of the patterns are built from the folder's own names, so that most of them match
    something.
    """
    chance, names = random.Random(4), ["a", "b", "ab", "a.py", "b.py", "[x]", "a b", "x#", "!n", "c"]
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for top in names:
        for below in chance.sample(names, 4):
            for deep in chance.sample(names, 2):
                write(tmp_path, {f"d{top}/{below}/d{deep}/{chance.choice(names)}": "", f"{top}": ""})

    def piece() -> str:
        word = chance.choice(
            [*names, "d" + chance.choice(names), "*", "?", "**", "*.py", "[ab]", "[!a]*", "[^x]", "a*"]
        )
        return chance.choice([word, word, word, "\\" + word, word.replace("a", "[a-c]"), word + "*", "d*"])

    for _ in range(60):
        lines = []
        for _ in range(chance.randint(1, 5)):
            text = "/".join(piece() for _ in range(chance.choice([1, 1, 1, 2, 2, 3])))
            lines.append(chance.choice(["", "", "", "!", "/", "!/"]) + text + chance.choice(["", "", "/", "/*", "/**"]))
        (tmp_path / ".gitignore").write_text("\n".join([*lines, ""]))
        (tmp_path / "da" / ".gitignore").parent.mkdir(exist_ok=True)
        (tmp_path / "da" / ".gitignore").write_text(chance.choice(lines) + "\n")
        listed = subprocess.run([*git, "ls-files", "-zco", "--exclude-standard"], capture_output=True, check=True)
        by_git = {name for name in listed.stdout.decode().split("\0") if name and not name.endswith(".gitignore")}
        assert set(find_files(tmp_path).files) == by_git, lines


# --- the archive


def test_the_same_files_give_the_same_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests, clock = set(), itertools.count(1e9, 1000)
    monkeypatch.setattr("gzip.time.time", lambda: next(clock))
    for number, order in enumerate((["a.py", "lib/b.py"], ["lib/b.py", "a.py"])):
        folder = tmp_path / str(number)
        write(folder, {name: name for name in order})
        (folder / "a.py").chmod(0o640 if number else 0o600)
        os.utime(folder / "a.py", (number, number))
        digests.add(pack(find_files(folder), "p", tmp_path / f"{number}.tar.gz").sha256)
    assert len(digests) == 1
    (tmp_path / "1" / "a.py").chmod(0o755)
    assert pack(find_files(tmp_path / "1"), "p", tmp_path / "2.tar.gz").sha256 not in digests
    with tarfile.open(tmp_path / "1.tar.gz") as tar:
        assert {(m.name, m.mtime, m.uid, m.gid, m.uname, m.mode) for m in tar} == {
            ("a.py", 0, 0, 0, "", 0o644), ("lib/b.py", 0, 0, 0, "", 0o644)}  # fmt: skip


def test_a_pod_unpacks_the_archive(tmp_path: Path) -> None:
    from ddpjob_runtime.launcher.fetch_code import unpack

    names = {"a.py": "1", "lib/ü ß.py": "2", f"{'long/' * 40}x.py": "3", "empty": ""}
    write(tmp_path / "from", names)
    packed = pack(find_files(tmp_path / "from"), "p", tmp_path / "a.tar.gz")
    (tmp_path / "to").mkdir()
    assert unpack(packed.path, tmp_path / "to") == 4
    assert {
        str(p.relative_to(tmp_path / "to")): p.read_text() for p in (tmp_path / "to").rglob("*") if p.is_file()
    } == names


def test_the_largest_folders_are_named_before_anything_is_read_if_a_limit_is_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"train.py": "", "data/a": "", "small/b": "x"})
    os.truncate(tmp_path / "data" / "a", 2**40)
    with pytest.raises(
        Mistake, match=r"1024\.0 GiB, but at most 8\.0 GiB can be sent; .*largest: data 1024\.0 GiB, small"
    ):
        pack(find_files(tmp_path), "p", tmp_path / "x")
    monkeypatch.setattr(code_archive, "MOST_CODE_FILES", 2)
    with pytest.raises(Mistake, match="3 files, but at most 2 can be sent"):
        pack(find_files(tmp_path), "p", tmp_path / "x")


# --- the manifest


def test_the_archive_of_a_large_folder_becomes_a_readable_field(tmp_path: Path) -> None:
    large(tmp_path)
    said: list[str] = []
    request = JobRequest(program=str(tmp_path), image="a", name="j", checkpoints="s3://team/jobs/", args=["--lr=1"])
    [job] = build(request, local=False, upload=False, say=said.append)
    digest = job["spec"]["code"]["digest"].removeprefix("sha256:")
    assert job["spec"]["code"]["archive"] == f"s3://team/jobs/code/sha256-{digest}.tar.gz"
    assert job["spec"]["script"] == "train.py" and "workingDir" not in job["spec"] and "podTemplate" not in job["spec"]
    assert len(said) == 1 and "is not uploaded" in said[0]
    own = JobRequest(program=str(tmp_path), image="a", name="j", code="s3://b", settings={"code.secretName": "keys"})
    [job] = build(own, local=False, upload=False)
    assert job["spec"]["code"]["archive"].startswith("s3://b/sha256-") and job["spec"]["code"]["secretName"] == "keys"


def test_the_error_about_a_large_folder_without_a_bucket_names_the_remedies(tmp_path: Path) -> None:
    large(tmp_path)
    for more in ({}, {"checkpoints": "claim:c"}):
        with pytest.raises(
            Mistake, match=r"1008 KiB.*set checkpoints \(--checkpoints\) or code \(--code\) to s3://BUCKET"
        ):
            build(JobRequest(program=str(tmp_path), image="a", name="j", **more), local=False)  # type: ignore[arg-type]
    with pytest.raises(Mistake, match=r"code \(--code\) is for a folder"):
        build(JobRequest(program=str(tmp_path / "train.py"), image="a", code="s3://b"), local=False)


def test_a_small_folder_is_still_sent_in_a_configmap(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "data/a": "x" * MOST_BYTES, ".gitignore": "data/\n"})
    code, job = build(JobRequest(program=str(tmp_path), image="a", name="j", checkpoints="s3://b/c"), local=False)
    assert code["kind"] == "ConfigMap" and "code" not in job["spec"]
