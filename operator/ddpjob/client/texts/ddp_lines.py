"""The lines of code that users add to a single-GPU script so that it trains on several ranks.

A script with its own training loop needs eight lines. They import `os`, form the group, select this
rank's GPU, add the sampler, wrap the model, set the sampler's epoch, save on one rank only, and
destroy the group. The lines work with and without GPUs and under any torchrun, and no other line
changes. For example:

    line 31      loader = DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))

Each line has a place, either before a line of the script or instead of it, so that a test can apply
the lines to a script and run it. If the script's names or the places are not certain, the general
form describes in words where each line belongs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from ddpjob.client.manifests.read_script import TrainingScript, trains

TUTORIAL = "docs/one-gpu-to-two-nodes.md"
_INIT = 'torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")'
_DEVICE = 'if torch.cuda.is_available(): torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
_SAMPLER = "torch.utils.data.DistributedSampler"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_FIRST = "if torch.distributed.get_rank() == 0:"
_END = "torch.distributed.destroy_process_group()"


@dataclass(frozen=True)
class FrameworkLines:
    """What a script that uses a framework needs in order to work well in a job.

    Each pair consists of a word and a text about what to add to the script. If the script contains
    the word, the text is not shown.
    """

    forms: str
    arguments: tuple[str, str]
    """Arguments that the Trainer or the Accelerator needs."""
    imports: str
    """The import that the arguments need; empty for none."""
    elsewhere: tuple[tuple[str, str], ...]
    resumes: tuple[str, str]
    """A word, and the page that explains how to make the script resume from a checkpoint."""
    given: str = ""
    """A phrase about the values that the arguments must have if the script already sets them. The
    phrase is empty if any values are right."""


_LIGHTNING = (
    'strategy="ddp", num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)), '
    'devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1))'
)
_NODES = "which must be the job's number of nodes"
_OF_FRAMEWORK = {
    "huggingface": FrameworkLines(
        "Hugging Face's Trainer forms the group itself.",
        ("DDPJobCallback", "add callbacks=[ddpjob_report.huggingface.DDPJobCallback()]"),
        "import ddpjob_report.huggingface",
        (("use_cpu", "without GPUs: TrainingArguments(use_cpu=True), otherwise each rank trains alone"),),
        ("last_checkpoint", "docs/own-scripts.md#hugging-faces-trainer"),
    ),
    "lightning": FrameworkLines(
        "Lightning's Trainer forms the group itself if it is given the number of nodes and processes.",
        ("num_nodes", f"set {_LIGHTNING}"),
        "import os",
        (),
        ("last_checkpoint", "docs/own-scripts.md#lightning"),
        _NODES,
    ),
    "fabric": FrameworkLines(
        "Lightning's Fabric forms the group itself if it is given the number of nodes and processes.",
        ("num_nodes", f"set {_LIGHTNING}"),
        "import os",
        ((".launch(", "after it: fabric.launch()"),),
        ("checkpoint_dir", "docs/own-scripts.md"),
        _NODES,
    ),
    "ignite": FrameworkLines(
        "Ignite's Parallel forms the group itself if it is given a backend.",
        ("backend", 'set backend="nccl", or backend="gloo" without GPUs'),
        "",
        (),
        ("checkpoint_dir", "docs/own-scripts.md"),
    ),
    "mmengine": FrameworkLines(
        'MMEngine\'s Runner forms the group itself if its launcher is "pytorch".',
        ("launcher", 'set launcher="pytorch"'),
        "",
        (),
        ("checkpoint_dir", "docs/own-scripts.md"),
        'which must be "pytorch"',
    ),
    "ultralytics": FrameworkLines(
        "Ultralytics forms a group only on one node (--nodes 1), and only if it is given several devices.",
        ("device", 'in train(), set device=list(range(int(os.environ["LOCAL_WORLD_SIZE"])))'),
        "import os",
        (),
        ("resume", "docs/own-scripts.md"),
        "which must be a list of all GPUs of the node",
    ),
    "accelerate": FrameworkLines(
        "Accelerate forms the group itself, without `accelerate launch`.",
        ("DDPJobTracker", "add log_with=ddpjob_report.accelerate.DDPJobTracker()"),
        "import ddpjob_report.accelerate",
        (
            ("init_trackers", 'after it: accelerator.init_trackers("job")'),
            (".log(", 'after each step: accelerator.log({"loss": loss.item()}, step=step)'),
            ("cpu=", "without GPUs: Accelerator(cpu=True), otherwise each rank trains alone"),
        ),
        ("resume(", "docs/own-scripts.md#accelerate"),
    ),
}
_CLI_ARGUMENTS = ("num_nodes", f"set trainer_defaults=dict({_LIGHTNING})")
_OF_FRAMEWORK["lightning-cli"] = replace(_OF_FRAMEWORK["lightning"], arguments=_CLI_ARGUMENTS)


@dataclass(frozen=True)
class AddedLine:
    """Text to insert before line `line`.

    If `replaces` is true, the text replaces the lines from `line` to `last` instead.
    """

    line: int
    text: str
    replaces: bool = False
    last: int = 0


def advice(script: TrainingScript, path: Path) -> Iterator[str]:
    """Yield advice on how to change a script so that its ranks train together."""
    if script.relative:
        module = ".".join(path.with_suffix("").parts)
        remedy = "write it without the dot"
        if "." in module and not path.is_absolute():
            remedy = f"set spec.module={module} instead of spec.script"
        yield f"{path}, line {script.relative}: a relative import fails in a script; {remedy}"
    if script.framework:
        yield from _advice_on_framework(script, path, _OF_FRAMEWORK[script.framework])
        return
    if script.group:
        group = f"{script.group}{f' in {script.where}' if script.where else ''}"
        yield f"{path} {'may need these changes to form one group' if script.alone else 'forms a group'} ({group})."
        yield from _on_own_launch(script)
        yield "To make the script resume and report its loss: docs/own-scripts.md"
        return
    if script.starts:
        yield f"{path} starts processes itself. In a job, each rank would start its own, and train separately."
        yield from _on_own_launch(script)
        return
    if not script.trains:
        yield f"{path}: no training loop was found, so the ranks might not form a group."
        yield f"If they do not, add these lines ({TUTORIAL}):"
        yield from general_form()
        return
    written = "forms no group" if script.alone else "is written for one process"
    yield f"{path} {written}. In a job, each rank would train a separate model."
    yield from script.alone
    lines = added_lines(script)
    if not lines:
        yield (
            f"It needs these lines ({TUTORIAL}), but where they belong is unclear, because "
            f"{' and '.join(script.doubts)}:"
        )
        yield from general_form(script)
        if script.optimizer and script.model and script.loop:
            yield from dict.fromkeys(_behind_the_wrapper(script))
        return
    yield f"With these lines the ranks train one model ({TUTORIAL}):"
    yield from _shown(lines)
    yield from _remarks(script)


def _on_own_launch(script: TrainingScript) -> Iterator[str]:
    yield from script.alone
    if script.starts:
        yield "To start the script with `command` instead: docs/own-scripts.md#other-launchers"


def _advice_on_framework(script: TrainingScript, path: Path, lines: FrameworkLines) -> Iterator[str]:
    yield lines.forms
    yield from _on_own_launch(script)
    at = f"{script.where or path}, line {script.call.lineno}" if script.call else str(path)
    word, text = lines.arguments
    if word in script.text:
        missing = [f"{at}: the script has {word}, {lines.given}"] if lines.given else []
    else:
        more = (
            [ast.unparse(k.value) for k in script.call.keywords if k.arg is None] if script.call and lines.given else []
        )
        missing = [f"{at}: {text}{''.join(f'; if {name} already has them, change them there' for name in more)}"]
        missing += [f"at the top: {lines.imports}"] if lines.imports else []
    missing += [text for word, text in lines.elsewhere if word not in script.text]
    yield from missing or [f"{at}: the script has {word}, so nothing is missing"]
    word, page = lines.resumes
    if word not in script.text:
        yield f"To make it resume: {page}"


def general_form(script: TrainingScript | None = None) -> Iterator[str]:
    """Yield the lines that a script needs, each with a description of where it belongs.

    If the names of the script's own variables are known, the lines contain these names.
    """
    models = (script and script.models) or ["model"]
    loader, data = "loader", "data"
    if script and script.loader:
        loader, data = script.loader.name, _dataset(script.loader.call)
        data = data if data.replace(".", "").isidentifier() else "data"
    sampled = script is None or script.is_sampled
    by_rank = "give each rank its own part, by torch.distributed.get_rank(), unless its dataset does so"
    rows = (
        ("at the top", "import os, torch"),
        ("then", _INIT),
        ("after that", _DEVICE),
        ("training loader", f"{loader} = DataLoader({data}, ..., sampler={_SAMPLER}({data}))  # without shuffle")
        if sampled
        else ("training data", by_rank),
        *(("before the epochs", f"{model} = {_DDP}({model})") for model in models),
        *([("in each epoch", f"{loader}.sampler.set_epoch(epoch)")] if sampled else []),
        *(("where it saves", f"{_FIRST} torch.save({model}.module.state_dict(), ...)") for model in models),
        ("at the end", _END),
    )
    for where, text in rows:
        yield f"  {where:<19}{text}"


def _shown(lines: Sequence[AddedLine]) -> Iterator[str]:
    """Yield each line to add, preceded by its place.

    The indentation is the same as in the script, to show which block the line belongs to.
    """
    for added in lines:
        is_end = added.text.strip() == _END and added is lines[-1]
        where = f"before line {added.line}" if not is_end else f"after line {added.line - 1}"
        where = f"line {added.line}" if added.replaces else where
        yield f"  {where:<17}{added.text}"


def added_lines(script: TrainingScript) -> list[AddedLine]:
    """Return the lines to add, in the order of their places in the script.

    The result is empty if it is unclear where the lines belong.
    """
    optimizer, loader, loop = script.optimizer, script.loader, script.loop
    if optimizer is None or loader is None or loop is None or script.doubts:
        return []
    tree = ast.parse(script.text)
    begin, first_import, last = _first_statement(script.scope), _first_import(tree), script.scope[-1]
    if not first_import <= begin.lineno <= min(optimizer.line, loader.line):
        return []
    inner = " " * begin.col_offset
    missing = [name for name in ("os", "torch") if name not in _bound(tree)]
    made = [AddedLine(first_import, f"import {', '.join(missing)}")] if missing else []
    made += [AddedLine(begin.lineno, inner + _INIT), AddedLine(begin.lineno, inner + _DEVICE)]
    made.append(_sampled(loader.node, loader.call))
    made.append(AddedLine(loop.lineno, f"{' ' * loop.col_offset}{script.model} = {_DDP}({script.model})"))
    if isinstance(loop, ast.For) and loader.name not in ast.unparse(loop.iter):
        inside = loop.body[0]
        set_epoch = f"{loader.name}.sampler.set_epoch({ast.unparse(loop.target)})"
        made.append(AddedLine(inside.lineno, " " * inside.col_offset + set_epoch))
    made += _saves(tree, script)
    end = last.lineno if isinstance(last, ast.Return) else (last.end_lineno or last.lineno) + 1
    made.append(AddedLine(end, inner + _END))
    return sorted(made, key=lambda added: added.line)


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that `import` statements define at the top level of the module."""
    imports = (node for node in tree.body if isinstance(node, ast.Import))
    return {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}


def _first_import(tree: ast.Module) -> int:
    """Return the line of the first import that is not from __future__; 1 if there is none."""
    for node in tree.body:
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if isinstance(node, ast.Import | ast.ImportFrom) and not future:
            return node.lineno
    return 1


def _first_statement(scope: Sequence[ast.stmt]) -> ast.stmt:
    """Return the first statement that does something, after imports and definitions."""
    imports = [at for at, node in enumerate(scope) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in scope[imports[-1] + 1 if imports else 0 :]:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            return node
    return scope[-1]


def _dataset(call: ast.Call) -> str:
    found = next((k.value for k in call.keywords if k.arg == "dataset"), call.args[0] if call.args else None)
    return "data" if found is None else ast.unparse(found)


def _sampled(node: ast.stmt, call: ast.Call) -> AddedLine:
    """Return the statement that creates the loader, with a sampler in place of `shuffle`."""
    copy = deepcopy(node)
    assert isinstance(copy, ast.Assign | ast.AnnAssign) and isinstance(copy.value, ast.Call)
    changed = copy.value
    shuffle = next((ast.unparse(k.value) for k in call.keywords if k.arg == "shuffle"), "")
    spread = any(k.arg is None for k in call.keywords)  # **kwargs may contain shuffle.
    order = "" if spread or shuffle == "True" else f", shuffle={shuffle or 'False'}"
    sampler = f"{_SAMPLER}({_dataset(call)}{order})"
    given = [k for k in changed.keywords if k.arg not in ("shuffle", "sampler")]
    position = next((at for at, k in enumerate(given) if k.arg is None), len(given))
    given.insert(position, ast.keyword("sampler", ast.parse(sampler, mode="eval").body))
    changed.keywords = given
    text = " " * node.col_offset + ast.unparse(ast.fix_missing_locations(copy))
    return AddedLine(node.lineno, text, replaces=True, last=node.end_lineno or node.lineno)


def _saves(tree: ast.Module, script: TrainingScript) -> Iterator[AddedLine]:
    """Yield a replacement for each statement that saves something with torch.save.

    In the replacement, only rank 0 saves, and it saves the model without the wrapper
    (DistributedDataParallel).
    """
    for node in ast.walk(tree):
        if _is_save(node):
            copy = deepcopy(node)
            assert isinstance(copy, ast.Expr) and isinstance(copy.value, ast.Call)
            if copy.value.args and ast.unparse(copy.value.args[0]) == script.model:
                copy.value.args[0] = ast.parse(f"{script.model}.module", mode="eval").body
            text = ast.unparse(copy).replace(f"{script.model}.state_dict()", f"{script.model}.module.state_dict()")
            line = f"{' ' * copy.col_offset}{_FIRST} {text}"
            yield AddedLine(copy.lineno, line, replaces=True, last=copy.end_lineno or copy.lineno)


def _is_save(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "torch.save"
    )


_OF_BOTH = ("train", "eval", "to", "cuda", "cpu", "parameters", "named_parameters", "zero_grad", "buffers", "modules")
"""Methods that DistributedDataParallel shares with the model, because both are modules."""


def _behind_the_wrapper(script: TrainingScript) -> Iterator[str]:
    """Yield remarks on calls to methods of the model that its wrapper lacks or changes."""
    loop = script.loop
    assert loop is not None
    raw = [node for node in script.scope if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = (each.lineno for node in raw for each in ast.walk(node) if isinstance(each, ast.expr))
    before = {line for line in lines if line < loop.lineno}
    tree = ast.parse(script.text)
    saved = {id(each) for node in ast.walk(tree) if _is_save(node) for each in ast.walk(node)}
    training = (
        node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.FunctionDef) and trains(node)
    )
    in_training = {id(each) for node in training for each in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in saved:
            continue
        own = ast.unparse(node.func.value) == script.model and node.func.attr not in _OF_BOTH
        if not own or node.lineno in before:
            continue
        method = node.func.attr
        text = f"line {node.lineno}: write {script.model}.module.{method}, if the model is wrapped there"
        if id(node) in in_training and "state_dict" not in method:
            text += f"; if the loss depends on {method}, call it in forward, because DDP adds up no gradients otherwise"
        yield text


def _remarks(script: TrainingScript) -> Iterator[str]:
    """Yield advice on changes other than the added lines."""
    assert script.optimizer is not None and script.loader is not None
    yield "Each process reads its own batch, so the global batch is larger. Divide the"
    yield f"batch size, or adapt the learning rate of {script.optimizer.name} (line {script.optimizer.line})."
    yield from dict.fromkeys(_behind_the_wrapper(script))
    spread = any(k.arg is None for k in script.loader.call.keywords)
    for node in ast.walk(ast.parse(script.text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("cuda:"):
                yield f'line {node.lineno}: write "cuda" instead of "{node.value}", because each rank has its own GPU'
            elif node.value == "shuffle" and spread:
                yield f"line {node.lineno}: remove shuffle, because the sampler replaces it"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "DataParallel":
            yield f"line {node.lineno}: remove DataParallel, because each process trains on one GPU"
        elif isinstance(node, ast.Call) and any(
            k.arg == "download" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords
        ):
            yield f"line {node.lineno}: download the data before the job, because otherwise all ranks download it"
