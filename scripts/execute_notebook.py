"""Executes examples/notebook.ipynb with Jupyter's kernel and saves its outputs.

    pip install nbclient ipykernel
    python scripts/execute_notebook.py

Paths of this machine are shortened to file names. If carriage returns overwrote a line, only its
last state is kept, as Jupyter shows it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
_PATH = re.compile(r"(?<![\w.<:])(?:/[\w.+-]+)+/([\w.+-]+)")


def neutral(output: dict[str, Any]) -> dict[str, Any]:
    """Return an output without the parts that differ between machines."""
    text = re.sub(r"[^\n]*\r(?!\n)", "", output.get("text", ""))
    data = output.get("data", {})
    html = data.get("text/html", "")
    output = {name: value for name, value in output.items() if name != "metadata" or value}
    if "text" in output:
        output["text"] = lines(_PATH.sub(r"\1", text))
    if "traceback" in output:
        output["traceback"] = [_PATH.sub(r"\1", line) for line in output["traceback"]]
        output["evalue"] = _PATH.sub(r"\1", output["evalue"])
    if data:
        kept = {"text/html": lines(html)} if html else {}
        output["data"] = {**kept, "text/plain": lines(_PATH.sub(r"\1", data.get("text/plain", "")))}
        output["metadata"] = {}
    return output


def lines(text: str) -> list[str]:
    """Return the text as notebooks store it."""
    return text.splitlines(keepends=True)


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive pieces of a stream, which arrive at random boundaries."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if found and output["output_type"] == "stream" and found[-1].get("name") == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(dict(output))
    return found


def main() -> None:
    """Execute each cell in order, and write the notebook back."""
    import nbclient
    import nbformat

    saved = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPJOB_RUNS"] = str(Path(folder) / "runs")
        ran = nbformat.reads(json.dumps(saved), as_version=4)
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(ran, timeout=600, kernel_name="python3", resources=resources).execute()
    number = 0
    for cell, made in zip(saved["cells"], ran.cells, strict=True):
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = [neutral(output) for output in joined(made.outputs)]
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = number
    NOTEBOOK.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
