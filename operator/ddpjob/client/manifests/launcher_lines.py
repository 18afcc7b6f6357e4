"""Translates command lines of other launchers into torchrun commands that start the same ranks.

`accelerate launch`, `deepspeed` and `srun` all start a script that finds its rank in RANK,
LOCAL_RANK and WORLD_SIZE, which torchrun also sets. Only their options differ:

    srun -N 2 torchrun --nproc-per-node=8 train.py
    accelerate launch --num_machines 2 --num_processes 16 train.py
    deepspeed --num_nodes 2 --num_gpus 8 train.py

All three become `torchrun --nnodes=2 --nproc-per-node=8 train.py`. An option such as
`--mixed_precision bf16` becomes the variable that Accelerate reads.

Options for hosts, addresses and ranks are left out, because the operator chooses these. A line
whose plugin needs its own launcher (`--use_deepspeed` or an Accelerate configuration file) has no
translation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

_PYTHON = re.compile(r"(.*/)?python[0-9.]*")


@dataclass
class LauncherLine:
    """A torchrun line with its variables, and notes on differences from the original line."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def as_torchrun(words: Sequence[str]) -> LauncherLine | None:
    """Translate another launcher's command line into a torchrun command line.

    Return None if there is no translation, or if the line already starts torchrun.
    """
    match [word.rpartition("/")[2] if at == 0 else word for at, word in enumerate(words[:3])]:
        case ["srun", *_]:
            return _srun(words[1:])
        case ["accelerate", "launch", *_]:
            return _accelerate(words[2:])
        case [str(python), "-m", "accelerate.commands.launch"] if _PYTHON.fullmatch(python):
            return _accelerate(words[3:])
        case ["deepspeed", *_]:
            return _deepspeed(words[1:])
    return None


class _Options:
    """The options of a launcher, which precede the script in its command line.

    An option is written with dashes or with underscores, and its value follows after a space or
    `=`. `bare` contains the names of options without a value.
    """

    def __init__(self, words: Sequence[str], bare: Sequence[str]) -> None:
        self.given: dict[str, str] = {}
        position = 0
        while position < len(words) and words[position].startswith("-"):
            name, equals, value = words[position].lstrip("-").partition("=")
            name = name.replace("-", "_")
            position += 1
            if not equals and name not in bare and position < len(words) and not words[position].startswith("-"):
                value = words[position]
                position += 1
            self.given[name] = value
        self.rest = list(words[position:])

    def take(self, *names: str) -> str | None:
        """Remove an option and return its value, or None if the option was not given.

        `names` are alternative names of the same option.
        """
        found = [self.given.pop(name) for name in names if name in self.given]
        return found[0] if found else None

    def drop(self, *names: str) -> None:
        for name in names:
            self.given.pop(name, None)


def _line(nodes: str | None, procs: str | None, rest: Sequence[str], *, module: bool) -> LauncherLine:
    options = [f"--nnodes={nodes}"] if nodes else []
    options += [f"--nproc-per-node={procs}"] if procs else []
    return LauncherLine(["torchrun", *options, *(["-m"] if module else []), *rest])


_ACCELERATE_BARE = (
    *("multi_gpu", "cpu", "same_network", "m", "module", "debug", "q", "quiet", "enable_cpu_affinity"),
    *("dynamo_use_dynamic", "dynamo_use_fullgraph", "no_python", "use_fsdp", "use_deepspeed", "tpu", "use_xpu"),
    *("use_megatron_lm", "use_parallelism_config", "ipex", "multi_npu"),
)
_ACCELERATE_PLUGINS = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu", "no_python")
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}


def _accelerate(words: Sequence[str]) -> LauncherLine | None:
    options = _Options(words, _ACCELERATE_BARE)
    if not options.rest or options.given.keys() & {*_ACCELERATE_PLUGINS, "config_file"}:
        return None
    nodes, ranks = options.take("num_machines"), options.take("num_processes")
    procs = None
    if ranks and ranks.isdigit() and (nodes or "1").isdigit() and int(ranks) % int(nodes or 1) == 0:
        procs = str(int(ranks) // int(nodes or 1))
    module = options.take("m", "module") is not None
    line = _line(nodes, procs, options.rest, module=module)
    if ranks and procs is None:
        line.notes.append(
            f"accelerate launch --num_processes {ranks}: set procsPerNode to the number of processes per node"
        )
    for name, variable in _ACCELERATE_VARIABLES.items():
        if (value := options.take(name)) is not None:
            line.env[variable] = value
    if options.take("cpu") is not None:
        line.env["ACCELERATE_USE_CPU"] = "true"
    options.drop("multi_gpu", "same_network", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
    options.drop("rdzv_backend", "rdzv_conf", "main_training_function", "q", "quiet", "debug")
    line.notes += [
        f"accelerate launch --{name}: left out; pass it to Accelerator(...) in the script" for name in options.given
    ]
    line.notes.append(
        "accelerate launch: torchrun starts the script instead; without GPUs, the script must create "
        "Accelerator(cpu=True)"
    )
    return line


_DEEPSPEED_BARE = (
    *("module", "no_python", "no_ssh", "no_ssh_check", "no_local_rank", "force_multi", "save_pid"),
    "bind_cores_to_rank",
)


def _deepspeed(words: Sequence[str]) -> LauncherLine | None:
    options = _Options(words, _DEEPSPEED_BARE)
    if not options.rest or options.given.keys() & {"no_python", "launcher", "autotuning"}:
        return None
    nodes, procs = options.take("num_nodes"), options.take("num_gpus", "num_accelerators")
    line = _line(nodes, procs, options.rest, module=options.take("module") is not None)
    if options.take("no_local_rank") is None:
        line.notes.append(
            "deepspeed: passed --local_rank to the script, but torchrun does not; read the variable LOCAL_RANK in the "
            "script"
        )
    if options.take("hostfile", "H") is not None and not nodes:
        line.notes.append(
            "deepspeed --hostfile: left out, because the file is not read; set nodes to the number of hosts in the file"
        )
    options.drop("master_addr", "master_port", "node_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid")
    line.notes += [f"deepspeed --{name}: left out" for name in options.given]
    return line


_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def _srun(words: Sequence[str]) -> LauncherLine | None:
    starts = [at for at, word in enumerate(words) if _starts(words[at:], word)]
    if not starts:
        return None
    inner = list(words[starts[0] :])
    options = _Options(words[: starts[0]], ())
    line = as_torchrun(inner) or LauncherLine(inner)
    nodes = options.take("N", "nodes") or next(
        (word[2:] for word in words[: starts[0]] if re.fullmatch(r"-N\d+", word)), None
    )
    at = next((at for at, word in enumerate(line.words) if word.rpartition("/")[2] in ("torchrun", _RUN)), None)
    if nodes and nodes.isdigit() and at is not None:
        line.words.insert(at + 1, f"--nnodes={nodes}")
    line.notes.append("srun: left out, because the operator starts one pod per node")
    return line


_RUN = "torch.distributed.run"


def _starts(words: Sequence[str], first: str) -> bool:
    """Whether the command `words` starts a launcher.

    `first` is the first word of the command. The command starts a launcher if this word is the
    launcher itself, or a Python that runs the launcher as a module (`python -m`).
    """
    name = first.rpartition("/")[2]
    options = list(takewhile(lambda word: word.startswith("-") and word != "-m", words[1:]))
    behind = [*words[len(options) + 1 : len(options) + 3]]
    return name in _LAUNCHERS or bool(_PYTHON.fullmatch(name) and behind == ["-m", _RUN])
