"""Writes docs/reference.md from the CRD: `python docs/generate_reference.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
CRD = DOCS.parent / "charts" / "ddpjob-operator" / "crds" / "ddpjobs.ddpjob.io.yaml"
PAGE = DOCS / "reference.md"

Schema = dict[str, Any]

_HEAD = """\
# API reference: `{api}`, kind `{kind}`

Generated from `{crd}` by `python docs/generate_reference.py`. Do not edit this page.
`kubectl explain {singular}.spec` shows the same descriptions. `examples/` contains an example of each kind of job.

In the table of `spec`, the column "while it runs" shows whether a field can be changed in a running job. To change a
field that is marked **No**, set `spec.runPolicy.suspend` to true, change the field, and set `spec.runPolicy.suspend` to
false.
"""


def main() -> None:
    """Write docs/reference.md."""
    PAGE.write_text(render(yaml.safe_load(CRD.read_text())))


def render(crd: Schema) -> str:
    """Return the page for a CustomResourceDefinition with one version."""
    [version] = crd["spec"]["versions"]
    names = crd["spec"]["names"]
    root = version["schema"]["openAPIV3Schema"]
    spec, status = root["properties"]["spec"], root["properties"]["status"]
    # Rules of the spec that also read the status are at the CRD's top level, next to the rules of
    # the name.
    top = root["x-kubernetes-validations"]
    of_name = [rule for rule in top if "self.metadata.name" in rule["rule"]]
    of_spec = [rule for rule in top if rule not in of_name]
    spec = {**spec, "x-kubernetes-validations": [*spec["x-kubernetes-validations"], *of_spec]}
    head = _HEAD.format(
        api=f"{crd['spec']['group']}/{version['name']}",
        kind=names["kind"],
        crd=CRD.relative_to(DOCS.parent),
        singular=names["singular"],
    )
    parts = [
        head,
        root["description"].replace("\n", " ") + "\n",
        _columns(version["additionalPrinterColumns"], names["shortNames"][0]),
        "## metadata.name\n\n" + "".join(f"- {_line(rule['message'])}\n" for rule in of_name),
        f"## spec\n\n{_text(spec)}\n",
        *_sections("spec", spec, 3, _fixed_while_running(spec)),
        f"## status\n\n{_text(status)}\n",
        *_sections("status", status, 3, None),
    ]
    return "\n".join(parts)


def _columns(columns: list[Schema], short: str) -> str:
    rows = ["| column | shows | only with `-o wide` |", "| --- | --- | --- |"]
    for column in columns:
        shown = column.get("description") or f"`{column['jsonPath']}`"
        rows.append(f"| {column['name']} | {_line(shown)} | {'yes' if column.get('priority') else ''} |")
    return f"## `kubectl get {short}`\n\n" + "\n".join(rows) + "\n"


def _fixed_while_running(spec: Schema) -> frozenset[str]:
    """Return the fields that a transition rule protects from changes unless the job is
    suspended.
    """
    rules = (rule for rule in spec["x-kubernetes-validations"] if "oldSelf." in rule["rule"])
    return frozenset(rule["fieldPath"].removeprefix(".") for rule in rules)


def _sections(path: str, schema: Schema, level: int, fixed: frozenset[str] | None) -> Iterator[str]:
    """Yield a table of an object's fields, then a section for each field that has its own
    fields.
    """
    table = _table(schema, fixed)
    yield table + "".join(f"\n- {_line(rule['message'])}" for rule in _own_rules(schema)) + "\n"
    for name, field in schema["properties"].items():
        inner, suffix = _inner(field)
        if inner is None:
            continue
        yield f"{'#' * min(level, 6)} {path}.{name}{suffix}\n\n{_text(field)}\n"
        yield from _sections(f"{path}.{name}{suffix}", inner, level + 1, None)


def _table(schema: Schema, fixed: frozenset[str] | None) -> str:
    columns = ["field", "type", "default", "meaning"] + (["while it runs"] if fixed is not None else [])
    rows = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for name, field in schema["properties"].items():
        required = " **required**" if name in schema.get("required", ()) else ""
        cells = [f"`{name}`{required}", _type(field), _default(field), _cell(_meaning(field))]
        if fixed is not None:
            cells.append("**No**" if name in fixed else "yes")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _meaning(field: Schema) -> str:
    """Return the description, range and rules of a field. Objects with their own section list their
    rules there.
    """
    words = [_text(field)]
    if "minimum" in field or "maximum" in field:
        words.append(f"From {field.get('minimum', '…')} to {field.get('maximum', '…')}.")
    inner, _ = _inner(field)
    if inner is None:
        rules = [*_own_rules(field), *_own_rules(field.get("items", {}))]
        words += [f"Rule: {_line(rule['message'])}." for rule in rules]
    return " ".join(word for word in words if word)


def _own_rules(schema: Schema) -> list[Schema]:
    return [rule for rule in schema.get("x-kubernetes-validations", ()) if "oldSelf." not in rule["rule"]]


def _inner(field: Schema) -> tuple[Schema | None, str]:
    """Return the schema whose fields get their own section, and the suffix of its path."""
    if field.get("properties"):
        return field, ""
    items = field.get("items") or {}
    return (items, "[]") if items.get("properties") else (None, "")


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "object"
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "object" and "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    return str(field.get("format") if field.get("format") == "date-time" else field["type"])


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default in (None, {}) else f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _text(schema: Schema) -> str:
    """Return the description without a final "Default: ..." sentence, because defaults have a
    column.
    """
    text = _line(schema.get("description", ""))
    return re.sub(r" Default: [^.:]*\.$", "", text) if "default" in schema else text


def _line(text: str) -> str:
    return " ".join(text.split()).replace("*", r"\*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
