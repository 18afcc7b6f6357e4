"""Commands that write, check, convert, run and submit manifests."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddpjob.cli.output import document, documents
from ddpjob.cli.places import EXIT_NEGATIVE, PLACE_NAMES, Place, in_place
from ddpjob.cli.root import BeforeArguments, print_line, print_note, root, say
from ddpjob.cli.waiting import wait_for
from ddpjob.client.backends.backend import Backend, Mistake, NoSuchJob
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.texts.job_text import phase

_RUN = """\
Run a manifest's job on this machine.

Checks, restarts, budget and status work as on a cluster. Each pod is a process group with its
own log file. All traffic stays on 127.0.0.1.

\b
Differences from a cluster:
  image, imagePull*, resources, scheduling
      not used; this Python runs the job, with the machine's resources
  disks
      shared; all pods use the same working folder, /tmp and
      checkpoints
  gpusPerNode
      assigned through CUDA_VISIBLE_DEVICES; if there are too few GPUs,
      the job trains on the CPU and a note is printed
  rendezvous.port
      replaced by free ports, so that several jobs can run side by side
  script, module
      relative to the current folder (or spec.workingDir, or --workdir)
  code
      fetched to RUNS/JOB/fetched-code; with --workdir, not used
  storage.data
      --data, or the hostPath if it exists, else RUNS/JOB/data
  storage.checkpoints
      always RUNS/JOB/checkpoints, where the next run resumes (unless
      --fresh); copies go to local.HOST.RUNS/JOB below the url, using the
      AWS_* variables of this shell
  env valueFrom, envFrom
      Secrets and ConfigMaps cannot be read; variables of this shell are
      used
  stdout, stderr
      written to the pod's log file; `> /dev/stderr` in a script empties
      it, `>&2` does not
  podTemplate
      only env of the container trainer is used; sidecars, init containers
      and volumes are not
  ttlSecondsAfterFinished, cleanPodPolicy, failedPodsKept, logsKept
      not used; the log files are kept

Runs are kept in $DDPJOB_RUNS (default: ./runs). After Ctrl-C, the nodes save a checkpoint and
exit. A second Ctrl-C kills them. SIGTERM, a closed terminal (without `nohup`) and a closed
output pipe have the same effect as Ctrl-C. No process is left behind.

\b
Exit code: 0 Complete, 1 Failed, 2 bad input (nothing was started),
129 closed terminal, 130 Ctrl-C, 141 no reader, 143 SIGTERM.
Example: ddpjob run examples/digits.yaml"""


@root.command()
@click.argument("script", required=False, type=Path)
@click.option("--name", help="Name of the job. Default: the script's name, or 'first' without SCRIPT.")
@click.option("--image", default="pytorch/pytorch", show_default=True, help="Any image with Python and PyTorch.")
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="Pods that train.")
@click.option(
    "--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs per node; 0 trains on the CPU."
)
@click.option("--check", is_flag=True, help="Only read SCRIPT, and write nothing.")
def init(script: Path | None, name: str | None, image: str, nodes: int, gpus: int, check: bool) -> int:
    """Write a first manifest, and show what a script still needs.

    The command writes job.yaml. If SCRIPT (default: train.py) does not exist, it also writes a
    small script. Existing files are kept.

    An existing SCRIPT is read, but not executed. If it was written for one GPU, the command prints
    the lines to add for several GPUs. The output uses the names and line numbers of the script.

    \b
    Exit code of --check: 1 if the ranks of SCRIPT do not form a group.
    Example: ddpjob init
             ddpjob init my_script.py --name mine --gpus 8
             ddpjob init my_script.py --check
    """
    from ddpjob.cli.starter import check_script, write_starter
    from ddpjob.client.manifests.build_manifest import name_after

    if name is None:
        name = name_after(script.stem) if script else "first"
    script = script or Path("train.py")
    if check:
        forms_group, lines = check_script(script)
    else:
        forms_group, lines = True, list(write_starter(script, name=name, image=image, nodes=nodes, gpus=gpus))
    for line in lines:
        print_line(line)
    return 0 if forms_group else EXIT_NEGATIVE


@root.command(help=_RUN)
@click.argument("file", metavar="FILE")
@click.option("--name", help="Name of the DDPJob, if the file contains several.")
@click.option("--fresh", is_flag=True, help="Start from scratch; earlier checkpoints are moved into the run's folder.")
@click.option("--data", type=Path, metavar="DIR", help="Folder with the data, instead of spec.storage.data.")
@click.option("--workdir", type=Path, metavar="DIR", help="Folder to start in, instead of spec.workingDir.")
def run(file: str, name: str | None, fresh: bool, data: Path | None, workdir: Path | None) -> int:
    from ddpjob.cli.run import run_command

    return run_command(file, name, data, workdir, fresh=fresh)


@root.command()
@click.argument("sources", metavar="[FILE|FOLDER|-]...", nargs=-1)
@click.option(
    "-f", "--filename", "more", multiple=True, metavar="FILE", help="Same as the argument FILE; may be repeated."
)
@click.option("--server", is_flag=True, help="Also have the API server check the job and its pods in dry runs.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing about valid manifests.")
@in_place
def validate(place: Place, sources: tuple[str, ...], more: tuple[str, ...], server: bool, quiet: bool) -> int:
    """Check manifests, without a cluster.

    The command checks the schema, the rules, podTemplate, and whether the API server would refuse
    the pods. It checks every DDPJob in files, folders and standard input (-), also in Lists and in
    files with several documents. It ignores objects of other kinds. Only --server needs a cluster.

    \b
    Exit code: 0 all are valid, 2 at least one is not.
    Example: ddpjob validate job.yaml
             kustomize build . | ddpjob validate --server -
    """
    from ddpjob.client.manifests.manifest_sources import BadInput, checked, manifests

    if not sources and not more:
        raise click.UsageError("specify a FILE, a FOLDER, or - for standard input")
    bad = False
    cluster = place.cluster() if server else None
    for manifest in manifests([*sources, *more]):
        try:
            if isinstance(manifest, BadInput):
                raise manifest
            body = checked(manifest)
            asked = f", also in {_ask_server(cluster, place, manifest, body)}" if cluster is not None else ""
            if not quiet:
                click.echo(f"{manifest.source}: ddpjob {body['metadata']['name']} is valid{asked}")
                if cluster is not None and body["spec"].get("className"):
                    named = body["spec"]["className"]
                    print_note(f"{manifest.source}: note: class {named} is checked only when the job starts")
                if _keeps_sigterm(body["spec"]):
                    print_note(f"{manifest.source}: note: {_NO_SIGTERM}")
        except BadInput as error:
            bad = True
            print_note(str(error))
    return 2 if bad else 0


def _ask_server(cluster: Any, place: Place, manifest: Any, body: Any) -> str:
    """Ask the API server whether it accepts a manifest.

    Return a text that names the cluster and the namespace. Raises BadInput if the API server
    refuses the manifest.
    """
    from ddpjob.client.backends.cluster_backend import ClusterBackend
    from ddpjob.client.manifests.manifest_sources import BadInput
    from ddpjob.client.manifests.server_check import server_problems

    namespace = place.namespace or body["metadata"].get("namespace")
    written = manifest.document.value
    written = {**written, "metadata": {**written["metadata"], "name": body["metadata"]["name"]}}
    asked = ClusterBackend(cluster.api, namespace)
    problems = list(server_problems(asked, written))
    if problems:
        raise BadInput("\n".join(f"{manifest.source}: {problem}" for problem in problems))
    return asked.where


def _complete_field(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from ddpjob.client.manifests.explain_fields import paths

    return [path for path in paths() if path.startswith(incomplete)]


@root.command()
@click.argument("field", default="", shell_complete=_complete_field)
@click.option("--recursive", is_flag=True, help="Print only the names and types of all nested fields.")
def explain(field: str, recursive: bool) -> None:
    """Explain a field of a DDPJob: type, limits, default, rules.

    \b
    Example: ddpjob explain spec.recovery
             ddpjob explain spec --recursive
    """
    from ddpjob.client.manifests.explain_fields import explain as explained

    for line in explained(field, recursive=recursive):
        print_line(line)


@root.command()
def schema() -> None:
    """Print the JSON schema of DDPJob, for editors.

    \b
    Example: ddpjob schema > ddpjob.schema.json
             and as the first line of a manifest, for yaml-language-server
             (VS Code, Neovim, ...):
             # yaml-language-server: $schema=ddpjob.schema.json
    """
    import json

    from ddpjob.client.manifests.explain_fields import editor_schema

    click.echo(json.dumps(editor_schema(), indent=1, ensure_ascii=False))


@root.command(cls=BeforeArguments)
@click.argument("program", metavar="MANIFEST|SCRIPT|FOLDER|MODULE")
@click.argument("args", nargs=-1, metavar="[-- ARGS...]")
@click.option("--image", default="", help="Any image with Python and PyTorch.")
@click.option("--name", default="", help="Name of the job. Default: the script's name and four random characters.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Pods that train.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs per node; 0 trains on the CPU.")
@click.option("--procs", type=click.IntRange(1), help="Processes per node. Default: one per GPU.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Pods on standby.")
@click.option(
    "--min-nodes", type=click.IntRange(1), help="While nodes are missing, continue if at least this many are left."
)
@click.option("--max-nodes", type=click.IntRange(1), help="The largest number of nodes that the job can be scaled to.")
@click.option("--mode", type=click.Choice(["Standard", "Fast"]), help="How a group recovers.")
@click.option(
    "--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment variable of the workers; may be repeated."
)
@click.option("--cpu", default="", help="CPUs that each node requests, such as 8.")
@click.option("--memory", default="", help="Memory per node (request and limit), such as 64Gi.")
@click.option("--checkpoints", default="", metavar="claim:NAME|s3://URL|/FOLDER", help="Where to keep checkpoints.")
@click.option("--entry", default="", metavar="SCRIPT", help="The script to start in FOLDER.")
@click.option(
    "--code", default="", metavar="s3://URL", help="Where to upload a large FOLDER. Default: the checkpoints' bucket."
)
@click.option("--git", default="", metavar="URL[@REF]", help="The repository that contains the SCRIPT or MODULE.")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Set any field of spec; the value is YAML."
)
@click.option("--fresh", is_flag=True, help="On this machine, start from scratch even if the job has checkpoints.")
@click.option("--dry-run", is_flag=True, help="Create nothing.")
@click.option("-o", "--output", type=click.Choice(["yaml", "json", "name"]), help="Print the created objects.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the job ends, as `ddpjob wait` does.")
@in_place
def submit(place: Place, program: str, args: tuple[str, ...], **options: Any) -> int:
    """Create a job from a manifest, a script or a folder.

    A manifest describes its jobs completely, so it cannot be combined with options that describe a
    job. Objects of other kinds in the manifest are listed, but not created.

    A script or folder on this machine is sent with the job in a ConfigMap. A folder larger than
    1 MiB is uploaded to the checkpoints' bucket (or to the URL in --code), unless the same content
    is already there. These files are not sent: hidden files, caches, outputs (runs, wandb, mlruns),
    files that look like secrets, and files that .ddpjobignore or .gitignore lists.

    An absolute path that does not exist on this machine is assumed to be a file in the image. Any
    other name that does not exist here is assumed to be a module. With --local, the job runs on
    this machine, in the background.

    \b
    Example: ddpjob submit job.yaml --wait
             ddpjob submit --nodes 2 --gpus 8 --image IMAGE train.py -- --lr 1
             ddpjob submit --image IMAGE --dry-run -o yaml ./src --entry train.py
             ddpjob submit --image IMAGE --git https://HOST/project@main train.py
    """

    local = place.is_local()
    if options["fresh"] and not local:
        raise click.UsageError(
            "--fresh: allowed only with --local; on a cluster, use `ddpjob rerun JOB --fresh`, or change metadata.name"
        )
    output = options["output"] or ("yaml" if options["dry_run"] else None)
    shown, created = list[Any](), list[tuple[Backend, str]]()
    try:
        for bodies in _bodies(program, args, options, local=local):
            name = bodies[-1]["metadata"].get("name") or bodies[-1]["metadata"]["generateName"]
            if not options["dry_run"]:
                backend = place.backend()
                if not local and not place.namespace and bodies[-1]["metadata"].get("namespace"):
                    backend = replace(place, namespace=bodies[-1]["metadata"]["namespace"], local=None).backend()
                begins = ""
                if isinstance(backend, ProcessBackend):
                    begins = _describe_earlier(backend, name, fresh=options["fresh"])
                    name = backend.create(bodies, fresh=options["fresh"])
                else:
                    name = backend.create(bodies)
                created.append((backend, name))
            if output == "name":
                click.echo(f"ddpjob.ddpjob.io/{name}")
            elif output:
                shown += bodies
            else:
                say(f"ddpjob {name} created{begins}", backend)
            if local:
                continue
            if not _keeps_files(bodies[-1]["spec"]):
                print_note(
                    "note: spec.storage.checkpoints is not set, so a checkpoint is lost with the pod that saved it, "
                    "and training then starts again from the beginning; set claimTemplate, claimName or url there"
                    + ("" if _is_manifest(program) else " (--set)")
                )
            if _keeps_sigterm(bodies[-1]["spec"]):
                print_note(f"note: {_NO_SIGTERM}")
    # Print the jobs that were already created, even if the API server refuses a later one.
    finally:
        if shown:
            click.echo(documents(shown, str(output)), nl=False)
    codes = [wait_for(backend, name, "end", None) for backend, name in created] if options["waits"] else []
    return next(filter(None, codes), 0)


def _describe_earlier(backend: ProcessBackend, name: str, *, fresh: bool) -> str:
    """Return the part of a message that describes what happens to an earlier job with this name.

    The text also says whether the new job resumes from the earlier job's checkpoints.
    """
    from ddpjob.client.rerun_jobs import where_it_begins

    try:
        state = phase(backend.job(name))
    except NoSuchJob:
        return f"; {where_it_begins(name, True)}" if backend.resumes(name) and not fresh else ""
    return f", replacing the {state} job; {where_it_begins(name, backend.resumes(name) and not fresh)}"


def _is_manifest(program: str) -> bool:
    from ddpjob.client.manifests.manifest_sources import SUFFIXES

    return program == "-" or program.endswith(SUFFIXES)


_LOST_WITH_POD = {"configMap", "secret", "projected", "downwardAPI", "emptyDir", "ephemeral", "image"}
"""Kinds of volumes that are deleted with their pod or cannot be written."""


def _keeps_files(spec: dict[str, Any]) -> bool:
    """Whether checkpoints outlive the pod that saved them.

    The function assumes so if the job has storage for checkpoints, any other lasting volume, or a
    class. With several nodes, checkpoints of the built-in trainer also outlive a pod, because this
    trainer copies checkpoints between pods.
    """
    volumes = ((spec.get("podTemplate") or {}).get("spec") or {}).get("volumes") or ()
    lasting = any(not _LOST_WITH_POD & it.keys() for it in volumes)
    twice = spec.get("module") == "ddpjob_trainer" and spec.get("nodes", 1) > 1
    return bool(lasting or twice or spec.get("className") or (spec.get("storage") or {}).get("checkpoints"))


_NO_SIGTERM = (
    "spec.command: sh does not pass SIGTERM on to its children, so a pod that is asked to stop saves nothing and uses "
    "its whole grace period (30 s by default); write `exec` before the last program, or use bash"
)


def _keeps_sigterm(spec: dict[str, Any]) -> bool:
    """Whether SIGTERM reaches only a shell, and not the program that trains.

    sh does not pass SIGTERM on if it runs the program without `exec` and has no `trap`.
    """
    match (*(spec.get("command") or ()), *(spec.get("args") or ())):
        case (str(shell), "-c" | "-ec" | "-euc" | "-lc", str(script), *_):
            return Path(shell).name in ("sh", "dash", "ash") and not re.search(r"\b(exec|trap)\b", script)
    return False


def _refuse_options_of_scripts() -> None:
    """Raise UsageError if an option describes the job although a manifest already does."""
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in ("program", "fresh", "dry_run", "output", "waits", *PLACE_NAMES):
            raise click.UsageError(
                f"{option.opts[0]}: allowed only with a script, folder or module; change the manifest instead"
            )


def _bodies(program: str, args: tuple[str, ...], options: dict[str, Any], *, local: bool) -> list[list[Any]]:
    """Read the manifest, or build one, and return the objects to create.

    The result contains one list of objects for each job. The DDPJob is the last object in its list.
    """
    from ddpjob.client.manifests.build_manifest import JobRequest, build, read_settings
    from ddpjob.client.manifests.manifest_sources import BadInput, check_made, checked, manifests

    if _is_manifest(program):
        if program != "-" and not _exists(program):
            raise Mistake(f"{program}: No such file or directory")
        if args:
            raise click.UsageError("ARGS: not allowed with a manifest; write them into the manifest's spec.args")
        _refuse_options_of_scripts()
        bodies, others = [], dict[str, None]()
        for manifest in manifests([program]):
            if isinstance(manifest, BadInput):
                raise manifest
            checked(manifest)
            others |= dict.fromkeys(manifest.others)
            bodies.append([{key: value for key, value in manifest.document.value.items() if key != "status"}])
        if others:
            print_note(
                f"{program}: only DDPJobs are created, not {', '.join(others)}; "
                f"to create everything, run `kubectl apply -f {program}`"
            )
        return bodies
    pairs = [variable.partition("=") for variable in options["env"]]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise click.UsageError(f"--env {wrong[0]}: write NAME=VALUE")
    apart = ("env", "settings", "fresh", "dry_run", "output", "waits")
    given = {key: value for key, value in options.items() if key not in apart}
    given |= {"env": {name: value for name, _, value in pairs}, "settings": read_settings(options["settings"])}
    request = JobRequest(program=program, args=args, **given)
    made = build(request, local=local, say=print_note, upload=not options["dry_run"])
    check_made(made[-1])
    return [made]


@root.command(cls=BeforeArguments)
@click.argument("words", metavar="FILE... | -- torchrun ...", nargs=-1, required=True)
@click.option("--image", default="", help="Image to use instead of the one in the manifest.")
@click.option("--name", default="", help="Name of the job, allowed only with a command line.")
@click.option("--script", default="", help="The script that the image's entry point starts.")
@click.option("--runtime", default="", metavar="FILE|cluster", help="Where to find the runtime of a TrainJob.")
def convert(words: tuple[str, ...], image: str, name: str, script: str, runtime: str) -> int:
    """Translate Kubeflow's jobs and torchrun lines into DDPJobs.

    The command reads PyTorchJobs, TrainJobs with their runtimes, and command lines of torchrun,
    accelerate, deepspeed and srun, and prints the resulting DDPJobs. Standard error lists
    settings that could not be converted, and problems in the result. The runtime of a TrainJob is
    read from the same file, from --runtime FILE or, with --runtime cluster, from the cluster of
    your kubeconfig.

    \b
    Exit code: 0 the result is valid, 1 it needs changes.
    Example: ddpjob convert pytorchjob.yaml > job.yaml
             ddpjob convert trainjob.yaml --runtime cluster
             ddpjob convert --image IMAGE -- torchrun --nproc-per-node=8 train.py
    """
    from ddpjob.client.manifests.convert_jobs import convert as convert_manifest
    from ddpjob.client.manifests.convert_jobs import convert_command
    from ddpjob.client.manifests.manifest_sources import SUFFIXES, BadInput, checked

    several = len(words) > 1 and not all(word.endswith(SUFFIXES) for word in words)
    if several or (" " in words[0] and not _exists(words[0])):
        if script or runtime:
            raise click.UsageError(
                "--script, --runtime: allowed only with manifests; a command line already names the script"
            )
        made = [convert_command(words, name, image or "IMAGE")]
    elif name:
        raise click.UsageError(
            "--name: allowed only with a command line; change metadata.name in the converted manifest"
        )
    else:
        found = [_convertible(word) for word in words]
        jobs, runtimes = (list(chain.from_iterable(part)) for part in zip(*found, strict=True))
        runtimes += _runtimes(runtime, jobs) if runtime else []
        made = [convert_manifest(value, runtimes, script=script, image=image) for value in jobs]
    faulty = False
    for number, conversion in enumerate(made):
        text = document(conversion.job, "yaml")
        click.echo(("---\n" if number else "") + text, nl=False)
        metadata = conversion.job["metadata"]
        for note in conversion.notes:
            print_note(f"# {metadata.get('name') or metadata['generateName']}: {note}")
        from ddpjob.api.reader import read_manifests

        try:
            checked(read_manifests(text, "the DDPJob")[0])
        except BadInput as error:
            faulty = True
            # Leave out this fault. A note has already explained what to do about the missing image,
            # and the check would only suggest a different spelling of the placeholder IMAGE.
            lines = [line for line in str(error).splitlines() if not line.startswith("spec.image: 'IMAGE' ")]
            for line in lines:
                print_note(f"# {line}")
    return EXIT_NEGATIVE if faulty else 0


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    # Text that is too long for a file name is not a path.
    except OSError:
        return False


def _runtimes(where: str, jobs: list[Any]) -> list[Any]:
    """Return the runtimes for TrainJobs, from a file or from a cluster.

    `where` is the path of a file, or `cluster`. From a cluster, only the runtimes that the jobs
    name are returned.
    """
    from ddpjob.client.manifests.training_runtimes import KINDS, runtime_paths

    if where != "cluster":
        found = [item for item in _items(where) if isinstance(item, dict) and item.get("kind") in KINDS]
        if not found:
            raise Mistake(f"--runtime {where}: no {' or '.join(KINDS)} found; specify a file that contains the runtime")
        return found
    backend = Place(None, None, None, local=False).cluster()
    paths = dict.fromkeys(path for job in jobs for path in runtime_paths(job, backend.namespace))
    asked = ((kind, backend.api.optional(path)) for kind, path in paths)
    return [{**body, "kind": kind} for kind, body in asked if body is not None]


def _convertible(source: str) -> tuple[list[Any], list[Any]]:
    """Return the convertible jobs and the runtimes in a file.

    Also print the kinds of the skipped objects.
    """
    from ddpjob.api.reader import CONVERTIBLE
    from ddpjob.client.manifests.training_runtimes import KINDS

    items = [item for item in _items(source) if isinstance(item, dict)]
    found = [item for item in items if item.get("kind") in CONVERTIBLE]
    runtimes = [item for item in items if item.get("kind") in KINDS]
    kinds = dict.fromkeys(str(item.get("kind")) for item in items if item not in found and item not in runtimes)
    if not found:
        there = f", only {', '.join((*kinds, *(KINDS[:1] if runtimes else ())))}" if kinds or runtimes else ""
        raise Mistake(
            f"{source}: no {' or '.join(CONVERTIBLE)} found{there}; for other kinds, convert the line that "
            f"starts torchrun: `ddpjob convert --image IMAGE -- torchrun ...`"
        )
    if kinds:
        print_note(f"# {source}: skipped {', '.join(kinds)}, because only {', '.join(CONVERTIBLE)} can be converted")
    return found, runtimes


def _items(source: str) -> list[Any]:
    """Return all objects in a file, or in standard input if `source` is `-`.

    Raises Mistake if the objects cannot be read.
    """
    from ddpjob.api.yamltext import YamlError, read_documents
    from ddpjob.client.manifests.manifest_sources import refuse_address, standard_input

    refuse_address(source, "convert")
    text = ""
    try:
        text = standard_input() if source == "-" else Path(source).read_text(encoding="utf-8")
        return [item.value for document in read_documents(text) for item in document.items()]
    except OSError as error:
        raise Mistake(f"{source}: {error.strerror}") from error
    except YamlError as error:
        # Text that begins with #! is not YAML but a script, for example for Slurm.
        if not text.startswith("#!"):
            raise Mistake(f"{source}, line {error.line}: {error}") from error
        return []
    except UnicodeDecodeError as error:
        raise Mistake(
            f"{source}: not UTF-8 text (invalid byte at offset {error.start}); expected a YAML manifest"
        ) from error
