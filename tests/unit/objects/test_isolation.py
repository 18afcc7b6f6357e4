"""The isolation of a job: the Secret with its token, and its NetworkPolicy, evaluated as a network
would evaluate it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from built import PLATFORM, job
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.local.local_platform import LocalPlatform
from ddpjob.objects import isolation
from ddpjob.objects.isolation import build_policy, build_token, policy_name
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_coordinator, build_node


def pods(platform: Platform, **spec: Any) -> list[Json]:
    made = job(**spec)
    return [
        build_node(made, made.status, platform, 0, 0),
        build_node(made, made.status, platform, 1, 0),
        build_coordinator(made, made.status, platform),
    ]


def token_variables(pod: Json) -> list[Json]:
    return [e for c in pod["spec"]["containers"] for e in c["env"] if e["name"] == "DDPJOB_TOKEN"]


# --- the token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
def test_no_pod_contains_the_token(placement: str) -> None:
    made, secret = job(), build_token(job(), PLATFORM)
    for pod in pods(PLATFORM, rendezvous={"placement": placement}):
        assert PLATFORM.token(made) not in json.dumps(pod)
        assert len(token_variables(pod)) == len(pod["spec"]["containers"])
        for variable in token_variables(pod):
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == secret["metadata"]["name"]
            assert secret["stringData"][reference["key"]] == PLATFORM.token(made)


def test_the_secret_with_the_token_is_owned_by_its_job_and_named_after_its_content() -> None:
    made = job()
    secret = build_token(made, PLATFORM)
    assert secret["metadata"]["ownerReferences"] == [made.owner_reference] and secret["immutable"]
    again = DDPJob(name=made.name, namespace=made.namespace, uid="another", spec=made.spec, status=made.status)
    names = {
        secret["metadata"]["name"],
        build_token(again, PLATFORM)["metadata"]["name"],
        build_token(made, Platform(operator_key=b"another key of the operator"))["metadata"]["name"],
    }
    assert len(names) == 3 and all(name.startswith("job-token-") for name in names)
    assert PLATFORM.key_mark not in secret["metadata"]["name"], "the hash is in the status, which everybody can read"


def test_processes_of_this_machine_have_the_token_in_their_environment() -> None:
    platform = LocalPlatform(operator_key=b"0123456789abcdef")
    for pod in pods(platform):
        assert [v["value"] for v in token_variables(pod)] == [platform.token(job())]


# --- the NetworkPolicy ------------------------------------------------------------------------------------------

NAMESPACES = {
    "space": {"kubernetes.io/metadata.name": "space"},
    "elsewhere": {"kubernetes.io/metadata.name": "elsewhere"},
    "ddpjob": {"kubernetes.io/metadata.name": "ddpjob"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring", "team": "monitoring"},
}
OPERATOR = {"app.kubernetes.io/name": "ddpjob-operator", "app.kubernetes.io/instance": "ddpjob"}
INSTALLED = replace(
    PLATFORM,
    operator_peer={
        "namespaceSelector": {"matchLabels": NAMESPACES["ddpjob"]},
        "podSelector": {"matchLabels": OPERATOR},
    },
    metrics_peers=({"namespaceSelector": {"matchLabels": {"team": "monitoring"}}},),
)
STORE, COORDINATOR, SSH = 29400, 29401, 22


@dataclass(frozen=True)
class At:
    """A pod on the network."""

    namespace: str
    labels: Json


def selects(selector: Json, labels: Json) -> bool:
    assert selector.keys() <= {"matchLabels"}, "the evaluator supports no other fields"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def is_peer(peer: Json, source: At, namespace: str) -> bool:
    """Whether both selectors of a peer match. Without a namespace selector, a peer is in the
    policy's own namespace.
    """
    assert peer and peer.keys() <= {"namespaceSelector", "podSelector"}
    there = peer.get("namespaceSelector")
    if there is None and source.namespace != namespace:
        return False
    if there is not None and not selects(there, NAMESPACES[source.namespace]):
        return False
    return selects(peer.get("podSelector", {}), source.labels)


def reaches(policies: list[Json], source: At, target: At, port: int) -> bool:
    """Whether a TCP connection is admitted: by any rule of any policy, or because no policy selects
    the target.
    """
    applying = [
        p
        for p in policies
        if p["metadata"]["namespace"] == target.namespace and selects(p["spec"]["podSelector"], target.labels)
    ]
    for policy in applying:
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            ports = rule.get("ports")
            open_here = ports is None or {"protocol": "TCP", "port": port} in ports
            if open_here and ("from" not in rule or any(is_peer(p, source, target.namespace) for p in rule["from"])):
                return True
    return not applying


def at(pod: Json) -> At:
    return At(pod["metadata"]["namespace"], pod["metadata"]["labels"])


def check_who_reaches_whom() -> None:
    ours = job()
    other = replace(ours, name="other", uid="other-uid")
    policies = [build_policy(j, INSTALLED) for j in (ours, other)]
    members = [at(pod) for pod in pods(INSTALLED)]
    stranger = at(build_node(other, other.status, INSTALLED, 0, 0))
    operator, monitoring = At("ddpjob", OPERATOR), At("monitoring", {"app": "prometheus"})
    for target in members:
        for port in (STORE, COORDINATOR, SSH):
            assert all(reaches(policies, member, target, port) for member in members), (
                "the job's own pods may connect to each other"
            )
            for source, who in (
                (stranger, "another job of the namespace"),
                (At("space", {"app": "web"}), "any pod of the namespace"),
                (At("space", OPERATOR), "a pod of the namespace that is labelled as the operator"),
                (At("elsewhere", {}), "a pod elsewhere"),
                (At("elsewhere", target.labels), "a pod elsewhere that is labelled as the job's"),
                (At("elsewhere", OPERATOR), "a pod elsewhere that is labelled as the operator"),
                (At("ddpjob", {"app": "other"}), "another pod of the operator's namespace"),
            ):
                assert not reaches(policies, source, target, port), f"{who} reaches port {port}"
        for source in (operator, monitoring):
            assert reaches(policies, source, target, COORDINATOR)
            assert not reaches(policies, source, target, STORE) and not reaches(policies, source, target, SSH)
    assert reaches(policies, members[0], operator, 443), "a job's policy restricts no other pod"


def test_only_a_jobs_own_pods_and_the_operator_can_connect_to_it() -> None:
    check_who_reaches_whom()


def _two_peers(policy: Json) -> None:
    """Make a common mistake: turn the two selectors into two peers, so that either of them
    suffices.
    """
    policy["ingress"][1]["from"][:1] = [{key: value} for key, value in policy["ingress"][1]["from"][0].items()]


DEFECTS: dict[str, Callable[[Json], Any]] = {
    "the selectors of the operator are two peers": _two_peers,
    "every pod of the namespace": lambda policy: policy["ingress"][0]["from"][0].update(podSelector={}),
    "the job's labels anywhere": lambda policy: policy["ingress"][0]["from"][0].update(namespaceSelector={}),
    "no ports for the operator": lambda policy: policy["ingress"][1].pop("ports"),
    "no peers": lambda policy: policy["ingress"][0].pop("from"),
    "selects no pod": lambda policy: policy["podSelector"]["matchLabels"].update(typo="true"),
    "selects every pod": lambda policy: policy.update(podSelector={}) or policy["ingress"].pop(0),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_of_the_policy_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = isolation._policy

    def wrong(made: DDPJob, platform: Platform) -> Json:
        policy = json.loads(json.dumps(right(made, platform)))
        DEFECTS[name](policy)
        return policy

    monkeypatch.setattr(isolation, "_policy", wrong)
    with pytest.raises(AssertionError):
        check_who_reaches_whom()


def test_no_policy_restricts_jobs_that_opt_out() -> None:
    """This holds even if a policy remains from before a job was suspended and opted out."""
    ours = job()
    policy = build_policy(ours, INSTALLED)
    for spec in ({"network": {"isolate": False}}, {"podTemplate": {"spec": {"hostNetwork": True}}}):
        assert policy_name(job(**spec), INSTALLED) == ""
        assert all(reaches([policy], At("elsewhere", {}), at(pod), STORE) for pod in pods(INSTALLED, **spec))
    assert policy_name(ours, PLATFORM) == "", "a policy cannot name an operator outside the cluster"


def test_a_moved_operator_needs_a_different_policy() -> None:
    names = {
        policy_name(job(), INSTALLED),
        policy_name(job(), replace(INSTALLED, operator_peer={"podSelector": {}})),
        policy_name(job(), replace(INSTALLED, metrics_peers=())),
        policy_name(job(rendezvous={"port": 4000}), INSTALLED),
    }
    assert len(names) == 4 and policy_name(job(), INSTALLED) in names
    assert build_policy(job(), INSTALLED)["metadata"]["ownerReferences"] == [job().owner_reference]


# --- outgoing traffic, which a namespace may deny ---------------------------------------------------------------


@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
def test_the_policy_of_the_page_lets_a_job_reach_its_own_pods_and_dns(placement: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "pod-security.md").read_text()
    [policy] = [
        body
        for text in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if (body := yaml.safe_load(text)).get("kind") == "NetworkPolicy"
    ]
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Egress"] and "ingress" not in spec
    own, names, buckets = spec["egress"]
    assert own.keys() == {"to"} and own["to"] == [{"podSelector": spec["podSelector"]}], "all ports of its own pods"
    assert {(port["protocol"], port["port"]) for port in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert buckets == {"ports": [{"protocol": "TCP", "port": 443}]}
    for pod in pods(PLATFORM, rendezvous={"placement": placement}):
        assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["automountServiceAccountToken"] is False, "a job does not need the API server"
