"""Packages the chart for a release: python scripts/package_chart.py DIGEST FOLDER

DIGEST (`sha256:` and 64 digits) identifies the release's operator image. It becomes the default of
image.digest, so the chart always runs this image, even if the image's tag is moved later. Needs
helm on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHART = Path(__file__).resolve().parent.parent / "charts" / "ddpjob-operator"
UNSET = '\n  digest: ""\n'
"""The line of image.digest in values.yaml."""


def package(digest: str, folder: Path) -> None:
    """Write the chart's archive into `folder`. Raises SystemExit if the digest is invalid."""
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise SystemExit(f"DIGEST={digest}: not the digest of an image; write sha256: and 64 hexadecimal digits")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(CHART, Path(temporary) / CHART.name))
        values = (copy / "values.yaml").read_text()
        (copy / "values.yaml").write_text(values.replace(UNSET, f"\n  digest: {digest}\n"))
        subprocess.run(["helm", "lint", "--strict", str(copy)], check=True)
        subprocess.run(["helm", "package", str(copy), "--destination", str(folder)], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    package(sys.argv[1], Path(sys.argv[2]))
