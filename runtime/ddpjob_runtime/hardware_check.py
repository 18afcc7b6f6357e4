"""Checks a node or the links between ranks before training, if `spec.preflight` requests this.

    python3 PATH/ddpjob_runtime check JSON

The check runs in a process of its own. Its device context is freed when that process ends, and a
hung driver blocks only that process. The check writes lines of JSON: `{"step": NAME}` before each
part, and `{"problem": TEXT, ...}` at the end. TEXT is empty if the check has passed.
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
"""Size in bytes of the file that is written to the checkpoint folder, synced and read back."""
SUM_BYTES = 16 << 20
"""Size in bytes of the tensor in the timed all-reduce."""
FREE_SHARE = 0.5
"""The fraction of a GPU's memory that must be free. If less is free, another process must be
using the GPU. The fraction is below 1 because a time-sliced GPU is never completely free.
"""
_SIDE = 1024
_SIOCGIFADDR = 0x8915


def main() -> None:
    """Run the check that the first argument describes.

    The launcher holds the other end of standard input. If standard input ends, the launcher is
    gone, and this process exits immediately.
    """
    settings = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        found = check_node(settings) if settings["what"] == "node" else check_links(settings)
    except Exception as error:
        found = {"problem": f"{type(error).__name__}: {str(error)[:1000]}"}
    _say(**found)
    # An ordinary exit could hang in a process group that has failed.
    os._exit(0)


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


# --- a node


def check_node(settings: dict[str, Any]) -> dict[str, Any]:
    """Check this node's checkpoint folder and devices.

    `settings` contains `folder` (the checkpoint folder; empty if none is to be checked), `pod` (the
    name of this pod), `gpus` (the number of devices that the pod must have) and `resource` (the
    kind of these devices). The result contains `problem`, which is empty if the node passes.
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
        # The launcher itself will report that torch is missing, and what to do about it.
        return {"problem": ""}
    devices, problem = _devices(torch, settings["gpus"], settings["resource"])
    for device in devices:
        _say(step=device)
        problem = problem or device_problem(torch, device)
    return {"problem": problem}


def folder_problem(folder: Path, pod: str) -> str:
    """Return the reason why the folder cannot hold checkpoints; empty if it can."""
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
        return f"cannot write a 1 MiB file to the checkpoint folder {folder}: {error.strerror or error}"
    return (
        "" if same else f"a file in the checkpoint folder {folder} does not contain the bytes that were written to it"
    )


def _devices(torch: Any, wanted: int, resource: str) -> tuple[list[str], str]:
    """Return torch's names for the node's devices, and a problem if there are too few of them.

    The problem is empty if there are enough devices.
    """
    if not wanted or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ["cpu"], ""
    kind = "xpu" if resource.startswith("gpu.intel.com/") else "cuda"
    if kind == "cuda" and resource.partition("/")[0] not in ("nvidia.com", "amd.com") and not torch.cuda.is_available():
        # torch supports this device only through a plugin, which this module does not know.
        return ["cpu"], ""
    module = getattr(torch, kind, None)
    there = module.device_count() if module is not None and module.is_available() else 0
    problem = f"torch sees {there} of {wanted} devices ({resource})" if there < wanted else ""
    return [f"{kind}:{number}" for number in range(min(there, wanted))], problem


def device_problem(torch: Any, device: str) -> str:
    """Return what is wrong with a device, or an empty string if its memory and arithmetic work.

    Every sum in the matrix product is a whole number below 2**24, because float32 and TF32
    represent such numbers exactly.
    """
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        if free < FREE_SHARE * total:
            return f"{device}: only {free >> 20} of {total >> 20} MiB are free, because another process uses the rest"
    count = (64 if device != "cpu" else 1) << 20
    try:
        filled = torch.full((count,), 3, dtype=torch.int32, device=device)
        if int(filled.sum()) != 3 * count:
            return f"{device}: numbers read from memory differ from those written"
        numbers = torch.arange(_SIDE, device=device)
        a = ((numbers[:, None] * 7 + numbers * 3) % 7 - 3).float()
        b = ((numbers[:, None] * 5 + numbers * 11) % 5 - 2).float()
        v = ((torch.arange(_SIDE) * 13) % 7 - 3).double()
        product = torch.mm(a, b).cpu().double()
        wrong = int((torch.mv(product, v) != torch.mv(a.cpu().double(), torch.mv(b.cpu().double(), v))).sum())
    except RuntimeError as error:  # torch raises RuntimeError for every driver error.
        return f"{device}: {(str(error).splitlines() or [type(error).__name__])[0][:300]}"
    return f"{device}: {wrong} of {_SIDE} rows of a matrix product are wrong" if wrong else ""


# --- links


def check_links(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of an all-reduce of whole numbers, verify the result, and time it.

    `settings` contains `rank`, `world`, `local`, the store's `host` and `port`, `backend`, `gpus`
    and `seconds`. The result contains `problem`, `transport` and `rate`. `rate` is the bus
    bandwidth as nccl-tests defines it, in 10^6 bytes per second; None if there is only one rank.
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
    _say(step=f"connecting to the store at {host}:{port}")
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    _say(step=f"forming a group of {world} with {backend}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    pattern = torch.arange(SUM_BYTES // 4, dtype=torch.int32, device=device) % 1000
    expected = pattern * sum(other % 8 + 1 for other in range(world))
    shortest, problem = float("inf"), ""
    # The first exchange opens the connections, so it is not timed.
    for count in (1000, SUM_BYTES // 4, SUM_BYTES // 4):
        _say(step=f"all-reduce of {4 * count} bytes with {backend}")
        numbers = pattern[:count] * (rank % 8 + 1)
        began = time.monotonic()
        dist.all_reduce(numbers)
        # `int` waits until the device has finished, so the time below includes the whole
        # all-reduce.
        wrong = int((numbers != expected[:count]).sum())
        if count > 1000:
            shortest = min(shortest, time.monotonic() - began)
        # Do not exit after a wrong result. An exit would break the connections to the other ranks,
        # and those ranks may be healthy.
        if wrong and not problem:
            problem = f"an all-reduce with {backend} returned {wrong} wrong sums out of {count}"
    rate = 2 * (world - 1) / world * SUM_BYTES / shortest / 1e6 if world > 1 else None
    if log is not None:
        transport = nccl_transport(log.read_text(errors="replace"))
        log.unlink()
    else:
        transport = f"gloo over TCP on {_gloo_interface()}"
    return {"problem": problem, "rate": rate, "transport": transport}


def _keep_nccl_log() -> Path:
    """Make NCCL log its choices to a file, and return that file's path.

    Must be called before NCCL is first used.
    """
    handle, name = tempfile.mkstemp(prefix="ddpjob-nccl-")
    os.close(handle)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH", NCCL_DEBUG_FILE=name)
    return Path(name)


def nccl_transport(log: str) -> str:
    """Return the network, the devices and the types of channel that NCCL uses, according to its
    log.

    The log must have been written with NCCL_DEBUG=INFO.
    """
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
    """Return the name of the network interface that gloo uses.

    Like torch, use the interface that the GLOO_SOCKET_IFNAME variable names. If this variable is
    not set, gloo looks up the address of this host's own name and uses the interface with that
    address. If there is no such interface, gloo uses the loopback interface.
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
    """Map each of this host's addresses to the name of its network interface."""
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
                continue  # This interface has no IPv4 address.
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
