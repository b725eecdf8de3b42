"""What the checkpoint server and its clients have in common: HTTP/1.1 whose messages both ends authenticate.

A connection begins with `GET /nonce/<nonce of the client>`, which the server answers with its own nonce. Each direction
then has its own key, and each message a number, as between launchers (`message_authentication`). A recording of another
connection or of an earlier message therefore proves nothing.

A request's head has a proof of method, target, length, and checksum of the content. A response's content is followed by
a proof of its status and content. The protocol authenticates; it does not encrypt.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from pacekeeper.message_authentication import MessageAuthenticator, derive_keys

MAX_PART_BYTES = 16 << 20
"""Most content of one request. A file comes in parts."""
PROOF_BYTES = 32
"""Length of the proof after the content of a response."""
CHUNK_BYTES = 1 << 20
"""Content that one request holds in memory at a time."""
PROOF_HEADER, CHECKSUM_HEADER = "X-Pacekeeper-Proof", "X-Pacekeeper-Sha256"
_PURPOSE = b"checkpoints"
_MAX_NAME_PARTS = 4
_NAME_PART_PATTERN = re.compile(r"[A-Za-z0-9._@+=-]{1,200}")


@dataclass(frozen=True)
class ConnectionKeys:
    """Authenticators of one connection: of requests, and of responses."""

    requests: MessageAuthenticator
    responses: MessageAuthenticator

    @classmethod
    def derive(cls, secret: str, server_nonce: bytes, client_nonce: bytes) -> ConnectionKeys:
        """Derive the keys. `secret`: the job's, hexadecimal. Both ends know the nonces."""
        to_server, to_client = derive_keys(_PURPOSE, secret, 0, server_nonce, client_nonce)
        return cls(MessageAuthenticator(to_server), MessageAuthenticator(to_client))

    def sign_request(self, method: str, target: str, length: int, checksum: str) -> str:
        """Return the proof of the next request, hexadecimal. `checksum`: SHA-256 of its content, hexadecimal."""
        return self.requests.sign(f"{method} {target} {length} {checksum}".encode()).hex()

    def sign_response(self, status: int, checksum: bytes) -> bytes:
        """Return the proof of the next response. `checksum`: SHA-256 of its content."""
        return self.responses.sign(b"%d " % status + checksum)


def compute_content_checksum(content: bytes | bytearray) -> str:
    """Return the SHA-256 of a request's content, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def is_object_name(name: str) -> bool:
    """Return whether a name is one of an object or of a folder: it has a few plain parts, none of which is `..`."""
    parts = name.split("/")
    return len(parts) <= _MAX_NAME_PARTS and all(
        _NAME_PART_PATTERN.fullmatch(part) and part not in (".", "..") for part in parts
    )
