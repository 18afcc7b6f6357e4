"""Decides, from a restart's cause, whether the restart counts against the budget and whether the
job fails.

A restart helps after a lost node, but not if the program itself is wrong. The operator cannot know
for certain which of the two has happened. The defaults therefore consider the cause, and whether
the job has ever completed a step. Users who know better write `recovery.rules`.

1. The first of `recovery.rules` that matches the cause and exit code decides (`evaluate_rules`)
   whether to fail the job, restart and count, or restart without counting.
2. Before the first step, an entry point that cannot start fails the job immediately, and so does an
   exit code for a wrong configuration (2, and most of 64 to 78, as in sysexits.h).
3. In all other cases, failures of the job itself count (COUNTED). Disruptions, lost nodes, manual
   deletions and consequences of other failures do not count.
4. Before the first step, the job fails after REPEATS consecutive counted failures with the same
   error, because the next attempt would run the same program. The error must be in the program's
   code (`find_repeated_error`) or occur on several ranks at once (`find_error_everywhere`).
   Network, disk and device errors do not fail the job, because they are usually temporary. The
   exception is a missing or unreadable file, which usually means a wrong path. Such an error fails
   the job if several ranks report it.
   (Whatever the error, torchrun and Ray Train end at the first exception by default, and a
   Kubernetes Job ends after six retries.)

Example of a job without rules and with maxRestarts=10:

    rank 3 raises KeyError 'lr' before the first step, 3 times    fails, after 2 restarts
    rank 3 raises ConnectionError before the first step, 3 times  restarts, 3 of 10 used
    no rank finds /data/labels.csv, for half a minute             fails; 10 restarts take 5 minutes
    rank 3 raises KeyError 'lr' in epoch 7                        restarts, 1 of 10 used
    the node of rank 3 is drained, 50 times                       restarts, 0 of 10 used
    the script refuses an option: exit code 2                     fails immediately

Exit codes are compared as a shell shows them, with 128 + N for signal N (`shell_code`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ddpjob_runtime.protocol import COMMUNICATION_ERROR, EXIT_STEPPED_ASIDE, error_mark

from ddpjob.api.job_spec import JobSpec, RuleAction, RuleCause
from ddpjob.api.job_status import Restart
from ddpjob.core.failures.classify import Cause, without_wait

_RULED = {
    Cause.WORKER_FAILED: RuleCause.EXIT_CODE,
    Cause.EXIT_CODE: RuleCause.EXIT_CODE,
    Cause.OOM_KILLED: RuleCause.OOM_KILLED,
    Cause.DISRUPTION: RuleCause.DISRUPTION,
    Cause.PREEMPTED: RuleCause.DISRUPTION,
    Cause.EVICTED: RuleCause.DISRUPTION,
    Cause.NODE_LOST: RuleCause.NODE_LOST,
    Cause.HANG: RuleCause.HANG,
    Cause.INIT_FAILURE: RuleCause.INIT_FAILURE,
}
COUNTED = frozenset(
    {
        *(Cause.WORKER_FAILED, Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED),
        *(Cause.HANG, Cause.INIT_FAILURE),
    }
)
"""Causes that are failures of the job itself and count against its budget. Disruptions, lost hosts,
manual deletions and consequences do not count."""
RULE_FAILED = "RuleFailed"
CONFIGURATION_ERROR = "ConfigurationError"
_CONFIGURATION = frozenset({2, *range(64, 79)} - {EXIT_STEPPED_ASIDE})
"""Exit codes of programs that reject their arguments or settings. Code 2 comes from argparse, and
the others are most of the codes in sysexits.h."""

PROGRAM_ERROR = "ProgramError"
REPEATS = 3
"""A job fails before its first step if this many counted failures in a row have the same program
error."""
APART = timedelta(seconds=10)
"""Minimum time between two failures that are counted separately. If less time passes, the same
temporary fault may have caused both, so the failures are counted as one."""
_OUTSIDE = re.compile(
    r"\b(?:OSError|IOError|EnvironmentError|BlockingIOError|BrokenPipeError|EOFError|InterruptedError|ChildProcessError"
    r"|ProcessLookupError|PermissionError|(?:FileNotFound|FileExists|NotADirectory|IsADirectory)Error)\b|\[Errno"
    r"|\w*(?:Connect|Timeout|TimedOut|Network|Socket|SSL|HTTP|URL|Storage|Endpoint|Retr|Throttl)\w*(?:Error|Exception)"
    r"|timed? ?out|unavailable|unreachable|temporar|refused|reset by|network|connect|resolve|too many req|rate limit"
    r"|\bhttps?:|no space|quota|\bS3\b|\b(?:CUDA|HIP|NCCL|cuDNN|cuBLAS|NVML|ECC)\b(?! out of memory)",
    re.IGNORECASE,
)
"""Matches network, disk and device errors by the type or the wording of the error."""
_WRONG_PATH = re.compile(
    r"\b(?:FileNotFound|NotADirectory|IsADirectory|Permission)Error: \[Errno (?:2|13|20|21)\] [\w ]+: '(?!\w+://)[^']*'"
)
"""Matches errors that name the path of a missing or unreadable file. Errors without a path do not
match, because they may come from a socket whose server starts later."""
_PROGRAM_ERROR = re.compile(
    r"^rank .* ended with exit code 1: ((?:SyntaxError|IndentationError|TabError|NameError|UnboundLocalError|KeyError"
    r"|ImportError|ModuleNotFoundError|AttributeError|TypeError|NotImplementedError|RecursionError): .*)$",
    re.MULTILINE,
)
"""Matches errors that Python raises for a faulty program or a missing name. Networks and disks
rarely cause these errors."""
_NO_GPU = re.compile(
    r"^rank .* ended with exit code 1: (\w+: (?:Found no NVIDIA driver|Torch not compiled with CUDA|No CUDA GPUs are"
    r"|Attempting to deserialize object on a CUDA device).*)$",
    re.MULTILINE,
)
"""Matches errors that torch raises if it finds no GPU. In a job without GPUs, the program is at
fault. In a job with GPUs, the machine may be at fault."""


_LOST_DEVICE = re.compile(
    r"no (?:CUDA|ROCm)-capable device|no (?:CUDA|HIP) GPUs are available|no XPU devices are available"
    r"|Found no NVIDIA driver|CUDA driver initialization failed|CUDA unknown error"
    r"|(?:initialize NVML|NVML error|NVML_ERROR\w*)\W.{0,40}\bunknown error|NVML_ERROR_(?:UNKNOWN|GPU_IS_LOST)"
    r"|GPU is lost|device (?:is )?lost(?![\w-])|DEVICE_LOST|fallen off the bus|\bXid\b.{0,40}\b79\b|hipErrorNoDevice"
    r"|Device acquire failed",
    re.IGNORECASE,
)
"""Matches messages from CUDA, ROCm, oneAPI and SynapseAI in a container that has lost its device. A
new process in the same container does not regain the device."""


@dataclass(frozen=True)
class Ruling:
    """The decision of the rules or the defaults on a cause."""

    counted: bool
    """Whether the cause counts against recovery.maxRestarts."""
    fails: str = ""
    """The Failed condition's reason; empty if the job continues."""
    why: str = ""
    """Which rule or default fails the job, as a message; empty if the job continues, or if its
    entry point cannot start."""


def evaluate_rules(spec: JobSpec, cause: Cause, exit_code: int | None, *, trained: bool) -> Ruling:
    """Return the ruling of the first matching rule, or of the defaults if no rule matches.

    `exit_code` is the code that a shell would show (128 + N for signal N, see `shell_code`).
    `trained` is true once the job has completed a step. Before the first step, a program that
    cannot start or rejects its configuration fails the job, because a restart cannot help.
    """
    for number, rule in enumerate(spec.recovery.rules):
        if _RULED.get(cause) is not rule.cause or (rule.exit_codes and exit_code not in rule.exit_codes):
            continue
        if rule.action is RuleAction.FAIL:
            return Ruling(False, RULE_FAILED, f"recovery.rules[{number}] (cause {rule.cause}) fails the job")
        return Ruling(rule.action is RuleAction.RESTART)
    if cause is Cause.INIT_FAILURE and not trained:
        return Ruling(False, Cause.INIT_FAILURE)
    if cause in (Cause.WORKER_FAILED, Cause.EXIT_CODE) and exit_code in _CONFIGURATION and not trained:
        return Ruling(
            False, CONFIGURATION_ERROR, f"exit code {exit_code} before the first step is a configuration error"
        )
    return Ruling(cause in COUNTED)


def find_repeated_error(spec: JobSpec, recent: Sequence[Restart]) -> str | None:
    """Return a message if the last REPEATS counted failures have the same program error.

    Return None if one of the user's rules covers exit code 1, because that rule takes precedence.
    """
    last = [r for r in recent if r.counted][-REPEATS:]
    if len(last) < REPEATS or _is_ruled(spec):
        return None
    texts = [without_wait(r.message) if r.reason == Cause.WORKER_FAILED else "" for r in last]
    where = ""
    found = [_PROGRAM_ERROR.search(text) for text in texts]
    if None in found and not spec.gpus_per_node:
        where = " in a job without GPUs (spec.gpusPerNode is 0)"
        found = [_NO_GPU.search(text) for text in texts]
    if None in found or len({match[1] for match in found if match}) > 1:
        return None
    return f"the same error {REPEATS} times before the first step{where}"


def _is_ruled(spec: JobSpec) -> bool:
    rules = (rule for rule in spec.recovery.rules if rule.cause is RuleCause.EXIT_CODE)
    return any(not rule.exit_codes or 1 in rule.exit_codes for rule in rules)


def find_error_everywhere(spec: JobSpec, recent: Sequence[Restart]) -> str | None:
    """Return a message if several ranks had the same error in the last REPEATS counted failures.

    Failures that follow each other within APART are counted as one. Network, disk and device errors
    are ignored, because they may be temporary. Errors about a wrong file path are not ignored.
    """
    if _is_ruled(spec):
        return None
    last: Restart | None = None
    times = 0
    for restart in reversed([r for r in recent if r.counted]):
        if not _is_final_everywhere(restart) or (last is not None and _mark(restart) != _mark(last)):
            break
        if last is None or last.time - restart.time >= APART:
            last, times = restart, times + 1
        if times == REPEATS:
            where = " in several ranks" if spec.nodes * spec.procs_per_node > 1 else ""
            return f"the same error{where} {REPEATS} times before the first step"
    return None


def _is_final_everywhere(restart: Restart) -> bool:
    said = restart.everywhere and restart.reason == Cause.WORKER_FAILED and bool(_mark(restart)[1])
    error = _WRONG_PATH.sub("", without_wait(restart.message).partition("\n")[0].partition(" ended with ")[2])
    return said and not (_OUTSIDE.search(error) or COMMUNICATION_ERROR.search(error))


def _mark(restart: Restart) -> tuple[str, str]:
    first, _, traceback = without_wait(restart.message).partition("\n")
    return error_mark(first.partition(" ended with ")[2], traceback)


def names_program_error(message: str) -> bool:
    """Whether a worker failed because of an error in the program's code.

    An error in the code occurs in every pod.
    """
    return _PROGRAM_ERROR.search(without_wait(message)) is not None


def find_lost_device(spec: JobSpec, message: str, *, trained: bool) -> str:
    """Return the words in a failure's message that show a lost device; empty if there are none.

    The message is ignored if the job requests no device and has not completed a step, because such
    a job may never have had a device.
    """
    found = _LOST_DEVICE.search(message) if trained or spec.gpus_per_node else None
    return found[0] if found else ""


def shell_code(exit_code: int | None, signal_name: str | None) -> int | None:
    """Return the exit code that a shell would show, which is 128 + N for signal N.

    torchrun reports a signal either as -N or by name.
    """
    if exit_code is not None:
        return exit_code if exit_code >= 0 else 128 - exit_code
    number = getattr(signal, signal_name, None) if signal_name else None
    return 128 + number if isinstance(number, signal.Signals) else None
