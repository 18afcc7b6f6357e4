"""A real Prometheus and promtool, either those on PATH or Debian's package, which is unpacked once
per machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from debian_packages import unpacked
from machine import free_port

PROGRAMS = ("prometheus", "promtool")


def prometheus_programs() -> Path:
    """Return the folder of both programs. Skips the test if neither is available; with CI=true, the
    test fails instead.
    """
    found = [shutil.which(name) for name in PROGRAMS]
    if all(found):
        return Path(str(found[0])).parent
    return unpacked("prometheus") / "usr" / "bin"


class PrometheusServer:
    """A server with its configuration, log and data in a folder, on a loopback port.

    `configuration` is the content of prometheus.yaml. A new server in the same folder continues
    with the existing data.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        command = [
            str(prometheus_programs() / "prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def ask(self, path: str, **query: str) -> Any:
        """Return the `data` in the API's response. Raises OSError while the server does not listen,
        and if it refuses the query.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def stop(self) -> None:
        """Stop the server, with its data complete on disk."""
        self.process.terminate()
        self.process.wait()
