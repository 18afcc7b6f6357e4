"""The requests of `create` to the API server, and the objects that remain if the server refuses
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.client.backends import cluster_backend
from ddpjob.client.backends.api_server import ApiRefusal, ApiServer
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.manifests.build_manifest import JobRequest, build
from ddpjob.client.texts.diagnose import RIGHTS

Json = dict[str, Any]


class Store:
    """A fake API server that stores objects by kind and name. `refused` maps (method, kind) to the
    error to raise.
    """

    namespace, context = "ml", "test"

    def __init__(self, refused: Mapping[tuple[str, str], ApiRefusal] | None = None) -> None:
        self.refused, self.objects = dict(refused or {}), dict[tuple[str, str], Json]()
        self.asked: list[tuple[str, str]] = []

    def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None,
        content_type: str = "",
    ) -> Json:  # fmt: skip
        kind, _, name = path.partition("/namespaces/ml/")[2].partition("/")
        self.asked.append((method, kind))
        if (method, kind) in self.refused:
            raise self.refused[method, kind]
        if method == "DELETE":
            return self.objects.pop((kind, name))
        assert method == "POST" and body is not None
        key = kind, body["metadata"]["name"]
        if key in self.objects:
            raise ApiRefusal(409, "AlreadyExists", f'{kind} "{key[1]}" already exists')
        self.objects[key] = {**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.asked)}"}}
        return self.objects[key]

    def optional(self, path: str, query: Mapping[str, str] | None = None) -> Json | None:
        """Return the ConfigMap, and remove it if it has an owner. This simulates garbage collection
        just after the owner's deletion.
        """
        kind, _, name = path.partition("/namespaces/ml/")[2].partition("/")
        there = self.objects.get((kind, name))
        if there is not None and there["metadata"].get("ownerReferences"):
            del self.objects[kind, name]
        return there

    def kinds(self) -> list[str]:
        return sorted(kind for kind, _ in self.objects)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    monkeypatch.setattr(cluster_backend, "_RETRY_SECONDS", 0.0)
    (tmp_path / "train.py").write_text("print(1)\n")
    return build(JobRequest(program=str(tmp_path / "train.py"), image="a", name="j"), local=False)


def create(store: Store, job: list[Json]) -> str:
    return ClusterBackend(store).create(job)  # type: ignore[arg-type]


def test_the_config_map_with_the_code_is_owned_by_its_job(job: list[Json]) -> None:
    store = Store()
    assert create(store, job) == "j"
    [code] = [body for (kind, _), body in store.objects.items() if kind == "configmaps"]
    assert [owner["name"] for owner in code["metadata"]["ownerReferences"]] == ["j"]
    verbs = {kind: verbs for _, kind, subresource, verbs in RIGHTS if not subresource}
    for method, kind in store.asked:
        assert {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[method] in verbs[kind]
    assert (
        "",
        "pods",
        "exec",
        ("get", "create"),
    ) in RIGHTS  # WebSockets need the right `get`, and Kubernetes 1.35 requires `create`


def test_a_refused_job_leaves_nothing_behind(job: list[Json]) -> None:
    forbidden = ApiRefusal(403, "Forbidden", "exceeded quota")
    for refused in (("POST", "ddpjobs"), ("POST", "configmaps")):
        store = Store({refused: forbidden})
        with pytest.raises(ApiRefusal, match="exceeded quota"):
            create(store, job)
        assert store.kinds() == []


def test_ctrl_c_before_the_code_exists_leaves_nothing_behind(job: list[Json], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the pods would wait for the ConfigMap forever."""
    store = Store()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterBackend, "_create_map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create(store, job)
    assert store.kinds() == []


def test_create_reports_a_job_that_it_could_not_remove_after_a_failure(job: list[Json]) -> None:
    refused = {("POST", "configmaps"): ApiRefusal(403, "Forbidden", "exceeded quota"),
               ("DELETE", "ddpjobs"): ApiRefusal(403, "Forbidden", "may not delete")}  # fmt: skip
    with pytest.raises(Mistake, match=r"exceeded quota; job j was created, but .* may not delete; run `ddpjob delete"):
        create(Store(refused), job)


def test_the_code_of_an_earlier_job_with_the_same_name_is_replaced(job: list[Json]) -> None:
    code = job[0]
    for owners in ([], [{"name": "j", "uid": "an earlier one"}]):
        store = Store()
        left = {**code, "metadata": {**code["metadata"], "ownerReferences": owners}}
        store.objects["configmaps", code["metadata"]["name"]] = left
        assert create(store, job) == "j" and store.kinds() == ["configmaps", "ddpjobs"]
    store.objects = {("configmaps", code["metadata"]["name"]): {**code, "data": {"train.py": "something else"}}}
    with pytest.raises(ApiRefusal, match="already exists"):
        create(store, job)


def test_a_namespace_that_does_not_exist_is_reported(job: list[Json]) -> None:
    missing = ApiRefusal(404, "NotFound", 'namespaces "typo" not found')
    with pytest.raises(Mistake, match='namespaces "typo" not found'):
        create(Store({("POST", "ddpjobs"): missing}), job)
    with pytest.raises(Mistake, match="definition"):
        create(Store({("POST", "ddpjobs"): ApiRefusal(404, "NotFound", "404 page not found")}), job)


def test_a_context_alone_selects_cluster_and_namespace(tmp_path: Path) -> None:
    file = tmp_path / "config"
    contexts = [{"name": name, "context": {"cluster": "c", "user": "u", "namespace": name}} for name in ("a", "b")]
    body = {"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
            "users": [{"name": "u", "user": {"token": "t"}}], "contexts": contexts}  # fmt: skip
    file.write_text(yaml.safe_dump(body))
    api = ApiServer.open(str(file), "b")
    assert (api.namespace, api.context) == ("b", "b")
    assert api.client.configuration.host == "https://127.0.0.1:9"
    with pytest.raises(Mistake, match="no cluster"):
        ApiServer.open(str(file))
    file.write_text(yaml.safe_dump(body | {"current-context": "a"}))
    assert ApiServer.open(str(file)).context == "a" and ApiServer.open(str(file), "b").context == "b"
