"""Code in a bucket: a large folder is uploaded to a real S3 server only once, and its job runs from
the uploaded copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from git_server import commit
from git_server import serving as serving_git
from process_harness import Json, Machine, manifest
from s3_server import BUCKET, Server, serving

pytest.importorskip("obstore", reason="pip install obstore")
SCRIPT = """
import os, sys
from lib.model import NAME
keys = [name for name in os.environ if "SECRET_ACCESS_KEY" in name and name.startswith("DDPJOB")]
print(NAME, sys.argv[1:], os.path.basename(os.getcwd()), keys)
open("written", "w").close()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "server") as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def submit(machine: Machine, project: Path, *options: str) -> tuple[list[Json], str]:
    """Return the objects that `submit` would create on a cluster, and its output. The upload is
    real.
    """
    program = (
        "import json, sys\n"
        "from ddpjob.client.manifests.build_manifest import JobRequest, build\n"
        "say = lambda text: print(text, file=sys.stderr)\n"
        "request = JobRequest(program=sys.argv[1], image='any', name='job', nodes=2, gpus=0, args=['--lr', '1'],\n"
        "    checkpoints=sys.argv[2])\n"
        "print(json.dumps(build(request, local=False, say=say)))\n"
    )
    (machine.folder / "submit.py").write_text(program)
    words = [sys.executable, "submit.py", str(project), f"s3://{BUCKET}/team", *options]
    done = subprocess.run(
        words, env=machine.environment(), cwd=machine.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    bodies: list[Json] = json.loads(done.stdout)
    return bodies, done.stderr


def test_a_large_folder_is_uploaded_once_and_trains_from_the_bucket(server: Server, machine: Machine) -> None:
    project = machine.folder / "project"
    for name, content in {
        "train.py": SCRIPT, "lib/__init__.py": "", "lib/model.py": "NAME = 'from the bucket'", "tls.key": "secret",
        "big.bin": "", ".gitignore": "*.tmp\n", "a.tmp": "",
    }.items():  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    (project / "big.bin").write_bytes(os.urandom(20_000_000))  # uploaded in several parts
    [job], said = submit(machine, project)
    stored = list((server.folder / "team" / "code").iterdir())
    code = job["spec"]["code"]
    assert [path.name for path in stored] == [code["archive"].rpartition("/")[2]] and "uploaded to" in said
    assert "skipped files that look like secrets: tls.key" in said
    before = stored[0].stat().st_mtime_ns
    [again], said = submit(machine, project)
    assert again == job and "is already in" in said and stored[0].stat().st_mtime_ns == before

    # The project is removed from this machine, so the job has only the copy in the bucket.
    # Checkpoints are not tested here.
    project.rename(machine.folder / "elsewhere")
    job["spec"] |= {"storage": {}, "recovery": {"mode": "Fast"}}
    run = machine.run(job)
    assert run.process.returncode == 0, run.everything()
    logs = "\n".join(run.log(pod) for pod in run.pods())
    folder = code["digest"].removeprefix("sha256:")[:16]
    assert logs.count(f"from the bucket ['--lr', '1'] {folder} []") == 2, logs
    assert logs.count("fetched in") == 1, "only one of the two pods fetched the code"
    assert (run.folder / "fetched-code" / folder / "written").exists()

    # The archive was replaced. It must not be unpacked, and the job must end with the reason.
    stored[0].write_bytes(stored[0].read_bytes()[:-1] + b"?")
    job["metadata"]["name"], job["spec"]["nodes"] = "replaced", 1
    run = machine.run(job)
    assert run.process.returncode == 1 and run.condition("Failed")["reason"] == "InitFailure", run.everything()
    assert "differs from code.digest" in run.condition("Failed")["message"]
    assert not list(run.folder.glob("fetched-code/*/train.py"))


def test_a_job_from_a_repository_fetches_its_commit_with_the_machines_git(machine: Machine) -> None:
    with serving_git(machine.folder / "git") as server:
        wanted = commit(
            server.root / "p", {"train.py": SCRIPT, "lib/__init__.py": "", "lib/model.py": "NAME = 'first'"}
        )
        commit(server.root / "p", {"lib/model.py": "NAME = 'second'"})
        code = {"git": {"url": f"{server.url}/p", "ref": "main", "commit": wanted}}
        run = machine.run(manifest(script="train.py", nodes=1, code=code, recovery={"mode": "Fast"}))
        assert run.process.returncode == 0, run.everything()
        assert f"first [] {wanted[:16]} []" in "\n".join(map(run.log, run.pods()))
        code["git"]["commit"] = "0" * 40
        server.root.rename(machine.folder / "away")
        run = machine.run(manifest("gone", script="train.py", nodes=1, code=code))
        assert run.process.returncode == 2 and "spec.code.git: 000000000000 of http" in run.output
