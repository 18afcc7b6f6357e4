"""The main promise on real pods: a force-deleted pod is replaced, and the job completes."""

from __future__ import annotations

from pathlib import Path

from jobs import Jobs, job, steps_job
from machine import slowness

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_force_deleted_pod_is_replaced_and_the_job_completes(jobs: Jobs) -> None:
    jobs.apply(steps_job("two", 200))  # on a busy machine, the job must not end before the pod is deleted
    jobs.wait_phase("two", "Running")
    jobs.wait("the first steps", lambda: jobs.step("two") >= 3)
    before = jobs.pods()
    assert sorted(before) == ["two-0-0", "two-1-0"]
    assert {pod["spec"]["nodeName"] for pod in before.values()} == set(jobs.cluster.nodes[:2]), (
        "there is one pod per node"
    )

    jobs.kill("two-1-0")
    jobs.wait("the replacement", lambda: "two-1-1" in jobs.pods(), timeout=5)
    jobs.wait_phase("two", "Complete")

    status = jobs.status("two")
    assert [slot["attempt"] for slot in status["slots"]] == [0, 1], "the other pod must survive"
    restarts = status["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 1)
    assert [(r["pod"], r["reason"], r["counted"]) for r in restarts["recent"]] == [("two-1-0", "Deleted", False)]
    assert status["round"] == 1
    assert status["progress"]["step"] == 200
    logs = jobs.kubectl("logs", "two-0-0")
    assert logs.count("rank 0 of 2 begins") + logs.count("rank 1 of 2 begins") == 2, (
        "its workers must have started twice"
    )


def test_a_spare_takes_over_and_a_new_coordinator_does_not_interrupt_training(jobs: Jobs) -> None:
    jobs.apply(steps_job("fast", 100000, spares=1, recovery={"mode": "Fast"}, scheduling={"onePodPerNode": False}))
    jobs.wait("a spare", lambda: jobs.status("fast").get("nodes", {}).get("display") == "2/2 +1")
    jobs.wait("the first steps", lambda: jobs.step("fast") >= 3)
    jobs.wait("the condition of the mode", lambda: jobs.condition("fast", "FastRecovery").get("status") == "True")
    (survivor, victim), (spare,) = sorted(jobs.pods()), jobs.pods("spare")

    jobs.kill(victim)
    jobs.wait("the spare's takeover", lambda: set(jobs.pods()) == {survivor, spare}, timeout=10)
    replacement = f"{victim.removesuffix('-0')}-1"
    jobs.wait(
        "another spare",
        lambda: jobs.status("fast")["nodes"]["display"] == "2/2 +1" and [*jobs.pods("spare")] == [replacement],
    )
    status = jobs.status("fast")
    assert [(r["pod"], r["reason"], r["counted"]) for r in status["restarts"]["recent"]] == [(victim, "Deleted", False)]
    seconds = status["restarts"]["recent"][0]["seconds"]
    assert seconds < 5 * slowness(), "from the loss until the group runs again"

    begun = [jobs.kubectl("logs", pod).count("begins") for pod in jobs.pods()]
    step = jobs.step("fast")
    jobs.kill("fast-coordinator-0")
    jobs.wait("another coordinator", lambda: jobs.status("fast")["rendezvous"].get("attempt") == 1)
    jobs.wait("more steps", lambda: jobs.step("fast") > step + 50, timeout=30)
    assert [jobs.kubectl("logs", pod).count("begins") for pod in jobs.pods()] == begun, "no worker must be restarted"
    status = jobs.status("fast")
    assert status["rendezvous"]["generation"] == 0 and status["restarts"]["counted"] == 0
    assert status["restarts"]["recent"][-1]["reason"] == "CoordinatorLost"


def test_a_script_without_checkpoints_continues_after_its_last_step(jobs: Jobs) -> None:
    """The script continues from the snapshot in the other pod's memory. The weights equal those of
    an undisturbed job.
    """
    for name in ("memory", "undisturbed"):
        script, args = str(EXAMPLES / "snapshots.py"), ["--steps=400"]
        jobs.apply(job(name, script=script, args=args, recovery={"mode": "Fast", "snapshots": 1}))
    for number, pod in enumerate(("memory-1-0", "memory-0-0"), start=1):
        jobs.wait("steps to lose", lambda: jobs.step("memory") > 20 * number)  # noqa: B023
        jobs.kill(pod)
        jobs.wait("the restart's record", lambda: len(continued_from(jobs, "memory")) == number)  # noqa: B023
    assert continued_from(jobs, "memory") == ["memory", "memory"]
    restarts = jobs.status("memory")["restarts"]
    assert max(restart["repeatedSteps"] for restart in restarts["recent"]) <= 1, restarts
    for name in ("memory", "undisturbed"):
        jobs.wait_phase(name, "Complete")
    sums = {
        line.rpartition("sum ")[2]
        for pod in jobs.pods()
        for line in jobs.kubectl("logs", pod).splitlines()
        if "ends with weights" in line
    }
    assert len(sums) == 1, sums


def continued_from(jobs: Jobs, name: str) -> list[str]:
    restarts = jobs.status(name).get("restarts", {}).get("recent", ())
    return [restart["continuedFrom"] for restart in restarts if "continuedFrom" in restart]
