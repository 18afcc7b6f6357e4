"""Turns a Python function into a script that a job can run.

The script contains the function's source, and calls the function with the arguments from JSON. If
there are `packages`, the script installs them before the call (see packages_in_pod).
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import json
import re
import symtable
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests import packages_in_pod
from ddpjob.client.manifests.build_manifest import SOURCE

_ALONE = "Only the function itself is sent"
_OF_NOTEBOOKS = {"display", "get_ipython", "__IPYTHON__", "_", "dreload"}
"""Names that IPython adds to a notebook's builtins. These names do not exist in a job's pods.
Notebook lines that begin with ! or % become calls to get_ipython."""


MOST_PACKAGES, MOST_OF_A_REQUIREMENT = 50, 200
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"(?:===|==|~=|!=|<=|>=|<|>) ?[A-Za-z0-9.*+!_-]+"
_REQUIREMENT = re.compile(rf"{_NAME}(?:\[{_NAME}(?: ?, ?{_NAME})*\])? ?(?:{_VERSION}(?: ?, ?{_VERSION})*)?")
"""Matches the name of a package, optionally followed by extras and versions. Addresses, paths and
pip's options do not match."""


def script_of(function: Callable[..., Any], args: Mapping[str, Any], packages: Sequence[str] = ()) -> str:
    """Return a script that installs `packages` and calls the function.

    Raises Mistake if the function needs anything besides its source, `args` and `packages`.
    """
    name = _checked_name(function)
    before = _installation(packages)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise Mistake(
            f"{name}: its source cannot be read, because it was typed at the Python prompt or created by exec; write "
            "it into a file or a notebook cell"
        ) from error
    if source[:1].isspace():
        # Put an indented function under `if True:`. Dedenting it would also change the content of
        # its multi-line strings.
        source = f"if True:\n{source}"
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        source = f"from __future__ import annotations\n{source}"
    _check_source(function, source)
    call = f"{name}(**_json.loads({_arguments(function, args)!r}))"
    return f'{source.rstrip()}\n\n\nif __name__ == "__main__":\n    import json as _json\n\n{before}    {call}\n'


def _installation(packages: Sequence[str]) -> str:
    """Return the lines of the script that install packages. Raises Mistake."""
    if isinstance(packages, str) or len(packages) > MOST_PACKAGES:
        raise Mistake(f"packages: must be a list of at most {MOST_PACKAGES} requirements, such as ['einops>=0.8']")
    for wrong in packages:
        if not isinstance(wrong, str) or len(wrong) > MOST_OF_A_REQUIREMENT or not _REQUIREMENT.fullmatch(wrong):
            raise Mistake(
                f"packages: {str(wrong)[:MOST_OF_A_REQUIREMENT]!r} is not a valid requirement; write a package name, "
                "optionally with versions, such as 'timm[x]>=1.0,<2'. For other sources, build an image"
            )
    if not packages:
        return ""
    code = Path(packages_in_pod.__file__).read_text(encoding="utf-8")
    # Run the installer in a namespace of its own, so that it cannot overwrite names that the
    # function uses.
    within = {"__name__": "packages_in_pod"}
    return (
        f"    _within = {within!r}\n    exec(compile({code!r}, 'packages_in_pod.py', 'exec'), _within)\n"
        f"    _within['install_packages']({list(packages)!r}, __file__)\n"
    )


def _checked_name(function: Callable[..., Any]) -> str:
    """Return the name of a plain function. Raises Mistake for anything else."""
    name = getattr(function, "__qualname__", "") or repr(function)
    if inspect.ismethod(function) or (inspect.isfunction(function) and _in_class(function.__qualname__)):
        raise Mistake(
            f"{name}: a method needs its class; write a function that creates the object and calls the method"
        )
    if not inspect.isfunction(function):
        raise Mistake(f"{name}: not a function written with def; write a function that calls it")
    if hasattr(function, "__wrapped__"):
        raise Mistake(f"{name}: decorators are not copied to the job; pass the function without its decorator")
    if function.__name__ == "<lambda>":
        raise Mistake("a lambda has no source of its own; write a function with def")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise Mistake(
            f"{name}: calling a coroutine or generator function does not run it; pass a plain function that runs it"
        )
    if inspect.isasyncgenfunction(function):
        raise Mistake(
            f"{name}: calling an asynchronous generator function does not run it; pass a plain function that runs it"
        )
    return function.__name__


def _in_class(qualified: str) -> bool:
    outside = qualified.rpartition(".")[0]
    return bool(outside) and not outside.endswith("<locals>")


def _check_source(function: Callable[..., Any], source: str) -> None:
    """Check that the source defines the function and every name that it uses. Raises Mistake."""
    name = function.__name__
    _check_used(name, {*function.__code__.co_freevars} - {name})
    try:
        nodes = list(ast.walk(ast.parse(source)))
        top = symtable.symtable(source, SOURCE, "exec")
    except SyntaxError as error:
        why = f"{error.msg}; the file may have changed since it was imported; import it again"
        raise Mistake(f"{name}: its source cannot be read: {why}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes):
        raise Mistake(f"{name}: its source does not define a function with this name; define the function with def")
    within = [symbol for table in _below(top) for symbol in table.get_symbols()]
    known = {*vars(builtins), "__file__", "__name__", name} - _OF_NOTEBOOKS
    changed = _changed(nodes)
    known |= {
        symbol.get_name()
        for symbol in within
        if symbol.is_declared_global()
        and (symbol.is_imported() or (symbol.is_assigned() and symbol.get_name() not in changed))
    }
    around = sorted({symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()} - known)
    if around:
        raise Mistake(
            f"{name}: its decorators, defaults or annotations use {', '.join(around)}, defined outside the "
            f"function. {_ALONE}, so leave them out, write annotations in quotes, and pass values in args"
        )
    used = {symbol.get_name() for symbol in within if symbol.is_global() and symbol.is_referenced()}
    used |= {symbol.get_name() for symbol in within if symbol.is_global()} & changed
    _check_used(name, used - known)


def _check_used(name: str, outside: set[str]) -> None:
    if outside:
        raise Mistake(
            f"{name} uses {', '.join(sorted(outside))}, defined outside the function. {_ALONE}, so import or "
            "define these names within the function, or pass their values in args"
        )


def _changed(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that are assigned only by statements such as `n += 1`.

    Such a statement needs a value from an earlier assignment, so it does not define the name.
    """
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    changed = {node.target for node in nodes if isinstance(node, ast.AugAssign)}
    return {name.id for name in names if name in changed} - {name.id for name in names if name not in changed}


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield all scopes within a scope, at any depth."""
    for child in table.get_children():
        yield child
        yield from _below(child)


def _arguments(function: Callable[..., Any], args: Mapping[str, Any]) -> str:
    """Return the keyword arguments as JSON. Raises Mistake."""
    name = function.__name__
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise Mistake(f"{name}: {error}; args must be its keyword arguments, such as {{'epochs': 3}}") from error
    for key, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise Mistake(f"{name}: the argument {key} cannot be written as JSON: {error}") from error
        if others := [*_other_keys(value)]:
            raise Mistake(
                f"{name}: the argument {key} has the key {others[0]!r}, but JSON keys must be strings; "
                "pass a list of pairs, or convert the keys in the function"
            )
    return json.dumps(dict(args))


def _other_keys(value: Any) -> Iterator[object]:
    """Yield every key that is not a string in the mappings in `value`, at any depth.

    json.dumps would turn such a key into a string, which could be equal to another key.
    """
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
        value = list(value.values())
    for below in value if isinstance(value, list | tuple) else ():
        yield from _other_keys(below)
