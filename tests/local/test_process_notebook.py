"""The notebook in examples/: each cell runs as in IPython.

There is no Jupyter kernel, which would need five more packages for one test. A cell only needs the
source of its
functions, which is an entry in linecache, as in IPython.
"""

from __future__ import annotations

import json
import linecache
import os
from pathlib import Path
from typing import Any

import pytest
from ddpjob import Client

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_jupyter_can_open_the_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and set(notebook["metadata"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source", *more}
        assert not cell.get("outputs") and cell.get("execution_count") is None, "clear the outputs before a commit"


def test_the_notebook_shows_a_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    cells: dict[str, Any] = {"__name__": "notebook"}
    try:
        for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                name = f"<cell {number}>"
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
                exec(compile(text, name, "exec", dont_inherit=True), cells)
    finally:
        for left in Client("local").list():
            Client("local").delete(left)
    seen, victim = cells["seen"], cells["victim"]
    assert seen.phase == "Running" and Client("local").list() == ()
    assert [(restart.pod, restart.reason, restart.counted) for restart in seen.status.restarts.recent] == [
        (victim.name, "Deleted", False)
    ]
    before, after = cells["curves"].values()
    assert before[-1][0] < after[0][0] and after[-1][1] < before[0][1] / 5
    assert len(cells["axes"].lines) == 2 and len(cells["axes"].patches) == 1
    if folder := os.environ.get("DDPJOB_TEST_PICTURES"):
        cells["figure"].savefig(Path(folder) / "notebook.png")
