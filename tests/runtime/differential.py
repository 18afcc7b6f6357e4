"""Run the corpus of small programs as plain torchrun does, in Standard and in Fast, and show the
differences.

    python tests/runtime/differential.py [PROGRAM ...]

Plain means Python as torchrun starts it, which test_differential.py compares with torchrun itself.
Standard means worker.py, started the same way. Fast means a fork of the launcher's own fork server.
The comparison covers the exit code, both outputs, and the error file that torchrun reads. The table
has a line for each program, and the differences follow below it.
"""

from __future__ import annotations

import concurrent.futures
import difflib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from differential_corpus import PROGRAMS, Program

HERE = Path(__file__).resolve().parent
RUNTIME = HERE.parents[1] / "runtime"
SERVER = HERE / "scripts" / "forked_corpus.py"
SECONDS = 60.0
SIDES = ("plain", "Standard", "Fast")
TORCHRUN = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": "default", "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}  # fmt: skip
OWN = {"DDPJOB_COORDINATOR": "127.0.0.1:1", "DDPJOB_TOKEN": "t"}


@dataclass(frozen=True)
class Outcome:
    """The result of one process: its exit code (as in Popen), its outputs, and the content of the
    error file.
    """

    code: int
    out: str
    err: str
    error: str = ""

    def text(self, program: Program) -> str:
        """Return the fields to compare. The error file counts only if torchrun writes one too."""
        error = self.error if "record" in program.text else ""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}\n--- error file\n{error}\n"


# ---- the folders


def write_all(folder: Path, programs: Mapping[str, Program]) -> None:
    """Write the programs and their files."""
    folder.mkdir(parents=True)
    for name, program in programs.items():
        encoding = "latin-1" if "latin-1 -*-" in program.text else "utf-8"
        (folder / f"p_{name}.py").write_text(program.text, encoding=encoding)
        for path, text in program.files.items():
            write(folder, path, text)


def write(folder: Path, path: str, text: str) -> None:
    """Write a file. `.pyc` files and members of `.zip` are compiled from their source, and `->
    TARGET` makes a link.
    """
    target = folder / path
    archive, _, member = path.partition(".zip/")
    if member:
        with zipfile.ZipFile(folder / f"{archive}.zip", "a") as opened:
            opened.writestr(zipfile.ZipInfo(member), text)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if text.startswith("-> "):
        target.symlink_to(text[3:])
    elif path.endswith(".pyc"):
        source = target.with_suffix(".source")
        source.write_text(text)
        py_compile.compile(str(source), str(target), dfile=str(target))
        source.unlink()
    else:
        target.write_text(text)


# ---- the sides


def run_corpus(folder: Path, names: Iterable[str] = (), runtime: Path = RUNTIME) -> dict[str, dict[str, Outcome]]:
    """Run each program on each side, and return {program: {side: outcome}}."""
    programs = {
        n: p for n, p in PROGRAMS.items() if (not names or n in set(names)) and sys.version_info[:2] >= p.oldest
    }
    for side in SIDES:
        write_all(folder / side, programs)
        (folder / f"{side}.results").mkdir()
    containers = {tuple(sorted(program.container.items())) for program in programs.values()}
    servers = [start_server(folder, programs, dict(container), runtime) for container in sorted(containers)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = {
            (name, side): pool.submit(run_cold, folder, name, program, side, runtime)
            for name, program in programs.items()
            for side in SIDES[:2]
        }
        codes = {key: future.result() for key, future in running.items()}
    for server, written in servers:
        try:
            _, text = server.communicate(timeout=SECONDS * 4)
        finally:
            server.kill()
        assert server.returncode == 0, text.decode()
        codes.update({(name, "Fast"): code for name, code in json.loads(written.read_text()).items()})
    return {name: {side: outcome(folder, name, side, codes[name, side]) for side in SIDES} for name in programs}


def start_server(
    folder: Path, programs: Mapping[str, Program], container: Mapping[str, str], runtime: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the process that runs all programs with this container environment in Fast mode. Return
    the process and the file with the exit codes.

    Python reads its own variables when it starts, so each environment needs a separate launcher.
    """
    orders = []
    for name, program in programs.items():
        if program.container == container:
            out, err = results(folder, "Fast", name)
            words = [word.replace("FOLDER", str(folder / "Fast")) for word in program.run]
            made = environment(folder, "Fast", name, program)
            orders.append({"name": name, "words": words, "environment": made, "out": str(out), "err": str(err)})
    written, ordered = (folder / f"{kind}{len(orders)}{len(container)}.json" for kind in ("results", "orders"))
    ordered.write_text(json.dumps(orders))
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(runtime), str(ordered), str(written)],
        cwd=folder / "Fast", stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env={**base_environment(), **TORCHRUN, **container},
    )  # fmt: skip
    return server, written


def run_cold(folder: Path, name: str, program: Program, side: str, runtime: Path) -> int:
    """Return the exit code of a program under `python -u`, as torchrun starts it, or under
    worker.py.
    """
    mode, *what = (word.replace("FOLDER", str(folder / side)) for word in program.run)
    plain = [*(["-m"] if mode == "--module" else []), *what]
    worker = str(runtime / "ddpjob_runtime" / "worker.py")
    command = [sys.executable, "-u", *(plain if side == "plain" else [worker, mode, *what])]
    out, err = results(folder, side, name)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder / side, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
            env=environment(folder, side, name, program),
        )  # fmt: skip
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def results(folder: Path, side: str, name: str) -> tuple[Path, Path]:
    """Return the folder for a program's outputs."""
    return folder / f"{side}.results" / f"{name}.out", folder / f"{side}.results" / f"{name}.err"


def base_environment() -> dict[str, str]:
    """Return the container's environment, without the variables that pytest and this project's own
    processes need.
    """
    unwanted = ("PYTEST", "DDPJOB_", "COLUMNS", "LINES", "PYTHONPATH", "PYTHONUNBUFFERED")
    return {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}


def environment(folder: Path, side: str, name: str, program: Program) -> dict[str, str]:
    """Return a worker's environment."""
    made = {**base_environment(), **TORCHRUN, **program.container, **program.environment}
    made["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{side}.results" / f"{name}.json")
    if side != "plain":
        made.update(OWN, DDPJOB_STACKS_DIR=str(folder / f"{side}.results"))
    if side == "Standard":
        made["DDPJOB_LAUNCHER_PID"] = str(os.getpid())
    return made


def outcome(folder: Path, name: str, side: str, code: int) -> Outcome:
    """Read a program's results without the details that differ between runs."""
    out, err = (normal(path.read_bytes(), folder, side) for path in results(folder, side, name))
    error = folder / f"{side}.results" / f"{name}.json"
    content = ""
    if error.exists():
        message = json.loads(error.read_text())["message"]
        for name in "timestamp", "ddpjob_exit":
            message.get("extraInfo", {}).pop(name, None)
        content = normal(json.dumps(message, indent=1).encode(), folder, side)
    return Outcome(code, out, err, content)


def normal(data: bytes, folder: Path, side: str) -> str:
    """Remove the side's folder, addresses and the variables that DDPJob adds."""
    text = data.decode(errors="backslashreplace")
    text = text.replace(str(folder / f"{side}.results"), "RESULTS").replace(str(folder / side), "FOLDER")
    text = re.sub(r"0x[0-9a-f]{8,}", "ADDRESS", text)
    return re.sub(r"^DDPJOB_\w+[ =].*\n", "", text, flags=re.MULTILINE)


# ---- what differs


def differences(found: Mapping[str, Mapping[str, Outcome]]) -> dict[tuple[str, str], str]:
    """Return {(program, side): a diff against plain} for the sides that differ."""
    seen = {}
    for name, sides in found.items():
        plain = sides["plain"].text(PROGRAMS[name])
        for side in SIDES[1:]:
            text = sides[side].text(PROGRAMS[name])
            if text != plain:
                lines = difflib.unified_diff(plain.splitlines(), text.splitlines(), "plain", side, lineterm="", n=1)
                seen[name, side] = "\n".join(lines)
    return seen


def table(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Format the table, with a line for each program."""
    differ = differences(found)
    lines = [f"{'program':28}{'exit code':>10}  {'Standard':14}Fast"]
    for name, sides in found.items():
        marks = []
        for side in SIDES[1:]:
            known = PROGRAMS[name].differs.get(side, "")
            is_other = (name, side) in differ
            marks.append((known or "DIFFERS") if is_other else "same" if not known else "NO " + known)
        lines.append(f"{name:28}{sides['plain'].code:>10}  {marks[0]:14}{marks[1]}")
    return "\n".join(lines)


def unexpected(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return the diffs that no row of the table explains, and the rows that no longer hold. The
    result is empty if all is as documented.
    """
    differ = differences(found)
    texts = [f"=== {n}, {side}\n{text}" for (n, side), text in differ.items() if side not in PROGRAMS[n].differs]
    for name, program in PROGRAMS.items():
        for side, row in program.differs.items():
            if name in found and (name, side) not in differ:
                texts.append(f"=== {name}, {side}: no longer differs, as row {row!r} says")
    return "\n".join(texts)


def main() -> int:
    """Print the table and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="differential-"))
    began = time.monotonic()
    try:
        found = run_corpus(folder, sys.argv[1:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = unexpected(found)
    print(table(found))
    print(f"{len(found)} programs, Python {sys.version.split()[0]}, {time.monotonic() - began:.0f} s\n{wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
