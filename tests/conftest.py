"""Puts this folder on the import path for shared modules, marks slow tests, and hides GPUs.

With DDPJOB_WITHOUT_TORCH=1 it hides torch and the other packages of the trainer, as `make
unit-operator` does.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

# A shell's background jobs may ignore these signals, and all processes of the tests would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# Make threads that wait for work sleep. Here, several processes compute at the same time, and busy
# waiting took a quarter of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A busy machine must not fail tests that only take longer on it.
hypothesis.settings.register_profile("ddpjob", deadline=None)
hypothesis.settings.load_profile("ddpjob")

HERE = Path(__file__).parent
HARNESSES = ("process_harness", "ranks", "runtime_harness")
"""Modules that start processes, most of them with torch. Every test in a module that imports from
one of them is slow.
"""
BUILDERS = ("chromium", "libraries", "prometheus_programs", "s3_server")
"""Modules that build or fetch a program when it is first requested."""
BUILD_LIMIT = 2700
"""Timeout in seconds of a test with such a build, on a busy machine."""
SLOW = (
    "benchmarks/test_fuzz.py",
    "runtime/test_agent.py",
    "runtime/test_coordinator_disorder.py",
    "runtime/test_coordinator_random.py",
    "runtime/test_forkserver.py",
    "runtime/test_rendezvous.py",
    "runtime/test_runtime_fast.py",
    "runtime/test_runtime_standard.py",
    "runtime/test_worker.py",
    "simulation/test_classes_in_simulation.py",
    "simulation/test_crashes.py",
    "simulation/test_gangs_in_simulation.py",
    "simulation/test_generated.py",
    "simulation/test_one_coordinator.py",
    "simulation/test_queues_in_simulation.py",
    "simulation/test_random_faults.py",
    "unit/cli/test_output.py",
    "unit/client/test_worker_stacks.py",
    "unit/engine/test_any_report.py",
    "unit/monitoring/test_monitoring.py",
    "unit/test_any_manifest.py",
    "unit/test_chart.py",
    "unit/test_imports.py",
    "unit/test_install_script.py",
    "unit/test_runtime.py",
    "unit/test_site.py",
)
"""Slow tests, with their CPU seconds: other programs, torch's import, and searches through
thousands of cases.
"""

LONGEST = (
    "unit/test_matrix.py",
    "benchmarks/test_recovery_and_torture.py",
    "benchmarks/test_trainer_speed.py",
    "benchmarks/test_recipe_accuracy.py",
    "trainer/model/test_compile.py",
    "trainer/optim/test_layer_decay.py",
    "runtime/test_preflight_in_pods.py",
    "simulation/test_crashes.py",
    "unit/monitoring/test_prometheus.py",
)
"""Modules to start first. A module runs in one worker, and the others would wait for it if it came
last.
"""

OF_THE_TRAINER = frozenset(
    {
        *("torch", "torchvision", "numpy", "scipy", "sklearn", "simplejpeg", "PIL", "fsspec", "matplotlib", "psutil"),
        *("deepspeed", "tensorboard", "obstore", "transformers", "accelerate", "timm"),
    }
)
"""Packages that the extra `dev` has in addition to `dev-operator`, by their import names. Lightning
is not included, because tests replace its package.
"""


class Without:
    """A `PathFinder` for an environment without some packages."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        """Find a module that is not hidden."""
        return None if name.partition(".")[0] in self._packages else PathFinder.find_spec(name, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(PathFinder, name)


if os.environ.get("DDPJOB_WITHOUT_TORCH"):
    sys.meta_path[sys.meta_path.index(PathFinder)] = Without(OF_THE_TRAINER)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests except tests/gpu.

    Otherwise, training runs would use a visible GPU with NCCL and bfloat16, and ranks forked from a
    process that has used the GPU would fail. This must happen before CUDA is first queried, and the
    tests' processes inherit it.
    """
    gpu = HERE / "gpu"
    chosen = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    if not chosen or not all(path.is_relative_to(gpu) for path in chosen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow modules with `-m "not slow"`, because some of them import torch in each
    worker.
    """
    return True if config.getoption("markexpr") == "not slow" and _is_one_of(collection_path, SLOW) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while pytest collects tests, and exempt the modules and tests from
    it afterwards, because they exist until the end. Scanning them repeatedly took a sixth of each
    worker's collection time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _is_one_of(item.path, LONGEST))
    for item in items:
        module = getattr(item, "module", None)
        if _is_one_of(item.path, SLOW) or _imports(module, HARNESSES):
            item.add_marker(pytest.mark.slow)
        if _imports(module, BUILDERS):
            item.add_marker(pytest.mark.timeout(BUILD_LIMIT))


@pytest.fixture(autouse=True)
def _sigterm_ends_a_training_of_this_test_alone() -> Iterator[None]:
    """Remove the SIGTERM handler of a training run that failed in this process. Otherwise a later
    test's SIGTERM would end the process.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(-1)


@cache
def _imports(module: ModuleType | None, modules: tuple[str, ...]) -> bool:
    imported = () if module is None else vars(module).values()
    return any(getattr(it, "__module__", getattr(it, "__name__", None)) in modules for it in imported)


@cache
def _is_one_of(path: Path, modules: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(HERE / name) for name in modules)
