"""Writes docs/cli.md from the help of the commands: `python docs/generate_cli.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
from ddpjob.cli.main import root
from ddpjob.cli.root import PLACES

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# The command line

<!-- Made from `ddpjob COMMAND --help` by `python docs/generate_cli.py`; do not edit. -->

"""
AFTER = """
`NO_COLOR` is honoured. `ddpjob COMMAND --help` prints the same text as this page.
"""
_PLACE = ("namespace", "context", "kubeconfig", "local")


def _prose(text: str) -> str:
    """Return the paragraphs of a help text. Paragraphs that click does not rewrap become code
    blocks.
    """
    parts = []
    for part in re.split(r"\n\n+", inspect.cleandoc(text)):
        if part.startswith("\b"):
            parts.append("```\n" + part.removeprefix("\b").strip("\n") + "\n```")
        else:
            parts.append(part)
    return "\n\n".join(parts)


def _options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.name in _PLACE:
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        kind = parameter.type
        value = "|".join(kind.choices) if isinstance(kind, click.Choice) else parameter.metavar or kind.name.upper()
        shown = "" if parameter.is_flag else f" `{value}`"
        default = f" Default: {parameter.default}." if parameter.show_default else ""
        cells = f"{names}{shown}", f"{parameter.help or ''}{default}"
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render() -> str:
    """Return the whole page."""
    context = click.Context(root, info_name="ddpjob")
    sections = [
        HEAD + _prose(root.help or "") + "\n\n" + PLACES + "\n" + AFTER,
        "## Where: cluster or this machine\n\n| option | |\n| --- | --- |",
    ]
    somewhere = root.commands["get"]
    for parameter in somewhere.params:
        if isinstance(parameter, click.Option) and parameter.name in _PLACE:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            sections[-1] += f"\n| {names} | {parameter.help} |"
    for name in root.list_commands(context):
        command = root.commands[name]
        usage = " ".join(command.collect_usage_pieces(click.Context(command, context, name)))
        section = f"## {name}\n\n`ddpjob {name} {usage}`\n\n{_prose(command.help or '')}"
        options = list(_options(command))
        if options:
            section += "\n\n| option | |\n| --- | --- |\n" + "\n".join(options)
        if any(parameter.name == "namespace" for parameter in command.params):
            section += "\n\nThe options in [Where](#where-cluster-or-this-machine) also apply."
        sections.append(section)
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
