"""The command line of `ddpjob`: jobs of this machine and of clusters."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddpjob.api.job_spec import Json
from ddpjob.api.yamltext import MAX_MESSAGE, shown
from ddpjob.cli.output import (
    PathTemplate,
    abandon_output,
    document,
    documents,
    listed,
    printable,
    printed_rows,
    usable_streams,
)
from ddpjob.cli.places import (
    EXIT_MISTAKE,
    EXIT_NEGATIVE,
    EXIT_TIMEOUT,
    PLACE_NAMES,
    PLACE_OPTIONS,
    PLUGIN,
    Place,
    exit_code,
    in_place,
)
from ddpjob.client.backend import Backend, LogOptions, Mistake, NoSuchJob, OutagePatience

_RUN = """\
Run the job of a manifest on this machine, as the operator does on a cluster: same checks, restarts, budget and status.
A pod is a process group with its own log file; all traffic stays on 127.0.0.1.

\b
Differences from a cluster:
  image, imagePull*, resources, scheduling   not used: this Python runs the job, with what the machine has
  disks              all pods share this machine's: their working folder, /tmp and checkpoints are the same ones
  gpusPerNode        assigned by CUDA_VISIBLE_DEVICES; with too few GPUs the job trains on the CPU, with a note
  rendezvous.port    replaced by free ports, so that several jobs can run side by side
  script, module     relative to the current folder (or spec.workingDir, or --workdir)
  storage.data       the hostPath if it exists, else RUNS/JOB/data, or --data
  storage.checkpoints  always RUNS/JOB/checkpoints, kept between runs: the next run resumes from there (unless --fresh);
                     copies go to the url's folder local.HOST.RUNS/JOB, with this shell's AWS_* variables
  env valueFrom, envFrom   Secrets and ConfigMaps cannot be read; variables of this shell are used instead
  stdout, stderr     the pod's log, a file: `> /dev/stderr` in a script empties it, `>&2` does not
  podTemplate        only env of the trainer is used; sidecars, init containers and volumes are not
  ttlSecondsAfterFinished, cleanPodPolicy, failedPodsKept   not used: logs are files, and are kept

Runs are kept in ./runs or $DDPJOB_RUNS. Ctrl-C: the nodes save a checkpoint and exit; a second Ctrl-C kills them.
So do SIGTERM, a closed terminal (not with `nohup`) and an output whose reader is gone. No process is left behind.

\b
Exit code: 0 Complete, 1 Failed, 2 bad input (nothing was started), 129 closed terminal, 130 Ctrl-C, 141 no reader,
143 SIGTERM.
Example: ddpjob run examples/digits.yaml"""

_ROOT = """\
PyTorch DDP jobs on Kubernetes and on this machine, from one manifest.

Jobs of a cluster and of this machine have the same commands. Without --local or --cluster a command means
this machine where `ddpjob run` was used ($DDPJOB_RUNS, else ./runs, holds a job), else the cluster of the kubeconfig;
-n, --context and --kubeconfig mean the cluster, and so does `kubectl ddp`. DDPJOB_PLACE=local or cluster decides it.

\b
Exit codes: 0 done; 1 the job has failed, or doctor found a fault; 2 wrong input, nothing was changed (of several
jobs: but those that were named before); 3 the cluster cannot be reached; 124 `wait` has waited long enough; 130 Ctrl-C.
"""


_MEANT = {
    **dict.fromkeys(("ls", "list", "ps"), "get"),
    **dict.fromkeys(("apply", "create", "launch"), "submit"),
    "status": "describe",
    **dict.fromkeys(("history", "archive"), "show"),
    "rm": "delete",
    "log": "logs",
    "check": "validate",
    "pause": "suspend",
    **dict.fromkeys(("ui", "web", "serve"), "dashboard"),
    **dict.fromkeys(("new", "scaffold", "quickstart"), "init"),
}
"""Other tools' words for commands."""


class _Commands(click.Group):
    """Commands in the order of their definition, with the near misses of unknown ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            meant = _MEANT.get(args[0])
            near = [meant] if meant else difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; the commands are {', '.join(self.commands)}"
            raise click.UsageError(f"no command {args[0]}{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        arguments = [one for one in command.params if isinstance(one, click.Argument)] if command else []
        names = bool(arguments) and arguments[0].name in ("job", "jobs", "pod")
        words = sum(1 for _ in itertools.takewhile(lambda word: not word.startswith("-"), rest))
        if names and words > sum(abs(one.nargs) for one in arguments) and f"{rest[0]}/" in _KINDS:
            rest = rest[1:]  # kubectl get ddp NAME
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            names = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
            what = "job.yaml" if names & {"file", "program", "words"} else "JOB" if names & {"job", "jobs"} else ""
            if error.option_name not in ("-f", "--filename") or error.ctx is None or not what:
                raise
            line = f"ddpjob {error.ctx.info_name} {what}"
            raise click.UsageError(f"no option {error.option_name}: `{line}`", error.ctx) from error
        except OSError as error:
            raise _SystemFault(error) from error


class _SystemFault(Exception):
    """A file or the output cannot be read or written. Where a reader is gone, click ends with 1: a failed job."""

    def __init__(self, error: OSError) -> None:
        self.error = error


_BEHIND = {"submit": "train.py --", "convert": "-- torchrun"}
_OF_TORCHRUN = {"nprocpernode": "--procs", "nnodes": "--nodes", "maxrestarts": "--set recovery.maxRestarts=N"}
"""What torchrun calls that which `submit` has an option for."""


class _BeforeArguments(click.Command):
    """A command whose last arguments are another program's, behind --."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # click takes them out
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if "--" in given or error.option_name in ("-f", "--filename"):
                raise
            theirs = _OF_TORCHRUN.get(error.option_name.lstrip("-").replace("-", "").replace("_", ""))
            if theirs and self.name == "submit":
                raise click.UsageError(f"no option {error.option_name}; did you mean {theirs}?", ctx) from error
            near = f" (or did you mean {' or '.join(sorted(error.possibilities))}?)" if error.possibilities else ""
            raise click.UsageError(
                f"no option {error.option_name}{near}; options of the program itself stand behind --, as in"
                f" `ddpjob {self.name} {_BEHIND[str(self.name)]} {error.option_name} ...`",
                ctx,
            ) from error


def _complete_job(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    given = ctx.params
    place = Place(*(given.get(name) for name in ("namespace", "context", "kubeconfig", "local")))
    try:
        return [n for job in place.backend().jobs() if (n := job["metadata"]["name"]).startswith(incomplete)]
    except Mistake:
        return []


_KINDS = ("ddpjob.ddpjob.io/", "ddpjobs.ddpjob.io/", "ddpjob/", "ddpjobs/", "ddp/", "pod/", "pods/")


def _bare(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Names as `-o name` prints them, and as kubectl takes them, without their kind."""
    if isinstance(value, tuple):
        return tuple(_bare(ctx, parameter, each) for each in value)
    kind = next((kind for kind in _KINDS if value and value.startswith(kind)), "")
    return value and value.removeprefix(kind)


_job = click.argument("job", shell_complete=_complete_job, callback=_bare)
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=_Commands, help=_ROOT, invoke_without_command=True, context_settings=_CONTEXT)
@click.option("--version", is_flag=True, help="Print the version.")
@click.pass_context
def root(ctx: click.Context, version: bool) -> None:
    if version:
        from ddpjob.client.diagnose import client_version

        click.echo(f"ddpjob {client_version()}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _say(text: str, place: Backend) -> None:
    """One line on success."""
    click.echo(f"{text} ({place.where})")


def _note(text: str) -> None:
    click.echo(printable(text), err=True)


def _print(line: str) -> None:
    click.echo(printable(line))


# --- before a job runs ------------------------------------------------------------------------------------------


@root.command()
@click.argument("script", default="train.py", metavar="[SCRIPT]", type=Path)
@click.option("--name", default="first", show_default=True, help="Of the job.")
@click.option("--image", default="pytorch/pytorch", show_default=True, help="Any image with Python and PyTorch.")
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="Pods that train.")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each node; 0: the CPU.")
def init(script: Path, name: str, image: str, nodes: int, gpus: int) -> int:
    """Write a manifest, job.yaml, to begin with, and a script where SCRIPT is not there yet.

    The script trains a small model, shows its loss, saves, and continues from what it saved. A file that is there is
    left as it is.

    \b
    Example: ddpjob init
             ddpjob init my_script.py --name mine --gpus 8
    """
    from ddpjob.cli.starter import write_starter

    for line in write_starter(script, name=name, image=image, nodes=nodes, gpus=gpus):
        click.echo(line)
    return 0


@root.command(help=_RUN)
@click.argument("file", metavar="FILE")
@click.option("--name", help="Name of the DDPJob, if the file holds several.")
@click.option("--fresh", is_flag=True, help="Start from scratch; earlier checkpoints are moved into the run's folder.")
@click.option("--data", type=Path, metavar="DIR", help="Folder with the data, instead of spec.storage.data.")
@click.option("--workdir", type=Path, metavar="DIR", help="Folder to start in, instead of spec.workingDir.")
def run(file: str, name: str | None, fresh: bool, data: Path | None, workdir: Path | None) -> int:
    from ddpjob.cli.run import RunOptions, run_command

    return run_command(RunOptions(file, name=name, fresh=fresh, data=data, workdir=workdir))


@root.command()
@click.argument("sources", metavar="[FILE|FOLDER|-]...", nargs=-1)
@click.option("-f", "--filename", "more", multiple=True, metavar="FILE", help="As an argument; may be repeated.")
@click.option(
    "--server", is_flag=True, help="Ask the API server too: dry runs of the job and of the pods it would get."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing of what is valid.")
@in_place
def validate(place: Place, sources: tuple[str, ...], more: tuple[str, ...], server: bool, quiet: bool) -> int:
    """Check manifests: schema, rules, podTemplate, and what the API server would refuse in the pods.

    Every DDPJob of files, folders and standard input (-) is checked, with several documents in a file and Lists;
    objects of other kinds are ignored. Needs no cluster, but for --server.

    \b
    Exit code: 0 all are valid, 2 one is not.
    Example: ddpjob validate job.yaml
             kustomize build . | ddpjob validate --server -
    """
    from ddpjob.client.manifest_sources import BadInput, checked, manifests

    if not sources and not more:
        raise click.UsageError("name a FILE, a FOLDER, or - for standard input")
    bad = False
    cluster = place.cluster() if server else None
    for manifest in manifests([*sources, *more]):
        try:
            if isinstance(manifest, BadInput):
                raise manifest
            body = checked(manifest)
            asked = f", also to {_ask_server(cluster, place, manifest, body)}" if cluster is not None else ""
            if not quiet:
                click.echo(f"{manifest.source}: ddpjob {body['metadata']['name']} is valid{asked}")
                if _keeps_sigterm(body["spec"]):
                    _note(f"{manifest.source}: note: {_NO_SIGTERM}")
        except BadInput as error:
            bad = True
            _note(str(error))
    return 2 if bad else 0


def _ask_server(cluster: Any, place: Place, manifest: Any, body: Any) -> str:
    """The namespace whose API server finds nothing wrong. Raises BadInput."""
    from ddpjob.client.cluster_backend import ClusterBackend
    from ddpjob.client.manifest_sources import BadInput
    from ddpjob.client.server_check import server_problems

    namespace = place.namespace or body["metadata"].get("namespace")
    written = manifest.document.value
    written = {**written, "metadata": {**written["metadata"], "name": body["metadata"]["name"]}}
    asked = ClusterBackend(cluster.api, namespace)
    problems = list(server_problems(asked, written))
    if problems:
        raise BadInput("\n".join(f"{manifest.source}: {problem}" for problem in problems))
    return asked.where


def _complete_field(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from ddpjob.client.explain_fields import paths

    return [path for path in paths() if path.startswith(incomplete)]


@root.command()
@click.argument("field", default="", shell_complete=_complete_field)
@click.option("--recursive", is_flag=True, help="The names and types of all fields below, without their descriptions.")
def explain(field: str, recursive: bool) -> int:
    """Explain a field of a DDPJob: type, limits, default, rules. As `kubectl explain`, without a cluster.

    \b
    Example: ddpjob explain spec.recovery
             ddpjob explain spec --recursive
    """
    from ddpjob.client.explain_fields import explain as explained

    for line in explained(field, recursive=recursive):
        _print(line)
    return 0


@root.command()
def schema() -> int:
    """Print the JSON schema of DDPJob, by which editors complete and check manifests.

    \b
    Example: ddpjob schema > ddpjob.schema.json
             and as the first line of a manifest, for yaml-language-server (VS Code, Neovim, ...):
             # yaml-language-server: $schema=ddpjob.schema.json
    """
    import json

    from ddpjob.client.explain_fields import editor_schema

    click.echo(json.dumps(editor_schema(), indent=1, ensure_ascii=False))
    return 0


@root.command(cls=_BeforeArguments)
@click.argument("program", metavar="MANIFEST|SCRIPT|FOLDER|MODULE")
@click.argument("args", nargs=-1, metavar="[-- ARGS...]")
@click.option("--image", default="", help="Any image with Python and PyTorch.")
@click.option("--name", default="", help="Default: the script's name and four letters.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Pods that train.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs of each node; 0 trains on the CPU.")
@click.option("--procs", type=click.IntRange(1), help="Processes of each node; default: one per GPU.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Pods on standby.")
@click.option("--min-nodes", type=click.IntRange(1), help="Continue with so few nodes while others are missing.")
@click.option("--max-nodes", type=click.IntRange(1), help="The most that scaling may set.")
@click.option("--mode", type=click.Choice(["Standard", "Fast"]), help="How a group recovers.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="A variable of the workers; may be repeated.")
@click.option("--cpu", default="", help="CPUs that each node requests, such as 8.")
@click.option("--memory", default="", help="Memory of each node, requested and at most, such as 64Gi.")
@click.option("--checkpoints", default="", metavar="claim:NAME|s3://URL|/FOLDER", help="Where checkpoints are kept.")
@click.option("--entry", default="", metavar="SCRIPT", help="Of a FOLDER: the script in it.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any field of spec, the value as YAML.")
@click.option("--dry-run", is_flag=True, help="Create nothing.")
@click.option("-o", "--output", type=click.Choice(["yaml", "json", "name"]), help="Print what is created.")
@click.option("--wait", "waits", is_flag=True, help="Wait for the job's end, as `ddpjob wait` does.")
@in_place
def submit(place: Place, program: str, args: tuple[str, ...], **options: Any) -> int:
    """Create a job from a manifest, or from a script and the options below.

    A manifest describes its jobs alone: options that describe one are refused, and objects of other kinds are named
    and left out. A script or a folder of this machine travels with the job in a ConfigMap, up to 1 MiB, a folder
    without its hidden files, __pycache__, node_modules, runs, wandb and mlruns. An absolute path that is not here is
    one in the image; anything else is a module. On this machine (--local) the job runs in the background.

    \b
    Example: ddpjob submit job.yaml --wait
             ddpjob submit --nodes 2 --gpus 8 --image pytorch/pytorch train.py -- --epochs 10
             ddpjob submit --nodes 2 --gpus 0 --image IMAGE --dry-run -o yaml ./project --entry train.py
    """

    local = place.is_local()
    output = options["output"] or ("yaml" if options["dry_run"] else None)
    shown, created = list[Any](), list[tuple[Backend, str]]()
    try:
        for bodies in _bodies(program, args, options, local=local):
            name = bodies[-1]["metadata"].get("name") or bodies[-1]["metadata"]["generateName"]
            if not options["dry_run"]:
                backend = place.backend()
                if not local and not place.namespace and bodies[-1]["metadata"].get("namespace"):
                    backend = Place(
                        bodies[-1]["metadata"]["namespace"], place.context, place.kubeconfig, None
                    ).backend()
                name = backend.create(bodies)
                created.append((backend, name))
            if output == "name":
                click.echo(f"ddpjob.ddpjob.io/{name}")
            elif output:
                shown += bodies
            else:
                _say(f"ddpjob {name} created", backend)
            if local:
                continue
            if not _keeps_files(bodies[-1]["spec"]):
                _note(
                    "note: spec.storage.checkpoints is not set: what a pod saves is gone with the pod, and training"
                    " begins again when the one that saved is lost; set claimTemplate, claimName or url there"
                    + ("" if _is_manifest(program) else " (--set)")
                )
            if _keeps_sigterm(bodies[-1]["spec"]):
                _note(f"note: {_NO_SIGTERM}")
    finally:  # Also of the first ones, when a later one is refused.
        if shown:
            click.echo(documents(shown, str(output)), nl=False)
    codes = [_wait(backend, name, "end", None) for backend, name in created] if options["waits"] else []
    return next(filter(None, codes), 0)


def _is_manifest(program: str) -> bool:
    from ddpjob.client.manifest_sources import SUFFIXES

    return program == "-" or program.endswith(SUFFIXES)


def _keeps_files(spec: dict[str, Any]) -> bool:
    """Whether files of the job may outlive its pods, or its pods copy them from each other, as the trainer's do."""
    volumes = ((spec.get("podTemplate") or {}).get("spec") or {}).get("volumes") or ()
    lasting = any(not {"configMap", "secret", "projected", "downwardAPI", "emptyDir"} & it.keys() for it in volumes)
    twice = spec.get("module") == "ddpjob_trainer" and spec.get("nodes", 1) > 1
    return bool(lasting or twice or spec.get("className") or (spec.get("storage") or {}).get("checkpoints"))


_NO_SIGTERM = (
    "spec.command: sh does not hand SIGTERM on to what it starts: nothing is saved when a pod is asked to end, and each"
    " restart waits for the pods' grace period, 30 s by default; write `exec` before its last program, or take bash"
)


def _keeps_sigterm(spec: dict[str, Any]) -> bool:
    """Whether a shell that never replaces itself by its last program is the first process of the pods' containers."""
    match (*(spec.get("command") or ()), *(spec.get("args") or ())):
        case (str(shell), "-c" | "-ec" | "-euc" | "-lc", str(script), *_):
            return Path(shell).name in ("sh", "dash", "ash") and not re.search(r"\b(exec|trap)\b", script)
    return False


def _refuse_options_of_scripts() -> None:
    """Raises UsageError for options that describe the job, which a manifest describes already."""
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in ("program", "dry_run", "output", "waits", *PLACE_NAMES):
            raise click.UsageError(f"{option.opts[0]}: only for a script, folder or module; change it in the manifest")


def _bodies(program: str, args: tuple[str, ...], options: dict[str, Any], *, local: bool) -> list[list[Any]]:
    """The objects of each job that is to be created."""
    from ddpjob.client.build_manifest import JobRequest, build, read_settings
    from ddpjob.client.manifest_sources import BadInput, check_made, checked, manifests

    if _is_manifest(program):
        if args:
            raise click.UsageError("a manifest has its arguments in spec.args")
        _refuse_options_of_scripts()
        bodies, others = [], dict[str, None]()
        for manifest in manifests([program]):
            if isinstance(manifest, BadInput):
                raise manifest
            checked(manifest)
            others |= dict.fromkeys(manifest.others)
            bodies.append([{key: value for key, value in manifest.document.value.items() if key != "status"}])
        if others:
            _note(f"{program}: only DDPJobs are created, not {', '.join(others)}; `kubectl apply -f {program}` can")
        return bodies
    pairs = [variable.partition("=") for variable in options["env"]]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise click.UsageError(f"--env {wrong[0]}: write NAME=VALUE")
    apart = ("env", "settings", "dry_run", "output", "waits")
    given = {key: value for key, value in options.items() if key not in apart}
    given |= {"env": {name: value for name, _, value in pairs}, "settings": read_settings(options["settings"])}
    request = JobRequest(program=program, args=args, **given)
    made = build(request, local=local)
    check_made(made[-1])
    return [made]


@root.command(cls=_BeforeArguments)
@click.argument("words", metavar="FILE... | -- torchrun ...", nargs=-1, required=True)
@click.option("--image", default="IMAGE", help="For a torchrun command line.")
@click.option("--name", default="", help="For a torchrun command line.")
def convert(words: tuple[str, ...], image: str, name: str) -> int:
    """Translate a PyTorchJob, a TrainJob or a torchrun command line into a DDPJob.

    The manifest goes to standard output; what could not be carried over, and what is wrong with the result,
    to standard error.

    \b
    Exit code: 0 the result is valid, 1 it needs changes.
    Example: ddpjob convert pytorchjob.yaml > job.yaml
             ddpjob convert --image IMAGE -- torchrun --nnodes=2 --nproc-per-node=8 train.py --lr 0.1
    """
    from ddpjob.client.convert_jobs import convert as convert_manifest
    from ddpjob.client.convert_jobs import convert_command
    from ddpjob.client.manifest_sources import SUFFIXES, BadInput, checked

    several = len(words) > 1 and not all(word.endswith(SUFFIXES) for word in words)
    if several or (" " in words[0] and not _exists(words[0])):
        made = [convert_command(words, name, image)]
    elif name or image != "IMAGE":
        raise click.UsageError("--image, --name: only for a torchrun command line; change them in the result")
    else:
        made = [convert_manifest(value) for word in words for value in _foreign(word)]
    faulty = False
    for number, conversion in enumerate(made):
        text = document(conversion.job, "yaml")
        click.echo(("---\n" if number else "") + text, nl=False)
        metadata = conversion.job["metadata"]
        for note in conversion.notes:
            _note(f"# {metadata.get('name') or metadata['generateName']}: {note}")
        from ddpjob.api.reader import read_manifests

        try:
            checked(read_manifests(text, "the DDPJob")[0])
        except BadInput as error:
            faulty = True
            # The note on the missing image says what to do; the check of its place holder would guess a name.
            lines = [line for line in str(error).splitlines() if not line.startswith("spec.image: 'IMAGE' ")]
            for line in lines:
                _note(f"# {line}")
    return EXIT_NEGATIVE if faulty else 0


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # Too long for a name.
        return False


def _foreign(source: str) -> list[Any]:
    """The manifests that can be converted; those that cannot are named."""
    from ddpjob.api.reader import CONVERTIBLE
    from ddpjob.api.yamltext import YamlError, read_documents
    from ddpjob.client.manifest_sources import refuse_address, standard_input

    refuse_address(source, "convert")
    try:
        text = standard_input() if source == "-" else Path(source).read_text(encoding="utf-8")
        items = [item.value for document in read_documents(text) for item in document.items()]
    except OSError as error:
        raise Mistake(f"{source}: {error.strerror}") from error
    except YamlError as error:
        if not text.startswith("#!"):  # Else it is a script, as of Slurm, which is no wrong YAML.
            raise Mistake(f"{source}, line {error.line}: {error}") from error
        items = []
    except UnicodeDecodeError as error:
        raise Mistake(f"{source}: is not UTF-8 text (byte {error.start}); a manifest is a YAML file") from error
    found = [item for item in items if isinstance(item, dict) and item.get("kind") in CONVERTIBLE]
    kinds = dict.fromkeys(str(item.get("kind")) for item in items if isinstance(item, dict) and item not in found)
    if not found:
        there = f", but {', '.join(kinds)}" if kinds else ""
        raise Mistake(
            f"{source}: holds none of {', '.join(CONVERTIBLE)}{there}; of another kind convert the line that starts"
            " torchrun: `ddpjob convert --image IMAGE -- torchrun ...`"
        )
    if kinds:
        _note(f"# {source}: left out, not one of {', '.join(CONVERTIBLE)}: {', '.join(kinds)}")
    return found


class _Output(click.Choice[str]):
    """Of `get`: one of a few words, or a template of paths."""

    def __init__(self) -> None:
        super().__init__(["table", "wide", "name", "json", "yaml", "jsonpath=TEMPLATE"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        kind, given, template = str(value).partition("=")
        if kind != "jsonpath":
            return super().convert(value, param, ctx)
        if not given:
            self.fail("write jsonpath='{.status.phase}'", param, ctx)
        try:
            return PathTemplate(template)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# --- looking ----------------------------------------------------------------------------------------------------


@root.command()
@click.argument("job", required=False, shell_complete=_complete_job, callback=_bare)
@click.option("-o", "--output", type=_Output(), default="table")
@click.option("-w", "--watch", is_flag=True, help="Print a line at each change, until Ctrl-C.")
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Jobs of all namespaces of the cluster.")
@in_place
def get(place: Place, job: str | None, output: str | PathTemplate, watch: bool, everywhere: bool) -> int:
    """List jobs, the newest last, or print one.

    \b
    Example: ddpjob get -w
             ddpjob get first -o yaml
             ddpjob get first -o jsonpath='{.status.phase}'
    """
    from ddpjob.client.job_text import header
    from ddpjob.engine.reconcile import utc_now

    if everywhere and job is not None:
        raise click.UsageError("-A lists jobs; name the job's namespace with -n")
    backend = place.backend(everywhere=everywhere)
    backend.whole = output in ("json", "yaml") or isinstance(output, PathTemplate)
    bodies = [backend.job(job)] if job is not None else backend.jobs()
    for note in backend.notes:
        _note(note)
    wide = output == "wide"
    if isinstance(output, PathTemplate) and not watch:
        click.echo(printable(output.text(bodies[0] if job is not None else listed(bodies))), nl=False)
        return 0
    if output in ("json", "yaml") and not watch:
        click.echo(document(bodies[0] if job is not None else listed(bodies), output), nl=False)
        return 0
    if output == "name" and not watch:
        for body in bodies:
            click.echo(f"ddpjob.ddpjob.io/{body['metadata']['name']}")
        return 0
    if not bodies and not watch:
        _note(f"no jobs in {backend.where}")
        return 0
    titles = header(wide=wide, namespaces=everywhere)
    if not watch:
        for line in printed_rows(titles, bodies, utc_now(), wide=wide, namespaces=everywhere):
            _print(line)
        return 0
    widths: list[int] = []
    for body, gone in backend.changes(job):
        if isinstance(output, PathTemplate):
            click.echo(printable(output.text(body)))
        elif output in ("json", "yaml"):
            click.echo(("---\n" if output == "yaml" else "") + document(body, output), nl=False)
        elif output == "name":
            click.echo(f"ddpjob.ddpjob.io/{body['metadata']['name']}")
        else:
            first = not widths
            lines = printed_rows(titles, [body], utc_now(), wide=wide, namespaces=everywhere, widths=widths)
            for line in lines if first else lines[1:]:
                _print(line + ("   (deleted)" if gone and line is lines[-1] else ""))
        sys.stdout.flush()
    return 0


@root.command()
@click.argument("job", required=False, shell_complete=_complete_job, callback=_bare)
@click.option("--once", is_flag=True, help="Print it once; also where the output is no terminal.")
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, metavar="SECONDS",
              help="Between two looks.")  # fmt: skip
@in_place
def top(place: Place, job: str | None, once: bool, interval: float) -> int:
    """Watch a job on a screen until it ends: progress, loss, samples/s, ranks, restarts with their causes.

    Without JOB all jobs, until Ctrl-C. The curves begin when the screen is opened; `ddpjob plot` draws earlier
    steps too.

    \b
    Example: ddpjob top first
    """
    from ddpjob.cli.top import show

    backend = place.backend()
    if job is not None:
        backend.job(job)
    show(backend, job, once=once, seconds=interval)
    return 0


@root.command()
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Jobs of all namespaces of the cluster.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8300, show_default=True, help="0: any free one.")
@click.argument("folder", type=click.Path(path_type=Path), metavar="[FOLDER]", required=False)
@in_place
def dashboard(place: Place, everywhere: bool, host: str, port: int, folder: Path | None) -> int:
    """Serve pages for a browser until Ctrl-C: all jobs, and of each its restarts, curves, pods, events and logs.

    Read-only, with your rights, and live. The address that is printed holds a token of this session; who has it sees
    what you see. From another machine use `ssh -L 8300:127.0.0.1:8300`: the connection itself is not encrypted.

    With FOLDER, jobs that are gone: a checkpoint folder, or one that holds several, as `ddpjob show` reads them.

    \b
    Example: ddpjob dashboard
             ddpjob dashboard -A --port 0
             ddpjob dashboard /mnt/checkpoints
    """
    from ddpjob.cli.dashboard_command import serve_dashboard

    if folder is not None:
        from ddpjob.client.past_jobs import PastJobs

        return serve_dashboard(PastJobs(folder), host, port)
    return serve_dashboard(place.backend(everywhere=everywhere), host, port)


@root.command()
@_job
@click.option("-o", "--output", type=Path, metavar="FILE", help="Draw a picture instead: .png, .svg or .pdf.")
@in_place
def plot(place: Place, job: str, output: Path | None) -> int:
    """Draw a job's loss and test accuracy over its restarts.

    From run/metrics.jsonl in the checkpoint folder, which the built-in trainer writes, and ddpjob_report.report with
    a `step`: on this machine at any time, on a cluster while a pod runs. Of a file above 8 MiB only the end is drawn,
    and the command says so. A picture needs the extra `trainer` here.

    \b
    Example: ddpjob plot first
             ddpjob plot first -o first.png
    """
    from ddpjob.cli.terminal_curves import CUT, curves, draw, is_cut

    backend = place.backend()
    backend.job(job)
    text = backend.metrics(job)
    if output is not None:
        draw(text, job, output)
        click.echo(f"wrote {output}")
        if is_cut(text):
            _note(CUT)
        return 0
    for line in curves(text, job):
        _print(line)
    return 0


@root.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
def show(folder: Path) -> int:
    """Show what a job has left in its checkpoint folder, when its pods and the job itself are gone.

    Rounds, restarts with causes and tracebacks, the end and the last progress, from .ddpjob-rounds.jsonl, which job
    pods write there; curves from run/metrics.jsonl. FOLDER is that of storage.checkpoints, or a
    job's folder of `ddpjob run`.

    \b
    Example: ddpjob show /mnt/checkpoints/first
             ddpjob show runs/digits
    """
    from ddpjob.cli.terminal_curves import curves
    from ddpjob.client.left_behind import in_words, read_left_behind

    found = read_left_behind(folder)
    for line in in_words(found):
        _print(line)
    if found.metrics:
        _print("")
        try:
            for line in curves(found.metrics, found.name):
                _print(line)
        except Mistake:  # Of a job that runs: it may be waited for.
            _print(f"{found.name}: its metrics hold no step")
    return 0


@root.command()
@_job
@in_place
def describe(place: Place, job: str) -> int:
    """Show a job on one screen: what it does or waits for, conditions, slots, pods, restarts, events.

    \b
    Example: ddpjob describe first
    """
    from ddpjob.client.job_client import if_allowed
    from ddpjob.client.job_text import describe as described
    from ddpjob.engine.reconcile import utc_now

    backend = place.backend()
    body = backend.job(job)
    faults = list[str]()
    pods, events = if_allowed(backend.pods, job, faults), if_allowed(backend.events, job, faults)
    for line in described(body, pods, events, utc_now()):
        _print(line)
    for fault in faults:
        _note(fault)
    return 0


@root.command()
@_job
@in_place
def why(place: Place, job: str) -> int:
    """Say what a job waits for, or why it failed, and what to do about it.

    \b
    Exit code: 1 if it has failed, else 0.
    Example: ddpjob why first
    """
    from ddpjob.client.job_client import if_allowed
    from ddpjob.client.job_text import phase
    from ddpjob.client.job_text import why as explained
    from ddpjob.engine.reconcile import utc_now

    backend = place.backend()
    body = backend.job(job)
    faults = list[str]()
    for line in explained(body, if_allowed(backend.pods, job, faults), utc_now()):
        _print(line)
    for fault in faults:
        _note(fault)
    return EXIT_NEGATIVE if phase(body) == "Failed" else 0


@root.command()
@click.argument("job", metavar="JOB|POD", shell_complete=_complete_job, callback=_bare)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Keep printing, also of pods that replace others, until the job ends; a POD's log until the pod ends.",
)
@click.option(
    "--index", type=click.IntRange(0), multiple=True, help="Only pods of this slot, the first number in a pod's name."
)
@click.option(
    "--rank",
    "rank",
    type=click.IntRange(0),
    multiple=True,
    help="Only the pod that has this global rank now, with -f those that take it over. Of a pod with several ranks, "
    'lines marked as another rank\'s are left out (spec.torchrunArgs: ["--tee=3"] marks all).',
)
@click.option("--coordinator", is_flag=True, help="The coordinator's pods too.")
@click.option("--previous", is_flag=True, help="Of the container before the present one.")
@click.option("--since", metavar="5m", help="Only lines of so long ago, such as 30s, 5m or 2h.")
@click.option(
    "--tail", type=click.IntRange(0), help="Only the last lines of each pod; with -f, all of pods that come later."
)
@click.option(
    "--prefix/--no-prefix", default=None, help="INDEX-ATTEMPT and ranks before each line; default for a whole job."
)
@in_place
def logs(
    place: Place, job: str, follow: bool, index: tuple[int, ...], rank: tuple[int, ...], coordinator: bool,
    previous: bool, since: str | None, tail: int | None, prefix: bool | None,
) -> int:  # fmt: skip
    """Print the logs of a job's pods, or of one pod.

    Each line of a whole job begins with its pod and the ranks that it has now: [1-0 rank 1], [1-0 ranks 8-15].

    \b
    Example: ddpjob logs first -f
             ddpjob logs first --rank 0 --tail 100
             ddpjob logs first-1-0
    """
    from ddpjob.api.near_misses import seconds
    from ddpjob.client.log_follower import Chosen, LogFollower

    length = None if since is None else int(since) if since.isdigit() else seconds(since)
    if since is not None and not length:
        raise click.UsageError(f"--since {since}: write a length of time, such as 30s, 5m or 2h")
    if follow and previous:
        raise click.UsageError("--previous: a container that has ended writes nothing more; leave --follow out")
    backend, options = place.backend(), LogOptions(follow=follow, tail=tail, since=length, previous=previous)
    body, pod = _job_or_pod(backend, job)
    name = body["metadata"]["name"]
    if pod and index:
        raise click.UsageError(f"{job} is a pod; --index chooses pods of a job: ddpjob logs {name} --index ...")
    follower = LogFollower(backend, body, options, Chosen(pod, index, rank, coordinator))
    printed = prefix if prefix is not None else not pod
    for line in follower.lines():
        ranks, by = line.ranks, line.rank
        words = f" rank {by}" if by is not None else f" ranks {ranks[0]}-{ranks[-1]}" if ranks else ""
        mark = f"[{line.pod.name.removeprefix(name + '-')}{words}] ".encode() if printed else b""
        click.echo(mark + line.text)
    for note in follower.notes:
        _note(note)
    if nothing := follower.why_nothing():
        _note(nothing)
    return EXIT_NEGATIVE if follower.notes and not follower.seen else 0


def _job_or_pod(backend: Backend, name: str) -> tuple[Json, str]:
    """(job, pod); the pod is empty where the name is a job's."""
    try:
        return backend.job(name), ""
    except NoSuchJob as missing:
        why = missing
    try:
        jobs = backend.jobs()
    except Mistake as mistake:
        if mistake.denied:  # Who may not list jobs has mistyped the name all the same.
            raise why from mistake
        raise
    for body in jobs:
        job = body["metadata"]["name"]
        if name.startswith(f"{job}-"):
            pods = [pod.name for pod in backend.pods(job)]
            if name in pods:
                return body, name
            why = NoSuchJob(f"no pod {name} of job {job}; its pods: {', '.join(pods[:10]) or 'none yet'}")
    raise why


@root.command()
@_job
@in_place
def events(place: Place, job: str) -> int:
    """Print a job's events, the oldest first; ! marks warnings.

    \b
    Example: ddpjob events first
    """
    from ddpjob.client.job_text import event_line
    from ddpjob.engine.reconcile import utc_now

    backend = place.backend()
    backend.job(job)
    found = backend.events(job)
    for event in found:
        _print(event_line(event, utc_now()))
    if not found:
        _note(f"no events of {job}; a cluster keeps them for an hour")
    return 0


@root.command()
@_job
@click.option("--for", "goal", type=click.Choice(["end", "Complete", "Running", "Suspended"]), default="end",
              show_default=True, help="What to wait for.")  # fmt: skip
@click.option("--timeout", metavar="1h", help="Give up after so long; exit code 124.")
@in_place
def wait(place: Place, job: str, goal: str, timeout: str | None) -> int:
    """Wait until a job has ended, or is in a state. Unlike `kubectl wait` it ends when the job fails.

    \b
    Exit code: 0 it is Complete (or what --for names), 1 it has failed or was deleted, 124 timeout.
    Example: ddpjob wait first --timeout 2h && ddpjob logs first --tail 1
    """
    from ddpjob.api.near_misses import seconds

    length = None if timeout is None else float(timeout) if timeout.isdigit() else seconds(timeout)
    if timeout is not None and length is None:
        raise click.UsageError(f"--timeout {timeout}: write a length of time, such as 90s, 30m or 2h")
    backend = place.backend()
    backend.job(job)
    return _wait(backend, job, goal, length)


WAITING_SECONDS = 30.0
"""Between two lines of progress of a job that is waited for."""


def _wait(backend: Backend, job: str, goal: str, seconds: float | None) -> int:
    """The exit code of `wait`. Standard error shows what happens meanwhile: states, restarts, now and then progress."""
    from ddpjob.api.job_status import JobStatus
    from ddpjob.client.job_text import header, phase, restart_line, why
    from ddpjob.engine.reconcile import utc_now

    state, shown, shown_at, widths = "", ("", 0), 0.0, list[int]()
    for body, gone in backend.changes(job, seconds):
        state = phase(body)
        if gone:
            _note(f"{job} was deleted")
            return EXIT_NEGATIVE
        if state == goal or (goal == "end" and state == "Complete"):
            _say(f"{job} is {state}", backend)
            return 0
        if state in ("Failed", "Complete", "Interrupted"):
            for line in why(body, (), utc_now()):
                _note(line)
            return EXIT_NEGATIVE
        restarts = JobStatus.read(body.get("status") or {}).restarts
        if restarts.recent and restarts.total > shown[1]:
            _note(restart_line(restarts.recent[-1], utc_now()))
        if (state, restarts.total) != shown or time.monotonic() - shown_at >= WAITING_SECONDS:
            lines = printed_rows(header(), [body], utc_now(), wide=False, namespaces=False, widths=widths)
            for line in lines[bool(shown[0]) :]:
                _note(line)
            shown, shown_at = (state, restarts.total), time.monotonic()
    _note(f"{job} is still {state}")
    return EXIT_TIMEOUT


@root.command()
@_job
@click.option("--index", type=click.IntRange(0), multiple=True, help="Only pods of this slot.")
@in_place
def stacks(place: Place, job: str, index: tuple[int, ...]) -> int:
    """Print what every rank is doing: the Python stack of its main thread. Training continues.

    \b
    Example: ddpjob stacks first --index 3
    """
    from ddpjob.client.worker_stacks import stacks as taken

    backend = place.backend()
    backend.job(job)
    pods = [p for p in backend.pods(job) if p.index is not None and p.state == "Running"]
    pods = [p for p in pods if not index or p.index in index]
    if not pods:
        raise Mistake(f"{job}: no pod runs{' in these slots' if index else ''}")
    for pod, text in taken(backend, pods):
        _print(f"--- pod {pod.name}")
        _print(text)
    return 0


# --- changing ---------------------------------------------------------------------------------------------------


@root.command()
@_job
@click.argument("nodes", type=click.IntRange(1))
@in_place
def scale(place: Place, job: str, nodes: int) -> int:
    """Change the number of nodes, in place: the group restarts from its last checkpoint.

    \b
    Example: ddpjob scale first 4
    """
    from ddpjob.client.job_client import change

    backend = place.backend()
    change(backend, job, {"nodes": nodes})
    _say(f"ddpjob {job} scaled to {nodes} {'node' if nodes == 1 else 'nodes'}", backend)
    return 0


def _suspend(backend: Backend, job: str, wanted: bool) -> None:
    from ddpjob.client.job_client import change

    change(backend, job, {"runPolicy": {"suspend": wanted}})


@root.command()
@_job
@in_place
def suspend(place: Place, job: str) -> int:
    """End a job's pods after they have saved a checkpoint; the job is kept.

    \b
    Example: ddpjob suspend first
    """
    backend = place.backend()
    _suspend(backend, job, True)
    _say(f"ddpjob {job} suspended; `ddpjob resume {job}` continues it", backend)
    return 0


@root.command()
@_job
@in_place
def resume(place: Place, job: str) -> int:
    """Continue a suspended job from its checkpoint.

    \b
    Example: ddpjob resume first
    """
    backend = place.backend()
    _suspend(backend, job, False)
    _say(f"ddpjob {job} resumed", backend)
    return 0


class _Ended(Mistake):
    """The job has ended before it was suspended."""


def _suspended(backend: Backend, job: str, timeout: float) -> None:
    """Waits until the job is suspended and its pods have ended. Raises Mistake."""
    from ddpjob.client.job_client import ENDED
    from ddpjob.client.job_text import phase

    end, patience = time.monotonic() + timeout, OutagePatience()
    while True:
        try:
            state = phase(backend.job(job))
            if state in (*ENDED, "Interrupted"):
                raise _Ended(f"{job} is {state}; it was not restarted")
            if state == "Suspended" and all(pod.ended for pod in backend.pods(job)):
                return
            patience.answered()
        except Mistake as mistake:
            patience.bear(mistake)
        if time.monotonic() > end:
            raise Mistake(f"{job}: its pods have not ended within {timeout} s")
        time.sleep(0.3)


@root.command()
@_job
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds for the pods to end.")
@in_place
def restart(place: Place, job: str, timeout: int) -> int:
    """Replace all pods of a job: suspend it, wait until they have ended, resume it. Costs nothing of the budget.

    \b
    Example: ddpjob restart first
    """
    backend = place.backend()
    _suspend(backend, job, True)
    try:
        _suspended(backend, job, timeout)
        _suspend(backend, job, False)
    except (_Ended, NoSuchJob):
        raise
    except (KeyboardInterrupt, Mistake):
        _note(f"{job} is suspended; `ddpjob resume {job}` continues it")
        raise
    _say(f"ddpjob {job} restarted", backend)
    return 0


@root.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=_complete_job, callback=_bare)
@in_place
def delete(place: Place, jobs: tuple[str, ...]) -> int:
    """Delete jobs and their pods; none of them where one is not there. Checkpoints on volumes stay, on this machine
    RUNS/JOB/checkpoints and what --fresh has moved; with storage.checkpoints.claimTemplate.whenDeleted: Delete they
    go too.

    \b
    Example: ddpjob delete first second
    """
    backend = place.backend()
    names = list(dict.fromkeys(jobs))
    if len(names) > 1:
        for job in names:
            backend.job(job)
    for job in names:
        backend.delete(job)
        _say(f"ddpjob {job} deleted", backend)
    return 0


@root.command()
@click.argument("pod", callback=_bare)
@in_place
def kill(place: Place, pod: str) -> int:
    """Kill a pod, to see the job recover: as kubectl delete pod --force --grace-period=0.

    \b
    Example: ddpjob kill first-0-0
    """
    backend = place.backend()
    backend.kill(pod)
    _say(f"pod {pod} killed", backend)
    return 0


@root.command()
@_job
@click.option("--now", is_flag=True, help="Kill, without time to save a checkpoint.")
def stop(job: str, now: bool) -> int:
    """Stop a run of this machine and all of its processes.

    \b
    Example: ddpjob stop digits
    """
    from ddpjob.client.process_backend import ProcessBackend

    was_running = ProcessBackend().stop(job, now=now)
    click.echo(f"{job}: stopped" if was_running else f"{job}: not running")
    return 0


# --- the tool itself --------------------------------------------------------------------------------------------


@root.command()
@in_place
def doctor(place: Place) -> int:
    """Check that this client, the cluster's definition (CRD), the operator and your rights fit together.

    \b
    Exit code: 0 all is well, 1 something is not, 3 no cluster.
    Example: ddpjob doctor -n research
    """
    from ddpjob.client.diagnose import checks

    backend = place.cluster()
    faults = 0
    for check in checks(backend.api, backend.namespace):
        mark = {True: "ok", False: "FAULT", None: "?"}[check.ok]
        _print(f"{mark:<6}{check.what}")
        if check.ok is False:
            faults += 1
            click.echo(printable(f"      {check.remedy}") if check.remedy else "", nl=bool(check.remedy))
    return EXIT_NEGATIVE if faults else 0


@root.command()
def version() -> int:
    """Print the version of this client; `ddpjob doctor` compares it with the cluster's.

    \b
    Example: ddpjob version
    """
    from ddpjob.client.diagnose import client_version

    click.echo(f"ddpjob {client_version()}")
    return 0


@root.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    Example: source <(ddpjob completion bash)
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # the choices are those that click knows
    click.echo(made(root, {}, "ddpjob", "_DDPJOB_COMPLETE").source())
    return 0


def _place_last(words: list[str]) -> list[str]:
    """Options of the place may stand before the command too, as kubectl's."""
    before: list[str] = []
    while words and (words[0].startswith("-n") or words[0].partition("=")[0] in PLACE_OPTIONS):
        size = PLACE_OPTIONS.get(words[0], 1)  # In one word with its value: -nNAMESPACE, --context=CONTEXT
        before, words = [*before, *words[:size]], words[size:]
    return [*words[:1], *before, *words[1:]] if words else before


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of an output that takes no more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    usable_streams()
    name = PLUGIN if PLUGIN in Path(sys.argv[0]).name else "ddpjob"
    if "NO_COLOR" in os.environ:
        root.context_settings["color"] = False
    try:
        code = root.main(
            _place_last(sys.argv[1:] if arguments is None else list(arguments)),
            prog_name=name.replace("kubectl-", "kubectl "),
            standalone_mode=False, complete_var="_DDPJOB_COMPLETE",
        )  # fmt: skip
        return int(code or 0)
    except Mistake as mistake:
        for line in str(mistake).split("\n"):  # A manifest's texts in it may have any length.
            _note(shown(line, MAX_MESSAGE))
        return exit_code(mistake)
    except click.exceptions.Exit as ended:
        return int(ended.exit_code)
    except click.ClickException as error:
        error.show()
        return int(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except _SystemFault as fault:
        if fault.error.filename is None and fault.error.errno == errno.ENOENT:  # os.getcwd() names no file
            _note("the current folder does not exist any more; change to another one")
            return EXIT_MISTAKE
        if fault.error.filename is None:
            if fault.error.errno not in _OUTPUT_ERRORS:
                raise fault.error from None
            abandon_output()
        if isinstance(fault.error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        _note(f"{fault.error.filename or 'standard output'}: {fault.error.strerror}")
        return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
