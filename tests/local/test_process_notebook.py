"""The notebook in examples/ runs cell by cell as in IPython, and its saved outputs match its cells.

There is no Jupyter kernel, which would need five more packages for one test. A cell only needs the
source of its functions, which is an entry in linecache, as in IPython. scripts/execute_notebook.py
runs a real kernel.
"""

from __future__ import annotations

import json
import linecache
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ddpjob import Client, Mistake

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text())["cells"])


def printed(output: dict[str, Any]) -> str:
    """Return the visible text of an output."""
    data = output.get("data", {})
    return "".join((*output.get("text", ""), *data.get("text/html", ""), *data.get("text/plain", "")))


def test_jupyter_can_open_the_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and set(notebook["metadata"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source", *more}


def test_the_notebook_has_outputs_without_traces_of_the_machine_that_made_them() -> None:
    """scripts/execute_notebook.py wrote the outputs."""
    made = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in made] == list(range(1, len(made) + 1))
    seen = {cell["id"]: "".join(map(printed, cell["outputs"])) for cell in made}
    assert "<polyline" in seen["plot"] and "stroke-dasharray" in seen["plot"], (
        "the curve with its restarts must be in the outputs"
    )
    assert ">Complete</b>" in seen["job"] and "<table>" in seen["train"]
    assert seen["wait"].startswith("sine  Complete") and seen["wait"].count("\n") == 1
    assert not re.search(r"/(?:tmp|home|root|work|usr)/", NOTEBOOK.read_text())
    (refused,) = next(cell for cell in made if cell["id"] == "refused")["outputs"]
    assert len(refused["traceback"]) == 1
    body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "sine"}}
    with pytest.raises(Mistake) as now:
        Client("local").validate({**body, "spec": {"image": "local", "module": "m", "nods": 2}})
    assert refused["evalue"] == str(now.value), "the message has changed; run: python scripts/execute_notebook.py"


@pytest.mark.slow
def test_the_outputs_of_the_notebook_show_a_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    try:
        for number, cell in enumerate(cells()):
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                name = f"<cell {number}>"
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
                fails = "raises-exception" in cell["metadata"].get("tags", ())
                with pytest.raises(Mistake) if fails else nullcontext():
                    exec(compile(text, name, "exec", dont_inherit=True), names)
    finally:
        for left in Client("local").list():
            Client("local").delete(left)
    job, victim = names["job"], names["victim"]
    assert job.phase == "Complete" and Client("local").list() == ()
    restarts = [(restart.pod, restart.reason, restart.counted) for restart in names["seen"].status.restarts.recent]
    assert restarts == [(victim.name, "Deleted", False)]
    assert names["curve"].label.endswith(" to 400, on a logarithmic scale")
    assert "stroke-dasharray" in names["curve"]._repr_svg_()
