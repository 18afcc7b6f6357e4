"""Generated jobs on a real API server. The server's verdicts match those of `ddpjob validate`, and
the operator survives all jobs.

DDPJOB_GENERATED=20 tries 20 times as many jobs. A failure reports the number of its job, and
`Maker(NUMBER)` generates it again.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.reader import validate, with_defaults
from ddpjob.objects.pod_template import problems
from generated import Maker
from jobs import FAST, Jobs, steps_job
from operator_process import OperatorProcess
from testcluster.cluster import Cluster

Json = dict[str, Any]
Ask = Callable[..., tuple[int, Json]]
TIMES = int(os.environ.get("DDPJOB_GENERATED", "1"))
VERDICTS, RECONCILED = 150 * TIMES, 30 * TIMES
PATH = "/apis/ddpjob.io/v1alpha1/namespaces/{}/ddpjobs"


@pytest.fixture
def ask(cluster: Cluster) -> Iterator[Ask]:
    """Yield the function `ask(method, path, body)`, which returns the status and the response. It
    uses `kubectl proxy`, because kubectl itself takes 0.1 s per request.
    """
    command = [*map(str, cluster._kubectl_words()), "proxy", "--port=0"]
    with subprocess.Popen(command, env=cluster.environment(), stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        address = proxy.stdout.readline().rsplit(" ", 1)[-1].strip()

        def request(method: str, path: str, body: Json) -> tuple[int, Json]:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            asked = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(), method=method)
            asked.add_header("Content-Type", kind)
            try:
                with urllib.request.urlopen(asked, timeout=30) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read() or b"{}")

        yield request
        proxy.terminate()


def as_kubectl_sends(value: Any) -> Any:
    """Replace 2.0 with 2, because kubectl's YAML has only one kind of number."""
    if isinstance(value, dict):
        return {key: as_kubectl_sends(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def test_the_api_servers_verdicts_match_those_of_validate(jobs: Jobs, ask: Ask) -> None:
    path = PATH.format(jobs.namespace) + "?dryRun=All&fieldValidation=Strict"

    def compare(number: int) -> str:
        manifest = as_kubectl_sends(Maker(number).manifest())
        status, answer = ask("POST", path, manifest)
        found = [str(problem) for problem in validate(manifest)]
        if status not in (201, 400, 422) or (status == 201) == bool(found):
            return f"Maker({number}): {status} {answer.get('message', '')[:300]}, but validate says {found[:3]}"
        return ""

    with ThreadPoolExecutor(4) as pool:
        different = list(filter(None, pool.map(compare, range(VERDICTS))))
    assert not different, "\n".join(different)


def accepted(namespace: str, ask: Ask) -> dict[str, Json]:
    """Return the created jobs by name. They have few nodes, and no scheduler handles their pods."""
    made: dict[str, Json] = {}
    number = 0
    while len(made) < RECONCILED:
        manifest = as_kubectl_sends(Maker(number).manifest(f"job-{number}"))
        number += 1
        spec = manifest["spec"]
        for field in ("nodes", "spares"):
            if field in spec:
                spec[field] = 1
        spec.pop("elastic", None)
        scheduling = spec.get("scheduling")
        spec["scheduling"] = {**(scheduling if isinstance(scheduling, dict) else {}), "schedulerName": "nobody"}
        spec.setdefault("runPolicy", None)
        if isinstance(spec["runPolicy"], dict):
            spec["runPolicy"].pop("ttlSecondsAfterFinished", None)
        status, _ = ask("POST", PATH.format(namespace) + "?fieldValidation=Strict", manifest)
        if status == 201:
            made[manifest["metadata"]["name"]] = manifest
    return made


def test_accepted_jobs_and_forged_statuses_are_reconciled(jobs: Jobs, ask: Ask, operator: OperatorProcess) -> None:
    """Each job gets a condition, regardless of its spec and status. A healthy job among them
    completes.
    """
    accepted_jobs = accepted(jobs.namespace, ask)
    made = {name: job for name, job in accepted_jobs.items() if not _managed_elsewhere(job)}
    jobs.wait("a condition of every job", lambda: not _silent(jobs, made), timeout=30)
    assert not any(status for name, status in _statuses(jobs).items() if name not in made), (
        "the job is managed by another controller"
    )
    for name, status in _statuses(jobs).items():
        if name not in made:
            continue
        failed = next((c for c in status["conditions"] if c["type"] == "Failed"), None)
        if failed is not None and failed["reason"] == "InvalidPodTemplate":
            template = made[name]["spec"]["podTemplate"]
            assert problems(template if isinstance(template, dict) else {}), (name, failed)
            assert "spec.podTemplate" in failed["message"], (name, failed)
    for number, name in enumerate(made):
        tries = (as_kubectl_sends(Maker(100 * number + i).status()) | {"observedGeneration": -7} for i in range(20))
        path = f"{PATH.format(jobs.namespace)}/{name}/status"
        assert any(ask("PATCH", path, {"status": status})[0] == 200 for status in tries), name
    jobs.wait("the operator to rewrite every status", lambda: not _silent(jobs, made, but=-7), timeout=40)
    jobs.apply(steps_job("healthy", steps=5, nodes=1, recovery=FAST))
    jobs.wait_phase("healthy", "Complete", timeout=60)
    log = operator.log.read_text()
    assert "Traceback" not in log and "cannot be read" not in log and operator.running()


def _statuses(jobs: Jobs) -> dict[str, Json]:
    items = jobs.cluster.kubectl_json("get", "ddpjobs", "--namespace", jobs.namespace)["items"]
    return {item["metadata"]["name"]: item.get("status", {}) for item in items}


def _silent(jobs: Jobs, made: dict[str, Json], but: int = -1) -> list[str]:
    """Return the jobs whose status the operator has not written yet."""
    known = _statuses(jobs)
    return [n for n in made if not known[n].get("conditions") or known[n].get("observedGeneration", but) == but]


def _managed_elsewhere(manifest: Json) -> bool:
    body = with_defaults(manifest)
    body["metadata"] |= {"namespace": "space", "uid": "uid"}
    return DDPJob.read(body).spec.managed_elsewhere
