"""Write what the tables of docs/troubleshooting.md say of each reason to the file that `ddpjob why` reads.

python docs/generate_remedies.py
"""

from __future__ import annotations

import json
from pathlib import Path

from ddpjob.client.texts.job_text import read_remedies

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
FILE = ROOT / "operator" / "ddpjob" / "client" / "texts" / "remedies.json"


def render(page: str) -> str:
    return json.dumps(read_remedies(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(PAGE.read_text()))
