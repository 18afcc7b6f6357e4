"""etcd, the API server, the controllers, the scheduler and DNS, all in the control plane's
namespace.
"""

from __future__ import annotations

from pathlib import Path

from testcluster import pki
from testcluster.processes import spawn, succeeds, wait_for
from testcluster.settings import Settings, of_oldest


def _gates() -> list[str]:
    """Return the feature gates for Kubernetes' own gangs, which release 1.36 disables by default
    and older ones lack.
    """
    gates = "--feature-gates=GenericWorkload=true,GangScheduling=true,WorkloadAwarePreemption=true"
    return [] if of_oldest() else [gates]


def create_credentials(settings: Settings) -> pki.Authority:
    """Create the certificates of all control plane components."""
    authority = pki.create_authority(settings)
    addresses = settings.addresses
    names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    ]
    pki.issue_server(
        settings, authority, "kube-apiserver", names, ["127.0.0.1", addresses.api, addresses.kubernetes_service]
    )
    pki.issue_client(settings, authority, "admin", "admin", "system:masters")
    pki.issue_client(settings, authority, "kubelet-client", "kubelet-client", "system:masters")
    pki.issue_client(settings, authority, "coredns", "coredns", "system:masters")
    for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        pki.issue_client(settings, authority, name, f"system:{name}")
    return authority


def start_api(settings: Settings, programs: Path) -> None:
    """Start etcd and the API server without waiting for them."""
    netns = settings.control_plane_netns
    # fsync is disabled, because the store is needed for only one test run.
    etcd: list[str | Path] = [
        programs / "etcd",
        "--data-dir",
        settings.run / "etcd",
        "--unsafe-no-fsync",
        "--quota-backend-bytes=8589934592",
    ]
    etcd += [
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]
    spawn(settings, "etcd", netns, etcd)
    start_apiserver(settings, programs)


def start_apiserver(settings: Settings, programs: Path) -> None:
    """Start only the API server, without waiting for it."""
    spawn(
        settings,
        "kube-apiserver",
        settings.control_plane_netns,
        [programs / "kube-apiserver", *_api_flags(settings)],
    )


def _api_flags(settings: Settings) -> list[str]:
    folder = settings.run / "pki"
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={settings.addresses.api}",
        f"--service-cluster-ip-range={settings.addresses.services}",
        f"--tls-cert-file={folder}/kube-apiserver.crt",
        f"--tls-private-key-file={folder}/kube-apiserver.key",
        f"--client-ca-file={folder}/ca.crt",
        f"--kubelet-client-certificate={folder}/kubelet-client.crt",
        f"--kubelet-client-key={folder}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={folder}/sa.pub",
        f"--service-account-signing-key-file={folder}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        # OpenShift enables the second plugin, which checks who may change an object's owners.
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
        "--allow-privileged=true",
        # Webhooks are reached at a pod's address, because no kube-proxy runs next to the API
        # server.
        "--enable-aggregator-routing=true",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
        *([] if of_oldest() else ["--runtime-config=scheduling.k8s.io/v1alpha2=true"]),
        *_gates(),
    ]


def wait_for_api(settings: Settings, programs: Path) -> float:
    """Wait until the API server reports that it is ready, and return the seconds it took."""
    kubectl: list[str | Path] = [programs / "kubectl", "--kubeconfig", settings.kubeconfig, "--request-timeout=5s"]
    return wait_for("the API server", lambda: succeeds(*kubectl, "get", "--raw", "/readyz"), settings)


def start_controllers(settings: Settings, programs: Path) -> None:
    """Start the controllers and the scheduler. A silent node is NotReady after only 8 s, so that
    tests can observe this.
    """
    folder = settings.run / "pki"
    manager: list[str | Path] = [
        programs / "kube-controller-manager",
        f"--kubeconfig={settings.run}/kube-controller-manager.kubeconfig",
    ]
    manager += [
        f"--service-account-private-key-file={folder}/sa.key",
        f"--root-ca-file={folder}/ca.crt",
        "--use-service-account-credentials=true",
    ]
    manager += [*_gates(), "--leader-elect=false", "--node-monitor-period=1s", "--node-monitor-grace-period=8s"]
    spawn(settings, "kube-controller-manager", settings.control_plane_netns, manager)
    _start_scheduler(settings, programs)


def _start_scheduler(settings: Settings, programs: Path) -> None:
    """Start the scheduler with the back-off that docs/gangs.md recommends.

    Otherwise it would retry a waiting gang some hundred times a second and occupy a core. All pods
    have the same back-off, so they are tried in the order of their arrival.
    """
    configuration = settings.run / "kube-scheduler.yaml"
    configuration.write_text(
        f"""apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: {settings.run}/kube-scheduler.kubeconfig
leaderElection:
  leaderElect: false
podInitialBackoffSeconds: 2
podMaxBackoffSeconds: 2
"""
    )
    scheduler: list[str | Path] = [programs / "kube-scheduler", f"--config={configuration}"]
    scheduler += [f"{gates},SchedulerPopFromBackoffQ=false" for gates in _gates()]
    spawn(settings, "kube-scheduler", settings.control_plane_netns, scheduler)


def start_dns(settings: Settings, programs: Path) -> None:
    """Start CoreDNS. It answers from its watch without a cache, so a new name resolves as soon as
    its endpoints exist.
    """
    corefile = settings.run / "Corefile"
    corefile.write_text(
        f""".:53 {{
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes cluster.local {{
        kubeconfig {settings.run}/coredns.kubeconfig
        pods insecure
        ttl 0
    }}
}}
"""
    )
    spawn(settings, "coredns", settings.control_plane_netns, [programs / "coredns", "-conf", corefile])
