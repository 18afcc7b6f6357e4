"""Run the corpus against a real API server, and check that verdicts, messages and stored objects
match those of ddpjob's own reader.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from corpus import Case, cases
from ddpjob.api.reader import read_manifests
from operator_process import install_crd
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError

NAMESPACE = f"ddpjob-corpus-{secrets.token_hex(3)}"


def _named(kind: str) -> list[Any]:
    return [pytest.param(case, id=case.path.stem) for case in cases(kind)]


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with the CRD of the checkout and a namespace for the corpus."""
    install_crd(cluster)
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _create(api: Cluster, path: Path) -> str:
    return api.kubectl("create", "--dry-run=server", "--output=json", "--namespace", NAMESPACE, "--filename", str(path))


def _replace(api: Cluster, path: Path) -> None:
    """Run `kubectl replace`. Retry if an operator wrote the status between kubectl's two
    requests.
    """
    for left in reversed(range(20)):
        try:
            api.kubectl("replace", "--namespace", NAMESPACE, "--filename", str(path))
            return
        except ClusterError as error:
            if "the object has been modified" not in str(error) or not left:
                raise


@pytest.mark.parametrize("case", _named("valid"))
def test_a_valid_case_is_accepted_by_the_server(api: Cluster, case: Case) -> None:
    """The stored object equals the reader's, including the defaults."""
    assert json.loads(_create(api, case.path))["spec"] == read_manifests(case.path)[0].checked()["spec"]


@pytest.mark.parametrize("case", _named("invalid"))
def test_an_invalid_case_is_refused_by_the_server(api: Cluster, case: Case) -> None:
    with pytest.raises(ClusterError) as caught:
        _create(api, case.path)
    for text in case.says:
        assert text in str(caught.value)


def test_the_status_has_a_single_field_manager(api: Cluster) -> None:
    """Listing the status fields in managedFields would double the object's size, and the list would
    be rebuilt at each write.
    """
    case = next(case for case in cases("valid") if case.path.stem == "smallest")
    api.kubectl("create", "--namespace", NAMESPACE, "--filename", str(case.path))
    name = case.documents()[0]["metadata"]["name"]
    status = {"status": {"phase": "Running", "nodes": {"ready": 1}, "slots": [{"attempt": 0}]}}
    patch = ("patch", "ddpjob", name, "--namespace", NAMESPACE, "--subresource=status", "--type=merge")
    written = api.kubectl(*patch, f"--patch={json.dumps(status)}", "--output=json", "--show-managed-fields")
    fields = {entry.get("subresource"): entry["fieldsV1"] for entry in json.loads(written)["metadata"]["managedFields"]}
    assert fields["status"] == {"f:status": {}} and "f:spec" in fields[None]


@pytest.mark.parametrize("case", _named("updates"))
def test_an_update_is_accepted_or_refused_by_the_server(api: Cluster, case: Case, tmp_path: Path) -> None:
    """Objects are really stored and replaced, because a dry run does not check transition rules."""
    old, new = (tmp_path / "old.yaml", tmp_path / "new.yaml")
    for path, document in zip((old, new), case.documents(), strict=True):
        # Each case has an object with a unique name, so that cases do not interfere.
        document["metadata"]["name"] = case.path.stem[:40].rstrip("-")
        path.write_text(yaml.safe_dump(document))
    api.kubectl("create", "--namespace", NAMESPACE, "--filename", str(old))
    if not case.refused:
        _replace(api, new)
        return
    with pytest.raises(ClusterError) as caught:
        _replace(api, new)
    for text in case.says:
        assert text in str(caught.value)
