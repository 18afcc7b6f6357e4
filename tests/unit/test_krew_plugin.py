"""The krew plugin: its manifest refers to the built archive, and its script runs `ddpjob` for
clusters.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "krew_plugin.py"))
URL = "https://github.com/me/ddpjob/releases/download/v9.8.7"


def krew_refuses(plugin: Any, unpacked: Path) -> Iterator[str]:
    """Return the faults that krew (internal/index/validation) and its index
    (validate-krew-manifest, naming guide) would reject.
    """
    spec, name = plugin["spec"], plugin["metadata"]["name"]
    if (plugin["apiVersion"], plugin["kind"]) != ("krew.googlecontainertools.github.com/v1alpha2", "Plugin"):
        yield "apiVersion and kind"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or name.startswith(("kubectl", "kube-")):
        yield "metadata.name: lower case, words joined by -, without kubectl"
    if not re.fullmatch(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?", spec["version"]):
        yield "spec.version: a semantic version with v"
    if not 0 < len(spec["shortDescription"]) <= 50 or "\n" in spec["shortDescription"]:
        yield "spec.shortDescription: one line of at most 50 characters"
    if not spec["description"] or not spec["homepage"].startswith("https://"):
        yield "spec.description and spec.homepage"
    known = {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    if not set(spec) <= known or not spec["platforms"]:
        yield "spec: an unknown field, or no platform"
    chosen = []
    for platform in spec["platforms"]:
        if set(platform) != {"selector", "uri", "sha256", "bin", "files"} or not platform["uri"].startswith("https://"):
            yield "spec.platforms: fields"
        if not re.fullmatch(r"[a-f0-9]{64}", platform["sha256"]):
            yield "spec.platforms.sha256"
        for file in platform["files"]:
            if not file["from"] or not file["to"] or ".." in file["to"] or file["to"].startswith("/"):
                yield "spec.platforms.files"
        binary = unpacked / platform["bin"]
        if (
            not binary.is_file()
            or not os.access(binary, os.X_OK)
            or not any("LICENSE" in f.name for f in unpacked.iterdir())
        ):
            yield "spec.platforms.bin: an executable file of the archive, which also holds the licence"
        for expression in platform["selector"]["matchExpressions"]:
            if expression["key"] not in ("os", "arch") or expression["operator"] != "In":
                yield "spec.platforms.selector"
            chosen += expression["values"]
    if len(chosen) != len(set(chosen)) or not set(chosen) <= {"linux", "darwin", "windows"}:
        yield "spec.platforms.selector: two platforms for one system, or an unknown one"


def test_the_plugin_of_a_release_is_valid(tmp_path: Path) -> None:
    SCRIPT["main"]("v9.8.7", URL, str(tmp_path))
    packed = (tmp_path / "kubectl-ddp.tar.gz").read_bytes()
    spec = yaml.safe_load((tmp_path / "ddp.yaml").read_text())["spec"]
    [platform] = spec["platforms"]
    assert spec["version"] == "v9.8.7" and spec["homepage"] == "https://github.com/me/ddpjob"
    assert platform["uri"] == f"{URL}/kubectl-ddp.tar.gz"
    assert platform["sha256"] == hashlib.sha256(packed).hexdigest()
    assert packed == SCRIPT["archive"]("9.8.7"), "each build produces the same bytes"
    with tarfile.open(tmp_path / "kubectl-ddp.tar.gz") as tar:
        assert {file["from"] for file in platform["files"]} == set(tar.getnames())
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # needs Python 3.11.4 or later
        tar.extractall(tmp_path)

    made = (tmp_path / "ddp.yaml").read_text()
    assert list(krew_refuses(yaml.safe_load(made), tmp_path)) == []
    defects = {"v9.8.7\n": "9.8.7\n", "name: ddp": "name: kubectl-ddp", "bin: kubectl-ddp": "bin: ddp",
               "linux": "Linux", "Submit, ": "Submit, validate, explain, ", "key: os": "key: distribution"}  # fmt: skip
    for right, wrong in defects.items():
        assert list(krew_refuses(yaml.safe_load(made.replace(right, wrong)), tmp_path)), wrong

    other = tmp_path / "bin"
    other.mkdir()
    launcher = tmp_path / "kubectl-ddp"
    missing = subprocess.run([launcher, "get"], env={"PATH": str(other)}, capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "ddpjob[cli]==9.8.7" in missing.stderr
    (other / "ddpjob").write_text('#!/bin/sh\necho "$DDPJOB_PLACE $*"\n')
    (other / "ddpjob").chmod(0o755)
    ran = subprocess.run([launcher, "get", "-A"], env={"PATH": str(other)}, capture_output=True, text=True, check=False)
    assert ran.stdout == "cluster get -A\n"
