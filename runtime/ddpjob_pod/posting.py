"""Posts data to the job's coordinator, with a proof that the sender knows the job's token.

The token itself is never sent, because an unrelated process may have taken over the coordinator's
address (docs/protocol.md, "Coordinator").
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (encodes host names; a thread must not be the first to import it)
import http.client
import json
import secrets
import socket
from typing import Any

from ddpjob_runtime import protocol

from ddpjob_pod.job_environment import JobEnvironment

TIMEOUT_SECONDS = 2.0


class Poster:
    """Posts progress reports to the coordinator at one address. Can be used from any thread."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token, self.instance = address, token, ""
        """`instance` identifies the coordinator process that responded last. A coordinator rejects
        proofs made for a different process.
        """
        # Each report contains the round of this process. Without the round, the coordinator could
        # mistake the figures of a fenced rank 0 for figures of the next round.
        fence = JobEnvironment.read().fence
        self._round = {"round": fence} if fence else {}
        with contextlib.suppress(OSError):
            # glibc reads the environment at the first lookup of a host name. If a thread made that
            # lookup while the program was setting a variable, the process could crash.
            socket.getaddrinfo("localhost", None)

    def post(self, report: dict[str, Any]) -> tuple[int, str]:
        """Post a report, and return the status and the body of the response.

        Return (0, "") if there is no response. No error is raised, because a missing coordinator
        must not disturb training. The operator notices a missing coordinator by itself.
        """
        body = json.dumps({**report, **self._round}).encode()
        try:
            status, instance, answer = self._ask(body)
            if status == 401 and instance not in ("", self.instance):
                self.instance = instance
                status, _, answer = self._ask(body)
        except (OSError, ValueError, http.client.HTTPException):
            return 0, ""
        return status, answer

    def _ask(self, body: bytes) -> tuple[int, str, str]:
        path, nonce = protocol.Command.PROGRESS.path, secrets.token_hex(16)
        proof = protocol.seal(self._token, "request", self.instance, nonce, "POST", path, body)
        headers = {protocol.NONCE_HEADER: nonce, protocol.PROOF_HEADER: proof, "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read(protocol.MAX_TEXT).decode(errors="replace")
            return answer.status, answer.getheader(protocol.INSTANCE_HEADER, ""), text
        finally:
            connection.close()
