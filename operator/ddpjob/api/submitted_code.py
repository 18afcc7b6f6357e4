"""The volume mount for the user's code, which `ddpjob submit` and `Client.train` add to
podTemplate.

Users do not write this mount, so even a class that fixes podTemplate allows the mount. The mount
only adds files from a ConfigMap in the job's own namespace, at one path. A mount does not count as
submitted code if it has a different form, or if the class's own template already uses the same name
or path.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ddpjob.api.schema import Json

CODE_FOLDER, CODE_VOLUME = "/ddpjob-code", "code"
_MOUNT = {"name": CODE_VOLUME, "mountPath": CODE_FOLDER, "readOnly": True}


def mount_code(config_map: str, items: list[Json]) -> tuple[Json, Json]:
    """Return the volume that contains the code, and its mount in the trainer's container."""
    return {"name": CODE_VOLUME, "configMap": {"name": config_map, "items": items}}, dict(_MOUNT)


def split_code(template: Any, given: Any = None) -> tuple[Json, Any]:
    """Split a podTemplate into the part that mounts the submitted code, and the rest.

    `given` is the podTemplate of the job's class. The first part is empty if the template does not
    mount submitted code, or if `given` already uses the same volume name or mount path.
    """
    volumes = [v for v in _entries(template, "volumes") if _is_code(v)]
    trainer = next((c for c in _entries(template, "containers") if c.get("name") == "trainer"), {})
    mounts = [m for m in _list(trainer, "volumeMounts") if m == _MOUNT]
    if len(volumes) != 1 or len(mounts) != 1 or _is_used(given):
        return {}, template
    code = {"spec": {"volumes": volumes, "containers": [{"name": "trainer", "volumeMounts": mounts}]}}
    rest = deepcopy(dict(template))
    pod = rest["spec"]
    pod["volumes"] = [v for v in pod["volumes"] if v not in volumes]
    for container in pod["containers"]:
        if container == trainer:
            container["volumeMounts"] = [m for m in container["volumeMounts"] if m != _MOUNT]
            if container.keys() <= {"name", "volumeMounts"} and not container["volumeMounts"]:
                container.clear()
    pod["containers"] = [c for c in pod["containers"] if c]
    rest["spec"] = {name: value for name, value in pod.items() if value not in ([], None)}
    return code, rest


def _is_code(volume: Any) -> bool:
    source = volume.get("configMap")
    named = volume.keys() == {"name", "configMap"} and volume["name"] == CODE_VOLUME
    return named and isinstance(source, Mapping) and source.keys() <= {"name", "items"}


def _is_used(template: Any) -> bool:
    mounts = (m for c in _entries(template, "containers") for m in _list(c, "volumeMounts"))
    taken = any(str(m.get("mountPath", "")).rstrip("/") == CODE_FOLDER for m in mounts)
    return taken or any(v.get("name") == CODE_VOLUME for v in _entries(template, "volumes"))


def _entries(template: Any, field: str) -> list[Json]:
    return _list(template.get("spec") if isinstance(template, Mapping) else None, field)


def _list(parent: Any, field: str) -> list[Json]:
    """Return the objects in one of a template's lists.

    Users can write anything, so items that are not objects are ignored, and so is a value that is
    not a list.
    """
    found = parent.get(field) if isinstance(parent, Mapping) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
