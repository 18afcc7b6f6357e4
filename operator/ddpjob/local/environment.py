"""Derives a container's environment, command and arguments as the kubelet does.

The container's variables are added to this shell's environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpjob.api.job_spec import Json

ADDRESS = "127.0.0.1"
HOST = "local"

_NOT_INHERITED = re.compile(
    r"(DDPJOB_|PET_|TORCHELASTIC_|ROLE_).*|POD_IP|NODE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE"
)
_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` with the variable's value and `$$` with a dollar sign.

    An unknown `$(NAME)` stays as it is.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else variables.get(name, match.group(0))

    return _REFERENCE.sub(value, text)


def field_value(pod: Json, path: str) -> str | None:
    """Return the value of a pod field, for a variable that refers to it (downward API).

    Return None if pods on this machine do not have this field.
    """
    meta, spec = pod["metadata"], pod["spec"]
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str(meta.get(keyed[1], {}).get(keyed[2], ""))
    known = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta.get("uid", ""),
        "spec.nodeName": HOST,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": ADDRESS,
        "status.podIPs": ADDRESS,
        "status.hostIP": ADDRESS,
        "status.hostIPs": ADDRESS,
    }
    return known.get(path)


def manifest_variables(pod: Json, container: Json) -> dict[str, str]:
    """Return the variables of a container's `env`.

    A variable that refers to a Secret or ConfigMap gets the value of this shell's variable with the
    same name. If the shell has no such variable, the container does not get one either. The names
    of credentials for the data and code buckets have a prefix in the container, but not in the
    shell.
    """
    variables: dict[str, str] = {}
    for entry in container.get("env", ()):
        name, source = entry["name"], entry.get("valueFrom")
        if source is None:
            variables[name] = expand(str(entry.get("value") or ""), variables)
            continue
        path = source.get("fieldRef", {}).get("fieldPath")
        value = field_value(pod, path) if path else os.environ.get(re.sub("^DDPJOB_(DATA|CODE)_", "", name))
        if value is not None:
            variables[name] = value
    return variables


def inherited(cores_per_rank: int) -> dict[str, str]:
    """Return this shell's environment, adapted to one machine.

    Variables that belong to another job or to torchrun are removed. Variables are added that keep
    the traffic between ranks on loopback and limit the threads of each rank. The folder that
    contains this interpreter is added to PATH, so that its torchrun and python are found.
    """
    environment = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    beside = str(Path(sys.executable).parent)
    if beside not in environment.get("PATH", "").split(os.pathsep):
        environment["PATH"] = os.pathsep.join(filter(None, (beside, environment.get("PATH", os.defpath))))
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",  # torch.distributed.rpc
        # All ranks share this machine's cores, but each would use all of them by default.
        "OMP_NUM_THREADS": str(cores_per_rank),
    }
    return defaults | environment


def argument_vector(container: Json, variables: Mapping[str, str]) -> list[str]:
    """Return the container's command and arguments, with each `$(NAME)` replaced."""
    words: Sequence[str] = [*container["command"], *container.get("args", ())]
    return [expand(word, variables) for word in words]
