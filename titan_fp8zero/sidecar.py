"""What is written beside a checkpoint's files: the checksum of each, and a seal.

Checksums are SHA-256, for which processors have instructions. The seal is the sidecar's own hash,
or, with a key, HMAC-SHA256 (RFC 2104) of it, which is checked before a file is unpickled.
"""

import hashlib
import hmac
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_fp8zero.checkpoint_errors import CheckpointError

SIDECAR = "checksums.json"
MIN_KEY_BYTES = 16

_SEAL = "seal"


@dataclass(frozen=True)
class FileChecksum:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Sidecar:
    """What is known of a checkpoint besides its contents."""

    files: dict[str, FileChecksum]
    """Every other file of the checkpoint, by name."""
    notes: dict[str, Any]
    """Small JSON values that have no place in DCP's state, where stock would miss them."""

    def to_json(self, key: bytes | None) -> str:
        """Sealed with `key`, if there is one."""
        content = asdict(self)
        kind = "sha256" if key is None else "hmac-sha256"
        content[_SEAL] = {"kind": kind, "hex": _seal(content, key)}
        return json.dumps(content, indent=1)


def read_sidecar(checkpoint: Path, key: bytes | None = None) -> Sidecar | None:
    """The sidecar of a checkpoint, or None if it has none, as those of stock TorchTitan.

    Raises CheckpointError where it is damaged, or if a key is given and it is not signed with it.
    """
    file = checkpoint / SIDECAR
    if not file.exists():
        if key is not None:
            raise CheckpointError(
                f"{checkpoint} is not signed, it has no {SIDECAR}: load it without a key if you "
                "trust where it comes from"
            )
        return None
    try:
        content = json.loads(file.read_bytes())
        seal = content.pop(_SEAL)
        files = {name: FileChecksum(**entry) for name, entry in content["files"].items()}
        sidecar = Sidecar(files, content["notes"])
        is_signed = {"sha256": False, "hmac-sha256": True}[seal["kind"]]
        given = seal["hex"].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from None
    if key is not None and not is_signed:
        raise CheckpointError(f"{checkpoint} is not signed: load it without a key if you trust it")
    # A signature says nothing to who has no key.
    expected = _seal(content, key).encode()
    if is_signed == (key is not None) and not hmac.compare_digest(given, expected):
        wrong = "is signed with another key, or was changed" if is_signed else "is damaged"
        raise CheckpointError(f"{file} {wrong}")
    return sidecar


def _seal(content: dict[str, Any], key: bytes | None) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    if key is None:
        return hashlib.sha256(canonical).hexdigest()
    return hmac.digest(key, canonical, "sha256").hex()


def read_key(file: str | os.PathLike[str]) -> bytes:
    """The whole content of a key file. Raises CheckpointError if it is missing or short."""
    try:
        key = Path(file).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint key: {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise CheckpointError(
            f"checkpoint key: {file} has {len(key)} bytes, at least {MIN_KEY_BYTES} random ones "
            f"are needed, for example from: head -c 32 /dev/urandom > {file}"
        )
    return key
