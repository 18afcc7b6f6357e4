"""Progress reports of a job's pods. They prove knowledge of the token and never send it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpjob_pod import outbox
from ddpjob_runtime import protocol, worker
from ddpjob_runtime.coordinator import server as coordinator_server
from machine import slowness
from runtime_harness import TOKEN, Job

ROOT = Path(__file__).parents[2]
Post = Callable[[str, int], bool]


class Relay:
    """A relay between a client and the coordinator that records every request."""

    def __init__(self, port: int) -> None:
        self.port, self.requests = port, list[bytes]()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            request = read_request(client)
            self.requests.append(request)
            client.sendall(self.send(request))
            client.close()

    def send(self, request: bytes) -> bytes:
        """Send a recorded request again, and return the coordinator's response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as other:
            other.sendall(request)
            return b"".join(iter(lambda: other.recv(65536), b""))


def read_request(client: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request or len(request.partition(b"\r\n\r\n")[2]) < _length(request):
        request += client.recv(65536)
    return request


def _length(request: bytes) -> int:
    head = request.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, nodes=1, store=False, mode="Fast")
    job.start_coordinator()
    job.wait_until(lambda r: r["state"] == "Forming", 10)
    yield job
    job.close()


def by_worker(monkeypatch: pytest.MonkeyPatch) -> Post:
    counters: dict[str, worker.StepCounter] = {}

    def post(address: str, step: int) -> bool:
        monkeypatch.setenv("DDPJOB_COORDINATOR", address)
        monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
        module = SimpleNamespace(register_optimizer_step_post_hook=lambda hook: None)
        counter = counters.setdefault(address, worker.StepCounter(module))
        counter.counts[0] = step
        counter.post(2.0)
        return counter.posted == step

    return post


def by_trainer(monkeypatch: pytest.MonkeyPatch) -> Post:
    monkeypatch.syspath_prepend(str(ROOT / "trainer"))
    if sys.version_info < (3, 11):
        pytest.skip("the trainer needs Python 3.11")
    client = pytest.importorskip("ddpjob_trainer.reporting.progress_client")
    clients: dict[str, Any] = {}

    def post(address: str, step: int) -> bool:
        made = clients.setdefault(address, client.ProgressClient(address, TOKEN))
        return bool(made._send({"step": step}))

    return post


def by_script(monkeypatch: pytest.MonkeyPatch) -> Post:
    from ddpjob_report import link

    clients: dict[str, link.Link] = {}

    def post(address: str, step: int) -> bool:
        return clients.setdefault(address, link.Link(address, TOKEN))._send({"step": step})

    return post


CLIENTS = pytest.mark.parametrize("client", [by_worker, by_trainer, by_script])


@CLIENTS
def test_the_token_is_proved_and_never_sent(
    job: Job, client: Callable[[pytest.MonkeyPatch], Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, post = Relay(job.port), client(monkeypatch)
    assert post(relay.address, 3) and post(relay.address, 4)
    assert job.status()["progress"]["step"] == 4
    assert len(relay.requests) == 3, "the first request learns the coordinator's number"
    assert not any(TOKEN.encode() in request for request in relay.requests)
    assert all(b"DDPJob-Proof: " in request for request in relay.requests)


@CLIENTS
def test_a_stranger_at_the_coordinators_address_does_not_get_the_token(
    client: Callable[[pytest.MonkeyPatch], Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for text in (b"401 Unauthorized", b"401 Unauthorized", b"200 OK"):
            try:
                other, _ = listening.accept()
            except OSError:  # The test has ended.
                return
            received.append(read_request(other))
            other.sendall(b"HTTP/1.1 " + text + b"\r\nContent-Length: 0\r\n\r\n")
            other.close()

    threading.Thread(target=answer, daemon=True).start()
    post, address = client(monkeypatch), f"127.0.0.1:{listening.getsockname()[1]}"
    assert [post(address, step) for step in (1, 2)] == [False, False]
    assert received and not any(TOKEN.encode() in request for request in received)
    listening.close()


@CLIENTS
def test_a_progress_report_names_its_round(
    job: Job, client: Callable[[pytest.MonkeyPatch], Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of a fenced rank 0 must not appear as a step of the next round."""
    monkeypatch.setenv("DDPJOB_FENCE", "0.7")
    relay, post = Relay(job.port), client(monkeypatch)
    assert post(relay.address, 3)
    assert b'"round": "0.7"' in relay.requests[-1]


def test_a_reported_step_has_the_time_at_which_the_script_reported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed must be right even if a post is late or repeated. The last post has no speed."""
    from ddpjob_report import link

    posted, clock = list[dict[str, Any]](), [50.0]
    monkeypatch.setattr(link.Link, "_work", lambda self: None)
    client = link.Link("127.0.0.1:1", TOKEN)
    monkeypatch.setattr(client._poster, "post", lambda figures: (posted.append(figures), (200, ""))[1])
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for step in (10, 20, 30):
        client.add({"step": step, "steps": 100})
        clock[0] += 2.0
    client.add({"loss": 0.5})
    clock[0] += 60.0
    assert client._send({"step": 30, "steps": 100}) and client._send({"loss": 0.5})
    assert posted[0]["metrics"] == {"stepsPerSecond": 5.0} and posted[0]["eta"] == 14.0
    assert posted[1] == {"loss": 0.5}
    client.close()
    assert client._send({"step": 31, "steps": 100}) and posted[2] == {"step": 31, "steps": 100}


def test_the_worker_signs_requests_as_the_protocol_requires() -> None:
    parts = ("request", "", "nonce", "POST", "/v1/progress", b'{"a": "\xc3\xa9"}')
    assert worker.seal(TOKEN, *parts) == protocol.seal(TOKEN, *parts)


def test_a_request_that_changes_something_is_accepted_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay at the coordinator's former address cannot replay a message."""
    relay, post = Relay(job.port), by_worker(monkeypatch)
    assert post(relay.address, 3)
    first = relay.requests[-1]
    assert post(relay.address, 7)
    assert relay.send(first).startswith(b"HTTP/1.1 401 ")
    assert job.status()["progress"]["step"] == 7
    assert post(relay.address, 8), "other requests are still accepted"


def test_few_used_nonces_are_kept_and_they_expire_with_the_coordinators_number() -> None:
    server = object.__new__(coordinator_server.Server)
    server.renew()
    first, most = server.instance, coordinator_server.MAX_NONCES
    assert all(server.use(str(number)) for number in range(most - 1)) and not server.use("5")
    assert server.instance == first and len(server._used) == most - 1
    assert server.use("last")
    assert server.instance != first and not server._used, "a used request is invalid for the new number too"


def test_reported_figures_arrive_with_the_speed_and_the_remaining_time(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ddpjob_report
    from ddpjob_report import link

    monkeypatch.setenv("DDPJOB_COORDINATOR", f"127.0.0.1:{job.port}")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    monkeypatch.setattr(link, "_link", None)
    monkeypatch.setattr(outbox, "TIMEOUT_SECONDS", outbox.TIMEOUT_SECONDS * slowness())
    monkeypatch.setenv("RANK", "1")
    ddpjob_report.report(step=90)
    assert link._link is None, "only rank 0 reports"
    monkeypatch.setenv("RANK", "0")
    ddpjob_report.report(epoch=1, step=10, steps=100, loss=0.5, accuracy=0.25)
    job.wait_until(lambda r: r["progress"].get("step") == 10, 10)
    ddpjob_report.report(step=20, steps=100, loss=float("nan"))
    job.wait_until(lambda r: r["progress"].get("step") == 20, 10)
    ddpjob_report.report(step=30)
    ddpjob_report.report(step=31)
    link.close()
    progress = job.status()["progress"]
    assert (progress["epoch"], progress["step"], progress["loss"]) == (1, 31, None), "the last report too"
    assert progress["metrics"].keys() <= {"accuracy", "stepsPerSecond"}
    link._link._send({"what": 1})  # type: ignore[attr-defined]
    link._link._send({"what": 1})  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("the coordinator rejected a report: ") == 1


def only_here(sleep: Callable[[float], None]) -> Callable[[float], None]:
    """Return a time.sleep that is replaced only in this thread. An earlier test's thread may still
    be running.
    """
    here, pause = threading.get_ident(), time.sleep
    return lambda seconds: (sleep if threading.get_ident() == here else pause)(seconds)


def test_the_speed_of_counted_steps_covers_only_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are posted 10 ms after the thread has started, which is too soon for a
    speed.
    """
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    counter = worker.StepCounter(SimpleNamespace(register_optimizer_step_post_hook=lambda hook: None))
    clock, waits, posted = [50.0], [0.01, *[0.5] * 12], list[tuple[int, float]]()

    def sleep(seconds: float) -> None:
        if not waits:
            raise EOFError
        assert seconds == waits.pop(0)
        clock[0] += seconds
        counter.counts[0] = counter.counts.get(0, 0) + 2 + len(waits) % 2

    monkeypatch.setattr(time, "sleep", only_here(sleep))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(counter, "post", lambda speed: posted.append((counter.counts[0], speed)))
    with pytest.raises(EOFError):
        counter.run()
    assert posted[0] == (2, 0.0)
    assert posted[1:4] == [(5, 0.0), (7, 5.0), (10, pytest.approx(16 / 3))], (
        "with few posts, the speed is a ratio of small whole numbers"
    )
    assert [speed for _, speed in posted[10:]] == pytest.approx([5.0, 5.0, 5.0], rel=0.05)


def torch_without_gpu(**fields: Any) -> Any:
    """Return the part of torch that the step counter uses."""
    cuda = SimpleNamespace(is_initialized=lambda: False)
    return SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False), cuda=cuda, **fields)


def test_the_counter_reports_that_steps_can_no_longer_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled optimizer's steps run no hook, and neither do steps that a CUDA graph repeats."""
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    hooks, posted = list[Any](), list[dict[str, Any]]()
    counter = worker.StepCounter(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))
    monkeypatch.setattr(counter, "start", lambda: None)
    monkeypatch.setattr(counter, "ask", lambda body: (posted.append(json.loads(body)), ("200", ""))[1])
    torch, frames = torch_without_gpu(), {"ok": 1}
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"frames": frames}))  # type: ignore[arg-type]

    def looks() -> bool:
        """Return whether the counter's next check, 0.5 s later, reports that steps cannot be
        counted.
        """
        posted.clear()
        waits = [None, EOFError]

        def sleep(_: float) -> None:
            if (end := waits.pop(0)) is not None:
                raise end

        monkeypatch.setattr(time, "sleep", only_here(sleep))
        with pytest.raises(EOFError):
            counter.run()
        return any(report.get("uncountable") for report in posted)

    hooks[0]("optimizer", (), {})
    assert not looks(), "the model is compiled, and its steps are counted"
    frames["ok"] = 2
    counter.posted = 1
    monkeypatch.setattr(counter, "counts", {})
    assert looks() and not looks(), "once"
    counter.counts["optimizer"] = 1
    hooks[0]("optimizer", (), {})
    assert not counter.is_uncountable(), "a step was counted again"
    torch.cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    hooks[0]("optimizer", (), {})
    assert counter.is_uncountable()


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        ({}, {"momentum": 1}, ["unknown", "no"]),
        ({"momentum": 1}, {"momentum": 2}, ["yes", "yes"]),
        ({}, {}, ["unknown", "unknown"]),
        ({}, "loaded", ["unknown", "yes"]),
    ],
)
def test_an_optimizer_with_an_early_state_shows_that_the_script_resumed(
    monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, known: list[str]
) -> None:
    """DCP takes an empty step before it loads. An optimizer without state proves nothing."""
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    monkeypatch.setitem(sys.modules, "torch", torch_without_gpu())
    ahead, behind, posted = list[Any](), list[Any](), list[dict[str, Any]]()
    module = SimpleNamespace(
        register_optimizer_step_pre_hook=ahead.append, register_optimizer_step_post_hook=behind.append
    )
    counter = worker.StepCounter(module)
    monkeypatch.setattr(counter, "start", lambda: None)
    monkeypatch.setattr(counter, "ask", lambda body: (posted.append(json.loads(body)), ("200", ""))[1])
    optimizer = SimpleNamespace(state=before)
    for number in (1, 2):
        ahead[0](optimizer, (), {})
        if after != "loaded":
            optimizer.state.update(after)
        elif number == 1:
            optimizer.state["momentum"] = 0
        behind[0](optimizer, (), {})
        counter.post(1.0)
        if after == "loaded":
            optimizer.state = {"momentum": 7}
    assert [report["resumed"] for report in posted] == known


@pytest.mark.parametrize(
    ("collectives", "exchanging"),
    [([3, 4, 5], True), ([0, 7, 9, 9, 9], True), ([3, 3, 3], False), ([3, 4, 4, 5, 6], False), ([0, 0, 0], False)],
)
def test_ranks_count_as_exchanging_if_each_of_the_first_steps_has_collectives(
    monkeypatch: pytest.MonkeyPatch, collectives: list[int], exchanging: bool
) -> None:
    """Collectives in later steps may belong to an evaluation."""
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    made, hooks, posted = [0], list[Any](), list[dict[str, Any]]()
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: made[0])
    c10d: Any = SimpleNamespace(_world=SimpleNamespace(pg_map=[group]))
    monkeypatch.setitem(sys.modules, "torch", torch_without_gpu())
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    counter = worker.StepCounter(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))
    monkeypatch.setattr(counter, "start", lambda: None)
    monkeypatch.setattr(counter, "ask", lambda body: (posted.append(json.loads(body)), ("200", ""))[1])
    for made[0] in collectives:
        hooks[0]("optimizer", (), {})
        counter.post(1.0)
    assert posted[-1].get("exchanging", False) is exchanging
    assert not any("exchanging" in report for report in posted[:2])


def test_a_program_that_steps_without_a_group_is_reported_until_it_forms_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DDPJOB_TOKEN", TOKEN)
    monkeypatch.setattr(worker, "exchanges_otherwise", lambda: False)
    posted: list[dict[str, Any]] = []

    def counted(world: str, *steps: int, last: bool = False) -> list[bool]:
        monkeypatch.setenv("WORLD_SIZE", world)
        hooks: list[Any] = []
        counter = worker.StepCounter(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))
        monkeypatch.setattr(counter, "start", lambda: None)
        monkeypatch.setattr(counter, "ask", lambda body: (posted.append(json.loads(body)), ("200", ""))[1])
        posted.clear()
        for number in steps:
            for _ in range(number):
                hooks[0]("optimizer", (), {})
            counter.post(1.0)
        if last:
            counter.post(0.0, last=True)
        return ["ungrouped" in report for report in posted]

    monkeypatch.setitem(sys.modules, "torch", torch_without_gpu())
    monkeypatch.setattr(worker, "group_exists", lambda: False)
    assert counted("2", 9, 1, 5) == [False, True, True], "a few steps may come before the group is formed"
    assert capsys.readouterr().err.count("each of the 2 ranks trains a separate model") == 1
    assert counted("1", 9, 1, 5) == [False, False, False]
    assert counted("2", 3, last=True) == [False, True], "a program that ends will form no group"
    assert counted("2", 12, last=True) == [True, True]
    monkeypatch.setattr(worker, "group_exists", lambda: True)
    monkeypatch.setattr(worker, "ignores_group", lambda: False)  # Another test may have used Accelerate.
    assert counted("2", 20, 1) == [False, False]
    monkeypatch.setattr(worker, "group_exists", lambda: False)
    monkeypatch.setattr(worker, "exchanges_otherwise", lambda: True)
    assert counted("2", 20) == [False]


@pytest.mark.parametrize(
    ("processes", "collectives", "alone"), [(1, 0, True), (1, 3, False), (2, 0, False), (None, 0, False)]
)
def test_a_group_that_accelerate_forms_without_using_it_is_reported(
    processes: int | None,
    collectives: int,
    alone: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = {} if processes is None else {"num_processes": processes}
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setitem(sys.modules, "torch", torch_without_gpu())
    for variable, value in {"DDPJOB_COORDINATOR": "127.0.0.1:1", "DDPJOB_TOKEN": TOKEN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(worker, "group_exists", lambda: True)
    monkeypatch.setattr(worker, "collectives", lambda: collectives)
    monkeypatch.setattr(worker, "exchanges_otherwise", lambda: False)
    hooks: list[Any] = []
    counter = worker.StepCounter(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))
    monkeypatch.setattr(counter, "start", lambda: None)
    for _ in range(20):
        hooks[0]("optimizer", (), {})
    assert counter.trains_alone(20, 10) is alone
    assert ("Accelerate needs cpu=True" in capsys.readouterr().err) is alone


@pytest.mark.parametrize("kind", ["link", "curves"])
def test_a_scripts_last_report_is_kept_while_an_earlier_one_is_being_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddpjob_report import curve_file, link

    on_its_way, may_go, kept = threading.Event(), threading.Event(), list[int]()

    def slowly(step: int) -> None:
        on_its_way.set()
        may_go.wait(60)
        kept.append(step)

    def send(self: link.Link, figures: dict[str, Any]) -> bool:
        slowly(figures["step"])
        return True

    def write_step(log: object, step: int, figures: dict[str, Any]) -> None:
        slowly(step)

    monkeypatch.setattr(link.Link, "_send", send)
    monkeypatch.setattr(curve_file, "_write_step", write_step)
    monkeypatch.setattr(outbox, "TIMEOUT_SECONDS", 60.0)
    box = link.Link("127.0.0.1:1", TOKEN) if kind == "link" else curve_file.CurveFile(tmp_path)
    box.add({"step": 1})
    assert on_its_way.wait(20)
    box.add({"step": 2})
    closing = threading.Thread(target=box.close)
    closing.start()
    while not box._closing:
        time.sleep(0.001)
    may_go.set()
    closing.join()
    assert kept == [1, 2]


COPIES = """
import sys, time, ddpjob_report
from ddpjob_bucket import Bucket
publish = Bucket.publish
def slow(*arguments):
    time.sleep(0.3)
    return publish(*arguments)
Bucket.publish = slow
folder = ddpjob_report.checkpoint_dir()
if sys.argv[1] == "first":
    ddpjob_report.report(step=4)
(folder / "a.pt").write_text("a")
ddpjob_report.copy_checkpoint(folder / "a.pt", 5)
while not (folder / "enough").exists():  # A long step.
    time.sleep(0.01)
ddpjob_report.copy_checkpoint(folder / "a.pt", 9)
"""


@pytest.mark.parametrize("reports", ["first", "never"])
def test_a_copy_is_reported_as_soon_as_it_exists(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reports: str
) -> None:
    """Regression: if a script hung or had ended, its newest copy was not shown."""
    pytest.importorskip("obstore", reason="pip install obstore")
    folder = tmp_path / "pod"
    folder.mkdir()
    own = {"DDPJOB_CHECKPOINT_DIR": str(folder), "DDPJOB_CHECKPOINT_URL": f"file://{tmp_path / 'store'}", "RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", COPIES, reports], env=job.environment(**own)) as script:
        try:
            job.wait_until(lambda r: r["progress"].get("metrics", {}).get("copyStep") == 5, 20)
            (folder / "enough").touch()
            assert script.wait(60 * slowness()) == 0
            assert job.status()["progress"]["metrics"]["copyStep"] == 9
        finally:
            script.kill()


def test_rank_0_reports_the_software_and_the_gpu_that_it_uses(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent again to a new coordinator, even if the script reports its own steps."""
    gpu = SimpleNamespace(is_initialized=lambda: True, get_device_name=lambda: "NVIDIA H200")
    torch = SimpleNamespace(__version__="2.9.1", version=SimpleNamespace(cuda="12.8"), cuda=gpu, _dynamo=None)
    post = by_worker(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", torch)
    job.post("/v1/progress", {"step": 1, "loss": 0.5})
    relay = Relay(job.port)
    assert post(relay.address, 3) and post(relay.address, 4)
    found = job.status()["progress"]["environment"]
    assert found["gpu"] == "NVIDIA H200" and found["packages"]["torch"] == "2.9.1"
    assert (
        found["packages"]["python"] == ".".join(map(str, sys.version_info[:3])) and found["packages"]["cuda"] == "12.8"
    )
    assert [b"environment" in request for request in relay.requests] == [True, True, False]


@pytest.mark.parametrize("environment", [{"gpu": 7}, {"packages": {"torch": "\x1b[31m"}}, {"packages": []}, {}])
def test_a_malformed_description_of_the_software_is_dropped(job: Job, environment: dict[str, Any]) -> None:
    assert job.post("/v1/progress", {"step": 1, "environment": environment})[0] == 200
    assert "environment" not in job.status()["progress"]
    assert job.post("/v1/progress", {"step": 1, "environment": "x"})[0] == 400
