"""`ddpjob doctor`: what it advises. What it finds in a cluster: tests/cluster/test_cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from ddpjob.cli.main import main
from ddpjob.client.api_server import ApiServer
from ddpjob.client.diagnose import _rights


class Refusing:
    """An API server at which one may do nothing."""

    def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        return {"status": {"allowed": False}}


def test_who_lacks_rights_is_not_sent_to_a_role_that_does_not_have_them() -> None:
    """The built-in role edit has none to DDPJobs in an installation with watchNamespaces."""
    (check,) = _rights(cast("ApiServer", Refusing()), "vision")
    assert check.ok is False and "you may not get ddpjobs" in check.what
    assert "ClusterRole edit in namespace vision" in check.remedy and "but not with watchNamespaces" in check.remedy


def test_a_cluster_that_cannot_be_reached_has_the_code_of_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").write_text(
        '{"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}], "current-context": "c",'
        ' "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}'
    )
    assert main(["--kubeconfig", str(tmp_path / "config"), "doctor"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("ok    client ") and "https://127.0.0.1:9 (context c) does not answer" in err
