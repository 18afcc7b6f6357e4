"""Notifications of real jobs: receivers accept, hang, redirect and fail, and the operator is
killed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from jobs import Jobs, Json, job
from operator_process import OperatorProcess


class Web:
    """Receivers on this machine, by path: /fine, /hangs, /moved, and /ails, which fails the first
    time.
    """

    def __init__(self, operator: OperatorProcess) -> None:
        self.operator, self.settings = operator, dict[str, str]()
        self.got: list[tuple[str, str, Json]] = []
        self.patient = threading.Event()
        """If set, /hangs responds."""
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                web.got.append((self.path, self.headers["Idempotency-Key"], body))
                if self.path == "/hangs":
                    web.patient.wait()
                times = len(web.came(self.path))
                status = {"/moved": 307, "/ails": 500 if times == 1 else 200}.get(self.path, 204)
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", "/fine")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def start_operator(self) -> None:
        self.operator.start(**self.settings)

    def came(self, path: str) -> list[tuple[str, Json]]:
        return [(id, body) for where, id, body in self.got if where == path]


@pytest.fixture
def web(jobs: Jobs, operator: OperatorProcess, tmp_path: Path) -> Iterator[Web]:
    """Start receivers, and an operator that knows them for the test's namespace. It also knows
    `foreign`, which only a different namespace may use.
    """
    made = Web(operator)
    names = ("fine", "hangs", "moved", "ails")
    for name in names:
        (tmp_path / name).write_text(f"{made.url}/{name}")
    made.settings = {
        "DDPJOB_OPERATOR_RECEIVERS": json.dumps({n: [jobs.namespace] for n in names} | {"foreign": ["elsewhere"]}),
        "DDPJOB_OPERATOR_RECEIVERS_FOLDER": str(tmp_path),
        "DDPJOB_OPERATOR_NOTIFY_LINK": "https://example.com/{namespace}/{job}",
    }
    operator.kill()
    made.start_operator()
    yield made
    made.patient.set()
    made.server.shutdown()


def ending(name: str, receiver: str, code: int = 0, **spec: object) -> Json:
    recovery = {"maxRestarts": 0}
    command = ["sh", "-c", f"exit {code}"]
    return job(name, command=command, nodes=1, recovery=recovery, notify={"receiver": receiver}, **spec)


def state(jobs: Jobs, name: str) -> str:
    return str(next((n["state"] for n in jobs.status(name).get("notifications", ())), ""))


def test_receivers_get_their_notifications_without_delaying_each_other(jobs: Jobs, web: Web) -> None:
    jobs.apply(ending("stuck", "hangs"))
    jobs.apply(ending("moved", "moved"))
    jobs.wait("a receiver hangs", lambda: web.came("/hangs"), timeout=120)
    jobs.apply(ending("failed", "fine", code=3))
    jobs.apply(ending("ails", "ails", runPolicy={"ttlSecondsAfterFinished": 0}))
    jobs.apply(ending("foreign", "foreign"))
    jobs.wait("a failure is delivered", lambda: state(jobs, "failed") == "Delivered", timeout=120)
    [(key, body)] = web.came("/fine")
    assert (body["job"], body["namespace"], body["event"], body["state"]) == (
        "failed",
        jobs.namespace,
        "Failed",
        "Failed",
    )
    assert key == f'"{body["id"]}"' and body["link"] == f"https://example.com/{jobs.namespace}/failed"
    assert body["text"].startswith(f"DDPJob {jobs.namespace}/failed: Failed (")
    assert state(jobs, "stuck") == "Pending" and jobs.status("stuck")["phase"] == "Complete"
    jobs.wait("the second attempt", lambda: len(web.came("/ails")) == 2, timeout=60)
    assert len({id for id, _ in web.came("/ails")}) == 1
    ails = ("get", "ddpjobs", "ails", "--namespace", jobs.namespace)
    jobs.wait("the deletion of the job", lambda: not jobs.cluster.succeeds(*ails), timeout=60)
    jobs.wait_phase("foreign", "Complete")
    jobs.wait("it is abandoned", lambda: state(jobs, "foreign") == "GivenUp")
    assert "may use (ails, fine, hangs, moved)" in jobs.condition("foreign", "Notifies")["message"]
    jobs.wait("redirects are not followed", lambda: len(web.came("/moved")) >= 2, timeout=60)
    assert len(web.came("/fine")) == 1, "no request may follow the redirect"
    assert web.url not in jobs.kubectl("get", "ddpjobs,events", "--output=yaml")


def test_after_a_kill_during_delivery_the_notification_is_repeated_with_its_id(
    jobs: Jobs, web: Web, operator: OperatorProcess
) -> None:
    jobs.apply(ending("job", "hangs"))
    jobs.wait("an attempt", lambda: web.came("/hangs"), timeout=120)
    operator.kill()
    assert state(jobs, "job") == "Pending"
    web.patient.set()
    web.start_operator()
    jobs.wait("it is delivered", lambda: state(jobs, "job") == "Delivered", timeout=60)
    assert {id for id, _ in web.came("/hangs")} == {f'"{jobs.status("job")["notifications"][0]["id"]}"'}
    assert len(web.came("/hangs")) >= 2
