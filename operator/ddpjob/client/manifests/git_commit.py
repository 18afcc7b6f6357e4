"""Resolves URL@REF to a commit by running git on this machine with the user's credentials."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

from ddpjob.client.backends.backend import Mistake

_SECONDS = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MOST_LINES = 1000


def resolve(text: str) -> dict[str, Any]:
    """Return the value of the code.git field (url, ref and commit) for `URL` or `URL@REF`.

    REF is a branch, a tag or a full commit hash. The default is HEAD. Raises Mistake.
    """
    url, at, ref = text.partition("@")
    if not re.match(r"https?://[^/@]+/", url):
        remedy = "write https://HOST/PATH or https://HOST/PATH@REF, without a user name (see code.git.secretName)"
        raise Mistake(f"git (--git) {_without_password(text)}: {remedy}")
    if at and not re.fullmatch(r"[A-Za-z0-9_][-A-Za-z0-9_./+#=]*", ref):
        raise Mistake(f"git (--git) {text}: REF must be a branch, a tag or a full commit hash")
    if _COMMIT.fullmatch(ref):
        return {"url": url, "commit": ref}
    ref = ref or "HEAD"
    found = _listed(url, ref)
    # An annotated tag is an object of its own, and not a commit. For such a tag, git also lists the
    # commit, under the tag's name with ^{} at the end. Compare full names, because git matches only
    # the ends of names: for `main`, it also lists refs/heads/old/main.
    names = (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref)
    commit = next((found[name] for name in names if name in found), "")
    if not commit:
        raise Mistake(
            f"git (--git) {url} has no branch or tag {ref}; write a branch, a tag or a full commit hash (40 digits)"
        )
    return {"url": url, "ref": ref, "commit": commit}


def _without_password(text: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", text)


def _listed(url: str, ref: str) -> dict[str, str]:
    if shutil.which("git") is None:
        raise Mistake(
            "git (--git): git is not installed here, so the commit is unknown; write URL@COMMIT with the full hash"
        )
    command = ["git", "ls-remote", "--", url, ref, f"{ref}^{{}}"]
    try:
        done = subprocess.run(
            command, env={**os.environ, "GIT_ALLOW_PROTOCOL": "http:https"}, capture_output=True, text=True,
            errors="replace", timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Mistake(f"git (--git) {url}: no response within {_SECONDS:.0f} s; write URL@COMMIT instead") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["git ls-remote failed"]
        raise Mistake(f"git (--git) {url}: {said[0][:300]}")
    lines = (line.partition("\t") for line in done.stdout.splitlines()[:_MOST_LINES])
    return {name: commit for commit, _, name in lines if _COMMIT.fullmatch(commit)}
