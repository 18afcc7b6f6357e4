"""The caches keep a limited amount of data from the objects that a tenant creates with a job's
labels, however many or large the objects are.
"""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from ddpjob.controller import kubernetes_cluster
from ddpjob.controller.caches import MOST_REFERENCES, _read_owned
from ddpjob.controller.pod_views import read_pod
from ddpjob.core.world import LABEL_INDEX, LABEL_ROLE, TRAINER_CONTAINER, Role
from ddpjob.objects.service import build_runtime

from .cluster_case import case
from .virtual_loop import run

LONG = "x" * 100_000 + "\N{GRINNING FACE}"


def a_pod(**labels: str) -> dict[str, Any]:
    """Return a pod that is as large as allowed in every field that is read."""
    ended = {"terminated": {"reason": LONG, "message": LONG, "exitCode": 1}}
    waiting = {"waiting": {"reason": LONG, "message": LONG}}
    states = [{"name": f"c{n}", "state": waiting if n % 2 else ended} for n in range(2000)]
    kinds = ("PodScheduled", "DisruptionTarget", "Initialized")
    conditions = [{"type": kind, "status": "False", "reason": LONG, "message": LONG} for kind in kinds]
    conditions += [{"type": "DisruptionTarget", "status": "True", "reason": LONG, "message": LONG}]
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {LABEL_ROLE: Role.NODE, LABEL_INDEX: "0", **labels}},
        "status": {
            "message": LONG,
            "reason": LONG,
            "conditions": conditions,
            "containerStatuses": [*states, {"name": TRAINER_CONTAINER, "state": {"terminated": {"exitCode": 7}}}],
            "initContainerStatuses": states,
        },
    }


def kept(read: Any, body: Any) -> tuple[Any, int]:
    gc.collect()
    tracemalloc.start()
    try:
        view = read(body)
        gc.collect()
        return view, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_only_the_main_container_and_bounded_strings_of_a_pod_are_kept() -> None:
    pod, size = kept(read_pod, a_pod())
    assert pod.main.exit_code == 7 and len(pod.containers) == len(pod.init_containers) == 64
    assert len(pod.status_message) == 1000 and size < 1_500_000


@pytest.mark.parametrize("number", ["-1", str(2**31), "9" * 60, "1.5"])
def test_a_pod_whose_index_is_out_of_range_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number|invalid literal"):
        read_pod(a_pod(**{LABEL_INDEX: number}))


def test_only_the_first_of_thousands_of_owner_references_are_kept() -> None:
    owners = [{"kind": "DDPJob", "name": f"j{n}", "uid": f"u{n}"} for n in range(15_000)]
    meta = {"namespace": "space", "name": "o", "uid": "u", "ownerReferences": [{**owners[0], "name": LONG}, *owners]}
    owned = _read_owned({"metadata": meta})
    assert len(owned.jobs) == len(owned.owner_uids) == MOST_REFERENCES - 1
    assert all(len(key.name) < 300 for key in owned.jobs)


def test_the_number_of_remembered_runtime_config_maps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may delete such ConfigMaps at will, and the operator creates them again."""
    monkeypatch.setattr(kubernetes_cluster, "_MOST_CHECKED", 3)

    async def main() -> None:
        async with case() as c:
            body = build_runtime(await c.job())
            for number in range(10):
                c.cluster._check_runtime({**body, "metadata": {**body["metadata"], "uid": str(number)}})
            assert list(c.cluster._checked) == ["7", "8", "9"]

    run(main())


def test_a_pods_devices_are_summed_over_its_containers_and_bounded() -> None:
    body = a_pod()
    limits = [{"nvidia.com/gpu": "4", "cpu": "8"}, {"nvidia.com/gpu": 1}, {"rdma/hca": "1k", "a/b": "9" * 99}, None]
    body["spec"] = {"containers": [{"name": f"c{n}", "resources": {"limits": each}} for n, each in enumerate(limits)]}
    assert read_pod(body).devices == {"nvidia.com/gpu": 5}
    many = {f"example.com/{n}": "1" for n in range(1000)}
    body["spec"]["containers"][0]["resources"]["limits"] = many
    assert len(read_pod(body).devices) == 16
