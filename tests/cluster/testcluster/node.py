"""A node: containerd, kubelet and kube-proxy in the node's network namespace, and pods in the
node's cgroup.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from testcluster import cgroups, pki
from testcluster.processes import kill, recorded, run, spawn, succeeds, wait_for
from testcluster.settings import Settings, node_number

DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins/kubelet.sock"
"""Socket for device plugins. All kubelets of this machine share it, regardless of their --root-dir.
"""
PAUSE_IMAGE = "localhost/pause:1"
CNI_PLUGINS = Path("/usr/lib/cni")


def folder(settings: Settings, node: str) -> Path:
    """Return the folder with all files of a node."""
    return settings.run / node


def socket(settings: Settings, node: str) -> Path:
    """Return the path of containerd's socket."""
    return folder(settings, node) / "containerd.sock"


def create(settings: Settings, node: str, authority: pki.Authority) -> None:
    """Create the node's folders, configuration, certificate and cgroup."""
    home = folder(settings, node)
    (home / "cni").mkdir(parents=True)
    pki.issue_client(settings, authority, node, f"system:node:{node}", "system:nodes")
    cgroups.create(settings, node)
    (home / "cni" / "10-bridge.conflist").write_text(json.dumps(_cni(settings, node), indent=1))
    (home / "containerd.toml").write_text(_containerd(settings, node))
    (home / "resolv.conf").write_text(f"nameserver {settings.addresses.dns}\n")
    (home / "kubelet.json").write_text(json.dumps(_kubelet(settings, node), indent=1))
    (home / "kube-proxy.json").write_text(json.dumps(_proxy(settings, node), indent=1))


def _cni(settings: Settings, node: str) -> dict[str, object]:
    subnet = settings.addresses.pods_of(node_number(node))
    ipam = {
        "type": "host-local",
        "dataDir": str(folder(settings, node) / "ipam"),
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "198.18.0.0/15"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    return {
        "cniVersion": "1.0.0",
        "name": f"{settings.prefix}-{node}",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def _containerd(settings: Settings, node: str) -> str:
    home = folder(settings, node)
    # oom_score 0 and restrict_oom_score_adj: a container may lack CAP_SYS_RESOURCE, which is needed
    # to lower a score. netns_mounts_under_state_dir: namespaces of pods are found and removed below
    # the run folder.
    return f"""version = 3
root = "{home}/containerd"
state = "{home}/state"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.differ.v1.erofs", "io.containerd.nri.v1.nri",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{socket(settings, node)}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  enable_selinux = false
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = "{home}/cni"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
"""


def _kubelet(settings: Settings, node: str) -> dict[str, object]:
    home = folder(settings, node)
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": settings.addresses.node(node_number(node)),
        "healthzPort": 0,
        "readOnlyPort": 0,
        "containerRuntimeEndpoint": f"unix://{socket(settings, node)}",
        "podLogsDir": str(home / "pods"),
        "volumePluginDir": str(home / "volume-plugins"),
        "resolvConf": str(home / "resolv.conf"),
        "clusterDNS": [settings.addresses.dns],
        "clusterDomain": "cluster.local",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(settings.run / "pki" / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.node_root(settings, node),
        "enforceNodeAllocatable": [],
        "oomScoreAdj": 0,
        "localStorageCapacityIsolation": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        "serializeImagePulls": False,
        "maxPods": 110,
    }


def _proxy(settings: Settings, node: str) -> dict[str, object]:
    return {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "mode": "iptables",
        "clusterCIDR": settings.addresses.pods,
        "clientConnection": {"kubeconfig": str(settings.run / "kube-proxy.kubeconfig")},
        "hostnameOverride": node,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # The limits belong to the machine, not to the namespace, so do not change them.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def start_containerd(settings: Settings, node: str, programs: Path) -> None:
    """Start containerd without waiting for it."""
    config = folder(settings, node) / "containerd.toml"
    spawn(
        settings,
        f"{node}-containerd",
        settings.node_netns(node),
        [programs / "containerd", "-c", config],
        _path(programs),
    )


def wait_for_containerd(settings: Settings, node: str, programs: Path) -> None:
    """Wait until containerd responds."""
    wait_for(f"containerd of {node}", lambda: succeeds(*ctr(settings, node, programs), "version"), settings, timeout=60)


def ctr(settings: Settings, node: str, programs: Path) -> list[str | Path]:
    """Return the beginning of a `ctr` command for a node's Kubernetes images."""
    return [programs / "ctr", "--address", socket(settings, node), "--namespace", "k8s.io"]


def import_image(settings: Settings, node: str, programs: Path, archive: Path) -> None:
    """Load an archive (docker or OCI layout, a tar) into a node."""
    run(*ctr(settings, node, programs), "images", "import", "--local", archive, timeout=1800)


def start_kubelet(settings: Settings, node: str, programs: Path) -> None:
    """Start kubelet and kube-proxy, which need the API server and containerd."""
    _start_kubelet(settings, node, programs)
    proxy: list[str | Path] = [programs / "kube-proxy", "--config", folder(settings, node) / "kube-proxy.json"]
    spawn(settings, f"{node}-kube-proxy", settings.node_netns(node), proxy, _path(programs))


def restart_kubelet(settings: Settings, node: str, programs: Path) -> None:
    """Stop the kubelet and start it again. The node's pods keep running."""
    (running,) = [process for process in recorded(settings) if process.name == f"{node}-kubelet"]
    kill(running.pid)
    wait_for(f"the end of {running.name}", lambda: not running.alive(), timeout=20)
    _start_kubelet(settings, node, programs)


def _path(programs: Path) -> dict[str, str]:
    return {"PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin"}


def _start_kubelet(settings: Settings, node: str, programs: Path) -> None:
    home = folder(settings, node)
    kubelet: list[str | Path] = [
        programs / "kubelet",
        "--config",
        home / "kubelet.json",
        "--kubeconfig",
        settings.run / f"{node}.kubeconfig",
    ]
    kubelet += ["--hostname-override", node, "--node-ip", settings.addresses.node(node_number(node))]
    kubelet += ["--root-dir", home / "kubelet", "--cert-dir", home / "certificates"]
    # A kubelet removes the socket and binds it again. If another kubelet does so in between, the
    # first one ends with "address already in use", so they take turns.
    with Path("/run/ddpjob-cluster-kubelet.lock").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        started = spawn(settings, f"{node}-kubelet", settings.node_netns(node), kubelet, _path(programs))
        wait_for(f"{started.name} to listen", lambda: not started.alive() or _listens(started.pid), timeout=60)


def _listens(pid: int) -> bool:
    try:
        # The file lists the sockets of the process's network namespace.
        return DEVICE_PLUGINS in Path(f"/proc/{pid}/net/unix").read_text()
    except OSError:
        return False  # the process has ended in the meantime
