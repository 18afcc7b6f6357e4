"""The shell script that clones the commit of spec.code.git before the workers start.

On Kubernetes, the script runs in an init container of each node pod. The chart specifies the image
of this container, because a job's image may lack git. On a single machine, `ddpjob run` runs the
script with the machine's own git. Three rules ensure that a manifest always gives the same code:

1. The manifest contains a commit. `ddpjob submit --git URL@REF` resolves REF once. If the branch
   moves later, nothing changes, even for a pod that is replaced days later.
2. Exactly that commit is fetched, without history. If the server refuses to send a single commit,
   the script fetches REF, whose history must then contain the commit.
3. The script gets all values as variables, so a URL or a name cannot become part of its code.

Example: with url https://github.com/me/project, ref main and commit 1f2e..., the script runs
`git fetch --depth 1 URL 1f2e...` and `git checkout 1f2e...`.

The init container runs as an unprivileged user, with a read-only root file system. It alone has the
credentials, which git sends only to this URL. Neither the trainer's container nor the cloned folder
contains them.

docs/decisions/0029 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddpjob_runtime.protocol import EXIT_INIT_FAILURE

from ddpjob.api.job_spec import GitCode, Json
from ddpjob.core.world import CODE_CONTAINER

DONE = ".git/ddpjob-cloned"
"""Path of a file in the code folder. The file exists once the folder contains the complete commit.
"""
_USER = 65532
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
PAUSES = "1 5 15 30 0"
"""Seconds to wait after each attempt to fetch the commit. If the last attempt fails, the pod fails
too. The job counts a failure, and a new pod tries again."""

SCRIPT = f"""\
set -eu
umask 0
cd "$DDPJOB_CODE_DIR"
[ ! -e {DONE} ] || exit 0
fetch() {{
    git -c http.lowSpeedLimit=1000 -c http.lowSpeedTime=60 fetch --quiet --no-tags "$@"
}}
git init --quiet .
fetched=
for pause in $DDPJOB_GIT_PAUSES; do
    if fetch --depth 1 -- "$DDPJOB_GIT_URL" "$DDPJOB_GIT_COMMIT" || fetch -- "$DDPJOB_GIT_URL" "$DDPJOB_GIT_REF"; then
        fetched=yes
        break
    fi
    sleep $pause
done
if [ -z "$fetched" ]; then
    echo "code.git: $DDPJOB_GIT_URL cannot be fetched; check url, ref and secretName" >&2
    exit 1
fi
if ! git checkout --quiet --force --detach "$DDPJOB_GIT_COMMIT"; then
    echo "code.git: $DDPJOB_GIT_URL has no commit $DDPJOB_GIT_COMMIT in $DDPJOB_GIT_REF" >&2
    exit {EXIT_INIT_FAILURE}
fi
touch {DONE}
echo "code.git: commit $DDPJOB_GIT_COMMIT of $DDPJOB_GIT_URL"
"""


def variables(git: GitCode, folder: str, pauses: str) -> dict[str, str]:
    """Return the environment variables that the script reads.

    `folder` is the folder for the code. `pauses` lists the seconds to wait after each attempt,
    separated by spaces.
    """
    return {
        "DDPJOB_CODE_DIR": folder,
        "DDPJOB_GIT_URL": git.url,
        "DDPJOB_GIT_REF": git.ref or "HEAD",
        "DDPJOB_GIT_COMMIT": git.commit,
        "DDPJOB_GIT_PAUSES": pauses,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "http:https",
    }


def build_clone(git: GitCode, image: str, mount: Json, env: Iterable[Json]) -> Json:
    """Build the init container that runs the script.

    `env` is the job's environment, of which the container gets only the proxy settings.
    """
    settings = {"safe.directory": "*"}
    found: list[Json] = [v for v in env if v["name"].upper() in _PROXIES and "value" in v]
    if git.secret_name:
        settings[f"credential.{git.url}.helper"] = (
            '!f() { echo "username=${DDPJOB_GIT_USER:-git}"; echo "password=$DDPJOB_GIT_PASSWORD"; }; f'
        )
        for name, key in (("DDPJOB_GIT_USER", "username"), ("DDPJOB_GIT_PASSWORD", "password")):
            source: Json = {"name": git.secret_name, "key": key, "optional": key == "username"}
            found.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    values = {
        **variables(git, mount["mountPath"], PAUSES),
        "HOME": "/",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    values["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        # The kubelet expands $(NAME) and $$ in the values of variables. This is harmless here,
        # because the credential helper contains neither.
        values |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return {
        "name": CODE_CONTAINER,
        "image": image,
        "command": ["sh", "-c", SCRIPT],
        "env": [*found, *({"name": name, "value": value} for name, value in values.items())],
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": {
            "runAsUser": _USER, "runAsGroup": _USER, "runAsNonRoot": True, "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [dict(mount)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip
