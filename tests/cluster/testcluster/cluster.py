"""The cluster as a whole: start, stop, and operations for tests."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from testcluster import binaries, builder, cgroups, controlplane, images, loading, network, node, pki, processes
from testcluster.settings import CHECKOUT, MAX_NODES, ClusterError, Settings

LEGACY_LOG_LINKS = Path("/var/log/containers")


@dataclass(frozen=True)
class State:
    """The owner and state of a cluster, kept in the lock file from the first step of `up` to the
    last step of `down`.
    """

    checkout: str
    run: str
    nodes: tuple[str, ...]
    ready: bool
    keep: bool


def _is_intact(state: State) -> bool:
    return all(process.alive() for process in processes.recorded_in(Path(state.run)))


@dataclass(frozen=True)
class Cluster:
    """A cluster of this machine. `settings.slot` distinguishes it from others."""

    settings: Settings = field(default_factory=Settings)

    # ---- up and down -------------------------------------------------------------------------------------------

    def up(self, nodes: int = 2, keep: bool = True) -> float:
        """Start the cluster and return the seconds it took. If it is already running, only missing
        nodes are added.

        With 0 nodes, only etcd and the API server run, without controllers, scheduler and DNS. If
        `keep` is false, the last test run that uses the cluster takes it down; a running cluster
        keeps its own setting. Raises ClusterError if a different checkout's cluster runs in the
        slot, or if a component does not start.
        """
        if not 0 <= nodes <= MAX_NODES:
            raise ClusterError(f"nodes: {nodes}: must be from 0 (the API server alone) to {MAX_NODES}")
        start = time.monotonic()
        with self._locked():
            state = self.state()
            names = tuple(f"n{number}" for number in range(1, nodes + 1))
            # An API server without nodes cannot be extended, so a cluster with nodes is started
            # from scratch.
            if state is not None and self._reusable(state) and (state.nodes or not names):
                self._grow(state, names)
                return time.monotonic() - start
            self._clean()
            binaries.build(self.settings)
            state = State(str(CHECKOUT), str(self.settings.run), names, ready=False, keep=keep)
            self._record(state)
            try:
                self._start(names)
            except BaseException:
                self._keep_logs()
                self._clean()
                raise
            self._record(replace(state, ready=True))
        return time.monotonic() - start

    def down(self) -> None:
        """Stop everything that belongs to the cluster and remove its files, even after a crash. It
        is not an error if there is nothing to remove.
        """
        with self._locked():
            state = self.state()
            if state is not None and state.run != str(self.settings.run):
                raise ClusterError(self._foreign(state))
            self._clean()

    def state(self) -> State | None:
        """Return the state in the lock file, or None if no cluster is up in this slot."""
        try:
            text = self.settings.lock.read_text()
        except FileNotFoundError:
            return None
        if not text.strip():
            return None
        facts = json.loads(text)
        return State(facts["checkout"], facts["run"], tuple(facts["nodes"]), facts["ready"], facts["keep"])

    def _foreign(self, state: State) -> str:
        return (
            f"slot {self.settings.slot} is taken by the cluster of {state.checkout} (files in {state.run}): "
            f"end it there with `python -m testcluster down`, or set DDPJOB_CLUSTER_SLOT to another number"
        )

    def is_anothers(self) -> bool:
        """Return whether a different checkout's cluster is up in this slot, or is being started."""
        state = self.state()
        return state is not None and state.checkout != str(CHECKOUT) and (not state.ready or _is_intact(state))

    def _reusable(self, state: State) -> bool:
        """Return whether the recorded cluster is ours and complete. If ours is broken, it is
        rebuilt.
        """
        intact = state.ready and _is_intact(state)
        if state.checkout != str(CHECKOUT) or state.run != str(self.settings.run):
            if intact:
                raise ClusterError(self._foreign(state))
            if state.run != str(self.settings.run):
                raise ClusterError(f"{self._foreign(state)}; it has crashed, and its files are still there")
            return False
        return intact

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.settings.lock.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"waiting for another `testcluster` for slot {self.settings.slot} ({self.settings.lock}) ...",
                    flush=True,
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _record(self, state: State | None) -> None:
        self.settings.lock.write_text("" if state is None else json.dumps(asdict(state)))

    def _start(self, names: tuple[str, ...]) -> None:
        settings = self.settings
        for name in ("log", "pid", "pki", "images"):
            (settings.run / name).mkdir(parents=True, exist_ok=True)
        programs = binaries.collect(settings)
        processes.allow_watches()
        cgroups.create(settings, "system")
        network.create_control_plane(settings)
        authority = controlplane.create_credentials(settings)
        controlplane.start_api(settings, programs)
        images.write_pause(settings.run / "images" / "pause.tar", programs / "pause")
        images.write_python_host(settings.run / "images" / "python-host.tar")
        for name in names:
            network.create_node(settings, name)
        with ThreadPoolExecutor(len(names) + 1) as pool:
            list(pool.map(lambda name: self._start_runtime(name, authority), names))
        controlplane.wait_for_api(settings, programs)
        if not names:
            return
        controlplane.start_controllers(settings, programs)
        for name in names:
            node.start_kubelet(settings, name, programs)
        controlplane.start_dns(settings, programs)
        processes.wait_for("nodes Ready", lambda: set(names) == self.ready_nodes(), settings)
        processes.wait_for("the default service account", self._has_default_account, settings)

    def _grow(self, state: State, wanted: tuple[str, ...]) -> None:
        """Add the nodes that a running cluster lacks. They also load the archives written at the
        start.
        """
        added = tuple(name for name in wanted if name not in state.nodes)
        if not added:
            return
        # The cluster is not ready until it is complete again. After a failure here, the next `up`
        # rebuilds it.
        self._record(replace(state, ready=False))
        authority = pki.load_authority(self.settings)
        for name in added:
            network.create_node(self.settings, name)
            self._start_runtime(name, authority)
            node.start_kubelet(self.settings, name, self.programs)
        processes.wait_for(f"{', '.join(added)} Ready", lambda: set(added) <= self.ready_nodes(), self.settings)
        self._record(replace(state, nodes=state.nodes + added))

    def _start_runtime(self, name: str, authority: pki.Authority) -> None:
        node.create(self.settings, name, authority)
        node.start_containerd(self.settings, name, self.programs)
        node.wait_for_containerd(self.settings, name, self.programs)
        for archive in sorted((self.settings.run / "images").glob("*.tar")):
            node.import_image(self.settings, name, self.programs, archive)

    def _has_default_account(self) -> bool:
        """Return whether the default service account exists. Pods are refused before that."""
        return self.succeeds("get", "serviceaccount", "default", "--namespace=default")

    def _keep_logs(self) -> None:
        kept = self.settings.cache / f"failed-start-{self.settings.slot}"
        shutil.rmtree(kept, ignore_errors=True)
        if (self.settings.run / "log").exists():
            shutil.copytree(self.settings.run / "log", kept)
            print(f"the logs of the failed start are in {kept}", flush=True)

    def _clean(self) -> None:
        """Remove all processes, mounts, namespaces, cgroups and files, in any state."""
        processes.end_all(self.settings)
        _unmount_below(self.settings.run)
        network.remove(self.settings)
        cgroups.remove(self.settings)
        if self.settings.run.exists():
            shutil.rmtree(self.settings.run)
        _remove_dead_log_links(self.settings.run)
        self._record(None)

    # ---- use -----------------------------------------------------------------------------------------------------

    @property
    def programs(self) -> Path:
        """The folder with kubectl, helm, ctr and the other programs."""
        return self.settings.run / "bin"

    @property
    def kubeconfig(self) -> Path:
        return self.settings.kubeconfig

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes. Raises ClusterError if the cluster is not up."""
        state = self.state()
        if state is None:
            raise ClusterError("the cluster is not up: run `python -m testcluster up`")
        return state.nodes

    def environment(self) -> dict[str, str]:
        """Return the environment for programs that use the cluster: KUBECONFIG, PATH, and no proxy
        for its addresses.
        """
        no_proxy = ",".join(part for part in (os.environ.get("NO_PROXY", ""), "198.18.0.0/15") if part)
        path = f"{self.programs}:{os.environ['PATH']}"
        return {"KUBECONFIG": str(self.kubeconfig), "PATH": path, "NO_PROXY": no_proxy, "no_proxy": no_proxy}

    def _kubectl_words(self) -> list[str | Path]:
        return [self.programs / "kubectl", "--kubeconfig", self.kubeconfig]

    def kubectl(self, *words: str, input_text: str | None = None, timeout: float = 120) -> str:
        """Return the standard output of `kubectl WORDS`. Raises ClusterError with the error output
        if it fails.
        """
        env = {**os.environ, **self.environment()}
        return processes.run(*self._kubectl_words(), *words, input_text=input_text, env=env, timeout=timeout)

    def succeeds(self, *words: str) -> bool:
        """Return whether `kubectl WORDS` exits with 0."""
        return processes.succeeds(*self._kubectl_words(), *words)

    def kubectl_json(self, *words: str) -> Any:
        """Return the parsed output of `kubectl WORDS --output=json`."""
        return json.loads(self.kubectl(*words, "--output=json"))

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> None:
        """Create or change objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--namespace", namespace, "--filename=-", input_text=json.dumps(listed))

    def ready_nodes(self) -> set[str]:
        """Return the names of the nodes whose Ready condition is True. While the API server does
        not respond, there are none.
        """
        words = [str(word) for word in self._kubectl_words()]
        done = subprocess.run([*words, "get", "nodes", "--output=json"], text=True, capture_output=True, check=False)
        if done.returncode != 0:
            return set()
        return {item["metadata"]["name"] for item in json.loads(done.stdout)["items"] if _is_ready(item)}

    def set_gpus(self, node_name: str, count: int, resource: str = "nvidia.com/gpu") -> None:
        """Make a node offer `count` GPUs to the scheduler, without devices. 0 removes them."""
        patch = json.dumps({"status": {"capacity": {resource: str(count)}, "allocatable": {resource: str(count)}}})
        self.kubectl("patch", "node", node_name, "--subresource=status", "--patch", patch)

    def cut(self, node_name: str) -> None:
        """Unplug the node's cable. Its pods keep running but are unreachable, and the node is
        NotReady about 9 s later.
        """
        network.set_link(self.settings, node_name, up=False)

    def heal(self, node_name: str) -> None:
        """Plug the cable in again."""
        network.set_link(self.settings, node_name, up=True)

    def register(self, node_name: str) -> None:
        """Register a node again after its object was deleted. A kubelet registers its node only
        when it starts.
        """
        node.restart_kubelet(self.settings, node_name, self.programs)
        processes.wait_for(
            f"{node_name} to be Ready again", lambda: node_name in self.ready_nodes(), self.settings, timeout=60
        )

    def load_image(self, image: builder.Image, nodes: tuple[str, ...] | None = None) -> None:
        """Load a built image into some or all nodes. Layers that a node already has are not sent
        again.
        """
        for name in nodes or self.nodes:
            loading.load(self.settings, image, name, self.programs)


def _is_ready(item: dict[str, Any]) -> bool:
    conditions = item.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _unmount_below(folder: Path) -> None:
    """Unmount everything below a folder lazily, the latest mount first, because a dying process may
    still use an overlay.
    """
    points = [_unescape(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed([path for path in points if Path(path).is_relative_to(folder)]):
        processes.run("umount", "--lazy", point)


def _unescape(path: str) -> str:
    """Decode a path of /proc/mounts, where characters such as blanks are octal."""
    return path.encode().decode("unicode_escape")


def _remove_dead_log_links(run: Path) -> None:
    """Remove dead links. The kubelet links every container's log in a folder that cannot be
    configured.
    """
    for link in LEGACY_LOG_LINKS.glob("*.log") if LEGACY_LOG_LINKS.is_dir() else []:
        if link.is_symlink() and link.readlink().is_relative_to(run):
            link.unlink()
