"""The facts that `ddpjob init` reads from a script, and its suggested lines, which these tests
apply to the script.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpjob.client.manifests.read_script import TrainingScript, UnreadableScript, read_script
from ddpjob.client.texts.ddp_lines import AddedLine, added_lines, advice

PAGE = Path(__file__).parents[3] / "docs" / "one-gpu-to-two-nodes.md"
MAIN = """\
from __future__ import annotations
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

def train(net, loader, opt):
    for x, y in loader:
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()

def main():
    import argparse
    options = {"batch_size": 8, "shuffle": True}
    device = torch.device("cuda:0")
    train_set, test_set = make(True, download=True), make(False)
    fed = DataLoader(train_set, num_workers=2, **options)
    checked = DataLoader(test_set)
    net = Net().to(device)
    opt = optim.SGD(net.parameters(), lr=0.1)
    if old:
        net.load_state_dict(torch.load("old.pt"))
    for number in range(3):
        train(net, fed, opt)
        torch.save({"net": net.state_dict()}, "net.pt")
    return net

if __name__ == "__main__":
    main()
"""


def read(folder: Path, text: str) -> TrainingScript:
    (folder / "train.py").write_text(text)
    return read_script(folder / "train.py")


def advised(folder: Path, text: str) -> str:
    return "\n".join(advice(read(folder, text), Path("train.py")))


def blocks(language: str = "python") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for named, text in found if named == language]


def apply_lines(text: str, lines: Sequence[AddedLine]) -> str:
    """Return the script with the lines applied."""
    rows = text.splitlines()
    in_order = sorted(lines, key=lambda each: each.line)
    for added in in_order[::-1]:  # Last line first, so that earlier line numbers stay valid.
        stop = added.last if added.replaces else added.line - 1
        rows[added.line - 1 : stop] = added.text.splitlines()
    return "\n".join(rows) + "\n"


def test_the_documentation_shows_the_commands_real_output_and_the_changed_script(tmp_path: Path) -> None:
    before, after = blocks()
    script = read(tmp_path, before)
    applied = apply_lines(before, added_lines(script))
    assert ast.unparse(ast.parse(applied)) == ast.unparse(ast.parse(after))
    assert len(added_lines(script)) == 8
    shown = next(block for block in blocks("") if "--check" in block)
    assert shown.splitlines()[1:] == list(advice(script, Path("train.py")))


def test_the_suggested_lines_use_the_names_and_places_of_a_script_with_functions(tmp_path: Path) -> None:
    script = read(tmp_path, MAIN)
    after = apply_lines(MAIN, added_lines(script))
    ast.parse(after)
    rows = [row.strip() for row in after.splitlines()]
    assert rows[:3] == ["from __future__ import annotations", "import os", "import torch"]
    begin = rows.index("import argparse")
    assert rows[begin + 1].startswith("torch.distributed.init_process_group(")
    assert (
        "fed = DataLoader(train_set, num_workers=2, sampler=torch.utils.data.DistributedSampler(train_set), **options)"
        in rows
    )
    wrapped = rows.index("net = torch.nn.parallel.DistributedDataParallel(net)")
    assert rows[wrapped + 1 : wrapped + 3] == ["for number in range(3):", "fed.sampler.set_epoch(number)"]
    assert "if torch.distributed.get_rank() == 0: torch.save({'net': net.module.state_dict()}, 'net.pt')" in rows
    assert rows[rows.index("return net") - 1] == "torch.distributed.destroy_process_group()"


def test_changes_beyond_the_suggested_lines_are_reported_with_their_line(tmp_path: Path) -> None:
    said = advised(tmp_path, MAIN)
    for line in ("line 13: remove shuffle", 'line 14: write "cuda" instead', "line 15: download the data before"):
        assert line in said
    assert "learning rate of opt (line 19)" in said


@pytest.mark.parametrize(
    "change, said",
    [
        (("num_workers=2", "sampler=WeightedRandomSampler(weights, 9)"), "its DataLoader has a sampler of its own"),
        (("num_workers=2", "batch_sampler=batches"), "its DataLoader has a sampler of its own"),
        (("make(True, ", "load_dataset('c4', streaming=True, "), "its DataLoader may read an IterableDataset"),
        (("DataLoader(", "Batches("), "it has no DataLoader"),
    ],
)
def test_a_sampler_is_not_suggested_where_it_would_replace_another_or_fail(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    printed = advised(tmp_path, MAIN.replace(*change))
    assert f"because {said}" in printed and "give each rank its own part" in printed
    assert "DistributedSampler" not in printed and "set_epoch" not in printed
    random = MAIN.replace("num_workers=2", "sampler=RandomSampler(train_set)")
    assert "sampler=torch.utils.data.DistributedSampler(train_set)" in advised(tmp_path, random)


def test_a_data_loader_that_a_function_returns_is_not_denied(tmp_path: Path) -> None:
    said = advised(tmp_path, "def feed(data):\n    return DataLoader(data)\nopt = SGD(net.parameters())\n")
    assert "no variable is set to its DataLoader" in said and "it has no DataLoader" not in said
    (tmp_path / "data.py").write_text("def feed(data):\n    return DataLoader(data)\n")
    said = advised(tmp_path, "import data\nopt = SGD(net.parameters())\n")
    assert "its DataLoader is in a different module" in said and "sampler=torch.utils.data.Distributed" in said


def test_a_script_with_a_relative_import_must_be_a_module(tmp_path: Path) -> None:
    script = read(tmp_path, "from .net import Net\ninit_process_group()\n")
    for path, remedy in {"pkg/train.py": "set spec.module=pkg.train instead", "train.py": "without the dot"}.items():
        first, *_ = advice(script, Path(path))
        assert first.startswith(f"{path}, line 1: a relative import fails in a script; ") and remedy in first


def test_each_model_of_a_gan_is_wrapped_in_the_general_form(tmp_path: Path) -> None:
    said = advised(tmp_path, "a = Adam(gen.parameters())\nb = Adam([*dis.parameters(), *dis.head.parameters()])\n")
    assert "gen = torch.nn.parallel" in said and "dis = torch.nn.parallel" in said and "dis.head =" not in said


def test_the_optimizers_in_the_branches_of_a_choice_count_as_one(tmp_path: Path) -> None:
    chosen = "    if adam:\n        opt = optim.Adam(net.parameters())\n    else:\n        opt = optim.SGD"
    text = MAIN.replace("    opt = optim.SGD", chosen)
    after = apply_lines(text, added_lines(read(tmp_path, text)))
    assert "    net = torch.nn.parallel.DistributedDataParallel(net)\n    for number" in after
    assert not added_lines(read(tmp_path, MAIN.replace("    opt = optim.SGD", chosen.replace("    else:\n    ", ""))))


def test_a_method_on_which_the_loss_may_depend_belongs_into_forward(tmp_path: Path) -> None:
    """Through `.module`, DistributedDataParallel would not add up the gradients, without any error."""
    said = advised(tmp_path, MAIN.replace("net(x), y)", "net.embed(x), y)"))
    assert "line 8: write net.module.embed, if the model is wrapped there; if the loss depends on embed" in said


def test_uses_of_the_model_that_must_bypass_the_ddp_wrapper_are_reported(tmp_path: Path) -> None:
    changed = MAIN.replace("    return net\n", "    net.decode(1)\n    torch.save(net, 'n')\n    return net\n")
    said = advised(tmp_path, changed)
    assert "write net.module.decode" in said and "net.module.load_state_dict" not in said
    assert "torch.save(net.module, 'n')" in said and "net.module.parameters" not in said


@pytest.mark.parametrize(
    "change, said",
    [
        (("    opt = optim", "    other = optim.SGD(net.head.parameters())\n    opt = optim"), "2 optimizers"),
        (("    for number in range(3):\n", "    if True:\n"), "in different functions"),
        (("fed = DataLoader", "fed = make_loader"), ""),
        (("train(net, fed, opt)", "train(net, chain(fed, checked), opt)"), "2 DataLoaders"),
        (("net.parameters()", "params"), "no optimizer for a single model"),
    ],
)
def test_an_uncertain_suggestion_is_marked_and_uses_the_general_form(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    text = MAIN.replace(*change)
    assert text != MAIN
    printed = advised(tmp_path, text)
    if said:
        assert "unclear, because it" in printed and said in printed and "without shuffle" in printed
    else:  # The only DataLoader left is used.
        assert "checked = DataLoader(test_set, sampler=" in printed


@pytest.mark.parametrize(
    "text, said",
    [
        ("import torch.distributed as d\nd.init_process_group()\n", "forms a group (init_process_group)"),
        ("from torch.distributed.device_mesh import init_device_mesh as m\nfrom x import init_device_mesh\n"
         "init_device_mesh('cuda', (2,))\n", "forms a group (init_device_mesh)"),
        ("from transformers import Trainer\nTrainer(model=m).train()\n", "line 2: add callbacks=[ddpjob_report.hugg"),
        ("from nemo import lightning as nl\nnl.Trainer(num_nodes=1).fit(m)\n", "the job's number of nodes"),
        ("import lightning as L\n\nL.Trainer(max_epochs=2).fit(m)\n", 'line 3: set strategy="ddp", num_nodes='),
        ("import lightning as L\n\nL.Trainer(num_nodes=2).fit(m)\n", "which must be the job's number of nodes"),
        ("import lightning as L\nL.Trainer(**cfg.trainer).fit(m)\n", "; if cfg.trainer already has them, change them"),
        ("from pytorch_lightning import Trainer\nTrainer.from_argparse_args(o)\n", "line 2: set strategy="),
        ("from lightning import Trainer\nt: Trainer = hydra.utils.instantiate(c)\n", "line 2: set strategy="),
        ("from accelerate import Accelerator\nfrom trl import KTOTrainer\nKTOTrainer(m)\nAccelerator()\n", "line 3:"),
        ("from accelerate import Accelerator\nimport transformers\nTrainer(m)\nAccelerator()\n", "line 4: add log"),
        ("import colossalai\ncolossalai.launch_from_torch()\n", "forms a group (launch_from_torch)"),
        ("with learn.distrib_ctx():\n    learn.fit(1)\n", "forms a group (distrib_ctx)"),
        ("from ultralytics import YOLO\nYOLO('n.pt').train(data='coco8.yaml')\n", "line 2: in train(), set device="),
        ("from mmengine.runner import Runner\nadd_argument('--launcher')\nRunner.from_cfg(c)\n", 'must be "pytorch"'),
        ("from transformers import Trainer\nTrainer(model=m).train()\n", "top: import ddpjob_report.huggingface"),
        ("from accelerate import Accelerator\na = Accelerator()\n", "line 2: add log_with="),
        ("import lightning as L\nf = L.Fabric(accelerator='cpu')\n", 'line 2: set strategy="ddp", num_nodes='),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)\n", "line 2: set trainer_defaults=dict(str"),
        ("import ignite.distributed as idist\nwith idist.Parallel() as p:\n    p.run(f)\n", 'line 2: set backend="'),
        ("from mmengine.runner import Runner\nRunner.from_cfg(c).train()\n", 'line 2: set launcher="pytorch"'),
        ("import deepspeed\ne, *_ = deepspeed.initialize(model=m)\n", "forms a group (deepspeed.initialize)"),
        ("from composer import Trainer\nimport transformers\nTrainer(m).fit()\n", "forms a group (composer.Trainer)"),
        ("from timm import utils\nutils.init_distributed_device(args)\n", "forms a group (init_distributed_device)"),
        ("from torch.distributed import rpc\nrpc.init_rpc('a')\n", "forms a group (init_rpc)"),
        ("from ddpjob_trainer.api import Group\nGroup.from_env()\n", "forms a group (ddpjob_trainer)"),
        ("print(1)\n", "no training loop was found"),
        ("# init_process_group()\nimport torch\nfor x in y:\n    loss(x).backward()\n", "for one process"),
    ],
)  # fmt: skip
def test_the_place_where_the_group_is_formed_is_read_from_the_script(text: str, said: str, tmp_path: Path) -> None:
    assert said in advised(tmp_path, text)


SPAWNED = """\
import os
import torch.distributed as dist, torch.multiprocessing as mp
def main(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("PORT")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
mp.spawn(main, args=(2,), nprocs=2)
"""


def test_lines_that_keep_the_ranks_of_different_nodes_apart_are_reported(tmp_path: Path) -> None:
    said = advised(tmp_path, SPAWNED)
    assert "forms a group" not in said and "may need these changes to form one group (init_process_group)" in said
    assert "line 7: mp.spawn starts processes that ignore the job's ranks" in said
    assert "line 4: remove the assignment of os.environ['MASTER_ADDR']" in said and "line 5" not in said


@pytest.mark.parametrize("address", ["'file:///tmp/store'", "f'tcp://127.0.0.1:{port}'", "'tcp://localhost:23456'"])
def test_an_init_method_that_other_nodes_cannot_reach_is_reported(address: str, tmp_path: Path) -> None:
    """A file is also stale after a restart: its ranks then connect to those that have exited."""
    said = advised(tmp_path, f"dist.init_process_group('gloo', init_method={address}, rank=rank)\n")
    assert f"line 1: remove init_method={address}, because the job sets the address" in said
    assert "forms a group" in advised(tmp_path, "dist.init_process_group(init_method='env://')\n")


@pytest.mark.parametrize(
    "text",
    [
        "if 'RANK' in os.environ:\n    rank = 1\nelif rank:\n    os.environ['MASTER_ADDR'] = '127.0.0.1'\n",
        "if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'\n",
        "if int(os.environ.get('WORLD_SIZE', 1)) == 1:\n    os.environ['RANK'] = '0'\n",
    ],
)
def test_an_address_that_is_set_only_without_torchrun_is_not_reported(text: str, tmp_path: Path) -> None:
    assert "forms a group" in advised(tmp_path, f"import os\n{text}dist.init_process_group()\n")


@pytest.mark.parametrize(
    "call",
    [
        "launch(main, args.num_gpus, num_machines=2, machine_rank=args.machine_rank, dist_url=args.dist_url)",
        "notebook_launcher(main, num_processes=2)",
        "TorchTrainer(main, scaling_config=ScalingConfig(num_workers=2))",
    ],
)
def test_a_script_that_starts_processes_gets_no_lines_to_add(call: str, tmp_path: Path) -> None:
    """A second group in addition to the launcher's would not help."""
    said = advised(tmp_path, f"def main():\n    loss.backward()\n{call}\n")
    assert "starts processes itself" in said and f"line 3: {call.partition('(')[0]} starts processes" in said
    assert "other-launchers" in said and "init_process_group" not in said


@pytest.mark.parametrize("package", ["mpi4py", "horovod.torch"])
def test_ranks_that_come_from_mpi_are_reported(package: str, tmp_path: Path) -> None:
    said = advised(tmp_path, f"import {package}\nloss.backward()\n")
    assert f"line 1: {package.partition('.')[0]} finds one process only" in said and "forms no group" in said
    optional = f"try:\n    import {package}\nexcept ImportError:\n    pass\ninit_process_group()\n"
    assert "forms a group" in advised(tmp_path, optional)


def test_processes_that_form_a_group_are_reported_and_others_are_not(tmp_path: Path) -> None:
    text = "def work(rank):\n    init_process_group(rank=rank)\nmp.Process(target=work, args=(1,)).start()\n"
    assert "line 3: mp.Process starts processes that ignore" in advised(tmp_path, text)
    assert "forms a group" in advised(tmp_path, text.replace("target=work", "target=copy_files"))


def test_a_script_that_hides_the_other_ranks_gpus_is_reported(tmp_path: Path) -> None:
    text = "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\ninit_process_group()\n"
    assert "line 1: remove the assignment of os.environ['CUDA_VISIBLE_DEVICES']" in advised(tmp_path, text)
    for visible in ("", "0,1"):
        assert "forms a group" in advised(tmp_path, text.replace("'0'", f"'{visible}'"))


def test_an_optimizer_per_fold_is_not_said_to_be_in_another_function(tmp_path: Path) -> None:
    epochs = "    for epoch in range(2):\n        loss.backward()\n"
    said = advised(tmp_path, f"for fold in folds:\n    opt = SGD(net.parameters())\n{epochs}")
    assert "its optimizer and its training loop are in different functions or loops" in said


def test_a_rank_that_only_slurm_sets_is_reported(tmp_path: Path) -> None:
    text = "rank = os.environ['SLURM_PROCID']\nsize = os.getenv('SLURM_NTASKS')\ninit_process_group()\n"
    said = advised(tmp_path, text)
    assert "line 1: read RANK instead of SLURM_PROCID" in said and "line 2: read WORLD_SIZE instead of" in said
    for known in ("if 'SLURM_PROCID' in os.environ:\n    ", "rank = os.environ.get('RANK')\n"):
        assert "forms a group" in advised(tmp_path, known + text)


def test_an_option_for_the_local_rank_is_reported_unless_its_variable_is_read(tmp_path: Path) -> None:
    """torchrun does not pass it, so all ranks would use the default, such as GPU 0."""
    text = "add_argument('--local_rank', default=-1)\ninit_process_group()\nset_device(args.local_rank)\n"
    assert "line 1: set default=int(os.environ.get('LOCAL_RANK', -1)) for --local_rank" in advised(tmp_path, text)
    for other in (text.replace("-1", "os.getenv('LOCAL_RANK')"), text.replace("args.local_rank", "0")):
        assert "forms a group" in advised(tmp_path, other)


def test_ranks_that_a_script_sets_itself_are_reported(tmp_path: Path) -> None:
    said = advised(tmp_path, "os.environ['RANK'] = '0'\nfrom transformers import Trainer\nTrainer()\n")
    assert "line 1: remove the assignment of os.environ['RANK'], because the job sets it" in said


def test_relative_imports_are_followed_in_the_folder_of_their_own_module(tmp_path: Path) -> None:
    for name, text in {
        "a/__init__": "from .b import f",
        "a/b": "from ..c.d import g",
        "c/d": "init_process_group()",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    assert "forms a group (init_process_group in c/d.py)" in advised(tmp_path, "import a\n")


HUGGING_FACE = """from ddpjob_report.huggingface import DDPJobCallback, last_checkpoint
from transformers import Trainer, TrainingArguments
Trainer(model=m, args=TrainingArguments(use_cpu=True), callbacks=[DDPJobCallback()]).train(last_checkpoint("."))
"""
ACCELERATE = """from accelerate import Accelerator
from ddpjob_report.accelerate import DDPJobTracker, resume
accelerator = Accelerator(cpu=args.cpu, log_with=DDPJobTracker())
accelerator.init_trackers("job")
accelerator.log({"loss": 1}, step=resume(accelerator))
"""


@pytest.mark.parametrize(
    "text, part, said",
    [
        (HUGGING_FACE, "use_cpu", "without GPUs: TrainingArguments(use_cpu=True)"),
        (HUGGING_FACE, "DDPJobCallback", "line 3: add callbacks=["),
        (HUGGING_FACE, "last_checkpoint", "To make it resume: docs/own-scripts.md#hugging-faces-trainer"),
        (ACCELERATE, "cpu=", "without GPUs: Accelerator(cpu=True)"),
        (ACCELERATE, "init_trackers", "after it: accelerator.init_trackers"),
        (ACCELERATE, "accelerator.log", "after each step: accelerator.log("),
        (ACCELERATE, "resume", "To make it resume: docs/own-scripts.md#accelerate"),
    ],
)
def test_only_the_missing_lines_of_a_framework_are_suggested(text: str, part: str, said: str, tmp_path: Path) -> None:
    whole = advised(tmp_path, text)
    assert "nothing is missing" in whole and said not in whole and "resume" not in whole
    partial = advised(tmp_path, text.replace(part, "other"))
    assert said in partial and ("nothing is missing" in partial) is said.startswith("To make")


def test_the_line_for_lightning_works_without_torchrun_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    said = advised(tmp_path, "import lightning as L\n\nL.Trainer(max_epochs=2).fit(m)\n")
    arguments = said.partition("line 3: set ")[2].partition("\n")[0]
    assert eval(f"dict({arguments})", {"os": os}) == {"strategy": "ddp", "num_nodes": 1, "devices": 1}


def test_a_package_in_the_current_folder_may_form_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"tools/train": "from pkg.a import b\n", "pkg/a": "import torch\ninit_process_group()\n"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.py").write_text(text)
    assert not read_script(tmp_path / "tools" / "train.py").forms_group
    monkeypatch.chdir(tmp_path)
    assert read_script(Path("tools/train.py")).where == "pkg/a.py"


def test_a_function_that_forms_a_group_but_is_not_used_does_not_count(tmp_path: Path) -> None:
    """Scripts for one GPU and for several often share their utilities."""
    (tmp_path / "utils.py").write_text("def setup():\n    init_process_group()\n")
    (tmp_path / "later.py").write_text("import utils\nutils.setup()\n")
    loop = "import utils\nutils.Meter()\nloss.backward()\n"
    assert "for one process" in advised(tmp_path, loop)
    assert "(init_process_group in utils.py)" in advised(tmp_path, f"{loop}utils.setup()\n")
    assert "(init_process_group in utils.py)" in advised(tmp_path, f"{loop}import later\n")
    assert "(init_process_group in utils.py)" in advised(tmp_path, f"{loop}from utils import setup as s\ns()\n")


def test_a_module_next_to_the_script_may_form_the_group(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("from tools import net\n")
    (tmp_path / "tools" / "net.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    script = read(tmp_path, "import tools\nraise SystemExit('it must not be executed')\n")
    assert script.forms_group and script.where == "tools/net.py"


@pytest.mark.parametrize("text", ["print 1\n", "a\0b", "(" * 3000 + ")" * 3000])
def test_a_file_that_is_not_python_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(UnreadableScript, match=r"train\.py"):
        read_script(tmp_path / "train.py")
