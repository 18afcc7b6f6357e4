"""`ClusterBackend` with responses that a real API server rarely sends."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from ddpjob.client.backends import backend as backends
from ddpjob.client.backends import cluster_backend
from ddpjob.client.backends.api_server import AnswerTooLarge, ApiRefusal
from ddpjob.client.backends.backend import LogOptions, Mistake, NoAnswer, NoSuchJob, PodLine
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.logs.log_follower import LogFollower

Json = dict[str, Any]


class Server:
    """An API server with one pod. Log requests get `answers` in turn, and the pod ends before the
    last request.
    """

    namespace, context = "ml", "test"

    def __init__(self, *answers: list[bytes] | Mistake) -> None:
        self.answers, self.queries = list(answers), list[Mapping[str, str]]()

    def stream(self, path: str, query: Mapping[str, str], silence: float | None = None) -> Iterator[bytes]:
        self.queries.append(dict(query))
        answer = self.answers.pop(0)
        if isinstance(answer, Mistake):
            raise answer
        yield from answer

    def optional(self, path: str, query: Mapping[str, str] | None = None) -> Json | None:
        labels = {"ddpjob.io/role": "node", "ddpjob.io/index": "0"}
        phase = "Running" if len(self.answers) > 1 else "Succeeded"
        return {"metadata": {"name": "j-0-0", "uid": "1", "labels": labels}, "status": {"phase": phase}}


AWAY = NoAnswer("the API server does not answer")
BUSY = ApiRefusal(503, "ServiceUnavailable", "the server is currently unable to handle the request")
POD = PodLine("j-0-0", "node", 0, "Running", containers=("trainer", "side"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_backend, "_RETRY_SECONDS", 0.0)


def followed(*answers: list[bytes] | Mistake) -> list[bytes]:
    return list(ClusterBackend(Server(*answers)).log(POD, LogOptions(follow=True)))  # type: ignore[arg-type]


def test_a_log_continues_where_the_connection_was_interrupted() -> None:
    server = Server(
        [b"2026-01-01T00:00:01.1Z one\n2026-01-01T00:00:01.", b"12Z two words\n2026-01-01T00:00:02Z cut"],
        [b"2026-01-01T00:00:01.12Z two words\n2026-01-01T00:00:02Z \n2026-01-01T00:00:02.000000001Z three\n"],
        [b"2026-01-01T00:00:02.000000001Z three\n2026-01-01T00:00:03Z four"],
    )
    backend = ClusterBackend(server)  # type: ignore[arg-type]
    lines = list(backend.log(POD, LogOptions(follow=True, tail=5, since=60)))
    assert lines == [b"one\n", b"two words\n", b"\n", b"three\n", b"four"]
    first, second, _ = server.queries
    assert first["tailLines"] == "5" and first["sinceSeconds"] == "60" and first["container"] == "trainer"
    assert (
        second["sinceTime"] == "2026-01-01T00:00:01.12Z" and "tailLines" not in second and "sinceSeconds" not in second
    )


def test_a_sidecar_inserted_by_a_webhook_is_not_mistaken_for_the_coordinator() -> None:
    server = Server([])
    pod = PodLine("j-coordinator-0", "coordinator", None, "Running", containers=("istio-proxy", "coordinator"))
    list(ClusterBackend(server).log(pod, LogOptions()))  # type: ignore[arg-type]
    assert server.queries[0]["container"] == "coordinator"


def test_lines_with_the_same_time_are_all_printed_once() -> None:
    """CRI-O gives all lines of one write the same time."""
    lines = [b"2026-01-01T00:00:01Z a\n", *(b"2026-01-01T00:00:02Z %d\n" % number for number in range(6))]
    assert followed(lines[:4], [*lines[1:6]], lines[1:]) == [b"a\n", *(b"%d\n" % number for number in range(6))]
    once = ClusterBackend(Server(lines, []))  # type: ignore[arg-type]
    assert len(list(once.log(POD, LogOptions()))) == 7


def test_no_line_of_a_log_is_lost_if_the_clock_is_set_back() -> None:
    before, after = b"2026-01-01T00:00:09Z a\n", [b"2026-01-01T00:00:01Z b\n", b"2026-01-01T00:00:02Z c\n"]
    assert followed([before, *after], [after[1], b"2026-01-01T00:00:03Z d\n"], []) == [b"a\n", b"b\n", b"c\n", b"d\n"]


def test_a_log_that_is_not_readable_yet_is_retried() -> None:
    waiting = ApiRefusal(400, "BadRequest", 'container "trainer" in pod "j-0-0" is waiting to start')
    line = [b"2026-01-01T00:00:01Z a\n"]
    assert followed(waiting, AWAY, BUSY, line, BUSY, AWAY, line) == [b"a\n"]
    assert followed(line, ApiRefusal(404, "NotFound", 'pods "j-0-0" not found')) == [b"a\n"]
    for final in (waiting, ApiRefusal(403, "Forbidden", "no")):
        with pytest.raises(ApiRefusal):
            followed(line, final)
    with pytest.raises(NoAnswer):
        list(ClusterBackend(Server(AWAY, line)).log(POD, LogOptions()))  # type: ignore[arg-type]


def test_requests_are_retried_for_a_while_during_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "OUTAGE_SECONDS", -1.0)
    with pytest.raises(NoAnswer):
        followed(AWAY, [], [])


class Restarting(Server):
    """An API server that fails every second request for a job, which is complete after some
    requests.
    """

    def __init__(self) -> None:
        super().__init__([b"2026-01-01T00:00:01Z a\n"], [])
        self.asked = 0

    def _answer(self) -> Json:
        self.asked += 1
        if self.asked % 2 == 0:
            raise (AWAY, BUSY, ApiRefusal(429, "TooManyRequests", "later"))[self.asked // 2 % 3]
        done = {"status": {"conditions": [{"type": "Complete", "status": "True", "reason": "a", "message": "",
                                           "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}  # fmt: skip
        version = str(self.asked)
        return {"metadata": {"name": "j", "resourceVersion": version}, **(done if self.asked > 8 else {})}

    def request(self, method: str, path: str) -> Json:
        return self._answer()

    def listing(self, path: str, *_: object, **__: object) -> tuple[list[Json], str]:
        return [self._answer()], "9"

    def lines(self, path: str, query: Mapping[str, str], **_: object) -> Iterator[Json]:
        yield {"type": "MODIFIED", "object": self._answer()}

    def items(self, path: str, query: Mapping[str, str] | None = None, **_: object) -> list[Json]:
        found = self.optional("")
        assert found is not None
        return [found | {"spec": {"containers": [{"name": "trainer"}]}}]


def test_wait_continues_while_the_api_server_restarts() -> None:
    changes = ClusterBackend(Restarting()).changes("j")  # type: ignore[arg-type]
    assert any(body.get("status") for body, _ in changes)


def test_logs_continue_while_the_api_server_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpjob.client.logs.log_follower._POLL", 0.01)
    backend, body = ClusterBackend(Restarting()), {"metadata": {"name": "j"}}  # type: ignore[arg-type]
    follower = LogFollower(backend, body, LogOptions(follow=True))
    assert [line.text for line in follower.lines()] == [b"a"] and not follower.notes


class Deleting(Server):
    """An API server whose only job is deleted between a list and the following watch."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = [[{"metadata": {"name": "j", "resourceVersion": "1"}}], [], []]

    def listing(self, path: str, *_: object, **__: object) -> tuple[list[Json], str]:
        return self.lists.pop(0), "9"

    def lines(self, path: str, query: Mapping[str, str], **_: object) -> Iterator[Json]:
        return iter([{"type": "ERROR", "object": {"code": 410}}])


def test_a_deletion_that_the_watch_has_missed_is_noticed() -> None:
    changes = ClusterBackend(Deleting()).changes("j")  # type: ignore[arg-type]
    assert [(body["metadata"]["name"], gone) for body, gone in (next(changes), next(changes))] == [
        ("j", False),
        ("j", True),
    ]
    with pytest.raises(NoSuchJob, match="no job j in namespace ml"):
        next(changes)


def test_lists_and_watches_keep_only_the_small_fields_of_a_large_job() -> None:
    """A hundred such jobs of one team would need gigabytes in each view of all jobs, especially in
    a dashboard.
    """
    spec = {"image": "a", "podTemplate": {"spec": {"containers": [{}] * 9999}}}
    large = {"metadata": {"name": "j", "resourceVersion": "1"}, "spec": spec}

    class Serving:
        namespace, context = "ml", "test"

        def listing(self, path: str, *_: object, shape: Any) -> tuple[list[Json], str]:
            return [shape(large)], "9"

        def lines(self, path: str, query: Mapping[str, str], silence: float, shape: Any) -> Iterator[Json]:
            yield shape({"type": "MODIFIED", "object": {**large, "metadata": {"name": "j", "resourceVersion": "2"}}})

    backend = ClusterBackend(Serving())  # type: ignore[arg-type]
    changes = backend.changes(None)
    assert [body["spec"] for body in (*backend.jobs(), next(changes)[0], next(changes)[0])] == [{"image": "a"}] * 3
    backend.whole = True
    assert backend.jobs()[0]["spec"] == spec


class Text(str):
    """A string to which a test can count the references."""


class Growing(Server):
    """An API server with two jobs. Each watch sends a change of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Text]] = []

    def job(self, name: str) -> Json:
        image = Text("a spec")
        self.made.append(weakref.ref(image))
        meta = {"name": name, "namespace": "ml", "resourceVersion": str(len(self.made))}
        return {"metadata": meta, "spec": {"image": image}}

    def listing(self, path: str, *_: object, **__: object) -> tuple[list[Json], str]:
        return [self.job("a"), self.job("b")], "9"

    def lines(self, path: str, query: Mapping[str, str], **_: object) -> Iterator[Json]:
        yield {"type": "MODIFIED", "object": self.job("a")}

    def held(self) -> int:
        return sum(text() is not None for text in self.made)


def test_followers_learn_of_deleted_jobs_without_keeping_copies_of_jobs() -> None:
    """Regression: a dashboard's view held each object, and kept a job that was deleted before the
    first list.
    """
    server = Growing()
    known = [{"metadata": {"name": name, "namespace": "ml"}} for name in ("a", "gone")]
    changes = ClusterBackend(server).changes(None, known=known)  # type: ignore[arg-type]
    assert next(changes) == ({"metadata": {"name": "gone", "namespace": "ml"}}, True)
    assert [next(changes)[0]["metadata"]["name"] for _ in range(3)] == ["a", "b", "a"]
    assert len(server.made) == 3 and server.held() == 1, "the version of the last change"


def test_printing_changes_keeps_only_the_last_version_of_each_job() -> None:
    """Regression: the last page of a list was kept as well, until the next list."""
    server = Growing()
    changes = ClusterBackend(server).changes(None)  # type: ignore[arg-type]
    assert [next(changes)[0]["metadata"]["name"] for _ in range(3)] == ["a", "b", "a"]
    assert len(server.made) == 3 and server.held() == 2


def test_a_log_that_is_not_followed_is_read_once() -> None:
    server = Server([b"2026-01-01T00:00:01Z one"], [])
    backend = ClusterBackend(server)  # type: ignore[arg-type]
    assert list(backend.log(PodLine("j-0-0", "node", 0, "Running"), LogOptions())) == [b"one"]
    assert len(server.queries) == 1


def test_a_cancellable_log_waits_for_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response's headers arrive with the first line, so a pod without output looks like an
    unreachable server.
    """
    monkeypatch.setattr(backends, "OUTAGE_SECONDS", -1.0)
    stop = threading.Event()
    server = Server(AWAY, AWAY, [b"2026-01-01T00:00:01Z one\n"], [])
    backend = ClusterBackend(server)  # type: ignore[arg-type]
    assert list(backend.log(POD, LogOptions(follow=True, stop=stop))) == [b"one\n"]
    stop.set()
    assert not list(ClusterBackend(Server(AWAY, AWAY)).log(POD, LogOptions(follow=True, stop=stop)))  # type: ignore[arg-type]


class Exec:
    """The WebSocket of a command in a pod, and its client. It sends `frames` and closes the
    connection.
    """

    frames: ClassVar[Iterable[bytes]] = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sock, self.sent, self.ended = self, iter(self.frames), False

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 60

    def recv_data_frame(self, control: bool) -> tuple[int, Any]:
        from websocket import ABNF

        assert control and not self.ended
        data = next(self.sent, None)
        if data is None:
            return ABNF.OPCODE_CLOSE, None
        return ABNF.OPCODE_BINARY, ABNF(data=data)

    def shutdown(self) -> None:
        self.ended = True


def running(frames: Iterable[bytes], monkeypatch: pytest.MonkeyPatch) -> ClusterBackend:
    """Return a backend whose pods send these frames."""
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.stream import ws_client

    monkeypatch.setattr(Exec, "frames", frames)
    monkeypatch.setattr(ws_client, "WSClient", Exec)
    server = Server()
    server.client = ApiClient(Configuration(host="http://127.0.0.1:9"))  # type: ignore[attr-defined]
    return ClusterBackend(server)  # type: ignore[arg-type]


def test_a_command_in_a_pod_returns_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "größe".encode()
    frames = [b"\x01", b"\x01a" + text[:3], b"\x01" + text[3:], b"\x02 error", b"\x03{}", b"\x01\xff"]
    assert running(frames, monkeypatch).run_in(POD, "print()") == "agröße error\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("channel", [b"\x01", b"\x02"])
def test_endless_output_of_a_command_in_a_pod_is_read_up_to_16_mib(
    channel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    def flood() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield channel + b"x" * 65_535

    with pytest.raises(
        Mistake,
        match=rf"^pod {POD.name}: python3 printed more than 16 MiB; check that `python3` starts Python",
    ):
        running(flood(), monkeypatch).run_in(POD, "print()")
    assert sent == 257, "in frames of 64 KiB"


def test_a_command_in_a_pod_that_sends_nothing_is_abandoned_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b"\x01."

    monkeypatch.setattr(cluster_backend, "_EXEC_SECONDS", 0.2)
    assert set(running(slow(), monkeypatch).run_in(POD, "print()")) <= {"."}


def test_commands_in_pods_do_not_affect_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.stream import ws_client

    server, both = Server(), threading.Barrier(2)
    client = server.client = ApiClient(Configuration(host="http://127.0.0.1:9"))  # type: ignore[attr-defined]
    changed: list[bool] = []

    class Overlapping(Exec):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            both.wait(60)
            changed.append("call_api" in vars(client))
            both.wait(60)

    monkeypatch.setattr(ws_client, "WSClient", Overlapping)
    backend = ClusterBackend(server)  # type: ignore[arg-type]
    threads = [threading.Thread(target=backend.run_in, args=(POD, "print()")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert changed == [False, False] and "call_api" not in vars(client)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            b'{"kind":"Status","message":"pods \\"j-0-0\\" is forbidden: no","code":403}',
            'pods "j-0-0" is forbidden: no',
        ),
        (b"<html>", "Handshake status 403 Forbidden"),
        (b"[]", "Handshake status 403 Forbidden"),
    ],
)
def test_the_api_servers_refusal_of_a_command_in_a_pod_is_quoted(
    monkeypatch: pytest.MonkeyPatch, body: bytes, shown: str
) -> None:
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.stream import ws_client
    from websocket import WebSocketBadStatusException

    class Refused(Exec):
        def __init__(self, *_: Any, **__: Any) -> None:
            headers = {"audit-id": "bd564c66", "content-type": "application/json"}
            said = f"Handshake status 403 Forbidden -+-+- {headers} -+-+- {body.decode()}"
            raise WebSocketBadStatusException(said, 403, "Forbidden", headers, body)

    monkeypatch.setattr(ws_client, "WSClient", Refused)
    server = Server()
    server.client = ApiClient(Configuration(host="http://127.0.0.1:9"))  # type: ignore[attr-defined]
    with pytest.raises(Mistake) as caught:
        ClusterBackend(server).run_in(POD, "print()")  # type: ignore[arg-type]
    assert str(caught.value) == f"pod {POD.name}: {shown}"


def test_metrics_are_looked_for_in_only_a_few_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    backend = ClusterBackend(Server())  # type: ignore[arg-type]
    pods = [PodLine(f"j-{n}-0", "spare" if n < 5 else "node", n, "Running") for n in range(100)]
    monkeypatch.setattr(backend, "pods", lambda name: pods)
    monkeypatch.setattr(backend, "run_in", lambda pod, code: asked.append(pod.name) or "")
    with pytest.raises(Mistake, match="none of its first 4 pods has"):
        backend.metrics("j")
    assert asked == ["j-5-0", "j-6-0", "j-7-0", "j-8-0"]
    monkeypatch.setattr(cluster_backend, "_METRICS_SECONDS", -1.0)
    with pytest.raises(Mistake, match="try again"):
        backend.metrics("j")
    assert len(asked) == 4


def test_a_pod_that_cannot_be_prepared_shows_the_kubelets_last_warning() -> None:
    """The pod's status says only ContainerCreating, without the missing Secret."""

    class Waiting:
        namespace, context = "ml", "test"
        asked: ClassVar[list[str]] = []
        refusal: Mistake | None = None

        def items(self, path: str, query: Mapping[str, str], **_: object) -> list[Json]:
            if path.endswith("/pods"):
                return [preparing(index) for index in range(5)]
            self.asked.append(query["fieldSelector"])
            if self.refusal is not None:
                raise self.refusal
            return [
                {
                    "lastTimestamp": f"2026-01-01T00:00:0{at}Z",
                    "type": "Warning",
                    "reason": "FailedMount",
                    "message": said,
                }
                for at, said in ((9, 'secret "keys" not found'), (1, "an earlier one"))
            ]

    def preparing(index: int) -> Json:
        labels = {"ddpjob.io/role": "node", "ddpjob.io/index": str(index)}
        waits = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
        return {
            "metadata": {"name": f"j-{index}-0", "uid": str(index), "labels": labels},
            "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]},
            "status": {"phase": "Pending", "containerStatuses": [waits]},
        }

    server = Waiting()
    lines = ClusterBackend(server).pods("j")  # type: ignore[arg-type]
    assert [line.message for line in lines] == ['FailedMount: secret "keys" not found'] * 3 + [""] * 2
    assert server.asked[0] == "involvedObject.kind=Pod,involvedObject.name=j-0-0,type=Warning"
    for refusal in (ApiRefusal(403, "Forbidden", "events is forbidden"), AnswerTooLarge("too large")):
        server.refusal = refusal
        assert [line.message for line in ClusterBackend(server).pods("j")] == [""] * 5  # type: ignore[arg-type]


@pytest.mark.parametrize(("uid", "shown"), [("new", []), ("old", ["j-0-0"]), (None, ["j-0-0"])])
def test_pods_of_a_deleted_job_do_not_belong_to_a_new_job_with_the_same_name(uid: str | None, shown: list[str]) -> None:
    class Ending:
        namespace, context = "ml", "test"

        def items(self, path: str, query: Mapping[str, str], **_: object) -> list[Json]:
            labels = {"ddpjob.io/role": "node", "ddpjob.io/index": "0", "ddpjob.io/job-uid": "old"}
            meta = {"name": "j-0-0", "uid": "1", "labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z"}
            return [{"metadata": meta, "spec": {"containers": [{"name": "trainer"}]}, "status": {"phase": "Running"}}]

        def optional(self, path: str) -> Json | None:
            return {"metadata": {"name": "j", "uid": uid}} if uid else None

    assert [pod.name for pod in ClusterBackend(Ending()).pods("j")] == shown  # type: ignore[arg-type]


def test_a_pod_with_a_failed_sidecar_is_shown_as_running_with_the_failure() -> None:
    """kubectl shows it as 1/2 and Error."""

    class Serving:
        namespace, context = "ml", "test"

        def items(self, path: str, query: Mapping[str, str], **_: object) -> list[Json]:
            labels = {"ddpjob.io/role": "node", "ddpjob.io/index": "0"}
            runs = {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
            failed = {"name": "side", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
            done = {"name": "copy", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
            return [
                {
                    "metadata": {"name": "j-0-0", "uid": "1", "labels": labels},
                    "spec": {"nodeName": "n1", "containers": [{"name": n} for n in ("trainer", "side", "copy")]},
                    "status": {"phase": "Running", "containerStatuses": [runs, failed, done]},
                }
            ]

    (line,) = ClusterBackend(Serving()).pods("j")  # type: ignore[arg-type]
    assert (line.state, line.message) == ("Running", "container side ended with exit code 3")


def test_events_of_an_earlier_job_do_not_belong_to_a_new_job_with_the_same_name() -> None:
    class Kept:
        namespace, context = "ml", "test"

        def request(self, method: str, path: str) -> Json:
            return {"metadata": {"name": "j", "namespace": "ml", "uid": "2"}}

        def items(self, path: str, query: Mapping[str, str], **_: object) -> list[Json]:
            chosen = [part.partition("=")[::2] for part in query["fieldSelector"].split(",")]
            found = [
                {"involvedObject": {"kind": "DDPJob", "name": "j", "uid": uid}, "reason": reason, "eventTime": None,
                 "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
                for uid, reason in (("1", "RestartBudgetSpent"), ("2", "Running"))
            ]  # fmt: skip
            return [e for e in found if all(e["involvedObject"][k.rpartition(".")[2]] == v for k, v in chosen)]

    assert [event.reason for event in ClusterBackend(Kept()).events("j")] == ["Running"]  # type: ignore[arg-type]


def test_a_missing_job_is_reported_even_if_the_user_may_not_list_jobs() -> None:
    """Regression: the error about a mistyped name was that the user may not list jobs."""

    class Closed:
        namespace, context = "ml", "test"

        def request(self, method: str, path: str, **options: Any) -> Json:
            raise ApiRefusal(404, "NotFound", 'ddpjobs.ddpjob.io "j" not found')

        def listing(self, path: str, *_: object, **__: object) -> tuple[list[Json], str]:
            raise ApiRefusal(403, "Forbidden", "User may not list it")

    backend = ClusterBackend(Closed())  # type: ignore[arg-type]
    for ask in (backend.job, backend.delete, lambda name: backend.patch(name, {})):
        with pytest.raises(NoSuchJob, match=r"^no job j in namespace ml, context test$"):
            ask("j")


@pytest.mark.parametrize("name", ["", ".", "..", "a/status", "a%2f"])
def test_an_invalid_job_name_never_addresses_all_jobs(name: str) -> None:
    """Regression: `ddpjob delete "$JOB"` with an empty variable requested the deletion of the whole
    collection.
    """

    class Asked:
        namespace, context = "ml", "test"

        def request(self, method: str, path: str, **_: Any) -> Json:
            raise AssertionError(f"{method} {path}")

        def existing(self, path: str) -> Json | None:
            raise AssertionError(f"GET {path}")

    backend = ClusterBackend(Asked())  # type: ignore[arg-type]
    acts = (backend.job, backend.delete, backend.kill, lambda name: backend.patch(name, {"nodes": 1}))
    for act in acts:
        with pytest.raises(Mistake, match="is not a valid object name"):
            act(name)
