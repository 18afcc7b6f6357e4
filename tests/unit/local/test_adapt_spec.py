"""The fields of a spec that apply on one machine, and the messages about fields that do not."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import utc_now
from ddpjob.api.reader import with_defaults
from ddpjob.local.adapt_spec import MOST_RANKS, LocalSpec, Options, adapt_spec, too_many_nodes, usable_gpus
from ddpjob.local.paths import JobFolder
from ddpjob.local.runner import new_body


def fitted(tmp_path: Path, options: Options | None = None, **spec: Any) -> LocalSpec:
    manifest = with_defaults(
        {"metadata": {"name": "j"}, "spec": {"image": "i", "script": "s.py", "gpusPerNode": 0, **spec}}
    )
    return adapt_spec(DDPJob.read(new_body(manifest, utc_now())), JobFolder(tmp_path / "j"), options or Options())


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the job's script into the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("s.py").touch()


@pytest.fixture(autouse=True)
def torch_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch is installed: jobs need it, these tests do not."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("json" if name == "torch" else name))


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a machine with four GPUs, as its nvidia-smi reports it."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpus")
def test_the_machines_gpus_are_divided_among_the_nodes(tmp_path: Path) -> None:
    found = fitted(tmp_path, nodes=2, gpusPerNode=2)
    assert [found.visible_gpus(index) for index in (0, 1)] == ["0,1", "2,3"]
    assert not any("gpusPerNode" in warning for warning in found.warnings)


@pytest.mark.usefixtures("gpus")
def test_only_visible_gpus_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert usable_gpus() == ("3", "1")
    assert fitted(tmp_path, nodes=2, gpusPerNode=1).visible_gpus(1) == "1"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_used(tmp_path: Path, nothing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
    found = fitted(tmp_path, nodes=1, gpusPerNode=1, backend="nccl")
    assert (usable_gpus(), found.visible_gpus(0), found.spec.backend) == ((), "", "auto")
    assert any("spec.gpusPerNode" in warning and "has 0" in warning for warning in found.warnings)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("visible", "usable"),
    [
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,-1,3", ("2",)),
        ("0,1,7", ("0", "1")),
        ("GPU-4b,MIG-7c", ("GPU-4b", "MIG-7c")),
    ],
)
def test_an_invalid_device_hides_all_devices_listed_after_it(
    visible: str, usable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job with CUDA_VISIBLE_DEVICES=-1 got the GPU -1, and one with a wrong number got
    fewer than it requested.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert usable_gpus() == usable


@pytest.mark.parametrize(
    "tool",
    [b"#!/bin/sh\nexec sleep 60\n", b"#!/nowhere\n", b"\x7fELF of another machine", b"#!/bin/sh\necho 0; exit 9\n"],
    ids=["hangs", "no interpreter", "no program", "fails"],
)
def test_without_a_working_nvidia_smi_training_uses_the_cpu(
    tool: bytes, tmp_path: Path, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_bytes(tool)
    monkeypatch.setattr("ddpjob.local.adapt_spec._SMI_SECONDS", 0.3)
    found = fitted(tmp_path, gpusPerNode=1)
    assert any("this machine has 0" in warning for warning in found.warnings)


@pytest.mark.usefixtures("gpus")
def test_a_warning_of_nvidia_smi_is_not_counted_as_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_bytes(b"#!/bin/sh\nprintf 'WARNING: infoROM \\377\\n0\\n1\\n'\n")
    assert usable_gpus() == ("0", "1")


@pytest.mark.usefixtures("gpus")
def test_too_few_gpus_are_reported_and_training_uses_the_cpu(tmp_path: Path) -> None:
    found = fitted(tmp_path, nodes=3, gpusPerNode=2, backend="nccl")
    assert found.visible_gpus(0) == "" and found.spec.backend == "auto"
    assert any("spec.gpusPerNode" in warning and "has 4" in warning for warning in found.warnings)


def test_more_ranks_than_the_machine_can_run_are_refused(tmp_path: Path) -> None:
    found = fitted(tmp_path, nodes=1000, spares=1, procsPerNode=64)
    said = f"spec.nodes=1000: 1000 nodes and 1 spare x 64 processes make 64064 ranks.* at most {MOST_RANKS}"
    assert [bool(re.match(said, problem)) for problem in found.problems] == [True]
    few = fitted(tmp_path, nodes=2)
    assert few.problems == () and not too_many_nodes(few, 3)
    assert "spec.nodes=10000: 10000 nodes x 1 processes make 10000 ranks" in too_many_nodes(few, 10_000)


def test_no_gpu_is_visible_unless_the_job_requests_one(tmp_path: Path) -> None:
    assert fitted(tmp_path).visible_gpus(0) == ""


def test_data_of_a_claim_is_read_from_the_jobs_folder(tmp_path: Path) -> None:
    found = fitted(tmp_path, storage={"data": {"claimName": "c"}})
    assert found.data == tmp_path / "j" / "data"
    assert any("spec.storage.data" in warning and "--data" in warning for warning in found.warnings)


def test_data_of_a_host_path_that_exists_here_is_used(tmp_path: Path) -> None:
    found = fitted(tmp_path, storage={"data": {"hostPath": str(tmp_path)}})
    assert found.data == tmp_path
    assert not any("spec.storage.data" in warning for warning in found.warnings)


def test_the_data_option_takes_precedence_over_the_manifest(tmp_path: Path) -> None:
    found = fitted(tmp_path, Options(data=tmp_path))
    assert found.data == tmp_path
    assert found.spec.storage.data is not None and not found.problems
    assert fitted(tmp_path, Options(data=tmp_path / "no")).problems == (f"--data {tmp_path / 'no'}: no such folder",)


def test_a_missing_script_is_reported(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    Path("code/there.py").touch()
    [problem] = fitted(tmp_path, script="there.py").problems
    assert problem == f"spec.script: there.py is not in {tmp_path}; specify its folder with --workdir DIR"
    (tmp_path / "three.py").touch()
    [problem] = fitted(tmp_path, script="there.py").problems
    assert problem == f"spec.script: there.py is not in {tmp_path}; did you mean three.py?"
    assert not fitted(tmp_path, Options(working_dir=Path("code")), script="there.py").problems
    [problem] = fitted(tmp_path, script="/code/no/train.py").problems
    assert problem.startswith("spec.script: /code/no/train.py is not on this machine")
    for found in ({"script": str(tmp_path / "s.py")}, {"script": "$(HERE)/s.py"}, {"script": "code"}):
        assert not fitted(tmp_path, **found).problems


def test_a_missing_working_folder_is_reported(tmp_path: Path) -> None:
    assert (
        "spec.workingDir: /no/such: no such folder on this machine"
        in fitted(tmp_path, workingDir="/no/such").problems[0]
    )
    assert fitted(tmp_path, Options(working_dir=tmp_path), workingDir="/no/such").working_dir == tmp_path


def test_settings_that_need_a_cluster_are_reported_by_their_field(tmp_path: Path) -> None:
    template = {
        "spec": {
            "containers": [{"name": "trainer"}, {"name": "proxy", "image": "p"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        }
    }
    more = {"network": {"interface": "eth1"}, "notify": {"receiver": "team"}, "rankOrder": ["example.com/rack"]}
    found = fitted(tmp_path, envFrom=[{"secretRef": {"name": "wandb"}}], podTemplate=template, **more)
    assert found.spec.network.interface is None, "the loopback interface has another name"
    assert found.spec.rank_order == (), "no operator would notify the coordinator"
    assert found.spec.notify is None, "there is no operator that knows the receiver"
    fields = {warning.split(":")[0] for warning in found.warnings}
    expected = {
        "spec.image",
        "spec.envFrom[0].secretRef",
        "spec.network.interface",
        "spec.rankOrder",
        "spec.notify",
        "spec.podTemplate.spec.containers[1]",
        "spec.podTemplate.spec.volumes",
    }
    assert fields == expected and not found.problems


def test_a_variable_from_a_file_of_a_volume_is_taken_from_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The field is fileKeyRef, which Kubernetes has since 1.34."""
    monkeypatch.delenv("TOKEN", raising=False)
    source = {"fileKeyRef": {"volumeName": "keys", "path": "keys.env", "key": "TOKEN"}}
    template = {"spec": {"containers": [{"name": "trainer", "env": [{"name": "TOKEN", "valueFrom": source}]}]}}
    assert fitted(tmp_path, podTemplate=template).problems == (
        "spec.podTemplate.spec.containers[0].env[0].valueFrom.fileKeyRef: the file of a volume cannot be read"
        " on this "
        "machine; export TOKEN in this shell to use that value instead",
    )
    monkeypatch.setenv("TOKEN", "x")
    assert not fitted(tmp_path, podTemplate=template).problems


def test_a_time_to_live_is_ignored(tmp_path: Path) -> None:
    assert fitted(tmp_path, runPolicy={"ttlSecondsAfterFinished": 0}).spec.run_policy.ttl_seconds_after_finished is None
    assert fitted(tmp_path).spec.run_policy.logs_kept == 0, "logs are files"


def test_the_variables_of_a_buckets_secret_are_taken_from_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = {"checkpoints": {"url": "s3://models/runs", "secretName": "keys"}}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    [problem] = fitted(tmp_path, storage=storage).problems
    assert problem.startswith("spec.storage.checkpoints.secretName: Secret keys cannot be read on this machine; export")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    assert not fitted(tmp_path, storage=storage).problems


def test_bucket_data_has_a_separate_folder_below_the_jobs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    storage = {"data": {"url": "s3://sets/a", "secretName": "keys"}}
    found = fitted(tmp_path, storage=storage)
    assert found.data is not None and found.data.parent == tmp_path / "j" / "data"
    [problem] = found.problems
    assert problem.startswith("spec.storage.data.secretName: Secret keys cannot be read on this machine; export")
    assert not any("spec.storage.data" in warning for warning in found.warnings)
    given = fitted(tmp_path, Options(data=tmp_path), storage=storage)
    assert given.data == tmp_path and not given.problems
    assert given.spec.storage.data is not None and given.spec.storage.data.url is None


def test_a_missing_python_module_is_reported(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    where = f"neither in {tmp_path} nor installed in this Python"
    assert (
        f"spec.module: absent.train is {where}; specify its folder with --workdir DIR"
        in fitted(tmp_path, module="absent.train").warnings
    )
    for module in ("there", "json.tool"):
        assert not any("spec.module" in warning for warning in fitted(tmp_path, module=module).warnings)


def test_a_job_that_needs_torch_is_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for needs in ({}, {"script": None, "module": "train"}):
        assert [p for p in fitted(tmp_path, **needs).problems if f"{sys.executable} -m pip install torch" in p]
    elsewhere = [{"name": "PYTHONPATH", "value": "/opt/site"}]
    assert fitted(tmp_path, env=elsewhere).problems == ()
    assert fitted(tmp_path, script=None, command=["conda", "run", "torchrun", "s.py"]).problems == ()


def test_a_command_that_is_not_executable_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "n.sh"
    program.touch(0o644)
    note = f"spec.command: ./n.sh cannot be executed; run chmod +x {program}"
    assert note in fitted(tmp_path, command=["./n.sh"]).warnings
    program.chmod(0o755)
    assert note not in fitted(tmp_path, command=["./n.sh"]).warnings


CODE = {"archive": "s3://team/code/a.tar.gz", "digest": "sha256:" + "0a" * 32}


def test_the_script_is_expected_in_the_folder_to_which_code_is_fetched(tmp_path: Path) -> None:
    fetched = tmp_path / "j" / "fetched-code" / ("0a" * 8)
    for script, folder, expected in (
        ("src/new.py", None, ("src/new.py", fetched)),
        ("new.py", "/ddpjob-code/src", ("new.py", fetched / "src")),
        ("/ddpjob-code/src/new.py", "/tmp", (str(fetched / "src/new.py"), Path("/tmp"))),
    ):
        local = fitted(tmp_path, script=script, code=CODE, **({"workingDir": folder} if folder else {}))
        assert not local.problems and local.code == fetched
        assert (local.spec.script, local.working_dir) == expected


def test_workdir_runs_the_code_of_this_machine_instead_of_the_buckets(tmp_path: Path) -> None:
    local = fitted(tmp_path, Options(working_dir=tmp_path), code=CODE)
    assert local.code is None and local.spec.code is None and local.working_dir == tmp_path
    assert any("spec.code: not fetched, because the code in --workdir" in warning for warning in local.warnings)


def test_missing_keys_of_the_code_bucket_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    local = fitted(tmp_path, code={**CODE, "secretName": "keys"})
    assert any(problem.startswith("spec.code.secretName: Secret keys cannot be read") for problem in local.problems)
