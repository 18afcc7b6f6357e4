"""Kills workers of tortured jobs while they copy their state, at a point that a file names.

It wraps functions of `ddpjob_pod` when a worker imports them; the product has no such points. The
file is in the folder TORTURE_COPY_KILLS, has the pod's name, and contains the name of one of
POINTS.
"""

import importlib.util
import os
import random
import signal
import sys

POINTS = {
    "tensor": ("ddpjob_pod.rank_snapshots", "", "_copy_to"),
    "mark": ("ddpjob_pod.snapshot_store", "Writing", "complete"),
    "begin": ("ddpjob_pod.snapshot_store", "SnapshotStore", "begin"),
    "made": ("ddpjob_pod.snapshot_store", "SnapshotStore", "note_made"),
    "neighbour": ("ddpjob_pod.rank_snapshots", "TorchExchange", "receive"),
}
"""The module, the class (empty for a plain function) and the function in which workers die, by
point.
"""
SHARE = 0.2
"""Probability that a call of such a function kills the worker."""


class Finder:
    """Finds ddpjob_pod.rank_snapshots once, and wraps its functions after its import."""

    def find_spec(self, name, path=None, target=None):
        """Return the module's specification; None for any other module."""
        if name != "ddpjob_pod.rank_snapshots":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            for point, (where, owner, function) in POINTS.items():
                place = module if where == name else sys.modules[where]
                _wrap(getattr(place, owner) if owner else place, function, point)

        spec.loader.exec_module = execute_and_wrap
        return spec


def _wrap(place, function, point):
    original = getattr(place, function)
    order = os.path.join(os.environ["TORTURE_COPY_KILLS"], os.environ["DDPJOB_POD"])  # noqa: PTH118

    def dying(*arguments):
        try:
            with open(order) as file:  # noqa: PTH123
                wanted = file.read() == point
        except OSError:
            wanted = False
        if wanted and random.random() < SHARE:
            os.unlink(order)  # noqa: PTH108
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(place, function, dying)
