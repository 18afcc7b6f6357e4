"""Determines, without running a script, what its main variables are and whether its ranks form a
group.

A script written for one GPU also runs under torchrun, but each rank then trains its own model on
all the data, without any error. Users must learn this before the job starts. They also need to know
which lines to add, written with the names in their script.

The script is parsed with `ast`, never imported or executed. Its ranks form a group if its own code,
or a module that it imports from its own folder or the current one, calls a function in `_FORMS` or
creates one of the objects in `_CREATES` or a Trainer. If they do not, the following is looked up:

- the optimizer is the variable that gets `SGD(…)`, `Adam(…)` or another class of torch.optim;
- the model is X in the optimizer's argument `X.parameters()`;
- the training loader is the DataLoader that a loop with `.backward()` iterates, or that is passed
  to a function with such a loop. If there is none, it is the DataLoader that shuffles, or that has
  `train` in its name;
- the epoch loop is the outermost loop in the optimizer's function that trains or calls a function
  that trains.

Example: `opt = torch.optim.SGD(net.parameters(), lr=0.1)` names the optimizer `opt` and the model
`net`. If a name is missing or has two candidates, `doubts` says so, and callers show the general
form of the lines instead.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

_FORMS = (
    *("init_process_group", "init_device_mesh", "init_distributed", "init_distributed_device", "init_rpc"),
    *("launch_from_torch", "distrib_ctx"),
)
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
_CREATES = {
    "Accelerator": ("accelerate", {"accelerate"}),
    "Fabric": ("fabric", _LIGHTNING),
    "LightningCLI": ("lightning-cli", _LIGHTNING),
    "Parallel": ("ignite", {"ignite"}),
    "Runner": ("mmengine", {"mmengine"}),
    "FlexibleRunner": ("mmengine", {"mmengine"}),
    "from_cfg": ("mmengine", {"mmengine"}),
    "YOLO": ("ultralytics", {"ultralytics"}),
}
"""Maps the name of a call to the framework that forms the group, and to the packages that define
the call."""
_LAUNCHERS = {
    "spawn": "nprocs",
    "start_processes": "nprocs",
    "launch": "dist_url",
    "notebook_launcher": "num_processes",
    "TorchTrainer": "scaling_config",
}
"""Maps the name of a call to a keyword argument. A call with this argument starts processes."""
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_SLURM = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_NTASKS": "WORLD_SIZE"}
_OF_MPI = ("mpi4py", "horovod")
_OWN_ADDRESSES = ("file:", "tcp://127.", "tcp://localhost")
_SETTINGS = tuple(f"os.environ['{name}']" for name in _VARIABLES)
_OPTIMIZERS = (
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"),
    *("LBFGS", "Adafactor", "Muon", "Lion", "Adam8bit", "AdamW8bit"),
)
_SAMPLERS = {"RandomSampler", "SequentialSampler", "DistributedSampler"}
"""Samplers that a DistributedSampler can replace."""
_ITERABLE = ("IterableDataset", "WebDataset", "WebLoader", "StreamingDataset", "streaming=True")
_TRAINERS = {"lightning": "lightning", "pytorch_lightning": "lightning", "nemo": "lightning"}
_TRAINERS |= {"transformers": "huggingface"}
_TRAINERS |= {"trl": "huggingface", "setfit": "huggingface", "sentence_transformers": "huggingface"}
_MODULES = 200
"""Maximum number of modules that are read in addition to the script."""


class UnreadableScript(ValueError):
    """The file is not Python that this version can parse."""


@dataclass(frozen=True)
class Named:
    """A variable and the statement that sets it."""

    name: str
    node: ast.stmt
    call: ast.Call

    @property
    def line(self) -> int:
        return self.node.lineno


@dataclass
class TrainingScript:
    """The result of reading a script.

    The fields say how the script's ranks form a group. If they do not form one, other fields
    contain the parts of the training loop, such as the optimizer and the model.
    """

    text: str
    framework: str = ""
    """The framework that forms the group, such as huggingface or accelerate; empty for none."""
    call: ast.Call | None = None
    """The call that creates the framework's Trainer, Accelerator or similar object."""
    group: str = ""
    """The function that forms the group if no framework does."""
    where: str = ""
    """The module that forms the group; empty if the script itself forms it."""
    alone: list[str] = field(default_factory=list)
    """Messages about lines that can keep the ranks of different nodes from forming one group. Each
    message contains the remedy."""
    relative: int = 0
    """The line of the script's first relative import; 0 for none. Relative imports work only if the
    script runs as a module."""
    starts: bool = False
    """Whether any of the lines in `alone` starts processes."""
    trains: bool = False
    """Whether the script calls `.backward()` or creates an optimizer."""
    optimizer: Named | None = None
    model: str = ""
    models: list[str] = field(default_factory=list)
    """The models of all optimizers."""
    loader: Named | None = None
    is_sampled: bool = True
    """Whether the script's training data can come from a DataLoader with a DistributedSampler."""
    scope: list[ast.stmt] = field(default_factory=list)
    """The statements of the function (or module) that creates the optimizer."""
    loop: ast.For | ast.While | None = None
    """The epoch loop, if it is in `scope`."""
    doubts: list[str] = field(default_factory=list)

    @property
    def forms_group(self) -> bool:
        return bool(self.framework or self.group)


def read_script(path: Path) -> TrainingScript:
    """Read a script, and the modules that it imports from its folder.

    Raises UnreadableScript, and OSError.
    """
    content = path.read_bytes()
    tree = _parse(content, path)
    script = TrainingScript(content.decode(errors="replace"))
    relatives = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level)
    script.relative = next((node.lineno for node in relatives), 0)
    modules: list[tuple[str, ast.Module]] = []
    used: set[str] = set()
    for where, module in chain([("", tree)], _neighbours(path, tree)):
        modules.append((where, module))
        used |= _used(module)
        script.alone += (f"{where or path}, line {text}" for text in _find_own_launch(script, module))
        if _find_group(script, module, used if where else None):
            script.where = where
            break
    else:  # A function that forms a group may be used by a module that was read later.
        script.where = next((where for where, module in modules[1:] if _find_group(script, module, used)), "")
    if not script.forms_group:
        _find_names(script, tree, used)
    script.alone += (f"{where or path}, line {text}" for where, text in _find_old_option(modules))
    return script


def _parse(content: bytes, path: Path) -> ast.Module:
    try:
        return ast.parse(content)
    except SyntaxError as error:
        at = f", line {error.lineno}" if error.lineno else ""
        raise UnreadableScript(f"{path}{at}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableScript(f"{path}: cannot be parsed as a Python script") from error


def _neighbours(path: Path, tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """Yield each module that the script imports from its own folder or the current one.

    Modules that these modules import are also yielded. The current folder counts because the
    packages of a repository are usually there. Each result is a pair of the module's path and its
    syntax tree.
    """
    seen: set[Path] = {path}
    waiting = deque([(path.parent, tree)])
    while waiting:
        folder, tree = waiting.popleft()
        for name in _imported(tree):
            parts = name.lstrip(".")
            base = folder
            for _ in range(len(name) - len(parts) - 1):
                base = base if base == path.parent else base.parent
            bases = [base] if name != parts else [path.parent, Path()]
            found = (base.joinpath(*parts.split(".")) for base in bases)
            files = (file for base in found for file in (base.with_suffix(".py"), base / "__init__.py"))
            file = next((file for file in files if file.is_file()), None)
            if file is None or file in seen or len(seen) > _MODULES:
                continue
            seen.add(file)
            try:
                module = _parse(file.read_bytes(), file)
            except (UnreadableScript, OSError):
                continue
            waiting.append((file.parent, module))
            yield str(file.relative_to(path.parent) if file.is_relative_to(path.parent) else file), module


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield each imported name. The name from a relative import begins with the import's dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or node.level):
            dots, base = "." * node.level, node.module or ""
            yield from (dots + name for name in (base, *(f"{base}.{a.name}".strip(".") for a in node.names)) if name)


# --- the group ---------------------------------------------------------------------------------


def _find_group(script: TrainingScript, tree: ast.Module, used: set[str] | None) -> bool:
    """Return whether a module, which may be the script itself, forms a group.

    If it does, set `framework` and `call`, or `group`, in `script`. `used` contains the names that
    the modules use. A function that forms a group counts only if its name is in `used`. If `used`
    is None, every such function counts.
    """
    modules = {name.partition(".")[0] for name in _imported(tree)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    frameworks = {_TRAINERS[name] for name in modules & _TRAINERS.keys()}
    trainers = [call for call, name in _made(tree) if name.endswith("Trainer") and name not in _LAUNCHERS]
    for call in calls:
        name = _last_name(call.func)
        is_known = name in _FORMS or (name == "initialize" and ast.unparse(call.func) == "deepspeed.initialize")
        if is_known and (used is None or _is_reached(call, tree, used)):
            script.group = name if name in _FORMS else "deepspeed.initialize"
            return True
        framework, packages = _CREATES.get(name, ("", set()))
        if packages & modules:
            script.framework, script.call = framework, call
        elif name == "Trainer" and "composer" in modules:
            script.group = "composer.Trainer"
    is_theirs = any(name.partition(".")[0] in _TRAINERS and name.endswith("Trainer") for name in _imported(tree))
    if trainers and frameworks and (not script.forms_group or (script.framework == "accelerate" and is_theirs)):
        script.framework, script.call = sorted(frameworks, reverse=True)[0], trainers[0]
    if script.framework:
        return True
    if "ddpjob_trainer" in modules:
        script.group = "ddpjob_trainer"
    return bool(script.group)


def _used(tree: ast.Module) -> set[str]:
    """Return the names of functions and other objects that a module reads, or renames on import."""
    nodes = list(ast.walk(tree))
    loads = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load))
    read = {_last_name(node) for node in loads}
    return read | {node.name for node in nodes if isinstance(node, ast.alias) and node.asname}


def _is_reached(call: ast.Call, tree: ast.Module, used: set[str]) -> bool:
    """Return whether a call is outside all functions, or in a function that is used."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _contains(node, call)]
    return not functions or any(node.name in used or node.name.startswith("__") for node in functions)


def _made(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call together with the class of its result.

    The class is the annotation of the variable that is set, the class that has the method
    `from_argparse_args`, or the name of the call itself.
    """
    annotated = {id(node.value): node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            made = annotated.get(id(call), call.func)
            is_method = isinstance(made, ast.Attribute) and made.attr == "from_argparse_args"
            yield call, _last_name(made.value if isinstance(made, ast.Attribute) and is_method else made)


def _find_own_launch(script: TrainingScript, tree: ast.Module) -> Iterator[str]:
    """Yield a message about each line that starts processes, or sets or gets the ranks by itself.

    Such lines override or ignore the values that torchrun sets. They are common in scripts for a
    single machine or for a different launcher. Lines that depend on torchrun's variables are left
    out.

    If a line starts processes, set `starts` in `script`.
    """
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = {name.partition(".")[0]: node.lineno for node in imports for name in _imported(ast.Module([node], []))}
    for package in _OF_MPI:
        if package in needed:
            yield (
                f"{needed[package]}: {package} finds one process only, because torchrun does not start MPI; "
                "take rank and world_size from torch.distributed instead"
            )
    names = list(_variables_read(tree))
    if not any(name in _VARIABLES or (name.startswith("SLURM") and is_test) for name, is_test, _ in names):
        for name, _, line in names:
            if name in _OF_SLURM:
                yield f"{line}: read {_OF_SLURM[name]} instead of {name}, which only Slurm sets"
    choices = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _knows_torchrun(node)]
    chosen = {id(each) for node in choices for each in ast.walk(node)}
    forming = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _calls(node) & {*_FORMS}}
    for node in ast.walk(tree):
        if id(node) in chosen:
            continue
        if isinstance(node, ast.Call) and _starts_processes(node, forming):
            script.starts = True
            yield (
                f"{node.lineno}: {ast.unparse(node.func)} starts processes that ignore the job's ranks; "
                "take rank and world_size from RANK and WORLD_SIZE instead"
            )
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = ast.unparse(node.targets[0])
            if target in _SETTINGS:
                yield f"{node.lineno}: remove the assignment of {target}, because the job sets it"
            elif target == "os.environ['CUDA_VISIBLE_DEVICES']" and str(node.value.value).isdigit():
                yield f"{node.lineno}: remove the assignment of {target}, because each rank needs its own GPU"
        elif isinstance(node, ast.keyword) and node.arg == "init_method":
            text = ast.unparse(node.value)
            if text.lstrip("f").strip("'\"").startswith(_OWN_ADDRESSES):
                yield f"{node.lineno}: remove init_method={text}, because the job sets the address"


def _starts_processes(call: ast.Call, forming: set[str]) -> bool:
    """Return whether a call starts processes that form a group.

    For example, such a call starts processes that run one of the functions `forming`.
    """
    name, arguments = _last_name(call.func), {k.arg: k.value for k in call.keywords}
    if name == "Process" and "target" in arguments:
        return _last_name(arguments["target"]) in forming
    return _LAUNCHERS.get(name, "") in arguments


def _variables_read(tree: ast.Module) -> Iterator[tuple[str, bool, int]]:
    """Yield each environment variable that a module reads or tests, and where it does so.

    A result contains the variable's name, whether the module only tests the variable in a
    comparison, and the line.
    """
    for node in ast.walk(tree):
        name: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = node.slice
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("get", "getenv") and node.args:
            name = node.args[0]
        elif isinstance(node, ast.Compare):
            name = node.left
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, isinstance(node, ast.Compare), name.lineno


def _find_old_option(modules: list[tuple[str, ast.Module]]) -> Iterator[tuple[str, str]]:
    """Yield a module and a message for each --local_rank option that is read instead of LOCAL_RANK.

    Only torch.distributed.launch and `deepspeed` pass this option. Under torchrun, all ranks would
    use its default as their local rank.
    """
    nodes = [(where, node) for where, module in modules for node in ast.walk(module)]
    is_used = any(isinstance(node, ast.Attribute) and node.attr == "local_rank" for _, node in nodes)
    texts = [(where, node) for where, node in nodes if isinstance(node, ast.Constant)]
    if not is_used or any(node.value == "LOCAL_RANK" for _, node in texts):
        return
    for where, node in texts:
        if node.value in ("--local_rank", "--local-rank"):
            default = "default=int(os.environ.get('LOCAL_RANK', -1))"
            yield where, f"{node.lineno}: set {default} for {node.value}, because torchrun does not pass it"


def _knows_torchrun(choice: ast.If) -> bool:
    """Return whether a condition depends on a variable that torchrun sets."""
    return any(isinstance(node, ast.Constant) and node.value in _VARIABLES for node in ast.walk(choice.test))


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# --- a training loop without a framework -------------------------------------------------------


def _find_names(script: TrainingScript, tree: ast.Module, used: set[str]) -> None:
    training = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and trains(node)}
    assigned = list(_assigned(tree))
    optimizers = [one for one in assigned if _is_optimizer(one.call)]
    loaders = [one for one in assigned if _last_name(one.call.func) == "DataLoader"]
    script.trains = bool(optimizers) or trains(tree)
    names = {name for one in optimizers for name in _models(one.call)}
    script.models = sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))
    if len(optimizers) == 1 or _are_alternatives(optimizers, tree):
        script.optimizer = max(optimizers, key=lambda one: one.line)
        script.model = script.models[0] if len(names) == 1 else ""
    if script.optimizer is None or not script.model:
        found = f"{len(optimizers)} optimizers" if len(optimizers) > 1 else "no optimizer for a single model"
        script.doubts.append(f"it has {found}")
    script.loader = _training_loader(loaders, tree, training)
    _check_loader(script, tree, loaders, used)
    if script.optimizer is not None:
        script.scope = _scope(tree, script.optimizer.node)
        after = [node for node in script.scope if node.lineno > script.optimizer.line]
        loops = (loop for node in after for loop in _loops(node) if trains(loop) or _calls(loop) & training)
        script.loop = next(loops, None)
        if script.loop is None:
            script.doubts.append("its optimizer and its training loop are in different functions or loops")
        elif script.loader is not None and not _is_seen(script.loader.node, script.scope, tree):
            script.doubts.append("its optimizer and its DataLoader are in different functions")


def _check_loader(script: TrainingScript, tree: ast.Module, loaders: list[Named], used: set[str]) -> None:
    """Add a doubt unless it is certain that a DataLoader accepts a DistributedSampler."""
    if "DataLoader" not in _calls(tree) and "DataLoader" in used:
        script.doubts.append("its DataLoader is in a different module")
    elif "DataLoader" not in _calls(tree):
        script.is_sampled = False
        script.doubts.append("it has no DataLoader")
    elif any(word in script.text for word in _ITERABLE):
        script.is_sampled = False
        script.doubts.append("its DataLoader may read an IterableDataset, which accepts no sampler")
    elif script.loader is None:
        found = f"it has {len(loaders)} DataLoaders" if loaders else "no variable is set to its DataLoader"
        script.doubts.append(found)
    elif _own_samplers(script.loader.call, tree) - _SAMPLERS:
        script.is_sampled = False
        script.doubts.append("its DataLoader has a sampler of its own")


def _own_samplers(loader: ast.Call, tree: ast.Module) -> set[str]:
    """Return the classes of a DataLoader's sampler; "" stands for an unknown class."""
    given = next((k.value for k in loader.keywords if k.arg in ("sampler", "batch_sampler")), None)
    if given is None or (isinstance(given, ast.Constant) and given.value is None):
        return set()
    made = [one.call for one in _assigned(tree) if one.name == ast.unparse(given)]
    return {_last_name(call.func) for call in made} or {_last_name(given.func) if isinstance(given, ast.Call) else ""}


def _are_alternatives(found: list[Named], tree: ast.Module) -> bool:
    """Return whether the branches of an `if` set one variable to optimizers of one model."""
    return len({(one.name, ast.unparse(one.call.args[0]) if one.call.args else "") for one in found}) == 1 and any(
        isinstance(node, ast.If)
        and all(_contains(node, one.node) for one in found)
        and any(_contains(other, one.node) for other in node.orelse for one in found)
        and any(_contains(other, one.node) for other in node.body for one in found)
        for node in ast.walk(tree)
    )


def trains(node: ast.AST) -> bool:
    """Return whether a part of a script calls `.backward()`."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(func, ast.Attribute) and func.attr == "backward" for func in calls)


def _calls(node: ast.AST) -> set[str]:
    return {_last_name(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}


def _assigned(tree: ast.Module) -> Iterator[Named]:
    """Yield each variable or attribute that is set to the result of a call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name | ast.Attribute):
            yield Named(ast.unparse(targets[0]), node, node.value)


def _is_optimizer(call: ast.Call) -> bool:
    return _last_name(call.func) in _OPTIMIZERS


def _models(call: ast.Call) -> set[str]:
    """Return the names of the models whose parameters the optimizer gets."""
    return {
        ast.unparse(node.func.value)
        for argument in [*call.args[:1], *(k.value for k in call.keywords if k.arg == "params")]
        for node in ast.walk(argument)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
    }  # fmt: skip


def _training_loader(loaders: list[Named], tree: ast.Module, training: set[str]) -> Named | None:
    """Return the DataLoader of the training loop, or None if there is no clear candidate."""
    if len(loaders) == 1:
        return loaders[0]
    walked = {
        ast.unparse(name)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For) and trains(loop)
        for name in ast.walk(loop.iter)
        if isinstance(name, ast.Name | ast.Attribute)
    }
    passed = {
        ast.unparse(name)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _last_name(call.func) in training
        for argument in [*call.args, *(k.value for k in call.keywords)]
        for name in ast.walk(argument)
        if isinstance(name, ast.Name | ast.Attribute)
    }
    for chosen in (
        [one for one in loaders if one.name in walked],
        [one for one in loaders if one.name in passed],
        [one for one in loaders if any(k.arg == "shuffle" and _is_true(k.value) for k in one.call.keywords)],
        [one for one in loaders if "train" in one.name.lower()],
    ):
        if len(chosen) == 1:
            return chosen[0]
    return None


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _scope(tree: ast.Module, wanted: ast.stmt) -> list[ast.stmt]:
    """Return the statements of the innermost function that contains `wanted`.

    If no function contains it, return the statements of the module.
    """
    body = tree.body
    node: ast.AST = tree
    while True:
        inner = next((child for child in _statements(node) if _contains(child, wanted)), None)
        if inner is None or inner is wanted:
            return body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            body = inner.body
        elif isinstance(inner, ast.If) and isinstance(node, ast.Module):
            # The body of an `if` at the top level of the module also counts as a scope. An example
            # is `if __name__ == "__main__":`.
            body = inner.body if any(_contains(each, wanted) for each in inner.body) else body
        node = inner


def _is_seen(wanted: ast.stmt, scope: list[ast.stmt], tree: ast.Module) -> bool:
    """Return whether the statements of `scope` can use a variable that `wanted` sets."""
    return wanted in tree.body or any(_contains(node, wanted) for node in scope)


def _statements(node: ast.AST) -> list[ast.stmt]:
    return [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _loops(node: ast.stmt) -> Iterator[ast.For | ast.While]:
    """Yield the loops in a statement, outermost first. Loops in inner functions are skipped."""
    if isinstance(node, ast.For | ast.While):
        yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from _loops(child)
