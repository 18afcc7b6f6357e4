"""`ddpjob`: DDPJobs on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

_RUN = """\
Runs the job of a manifest on this machine, as the operator does on a cluster: same checks, restarts, budget and status.
A pod is a process group with a log file of its own; everything is on 127.0.0.1.

What is otherwise here than on a cluster:
  image, imagePull*, resources, scheduling   not used: this Python runs the job, with what the machine has
  gpusPerNode        shared out by CUDA_VISIBLE_DEVICES; with too few GPUs the CPU trains, with a note
  rendezvous.port    free ports are taken instead, so that several jobs run side by side
  script, module     looked up from the current folder (or spec.workingDir, or --workdir)
  storage.data       the hostPath if it is there, else RUNS/JOB/data, or --data
  storage.checkpoints  always RUNS/JOB/checkpoints, kept between runs: the next run goes on from there (--fresh: anew)
  env valueFrom, envFrom   Secrets and ConfigMaps cannot be read; variables of this shell are taken instead
  podTemplate        env of the trainer counts; sidecars, init containers and volumes do not
  ttlSecondsAfterFinished, cleanPodPolicy, failedPodsKept   logs are files and stay

Runs are kept in ./runs or $DDPJOB_RUNS. Ctrl-C: the nodes save and end; a second one ends them at once. Nothing is left behind.
Exit code: 0 Complete, 1 Failed, 2 bad input (nothing was started), 130 Ctrl-C, 143 SIGTERM."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="ddpjob", description="PyTorch DDP jobs from one manifest, on this machine as on a cluster.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    keep_lines = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser("run", help="run a job on this machine", description=_RUN, formatter_class=keep_lines)
    run.add_argument("file", type=Path, metavar="FILE", help="manifest with a DDPJob")
    run.add_argument("--name", help="which DDPJob, where the file holds several")
    run.add_argument("--fresh", action="store_true", help="begin anew; earlier checkpoints are put aside into the new run's folder")
    run.add_argument("--data", type=Path, metavar="DIR", help="folder with the data, instead of spec.storage.data")
    run.add_argument("--workdir", type=Path, metavar="DIR", help="folder to start in, instead of spec.workingDir")
    validate = commands.add_parser("validate", help="check manifests as the API server and the operator would")
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE")
    get = commands.add_parser("get", help="list the jobs run here, as kubectl get ddp")
    get.add_argument("job", nargs="?", metavar="JOB")
    get.add_argument("-o", "--output", choices=["table", "json", "yaml"], default="table")
    logs = commands.add_parser("logs", help="print the log of a pod of the last run")
    logs.add_argument("pod", metavar="POD")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job's run ends")
    kill = commands.add_parser("kill", help="kill a pod at once, as kubectl delete pod --force --grace-period=0")
    kill.add_argument("pod", metavar="POD")
    for verb, text in (("suspend", "end the pods after they saved; the job stays"), ("resume", "let a suspended job go on")):
        commands.add_parser(verb, help=text).add_argument("job", metavar="JOB")
    scale = commands.add_parser("scale", help="change the number of nodes, as kubectl scale")
    scale.add_argument("job", metavar="JOB")
    scale.add_argument("nodes", type=int, metavar="NODES")
    stop = commands.add_parser("stop", help="end a run; nothing stays behind")
    stop.add_argument("job", metavar="JOB")
    stop.add_argument("--now", action="store_true", help="without time to save a checkpoint")
    return root


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parsed = parser().parse_args(arguments)
    try:
        return _dispatch(parsed)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output is gone. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _dispatch(parsed: argparse.Namespace) -> int:
    if parsed.command == "run":
        from ddpjob.cli.run import run_command

        return run_command(parsed)
    from ddpjob.cli import commands

    try:
        return int(getattr(commands, parsed.command)(parsed))
    except commands.Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
