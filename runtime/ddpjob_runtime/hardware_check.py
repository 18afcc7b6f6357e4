"""Checks a node, or the links between ranks, before training, as `spec.preflight` requests.

    python3 PATH/ddpjob_runtime check JSON

The check is a separate process, so that its device context ends with it and a hung driver does not
block anything else. It writes lines of JSON: `{"step": NAME}` before each part, and `{"problem":
TEXT, ...}` at the end. TEXT is empty if the check has passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE_BYTES = 1 << 20
"""Size of the file written to the checkpoint folder, synced and read back."""
SUM_BYTES = 16 << 20
"""Size of the timed all-reduce."""
FREE_SHARE = 0.5
"""The share of a GPU's memory that must be free; if less is free, another process is using the GPU.
Time-sliced GPUs are never completely free."""
_SIDE = 1024
_SIOCGIFADDR = 0x8915


def main() -> None:
    """Run the check that the argument describes.

    Exit immediately when stdin ends, because the launcher is then gone.
    """
    settings = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        found = check_node(settings) if settings["what"] == "node" else check_links(settings)
    except Exception as error:
        found = {"problem": f"{type(error).__name__}: {str(error)[:1000]}"}
    _say(**found)
    os._exit(0)  # Otherwise a failed process group could keep this process from exiting.


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


# --- a node


def check_node(settings: dict[str, Any]) -> dict[str, Any]:
    """Check this node.

    In `settings`, `folder` is the checkpoint folder (empty: not checked), and `pod` is this pod's
    name. `gpus` and `resource` are the number and kind of devices that the pod must have.
    """
    folder = settings["folder"]
    if folder:
        _say(step=f"checkpoint folder {folder}")
        problem = folder_problem(Path(folder), settings["pod"])
        if problem:
            return {"problem": problem}
    _say(step="import of torch")
    try:
        import torch
    except ImportError:
        return {"problem": ""}  # The launcher reports this case, with the remedy.
    devices, problem = _devices(torch, settings["gpus"], settings["resource"])
    for device in devices:
        _say(step=device)
        problem = problem or device_problem(torch, device)
    return {"problem": problem}


def folder_problem(folder: Path, pod: str) -> str:
    """Return why the folder cannot hold checkpoints; empty if it can."""
    path, content = folder / f".ddpjob-preflight-{pod}-{os.urandom(4).hex()}", os.urandom(FILE_BYTES)
    try:
        try:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            same = path.read_bytes() == content
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"the checkpoint folder {folder} cannot store a file of 1 MiB: {error.strerror or error}"
    return "" if same else f"the checkpoint folder {folder} does not return the bytes that were written"


def _devices(torch: Any, wanted: int, resource: str) -> tuple[list[str], str]:
    """Return torch's names for the node's devices, and what is wrong with their number, if
    anything.
    """
    if not wanted or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ["cpu"], ""
    kind = "xpu" if resource.startswith("gpu.intel.com/") else "cuda"
    if kind == "cuda" and resource.partition("/")[0] not in ("nvidia.com", "amd.com") and not torch.cuda.is_available():
        return ["cpu"], ""  # A device that torch supports through a plugin unknown to this module.
    module = getattr(torch, kind, None)
    there = module.device_count() if module is not None and module.is_available() else 0
    problem = f"torch sees {there} of {wanted} devices ({resource})" if there < wanted else ""
    return [f"{kind}:{number}" for number in range(min(there, wanted))], problem


def device_problem(torch: Any, device: str) -> str:
    """Return what is wrong with a device, such as a wrong result; empty if it works.

    All sums are whole numbers below 2**24, which float32 and TF32 represent exactly.
    """
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        if free < FREE_SHARE * total:
            return f"{device}: {free >> 20} of {total >> 20} MiB are free, because another process holds the rest"
    count = (64 if device != "cpu" else 1) << 20
    try:
        filled = torch.full((count,), 3, dtype=torch.int32, device=device)
        if int(filled.sum()) != 3 * count:
            return f"{device}: memory does not return the numbers that were written"
        numbers = torch.arange(_SIDE, device=device)
        a = ((numbers[:, None] * 7 + numbers * 3) % 7 - 3).float()
        b = ((numbers[:, None] * 5 + numbers * 11) % 5 - 2).float()
        v = ((torch.arange(_SIDE) * 13) % 7 - 3).double()
        product = torch.mm(a, b).cpu().double()
        wrong = int((torch.mv(product, v) != torch.mv(a.cpu().double(), torch.mv(b.cpu().double(), v))).sum())
    except RuntimeError as error:  # torch raises it for any driver error
        return f"{device}: {(str(error).splitlines() or [type(error).__name__])[0][:300]}"
    return f"{device}: {wrong} of {_SIDE} rows of a matrix product are wrong" if wrong else ""


# --- links


def check_links(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of an all-reduce of whole numbers. Verify the result and time it.

    `settings` contains `rank`, `world`, `local`, the store's `host` and `port`, `backend`, `gpus`
    and `seconds`. In addition to the problem, the result has `transport` and `rate`, the bus
    bandwidth as defined by nccl-tests, in 10^6 bytes per second (None with one rank).
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    rank, world, host, port = (settings[name] for name in ("rank", "world", "host", "port"))
    on_gpu = settings["gpus"] > 0 and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and torch.cuda.is_available()
    backend = "nccl" if on_gpu and settings["backend"] in ("auto", "nccl") else "gloo"
    log = _keep_nccl_log() if backend == "nccl" else None
    device = torch.device("cuda", settings["local"]) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=settings["seconds"])
    _say(step=f"connection to the store at {host}:{port}")
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    _say(step=f"forming a group of {world} with {backend}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    pattern = torch.arange(SUM_BYTES // 4, dtype=torch.int32, device=device) % 1000
    expected = pattern * sum(other % 8 + 1 for other in range(world))
    shortest, problem = float("inf"), ""
    for count in (1000, SUM_BYTES // 4, SUM_BYTES // 4):  # The first exchange opens the connections.
        _say(step=f"all-reduce of {4 * count} bytes with {backend}")
        numbers = pattern[:count] * (rank % 8 + 1)
        began = time.monotonic()
        dist.all_reduce(numbers)
        wrong = int((numbers != expected[:count]).sum())  # This also waits for the device.
        if count > 1000:
            shortest = min(shortest, time.monotonic() - began)
        if wrong and not problem:  # Ending here would break the connections of ranks that may be healthy.
            problem = f"{wrong} of {count} sums of an all-reduce with {backend} are wrong"
    rate = 2 * (world - 1) / world * SUM_BYTES / shortest / 1e6 if world > 1 else None
    if log is not None:
        transport = nccl_transport(log.read_text(errors="replace"))
        log.unlink()
    else:
        transport = f"gloo over TCP on {_gloo_interface()}"
    return {"problem": problem, "rate": rate, "transport": transport}


def _keep_nccl_log() -> Path:
    """Make NCCL log its choices to a file.

    Must be called before NCCL is first used.
    """
    handle, name = tempfile.mkstemp(prefix="ddpjob-nccl-")
    os.close(handle)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH", NCCL_DEBUG_FILE=name)
    return Path(name)


def nccl_transport(log: str) -> str:
    """Return the network, devices and channel types according to NCCL's log (NCCL_DEBUG=INFO)."""
    network = re.search(r"NET/(IB|Socket) : Using (.*)", log) or re.search(r"Using network (\S+)()", log)
    how = sorted(
        {"/".join(found.split("/")[:2]) for found in re.findall(r"\bvia ((?:P2P|SHM|NET|COLLNET|NVLS)\S*)", log)}
    )
    parts = ["NCCL"]
    if network is not None:
        name = {"IB": "InfiniBand or RoCE", "Socket": "TCP"}.get(network[1], network[1])
        devices = re.findall(r"\[\d+\]([^\s<]+)", network[2].partition(";")[0])
        devices = [name.partition(":")[0] for name in devices] if network[1] == "Socket" else devices
        interface = re.search(r"OOB (\w+)", network[2])
        parts.append(f"network {name}" + (f" on {', '.join(devices)}" if devices else ""))
        parts += [f"sockets on {interface[1]}"] if interface else []
    return ", ".join([*parts, *([f"channels via {' and '.join(how)}"] if how else [])])


def _gloo_interface() -> str:
    """Return the interface that gloo uses.

    As in torch, this is GLOO_SOCKET_IFNAME or, if it is not set, the interface of the host name's
    address. If neither is known, return the loopback interface.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return named
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "lo"
    own = _interfaces()
    return next((own[str(entry[4][0])] for entry in found if str(entry[4][0]) in own), "lo")


def _interfaces() -> dict[str, str]:
    """Return the interface of each address of this host."""
    import fcntl

    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))] = name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # it has no IPv4 address
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
