"""Signatures of bundles: Ed25519 over the bytes of manifest.json, which names every file's SHA-256.

`openssl pkeyutl -verify -pubin -inkey PUB -rawin -in manifest.json -sigfile manifest.sig` agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_core.base.messages import first_line
from elsa_core.base.reading import open_regular
from elsa_core.errors import ArgumentError, ModelError, UnavailableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE_NAME = "manifest.sig"
SIGNATURE_BYTES = 64
_KEY_BYTES = 1 << 16


def matches(manifest: bytes, signature: bytes, key: Ed25519PublicKey) -> bool:
    """Whether the owner of `key` signed exactly these bytes."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def read_key(path: Path, kind: str) -> Any:
    """A "private" key of `openssl genpkey -algorithm ed25519` or `ssh-keygen -t ed25519`, without a
    phrase; or a "public" one: a PEM file, or a line that begins with `ssh-ed25519`."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UnavailableError(
            "signatures need the package cryptography: pip install 'elsa-attention[sign]'"
        ) from None
    flag = "--sign" if kind == "private" else "--key"
    try:
        with open_regular(path) as file:
            content = file.read(_KEY_BYTES)
    except (ModelError, OSError) as error:
        raise ArgumentError(f"({flag}) {error}") from None
    ssh = b"OPENSSH" in content[:100] or content.startswith(b"ssh-")
    load: Callable[..., Any] = getattr(serialization, f"load_{'ssh' if ssh else 'pem'}_{kind}_key")
    wanted = ed25519.Ed25519PrivateKey if kind == "private" else ed25519.Ed25519PublicKey
    try:
        key = load(content, **({"password": None} if kind == "private" else {}))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        line = first_line(error)[:120]
        raise ArgumentError(f"{path} ({flag}) holds no key that can be used: {line}") from None
    if not isinstance(key, wanted):
        raise ArgumentError(f"{path} ({flag}) holds no Ed25519 {kind} key")
    return key
