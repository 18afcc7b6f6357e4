"""DDPJobs generated from the CRD's schema: valid ones, some at the limits, and invalid ones. Pod
templates and statuses may have any content.

The same number generates the same object in every Python version. A failing test prints the number,
and `Maker(number)` generates the object again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from ddpjob.api.schema import schema_of
from kubernetes.client import models

Json = dict[str, Any]

TEXTS = (
    *("", " ", "a", "train.py", "my.module", "job", "n1", "x-1", "-1", "true", "null", "~", "$(POD_IP)", "é\n"),
    *("/", "//", "/data", "/data/", "/dev/shm", "/opt/ddpjob", "../x", "nvidia.com/gpu"),
    *("--nnodes=9", "--tee=3", "--max=1", "MASTER_ADDR", "DDPJOB_X", "PATH", "x" * 63, "x" * 64, "x" * 300),
    *("0", "1", "500m", "1Gi", "+1", ".5", "1e3", "16Gi", "9999999999999999999Ei", "1n", "-1Gi", "1 Gi", "memory"),
)  # fmt: skip
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    -1,
    29400,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    0.1,
    0.5,
    2.0,
    1e300,
)
TIMES = (
    *("2026-01-01T00:00:00Z", "2026-01-01t00:00:00z", "2026-01-01T00:00:00.123456789+05:30", "1970-01-01T00:00:00Z"),
    *("0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00"),
    *("2026-02-30T00:00:00Z", "0000-01-01T00:00:00Z", "2026-01-01T00:00:60Z", "2026-01-01T00:00:00+99:99"),
)  # fmt: skip
KINDS = {"string": "", "integer": 0, "number": 0.5, "boolean": False, "object": {}, "array": []}
WRONG = (None, "", "x", 0, -1, 1.5, 1e300, 2**70, True, [], {}, [None], [[]], {"": None}, [{}], {"unknown": 1})


class Maker:
    """Generates random Kubernetes objects of several kinds. The same `number` always generates the
    same objects.
    """

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)

    def one_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0

    def pick(self, choices: Any) -> Any:
        return self.random.choice(list(choices))

    # --- whole objects

    def manifest(self, name: str = "job") -> Json:
        """Return a DDPJob. About half of these are valid."""
        chosen = self.pick(("script", "script", "module", "command"))
        program: Json = {"script": "train.py", "module": "my.module", "command": ["python", "-m", "train"]}
        spec: Json = {"image": "image", chosen: program[chosen]}
        properties = schema_of("spec")["properties"]
        for field in self.random.sample(sorted(properties), self.pick((0, 1, 2, 2, 3, 5))):
            if field not in ("script", "module", "command"):
                spec[field] = self.pod_template() if field == "podTemplate" else self.value(properties[field])
        made: Json = {
            "apiVersion": "ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": spec,
        }
        for _ in range(self.pick((0, 0, 0, 1, 1, 2))):
            self.spoil(spec)
        return made

    def status(self) -> Json:
        """Return a status that the CRD admits, whether or not it makes sense."""
        properties = schema_of("status")["properties"]
        fields = self.random.sample(sorted(properties), self.pick((1, 3, 6, 12, len(properties))))
        status = {field: self.value(properties[field]) for field in fields}
        if "conditions" in status:  # the list is a map by type
            status["conditions"] = list({c["type"]: c for c in status["conditions"]}.values())
        return status

    # --- values for a schema

    def value(self, schema: Json) -> Any:
        """Return a value that fits the schema, often one at its limits."""
        if "enum" in schema:
            return self.pick(schema["enum"])
        if schema.get("x-kubernetes-int-or-string"):
            return self.pick((self.number(schema | {"type": "integer"}), self.text(schema), "1", "500m"))
        kind = schema.get("type")
        if kind == "object":
            return self.mapping(schema)
        if kind == "array":
            least = schema.get("minItems", 0)
            length = min(least + self.pick((0, 1, 1, 2, 3)), schema.get("maxItems", 9))
            return [self.value(schema["items"]) for _ in range(length)]
        if kind in ("integer", "number"):
            return self.number(schema)
        if kind == "boolean":
            return self.pick((True, False))
        return self.text(schema)

    def mapping(self, schema: Json) -> Json:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        made = {n: self.value(s) for n, s in properties.items() if n in required or self.one_in(2)}
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            made |= {self.pick(TEXTS[:18]): self.value(rest) for _ in range(self.pick((0, 1, 2)))}
        return made

    def number(self, schema: Json) -> float:
        low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
        fitting = [n for n in (*NUMBERS, low, low + 1, high, high - 1) if low <= n <= high]
        if schema["type"] == "integer":
            fitting = [n for n in fitting if isinstance(n, int) or n == 2.0]
        small = [n for n in fitting if abs(n) < 100]
        return self.pick(small if small and self.one_in(2) else fitting)

    def text(self, schema: Json) -> str:
        if schema.get("format") == "date-time":
            return self.pick(TIMES)
        pattern = re.sub(r"\$$", r"\\Z", schema.get("pattern", ""))
        low, high = schema.get("minLength", 0), schema.get("maxLength", 10**6)
        long = ("x" * high if high < 5000 else "x" * 5000, "/" + "x" * min(high - 1, 5000))
        fitting = [t for t in (*TEXTS, *long) if low <= len(t) <= high and re.search(pattern, t)]
        return self.pick(fitting or TEXTS)

    # --- faults

    def spoil(self, value: Any) -> None:
        """Plant one fault in the value: a null, a different type, an unknown field, or an empty or
        very long value.
        """
        places: list[tuple[Any, Any]] = []

        def walk(here: Any, depth: int) -> None:
            for key in list(here) if isinstance(here, dict) else range(len(here)):
                places.append((here, key))
                if isinstance(here[key], dict | list) and depth:
                    walk(here[key], depth - 1)

        walk(value, 12)
        here, key = self.pick(places)
        fault = self.pick(("null", "null", "wrong", "wrong", "text", "unknown", "gone", "deep", "twice"))
        if fault == "unknown" and isinstance(here, dict):
            here[self.pick(("unknown", "", "Nodes", "x" * 300))] = deepcopy(self.pick(WRONG))
        elif fault == "gone" and isinstance(here, dict):
            del here[key]
        elif fault == "deep":
            here[key] = nested(self.pick((5, 50, 90)))
        elif fault == "twice" and isinstance(here, list):
            here.append(here[key])
        elif fault == "text":
            here[key] = self.pick((*TEXTS, *NUMBERS))
        else:
            here[key] = None if fault == "null" else deepcopy(self.pick(WRONG))

    # --- pod templates

    def pod_template(self) -> Any:
        """Return a podTemplate with fields of a pod that the operator does not own, with nulls and
        empty values.
        """
        if self.one_in(12):
            return deepcopy(self.pick(WRONG))
        template = {"spec": self.modelled("V1PodSpec", 3)}
        if self.one_in(2):
            metadata = schema_of("spec.podTemplate.metadata")
            template["metadata"] = self.value(metadata)
        return template

    def modelled(self, type_name: str, depth: int) -> Any:
        """Return a value of one of the Kubernetes client's types."""
        if self.one_in(15):
            return deepcopy(self.pick(WRONG[:11])) if self.one_in(3) else None
        listed = re.fullmatch(r"[Ll]ist\[(.+)\]", type_name)
        mapped = re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", type_name)
        if listed:
            return [self.modelled(listed[1], depth - 1) for _ in range(self.pick((0, 1, 1, 2)))] if depth >= 0 else []
        if mapped:
            return {self.pick(TEXTS[2:8]): self.modelled(mapped[1], depth - 1) for _ in range(self.pick((0, 1, 2)))}
        plain: dict[str, Callable[[], Any]] = {
            "str": lambda: self.pick(TEXTS),
            "int": lambda: self.pick(NUMBERS[:11]),
            "bool": lambda: self.pick((True, False)),
            "float": lambda: self.pick(NUMBERS),
            "object": lambda: deepcopy(self.pick(WRONG)),
            "datetime": lambda: self.pick(TIMES),
        }
        if type_name in plain:
            return plain[type_name]()
        return self.model(getattr(models, type_name), depth)

    def model(self, model: Any, depth: int) -> Json:
        names = [a for a in model.openapi_types if a not in _OWNED or self.one_in(20)]
        chosen = self.random.sample(names, min(len(names), self.pick((0, 1, 2, 3)))) if depth > 0 else []
        if "name" in model.openapi_types and "name" not in chosen and not self.one_in(8):
            chosen.append("name")
        made = {model.attribute_map[a]: self.modelled(model.openapi_types[a], depth - 1) for a in chosen}
        if model is models.V1Container and not self.one_in(6):
            made["name"] = self.pick(("trainer", "trainer", "sidecar", "coordinator"))
            if made["name"] == "sidecar":
                made["image"] = "image"
        return made


_OWNED = frozenset(
    {
        *("restart_policy", "hostname", "subdomain", "node_name", "active_deadline_seconds", "scheduler_name"),
        *("priority_class_name", "image_pull_secrets", "image", "image_pull_policy", "command", "args", "env_from"),
        *("working_dir", "resources", "restart_policy_rules"),
    }
)
"""Fields that the operator refuses in a template. They are rarely used, because nothing else would
be tested otherwise.
"""


def nested(levels: int) -> Any:
    """Return nested mappings."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value
