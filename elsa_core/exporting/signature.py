"""Signatures of bundles: Ed25519 over the bytes of manifest.json, which names every file's SHA-256.

`openssl pkeyutl -verify -pubin -inkey PUB -rawin -in manifest.json -sigfile manifest.sig` agrees.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE_NAME = "manifest.sig"
SIGNATURE_BYTES = 64
_KEY_BYTES = 1 << 16


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key of `openssl genpkey -algorithm ed25519` or `ssh-keygen -t ed25519`, no phrase."""
    key: Ed25519PrivateKey = _read(path, "private")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The public half: a PEM file, or a line that begins with `ssh-ed25519`."""
    key: Ed25519PublicKey = _read(path, "public")
    return key


def sign(manifest: bytes, key: Ed25519PrivateKey) -> bytes:
    """The 64 bytes of manifest.sig."""
    return key.sign(manifest)


def matches(manifest: bytes, signature: bytes, key: Ed25519PublicKey) -> bool:
    """Whether the owner of `key` signed exactly these bytes."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _read(path: Path, kind: str) -> Any:
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
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # of a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ArgumentError(f"{path} ({flag}) is not a plain file")
            content = file.read(_KEY_BYTES)
    except OSError as error:
        raise ArgumentError(f"{path} ({flag}) cannot be read: {error.strerror or error}") from None
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
