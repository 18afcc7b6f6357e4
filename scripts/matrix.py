"""Run the runtime's tests on every supported Python and torch: make matrix.

A row is a Python version with only the standard library, or with one minor version of torch. By
default, there are the following rows:

- every Python, without torch
- each torch with the oldest and with the newest installed Python for which it has wheels; with
  `--all`, each torch with every such Python, and all tests instead of the quick ones
- the newest Python with the newest pre-release of torch, from TORCH_PRE_INDEX_URL; failures of this
  row are only reported
- the trainer's checkpoint tests on Debian 12's Python, with the packages of the current environment

A row that cannot run (no interpreter, no wheel, no registry) is skipped with the reason. The exit
code is 1 if a row fails.

Environments are kept in ~/.cache/ddpjob/matrix (XDG_CACHE_HOME is respected), by the versions of
Python, torch and pytest.
"""

# nox and tox would replace only a fifth of this file: they keep environments, and find interpreters
# on PATH. The rest would remain: finding torch wheels for each Python, installing them without
# CUDA's gigabytes, and printing the table.
from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "runtime"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 6)
PYTEST = "8.4.2"
"""The last version for Python 3.9. All rows use it, so that they differ only in interpreter and
torch.
"""
ROW_SECONDS = 3600
QUICK = (
    # Start, loss of a node and finish, then failures of workers, in both modes.
    "test_runtime_standard.py::test_a_killed_node_is_replaced_and_the_job_continues",
    "test_runtime_standard.py::test_exceptions_restart_workers_in_place_and_are_reported_with_rank_and_line",
    "test_runtime_fast.py::test_a_spare_takes_over_immediately",
    "test_runtime_fast.py::test_a_job_that_crashes_repeatedly_backs_off",
    "test_launcher_checks.py::test_arguments_of_a_script_are_not_mistaken_for_options_of_torchrun",
    # The fork server's effects on torch, and its assumptions about torch.
    "test_forkserver.py::test_a_forked_worker_sees_the_same_environment_as_a_fresh_process",
    "test_forkserver.py::test_the_exit_of_a_worker_is_reported",
    "test_forkserver.py::test_torchs_compiler_is_imported_only_when_something_needs_it",
    "test_forkserver.py::test_an_idle_fork_server_imports_the_compiler_and_tests_a_fork",
    "test_forkserver.py::test_settings_of_torch_whose_source_is_missing_stay_unchanged",
    "test_forkserver.py::test_a_worker_that_torchrun_starts_with_a_different_program_is_reported",
    "test_forkserver.py::test_workers_run_cold_if_this_torch_starts_them_differently",
)
"""The tests that a row with torch runs by default."""
LONG = (
    "test_coordinator_disorder.py",
    "test_one_coordinator.py",
    "test_planted_hangs.py::test_deliberate_hangs_are_resolved_automatically",
    "test_silent_hosts.py",
    "test_coordinator_sockets.py::test_the_coordinator_waits_if_all_members_fall_silent_together",
    "test_coordinator_sockets.py::test_a_launcher_that_was_stopped_does_not_restart_workers",
    "test_coordinator_sockets.py::test_a_coordinator_that_was_stopped_does_not_restart_workers",
    "test_coordinator_sockets.py::test_a_coordinator_that_was_stopped_does_not_report_a_hang",
    "test_coordinator_sockets.py::test_a_member_whose_host_is_gone_is_lost_within_seconds",
    "test_coordinator_sockets.py::test_a_host_that_stays_silent_is_declared_lost",
)
"""Tests without torch that are skipped by default, because they wait or play random histories, with
the same result on every Python.
"""
TRAINER_PYTHON = "3.11.2"
"""Debian 12's python3. Its patch release pickles differently from later ones, such as CI's 3.11."""
TRAINER = (
    # These tests restore content in both formats, from fsdp to ddp to a single process, and from
    # other Python versions.
    "test_checkpoint_dcp.py::test_content_read_from_a_checkpoint_keeps_its_types",
    "test_checkpoint_dcp.py::test_fsdp_then_ddp_then_a_single_process_continue_the_same_run",
    "test_manifest.py",
    "test_other_pythons.py",
)
"""The tests of the row for TRAINER_PYTHON."""
CALLER = "MATRIX_CALLER"
"""The variable that gives a row's tests the path of the Python that runs the matrix."""
CUDA_PACKAGES = re.compile(r"(nvidia|cuda|triton|pytorch-triton)\b", re.IGNORECASE)
CUDA_LIBRARY = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]*)\]")
CUDA_SYMBOL = re.compile(r" U ((?:cu|nccl|nv|__cuda)\w*)(?:@+(\S+))?$", re.MULTILINE)
BINUTILS = ("gcc", "nm", "readelf")


class NotHere(Exception):
    """A row cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        torch: a full version, or None for the standard library alone.
        trainer: whether this is the row for TRAINER_PYTHON.
        pre: whether torch is a pre-release, which may lack what the runtime needs.
    """

    python: str
    torch: str | None = None
    trainer: bool = False
    pre: bool = False


@dataclass(frozen=True)
class Result:
    """The outcome of a row. `skipped_because` is empty if the row ran."""

    row: Row
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    skipped_because: str = ""
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the row passed, could not run, or is allowed to fail."""
        return self.row.pre or self.went_well

    @property
    def went_well(self) -> bool:
        """Whether the row passed or could not run."""
        return bool(self.skipped_because) or (self.failed == 0 and self.passed > 0)


def main() -> int:
    """Run the rows selected by the arguments, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every Python with each torch, and all tests")
    parser.add_argument("--python", action="append", help="only this Python (3.9); repeatable")
    parser.add_argument("--torch", action="append", help="only this torch (2.6, none, oldest, newest, pre); repeatable")
    parser.add_argument("--discard", action="store_true", help="remove each environment with torch after its row")
    arguments = parser.parse_args()
    results = []
    for row in choose(arguments.all, arguments.python, arguments.torch):
        print(f"Python {row.python}, torch {row.torch or '-'} ...", flush=True)
        result = run_row(row, everything=arguments.all)
        results.append(result)
        print(describe(result) if result.went_well else result.output, flush=True)
        if arguments.discard and row.torch:
            shutil.rmtree(environment_of(row), ignore_errors=True)
    print("\n" + table(results))
    return 0 if results and all(result.ok for result in results) else 1


# ---- which rows


def choose(everything: bool, pythons: Sequence[str] | None = None, torches: Sequence[str] | None = None) -> list[Row]:
    """Return the rows: first the standard library, then each torch, oldest first, then the
    trainer's row.
    """
    chosen = [python for python in PYTHONS if not pythons or python in pythons]
    rows = [Row(python) for python in chosen] if not torches or "none" in torches else []
    if torches and set(torches) == {"none"}:
        return rows
    debian = (
        [Row(TRAINER_PYTHON, trainer=True)] if not torches and TRAINER_PYTHON in (pythons or [TRAINER_PYTHON]) else []
    )
    here = [python for python in chosen if interpreter(python)]
    wheels = {python: torch_versions(python) for python in here}
    minors = sorted({minor for versions in wheels.values() for minor in versions})
    for minor in minors:
        names = {".".join(map(str, minor)), *(["oldest"] * (minor == minors[0])), *(["newest"] * (minor == minors[-1]))}
        if not torches or names & set(torches):
            rows += of_minor(minor, wheels, everything)
    if here and (not torches or "pre" in torches):
        rows += pre_release(here[-1], minors[-1] if minors else ())
    return rows + debian


def pre_release(python: str, newest: tuple[int, ...]) -> list[Row]:
    """Return the row of torch's newest pre-release, which must be later than the `newest` released
    minor.
    """
    found = newest_patches(list_versions(python, "--pre", *index("TORCH_PRE_INDEX_URL")))
    minor = max(found, default=())
    is_pre = minor > newest and re.search("[a-z]", found[minor])
    if not is_pre:
        print("no pre-release of torch; set TORCH_PRE_INDEX_URL to the index of its nightly builds", file=sys.stderr)
    return [Row(python, found[minor], pre=True)] if is_pre else []


def of_minor(
    minor: tuple[int, ...], wheels: Mapping[str, Mapping[tuple[int, ...], str]], everything: bool
) -> list[Row]:
    """Return the rows of one minor version of torch.

    `wheels` maps each Python, in ascending order, to the newest patch release of every minor
    version.
    """
    rows = [Row(python, versions[minor]) for python, versions in wheels.items() if minor in versions]
    return rows if everything else list(dict.fromkeys([rows[0], rows[-1]]))


def torch_versions(python: str) -> dict[tuple[int, ...], str]:
    """Return the newest patch release of every minor version of torch that has wheels for this
    Python.

    The result is empty if the machine is offline.
    """
    return newest_patches(list_versions(python, *index()))


def list_versions(python: str, *options: str) -> str:
    """Return what `pip index versions` prints about torch; empty without a registry."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--only-binary=:all:", *options]
    done = subprocess.run([*command, "--python-version", python], capture_output=True, text=True)
    if done.returncode:
        print(f"no list of torch's versions for Python {python}: {last_line(done.stderr)}", file=sys.stderr)
    return done.stdout


def newest_patches(text: str) -> dict[tuple[int, ...], str]:
    """Return the newest patch release of each minor version in the output of `pip index versions`.

    pip lists the newest version first.
    """
    found = re.search(r"Available versions: (.*)", text)
    newest: dict[tuple[int, ...], str] = {}
    for version in found.group(1).split(", ") if found else []:
        minor = tuple(int(part) for part in version.split(".")[:2])
        if minor >= OLDEST_TORCH:
            newest.setdefault(minor, version.split("+")[0])
    return newest


def index(variable: str = "TORCH_INDEX_URL") -> list[str]:
    """Return pip's arguments for torch's index, whose URL is in the environment variable
    `variable`.
    """
    url = os.environ.get(variable, "")
    return ["--index-url", url] if url else []


# ---- interpreters and environments


def interpreter(python: str) -> str | None:
    """Return an interpreter of a version such as 3.11 or 3.11.2; None if there is none.

    pythonX.Y on PATH is preferred, then pyenv's newest, then the system's python3.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [*pyenv.glob(f"{python}.*"), *pyenv.glob(python)]
    patches = sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    minor = ".".join(python.split(".")[:2])
    pyenvs = [str(patch / "bin" / "python") for patch in reversed(patches)]
    for path in (shutil.which(f"python{minor}"), *pyenvs, "/usr/bin/python3"):
        # PATH may have a shim without an interpreter behind it.
        code = "import ensurepip, platform, sys; print(platform.python_version(), sys.executable)"
        with contextlib.suppress(OSError):
            done = subprocess.run([path or "", "-c", code], capture_output=True, text=True)
            version, _, executable = done.stdout.strip().partition(" ")
            if f"{version}.".startswith(f"{python}."):
                return executable
    return None


def environment_of(row: Row) -> Path:
    """Return the path of a row's environment, which need not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    torch = f"-torch{row.torch}" if row.torch else ""
    return cache / "ddpjob" / "matrix" / f"python{row.python}{torch}-pytest{PYTEST}"


def prepare(row: Row) -> Path:
    """Return the interpreter of the row's environment. The first call creates the environment.

    Raises:
        NotHere: there is no interpreter, no wheel or no registry.
    """
    folder = environment_of(row)
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, ready = folder / "bin" / "python", folder / ".ready"
    with folder.with_suffix(folder.suffix + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists() and works(python):
            return python
        base = interpreter(row.python)
        if base is None:
            raise NotHere(f"no python{row.python} on PATH or in pyenv")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            subprocess.run([base, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
            pip(python, f"pytest=={PYTEST}")
            if row.torch:
                install_torch(python, row.torch, row.pre)
        except subprocess.CalledProcessError as error:
            raise NotHere(last_line(error.stderr or error.stdout)) from error
        ready.touch()
    return python


def works(python: Path) -> bool:
    """Whether the interpreter behind an environment still exists."""
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    return False


def install_torch(python: Path, version: str, pre: bool = False) -> None:
    """Install torch without CUDA.

    This installs a CPU wheel if TORCH_INDEX_URL has one, otherwise the usual wheel with empty CUDA
    libraries. If a program in BINUTILS is missing, the wheel's real CUDA libraries are installed.
    """
    source = ["--pre", *index("TORCH_PRE_INDEX_URL")] if pre else index()
    if not all(map(shutil.which, BINUTILS)):
        pip(python, f"torch=={version}", "numpy", *source)
        return
    pip(python, "--no-deps", f"torch=={version}", *source)
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"
    requires = json.loads(output_of([str(python), "-c", code]))
    pip(python, "numpy", *(r for r in requires if "extra ==" not in r and not CUDA_PACKAGES.match(r)))
    [lib] = python.parent.parent.glob("lib/python*/site-packages/torch/lib")
    replace_cuda(lib)
    output_of([str(python), "-c", "import torch.distributed"])


def replace_cuda(lib: Path) -> None:
    """Create an empty library for every CUDA library that torch is linked with.

    The real libraries take 2 to 3 GB for each torch. Loading torch requires their names, symbols
    and symbol versions, but without a GPU it calls almost none of their functions. Every function
    returns 100, CUDA's "no device".
    """
    libraries = [str(path) for path in lib.glob("*.so")]
    needed = set(CUDA_LIBRARY.findall(output_of(["readelf", "--dynamic", "--wide", *libraries])))
    if not needed:
        return
    undefined = CUDA_SYMBOL.findall(output_of(["nm", "--dynamic", "--undefined-only", *libraries]))
    defined = {
        line.split()[-1].partition("@")[0]
        for line in output_of(["nm", "--dynamic", "--defined-only", *libraries]).splitlines()
        if line
    }
    symbols = {name: version for name, version in undefined if name not in defined}
    by_version: dict[str, list[str]] = {}
    for name, version in symbols.items():
        if version:
            by_version.setdefault(version, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder) / "empty.c", Path(folder) / "versions"
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(symbols)))
        versions.write_text("".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in by_version.items()))
        made = lib / "libddpjob_no_cuda.so"
        output_of(["gcc", "-w", "-shared", "-fPIC", f"-Wl,--version-script={versions}", "-o", str(made), str(source)])
    for name in needed:
        (lib / name).symlink_to(made.name)


def pip(python: Path, *what: str) -> None:
    """Install into an environment.

    pip's cache is not used, because environments are kept and torch's wheels are large.
    """
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-cache-dir"]
    output_of([str(python), "-m", "pip", "install", *options, *what])


def output_of(command: list[str]) -> str:
    """Return the standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment()).stdout


def clean_environment() -> dict[str, str]:
    """Return the environment variables, without those that would add packages or options of this
    environment to a row.
    """
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "DDPJOB_TEST_PYTHON", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in unwanted and not k.startswith("PYTEST_")}


# ---- a row


def run_row(row: Row, everything: bool = False, tests: Sequence[str] = ()) -> Result:
    """Run the tests of one row. `tests` replaces the default tests."""
    try:
        if row.trainer:
            return run_trainer(row, tests or TRAINER)
        python = prepare(row)
    except NotHere as why:
        return Result(row, skipped_because=str(why))
    quick = QUICK if row.torch and not everything else ("",)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # tests/conftest.py and pyproject.toml are not used, because they need more packages than
        # pytest.
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-ra",
            "-c",
            os.devnull,
            f"--rootdir={TESTS}",
            f"--confcutdir={TESTS}",
        ]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *(str(TESTS / test) for test in tests or quick)]
        command += [f"--deselect={test}" for test in LONG if not everything]
        return run_tests(row, command, report, TESTS, clean_environment())


def run_trainer(row: Row, tests: Sequence[str]) -> Result:
    """Run the trainer's tests with the row's interpreter and this environment's packages.

    Both must have the same minor version of Python.

    Raises:
        NotHere: there is no such interpreter, or this environment's packages are for a different
        version or lack torch.
    """
    base, own = interpreter(row.python), f"{sys.version_info.major}.{sys.version_info.minor}"
    if base is None:
        raise NotHere(f"no Python {row.python} on PATH, in pyenv or at /usr/bin/python3")
    if not row.python.startswith(f"{own}.") or importlib.util.find_spec("torch") is None:
        raise NotHere(
            f"the row needs the packages of a Python {row.python.rpartition('.')[0]} with torch, but this Python is"
            f" {own} or does not have torch"
        )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, capture_output=True, text=True)
        [packages] = Path(folder).glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        report = Path(folder) / "report.xml"
        names = [str(ROOT / "tests" / "trainer" / "checkpoints" / test) for test in tests]
        command = [str(Path(folder) / "bin" / "python"), "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]
        places = [str(ROOT / part) for part in ("operator", "runtime", "trainer")]
        environment = {**clean_environment(), CALLER: sys.executable, "PYTHONPATH": os.pathsep.join(places)}
        return run_tests(row, [*command, f"--junitxml={report}", *names], report, ROOT, environment)


def run_tests(row: Row, command: list[str], report: Path, folder: Path, environment: dict[str, str]) -> Result:
    """Run pytest in a folder, with a report."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=ROW_SECONDS)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        output = f"more than {ROW_SECONDS} s"
    seconds = time.monotonic() - began
    if not report.exists():
        return Result(row, failed=1, seconds=seconds, output=output)
    return Result(row, *counts(report), seconds=seconds, output=output)


def counts(report: Path) -> tuple[int, int, int]:
    """Return (passed, failed, skipped) from a JUnit file.

    A module that cannot be imported counts as a failure.
    """
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failed = totals["failures"] + totals["errors"]
    return totals["tests"] - failed - totals["skipped"], failed, totals["skipped"]


def describe(result: Result) -> str:
    """Describe in one line a row that has not failed."""
    if result.skipped_because:
        return f"  skipped: {result.skipped_because}"
    return f"  {result.passed} passed, {result.skipped} skipped in {result.seconds:.0f} s"


def table(results: Sequence[Result]) -> str:
    """Return all rows as a table for people."""
    lines = [f"{'Python':8}{'torch':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for result in results:
        start = f"{result.row.python:8}{result.row.torch or '-':10}"
        if result.skipped_because:
            lines.append(f"{start}  skipped: {result.skipped_because}")
        else:
            note = "  a pre-release, which may fail" if result.row.pre else ""
            lines.append(f"{start}{result.passed:8}{result.failed:8}{result.skipped:9}{result.seconds:9.0f}{note}")
    return "\n".join(lines)


def last_line(text: str) -> str:
    """Return the last non-blank line, which has pip's own error."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1].strip() if lines else "no reason given"


if __name__ == "__main__":
    sys.exit(main())
