"""Gets the Python stacks of a job's ranks by running a few lines of Python in each pod."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from ddpjob.client.backends.backend import Backend, Mistake, PodLine

AT_ONCE = 16

MOST_CHARACTERS = 1 << 20
"""Maximum number of characters in a rank's stacks. The size is limited because a script can write
anything to the file that contains the stacks."""

PROBE = (
    f"""
MOST = {MOST_CHARACTERS}
"""
    + """
import contextlib, os, re, signal, time
def environment(pid):
    with open("/proc/%d/environ" % pid, "rb") as file:
        pairs = (item.partition(b"=") for item in file.read().split(b"\\0"))
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
def parent(pid):
    with open("/proc/%d/stat" % pid, "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
def files(pid):
    for fd in os.listdir("/proc/%d/fd" % pid):
        with contextlib.suppress(OSError):  # just closed
            yield os.readlink("/proc/%d/fd/%s" % (pid, fd))
wanted = {"DDPJOB_POD": os.environ.get("DDPJOB_STACKS_POD"), "DDPJOB_UID": os.environ.get("DDPJOB_STACKS_UID")}
def of_pod(pid):
    while pid:  # also check its parents, because setproctitle overwrites the environment of a process
        env = environment(pid)  # for a forked worker: the launcher's environment, without a rank
        if all(not value or env.get(name) == value for name, value in wanted.items()):
            return True
        pid = parent(pid)
    return False
holders = {}
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
        for path in files(pid):  # the signal would kill a process that does not hold the file open
            if re.search(r"/ddpjob-worker-stacks-[^/]+/\\d+\\.txt$", path) and of_pod(pid):
                holders.setdefault(path, {})[pid] = parent(pid)
found = {}
for path, parents in holders.items():
    pid = min(pid for pid in parents if parents[pid] not in parents)  # forked children (DataLoader) also hold the file
    with contextlib.suppress(OSError):  # the process has just ended, or its container has a separate /tmp
        size = os.path.getsize(path)
        os.kill(pid, signal.SIGRTMIN + 7)
        found[int(os.path.basename(path)[:-4])] = (pid, path, size)
time.sleep(1 if found else 0)
for rank, (pid, path, size) in sorted(found.items()):
    with open(path, errors="replace") as file:
        file.seek(size)
        print("rank %d, process %d:" % (rank, pid))
        print(file.read(MOST).rstrip() or "(no stack within a second)")
if not found:
    print("no worker in this pod writes stacks; the pod is starting, or runs a command without torchrun")
"""
)
"""Python code that runs in a pod and prints the stacks of the pod's ranks. To make a rank write its
stacks, the code sends the signal that the launcher also sends when the group hangs."""


_OWN_FRAME = re.compile(r'^  File "(?:[^"\n]*/ddpjob_(?:runtime|pod)/|<frozen |[^"\n]*/runpy\.py).*\n?', re.MULTILINE)
"""Matches the stack frames of the runtime, of imports and of `python -m`, which do not belong to
the script."""


def stacks(backend: Backend, pods: list[PodLine]) -> list[tuple[PodLine, str]]:
    """Return the current Python stacks of the ranks in each pod, as one text per pod.

    Training continues. If a pod cannot be read, its text gives the reason. Raises Mistake if none
    of the pods can be read, for instance because the user is not permitted to run commands in pods.
    """

    def one(pod: PodLine) -> str | Mistake:
        try:
            return _OWN_FRAME.sub("", backend.run_in(pod, PROBE)).rstrip()
        except Mistake as mistake:
            return mistake

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(one, pods))
    mistakes = [each for each in found if isinstance(each, Mistake)]
    if mistakes and len(mistakes) == len(found):
        raise mistakes[0]
    return [(pod, str(each)) for pod, each in zip(pods, found, strict=True)]
