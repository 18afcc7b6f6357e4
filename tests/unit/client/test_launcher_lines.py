"""Command lines of accelerate, deepspeed and srun become DDPJobs that start the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
from ddpjob.api.reader import validate
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.convert_jobs import Conversion, convert, convert_command

TWO_OF_EIGHT = {"image": "i", "nodes": 2, "gpusPerNode": 8, "script": "train.py"}


def converted(line: str) -> Conversion:
    made = convert_command([line], image="i")
    assert validate(made.job) == []
    return made


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank $RANK --main_process_ip "
         "$MASTER_ADDR --main_process_port=29500 train.py --lr 1", {"args": ["--lr", "1"]}),
        ("accelerate launch --num_machines=2 --num_processes=16 --mixed_precision bf16 --num_cpu_threads_per_process 4"
         " train.py", {"env": [{"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"},
                               {"name": "OMP_NUM_THREADS", "value": "4"}]}),
        ("python -m accelerate.commands.launch --num_machines 2 --num_processes 16 train.py", {}),
        ("srun -N 2 --ntasks-per-node=1 torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d "
         "--rdzv_endpoint $head:29500 train.py", {}),
        ("srun -N2 --gpus-per-node 8 python -u -m torch.distributed.run --nproc-per-node=8 train.py", {}),
        ("srun --nodes=2 accelerate launch --num_processes 8 train.py", {}),
        ("deepspeed --num_nodes 2 --num_gpus 8 --hostfile h --no_local_rank --master_port 1 train.py --deepspeed_config"
         " ds.json", {"args": ["--deepspeed_config", "ds.json"]}),
        ("A=b deepspeed --num_nodes=2 --num_gpus=8 train.py", {"env": [{"name": "A", "value": "b"}]}),
    ],
)  # fmt: skip
def test_a_launchers_command_line_is_converted(line: str, wanted: dict[str, Any]) -> None:
    made = converted(line)
    assert made.job["spec"] == {**TWO_OF_EIGHT, **wanted}
    assert not any("pass it to" in note or note.endswith(": left out") for note in made.notes)


def test_a_module_started_by_a_launcher_is_converted() -> None:
    for line in ("accelerate launch -m my.train --x", "deepspeed --module my.train --x"):
        spec = converted(line).job["spec"]
        assert (spec["module"], spec["args"]) == ("my.train", ["--x"])


def test_settings_of_a_launcher_that_a_ddpjob_lacks_are_reported() -> None:
    notes = converted("deepspeed --hostfile h --include a:0 train.py").notes
    assert [any(part in note for note in notes) for part in ("LOCAL_RANK", "set nodes", "--include")] == [True] * 3
    notes = converted("accelerate launch --num_processes 3 --num_machines 2 --fp8_format E4M3 train.py").notes
    assert [any(part in note for note in notes) for part in ("set procsPerNode", "--fp8_format", "cpu=True")] == [
        *[True] * 3
    ]


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --use_deepspeed train.py",
        "accelerate launch --config_file fsdp.yaml train.py",
        "accelerate config",
        "deepspeed --launcher slurm train.py",
        "srun python train.py",
        "srun",
        "deepspeed",
    ],
)
def test_a_launchers_command_line_that_cannot_be_converted_is_refused(line: str) -> None:
    with pytest.raises(Mistake, match=r"not a torchrun command line"):
        convert_command([line], image="i")


def test_a_launchers_command_line_in_a_shell_command_is_converted() -> None:
    line = "accelerate launch --num_machines $WORLD_SIZE --machine_rank=$RANK --main_process_ip $MASTER_ADDR a.py --b"
    for command in (["bash", "-c", line], ["accelerate", "launch", "a.py", "--b"]):
        container = {"name": "pytorch", "image": "i", "command": command}
        replicas = {"Worker": {"replicas": 2, "template": {"spec": {"containers": [container]}}}}
        made = convert({"kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": {"pytorchReplicaSpecs": replicas}})
        spec = made.job["spec"]
        assert validate(made.job) == [] and (spec["script"], spec["args"], spec["nodes"]) == ("a.py", ["--b"], 2)
