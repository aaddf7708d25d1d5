"""What a user typed for MODEL, understood: a library and a name, a file, a directory or a hub id.

Parsing reads no weights and builds nothing. A library is imported only when a name of its models
has to be looked up, because timm alone takes seconds.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elsa_core.base.files import located
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.loading import libraries
from elsa_core.loading.library import Library

CHECKPOINT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
CONFIG_NAMES = ("config.json", "open_clip_config.json")
_PLACES = ("hf-hub", "local-dir", "python")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# By who publishes a library's models on the hub.
_OWNERS = {library.hub_owner: library for library in libraries.LIBRARIES if library.hub_owner}


@dataclass(frozen=True)
class ModelSpec:
    """One model, named without doubt."""

    # The library that knows the name, or "hub", "safetensors", "checkpoint", "directory", "python".
    source: str
    name: str  # the full name in that library (aliases resolved), the hub id, or the path as text
    given: str  # what the user typed
    tag: str | None = None  # which published weights: `ms_in1k` in `swin_tiny....ms_in1k`
    path: Path | None = None  # for the sources that are a file or a directory

    @property
    def alias(self) -> str | None:
        """One line for the user when a short name was completed, otherwise None."""
        plain = libraries.LIBRARIES[0]
        typed = self.given.removeprefix(f"{plain.name}:").removeprefix(f"{plain.hub_owner}/")
        typed = typed.split(".")[0]
        if self.source != plain.name or typed == self.name or ":" in typed:
            return None
        return f"{typed} is short for {self.name}"


def parse(text: str | os.PathLike[str]) -> ModelSpec:
    """Understand MODEL: `vit_base_patch16_224`, `swin_tiny`, `timm:NAME[.tag]`,
    `open_clip:NAME[/tag]`, `torchvision:NAME`, `hf-hub:OWNER/NAME`, `timm/NAME[.tag]`,
    `python:PACKAGE.MODULE:FACTORY`, or a path. A bare word is a timm name or alias before it is a
    file of that name; `./word` is always a path. ModelError: unknown name (close ones are listed),
    no such path, or a file of another kind; UnavailableError: the library that the prefix names is
    not installed."""
    if not isinstance(text, str | os.PathLike):
        raise TypeError(f"spec must be a model's name or a path, not {type(text).__name__}")
    given = os.fspath(text).strip()
    if not given:
        raise ModelError("the model name is empty: give one such as vit_base_patch16_224")
    prefix, colon, rest = given.partition(":")
    sources = {name.replace("_", "-"): name for name in (*libraries.names(), *_PLACES)}
    source = sources.get(prefix.replace("_", "-")) if colon and isinstance(text, str) else None
    if source is not None:
        return _from_source(source, rest, given)
    owned = "/" in given and given.partition("/")[0] in _OWNERS
    # What can only be a path: a leading dot, slash or tilde, a file suffix, a folder.
    if (
        not isinstance(text, str)
        or given.startswith((".", "/", "~", "\\"))
        or given.endswith((".safetensors", ".onnx", ".txt", ".json", *CHECKPOINT_SUFFIXES))
        or re.match(r"[A-Za-z]:[\\/]", given)
        or (("/" in given or os.sep in given) and not owned)
    ):
        return _from_path(given, given)
    if owned:
        return _from_hub(given, given)
    if colon and re.fullmatch(r"[A-Za-z][\w-]+", prefix):
        known = ", ".join(f"{name}:" for name in sources.values())
        raise ModelError(f"unknown model source {prefix!r} in {given!r}: the sources are {known}")
    first = libraries.LIBRARIES[0]
    if located(given, ModelError).exists() and given.split(".")[0] not in first.names():
        return _from_path(given, given)
    return _from_library(first, given, given)


def _from_source(source: str, rest: str, given: str) -> ModelSpec:
    if not rest:
        raise ModelError(f"{given!r} names no model after the colon")
    if source in libraries.names():
        return _from_library(libraries.of(source), rest, given)
    if source == "python":
        return ModelSpec("python", rest, given)
    return (_from_hub if source == "hf-hub" else _from_path)(rest, given)


def _from_path(text: str, given: str) -> ModelSpec:
    path = located(text, ModelError)
    if not path.exists():
        hub = f"; for a model of the Hugging Face hub write hf-hub:{text}"
        raise ModelError(
            f"no such file or directory: {text}{hub if _HUB_ID.fullmatch(text) else ''}"
        )
    if path.is_dir():
        try:
            described = any((path / name).is_file() for name in CONFIG_NAMES)
            bundle = (path / "manifest.json").is_file()
        except OSError as error:  # a link that leads nowhere
            raise ModelError(f"{text} cannot be read: {error}") from None
        if not described:
            what = "not a model directory"
            if bundle:
                what = "a bundle of one tower or of a model of your own, which its load.py runs"
            raise ModelError(f"{text} holds no config.json or open_clip_config.json: {what}")
        return ModelSpec("directory", str(path), given, None, path)
    if not path.is_file():
        raise ModelError(f"{text} is neither a regular file nor a directory")
    if path.name.lower().endswith((".safetensors", ".safetensors.index.json")):
        return ModelSpec("safetensors", str(path), given, None, path)
    if path.suffix.lower() in CHECKPOINT_SUFFIXES:
        return ModelSpec("checkpoint", str(path), given, None, path)
    suffixes = ", ".join((".safetensors", *CHECKPOINT_SUFFIXES[:3]))
    raise ModelError(f"{text} is not a model file: expected {suffixes} or a directory")


def _from_library(library: Library, text: str, given: str) -> ModelSpec:
    if library.takes_hub_ids and text.startswith("hf-hub:"):
        return _from_hub(text.removeprefix("hf-hub:"), given)
    found = library.lookup(text)
    if found is not None:
        name, tag = found
        tags = library.tags(name) if tag and library.tags is not None else ()
        if tag and tag not in tags:
            known = ", ".join(sorted(tags)) if tags else "none are published"
            raise ModelError(f"{library.name} model {name} has no weights named {tag!r}: {known}")
        return ModelSpec(library.name, name, given, tag)
    if library is not libraries.LIBRARIES[0]:
        stem = text.rpartition("/")[0] or text
        close = difflib.get_close_matches(stem, library.names(), n=4, cutoff=0.5)
        hint = f"; close names: {', '.join(f'{library.name}:{c}' for c in close)}" if close else ""
        raise ModelError(f"no {library.name} {library.kind} is named {text!r}{hint}")
    # Close names of every installed library, the exact ones of others first.
    others: dict[str, str] = {}
    for other in libraries.LIBRARIES:
        if other is not library:
            with suppress(UnavailableError):  # not installed
                others |= {name: f"{other.name}:{name}" for name in other.names()}
    if text in others:
        raise ModelError(
            f"no {library.name} model is named {given!r}: did you mean {others[text]}?"
        )
    arch = text.split(".", maxsplit=1)[0]
    close = difflib.get_close_matches(arch, [*library.names(), *others], n=4, cutoff=0.6)
    shown = ", ".join(others.get(name, name) for name in close)
    hint = f"close names: {shown}" if close else f"`elsa list '{library.name}:*'` names them"
    raise ModelError(f"no file and no {library.name} model is named {given!r}; {hint}")


def _from_hub(text: str, given: str) -> ModelSpec:
    if not _HUB_ID.fullmatch(text):
        raise ModelError(f"{text!r} is not a Hugging Face hub id: expected OWNER/NAME[@REVISION]")
    owner, _, repository = text.partition("/")
    library = _OWNERS.get(owner)
    arch = repository.split(".", maxsplit=1)[0]
    # A library's own repositories are its models: their configuration needs no network.
    if library is not None and "@" not in repository and arch in library.names():
        return _from_library(library, repository, given)
    return ModelSpec("hub", text, given)
