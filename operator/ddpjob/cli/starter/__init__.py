"""The `ddpjob init` command, which writes a manifest and a script, or checks an existing script and
gives advice.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from string import Template

import yaml

from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.manifest_sources import check_made
from ddpjob.client.manifests.read_script import UnreadableScript, read_script
from ddpjob.client.texts.ddp_lines import TUTORIAL, advice, general_form

_MANIFEST = Path("job.yaml")
_PLAIN = re.compile(r"[A-Za-z][-\w./:@]*\w")


def write_starter(script: Path, *, name: str, image: str, nodes: int, gpus: int) -> Iterator[str]:
    """Write job.yaml and, if the script does not exist yet, the script. Yield the lines to print.

    If job.yaml already exists, or if the API server would refuse the job, raise Mistake and write
    nothing.
    """
    _check_suffix(script)
    if script.is_absolute() or ".." in script.parts:
        raise Mistake(
            f"{script}: must be in the current folder or below, because on a cluster the path is relative to the "
            "image's working folder"
        )
    values = {"name": name, "image": image, "script": script.as_posix()}
    text = Template(_file(_MANIFEST.name)).substitute(
        {key: _scalar(value) for key, value in values.items()}, nodes=nodes, gpus=gpus
    )
    check_made(yaml.safe_load(text))
    try:
        _create(_MANIFEST, text)
    except FileExistsError:
        only = f"; to only check the script, run `ddpjob init {script} --check`" if script.is_file() else ""
        raise Mistake(f"{_MANIFEST} already exists; remove it, or change to a different folder{only}") from None
    except OSError as error:
        raise Mistake(f"{_MANIFEST}: {error.strerror}") from error
    written = [str(_MANIFEST)]
    is_theirs = script.exists()
    others = [path.name for path in script.parent.glob("*.py")]
    if not is_theirs:
        try:
            script.parent.mkdir(parents=True, exist_ok=True)
            _create(script, _file("train.py"))
        except OSError as error:
            raise Mistake(f"{script}: {error.strerror}; {_MANIFEST} was written") from error
        written.append(str(script))
    yield f"written: {' and '.join(written)}"
    yield f"on this machine:  ddpjob run {_MANIFEST}"
    words = ["--image", image, "--nodes", str(nodes), "--gpus", str(gpus), str(script)]
    yield f"on a cluster:     ddpjob submit {shlex.join(words)}"
    if is_theirs:
        yield ""
        yield from check_script(script)[1]
    elif near := difflib.get_close_matches(script.name, others, n=1, cutoff=0.8):
        yield f"{script} did not exist. If you meant {near[0]}, set spec.script to it in {_MANIFEST}."


def check_script(script: Path) -> tuple[bool, list[str]]:
    """Return whether the script's ranks form a group, and lines of advice to print.

    The script is read but not executed. Raises Mistake if the script cannot be opened.
    """
    _check_suffix(script)
    try:
        read = read_script(script)
    except UnreadableScript as unreadable:
        general = [f"{unreadable}. If the ranks do not form a group, add these lines ({TUTORIAL}):", *general_form()]
        return False, general
    except OSError as error:
        raise Mistake(f"{script}: {error.strerror}") from error
    return read.forms_group, list(advice(read, script))


def _check_suffix(script: Path) -> None:
    """Raise Mistake unless the script's name ends in .py.

    Checking the content is not enough, because even a notebook may be valid Python.
    """
    if script.suffix != ".py":
        raise Mistake(f"{script}: the script's name must end in .py")


def _create(path: Path, text: str) -> None:
    """Create a file with this text, or no file at all.

    If the disk is full, the incomplete file is removed, so that the next attempt does not find it.
    Raises OSError.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _file(name: str) -> str:
    """Return the text of a template file in this package.

    The names of these files end in `-tpl`, so that linters and importers do not take them for
    modules.
    """
    return resources.files(__name__).joinpath(f"{name}-tpl").read_text(encoding="utf-8")


def _scalar(text: str) -> str:
    """Return the text in a form that YAML reads as a string.

    The text is quoted as in JSON if YAML could read it as a value of a different type.
    """
    plain = _PLAIN.fullmatch(text) and isinstance(yaml.safe_load(text), str)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
