"""The files that run inside job pods. They are shipped as text and run by path: never import them as a package there."""

from pathlib import Path

MOUNT_PATH = "/opt/ddpjob"


def read_podfiles() -> dict[str, str]:
    """File name -> source text of every pod file, for a ConfigMap or a folder of the process backend."""
    return {path.name: path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")) if path.name != "__init__.py"}
