"""What a user typed for MODEL, understood: a library and a name, a file, a directory or a hub id.

Parsing reads no weights and builds nothing. timm, open_clip and torchvision are imported only when
a name of theirs has to be looked up, because timm alone takes seconds.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elsa_core.errors import ModelError, UnavailableError
from elsa_core.files import located

Source = Literal[
    "timm", "open_clip", "torchvision", "hub", "safetensors", "checkpoint", "directory"
]

CHECKPOINT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
CONFIG_NAMES = ("config.json", "open_clip_config.json")
_PREFIXES = ("timm", "open_clip", "torchvision", "hf-hub", "local-dir")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class ModelSpec:
    """One model, named without doubt.

    Attributes:
        source: the library that knows the name, or the kind of file.
        name: the full name in that library (aliases resolved), the hub id, or the path as text.
        given: what the user typed; differs from `name` where an alias or a prefix was resolved.
        tag: which published weights (`ms_in1k` in `swin_tiny_patch4_window7_224.ms_in1k`), or None.
        path: the file or directory, for the sources that are one.
    """

    source: Source
    name: str
    given: str
    tag: str | None = None
    path: Path | None = None

    @property
    def alias(self) -> str | None:
        """One line for the user when a short name was completed, otherwise None."""
        typed = self.given.removeprefix("timm:").removeprefix("timm/").split(".")[0]
        if self.source != "timm" or typed == self.name or ":" in typed:
            return None
        return f"{typed} is short for {self.name}"


def parse(text: str | os.PathLike[str]) -> ModelSpec:
    """Understand MODEL: a name, an alias, a hub id, a file or a directory.

    A bare word is a timm name or alias before it is a file of that name; `./word` is always a path.

    Args:
        text: `vit_base_patch16_224`, `swin_tiny`, `timm:NAME[.tag]`, `open_clip:NAME[/tag]`,
            `torchvision:NAME`, `hf-hub:OWNER/NAME`, `timm/NAME[.tag]`, or a path.

    Raises:
        TypeError: no text and no path.
        ModelError: unknown name (close ones are listed), no such path, or a file of another kind.
        UnavailableError: the library that the prefix names is not installed.
    """
    if not isinstance(text, str | os.PathLike):
        raise TypeError(f"spec must be a model's name or a path, not {type(text).__name__}")
    given = os.fspath(text).strip()
    if not given:
        raise ModelError("the model name is empty: give one such as vit_base_patch16_224")
    if not isinstance(text, str):
        return _from_path(given, given)
    prefix, colon, rest = given.partition(":")
    if colon and prefix.replace("_", "-") in (p.replace("_", "-") for p in _PREFIXES):
        return _from_prefix(prefix.replace("_", "-"), rest, given)
    if _looks_like_path(given):
        return _from_path(given, given)
    if given.startswith("timm/"):
        return _from_hub(given, given)
    if colon and re.fullmatch(r"[A-Za-z][\w-]+", prefix):
        known = ", ".join(f"{p}:" for p in _PREFIXES)
        raise ModelError(f"unknown model source {prefix!r} in {given!r}: the sources are {known}")
    return _from_bare(given)


def _from_prefix(prefix: str, rest: str, given: str) -> ModelSpec:
    if not rest:
        raise ModelError(f"{given!r} names no model after the colon")
    if prefix == "timm":
        return _from_timm(rest, given)
    if prefix == "open-clip":
        return _from_open_clip(rest, given)
    if prefix == "torchvision":
        return _from_torchvision(rest, given)
    if prefix == "hf-hub":
        return _from_hub(rest, given)
    return _from_path(rest, given)


def _looks_like_path(text: str) -> bool:
    """True for what can only be a path: a leading dot, slash or tilde, a file suffix, a folder."""
    if text.startswith((".", "/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", text):
        return True
    if text.endswith((".safetensors", ".onnx", ".txt", ".json", *CHECKPOINT_SUFFIXES)):
        return True
    return ("/" in text or os.sep in text) and not text.startswith("timm/")


def _from_bare(given: str) -> ModelSpec:
    if located(given, ModelError).exists() and not _is_timm_name(given):
        return _from_path(given, given)
    return _from_timm(given, given)


# --- paths -------------------------------------------------------------------------------------


def _from_path(text: str, given: str) -> ModelSpec:
    path = located(text, ModelError)
    if not path.exists():
        hub = f"; for a model of the Hugging Face hub write hf-hub:{text}"
        raise ModelError(
            f"no such file or directory: {text}{hub if _HUB_ID.fullmatch(text) else ''}"
        )
    if path.is_dir():
        if not any((path / name).is_file() for name in CONFIG_NAMES):
            what = "not a model directory"
            if (path / "manifest.json").is_file():
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


# --- timm --------------------------------------------------------------------------------------


def _timm_names() -> list[str]:
    try:
        import timm
    except ImportError as error:
        raise UnavailableError(
            f"timm is needed for model names: pip install timm ({error})"
        ) from None
    names: list[str] = timm.list_models()
    return names


def _is_timm_name(text: str) -> bool:
    return text.split(".", maxsplit=1)[0] in _timm_names()


def _from_timm(text: str, given: str) -> ModelSpec:
    arch, _, tag = text.partition(".")
    names = _timm_names()
    name = arch if arch in names else _complete(arch, names) or _deprecated(arch)
    if name is None:
        raise ModelError(_unknown(text, given, names))
    if tag:
        _check_tag("timm", name, tag, _timm_tags(name))
    return ModelSpec("timm", name, given, tag or None)


def _complete(prefix: str, names: Iterable[str]) -> str | None:
    """Return the shortest name that continues `prefix` at an underscore; the first of equals."""
    fitting = [name for name in names if name.startswith(prefix.rstrip("_") + "_")]
    return min(fitting, key=lambda name: (len(name), name), default=None) if prefix else None


def _deprecated(name: str) -> str | None:
    """Return `name` when timm keeps it as an old name of another model."""
    import timm

    return name if timm.is_model(name) else None


def _timm_tags(name: str) -> list[str]:
    import timm

    return [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]


def _check_tag(library: str, name: str, tag: str, tags: list[str]) -> None:
    if tag in tags:
        return
    known = ", ".join(sorted(tags)) if tags else "none are published"
    raise ModelError(f"{library} model {name} has no weights named {tag!r}: {known}")


def _unknown(text: str, given: str, names: list[str]) -> str:
    """One line with close names of every installed library, the exact ones of others first."""
    others = {name: f"open_clip:{name}" for name in _optional_names("open_clip")}
    others.update({name: f"torchvision:{name}" for name in _optional_names("torchvision")})
    if text in others:
        return f"no timm model is named {given!r}: did you mean {others[text]}?"
    arch = text.split(".", maxsplit=1)[0]
    close = difflib.get_close_matches(arch, [*names, *others], n=4, cutoff=0.6)
    shown = ", ".join(others.get(name, name) for name in close)
    hint = f"close names: {shown}" if close else "see timm.list_models() for the names"
    return f"no file and no timm model is named {given!r}; {hint}"


def _optional_names(library: str) -> list[str]:
    """Return the library's model names, or none where it is not installed."""
    try:
        return _open_clip_names() if library == "open_clip" else _torchvision_names()
    except UnavailableError:
        return []


# --- open_clip, torchvision, the hub -----------------------------------------------------------


def _open_clip_names() -> list[str]:
    try:
        import open_clip
    except ImportError as error:
        raise UnavailableError(
            f"open_clip is not installed: pip install open_clip_torch ({error})"
        ) from None
    names: list[str] = open_clip.list_models()
    return names


def _from_open_clip(text: str, given: str) -> ModelSpec:
    if text.startswith("hf-hub:"):
        return _from_hub(text.removeprefix("hf-hub:"), given)
    names = _open_clip_names()
    # OpenAI writes ViT-B/32 where open_clip writes ViT-B-32.
    name, tag = (text.replace("/", "-"), "") if text.replace("/", "-") in names else ("", "")
    if not name:
        name, _, tag = text.rpartition("/") if "/" in text else (text, "", "")
        name = name.replace("/", "-")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
        hint = f"; close names: {', '.join(f'open_clip:{c}' for c in close)}" if close else ""
        raise ModelError(f"no open_clip model is named {name!r}{hint}")
    if tag:
        import open_clip

        _check_tag("open_clip", name, tag, list(open_clip.list_pretrained_tags_by_model(name)))
    return ModelSpec("open_clip", name, given, tag or None)


def _torchvision_names() -> list[str]:
    try:
        import torchvision
    except ImportError as error:
        raise UnavailableError(
            f"torchvision is not installed: pip install torchvision ({error})"
        ) from None
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _from_torchvision(text: str, given: str) -> ModelSpec:
    names = _torchvision_names()
    if text not in names:
        close = difflib.get_close_matches(text, names, n=4, cutoff=0.5)
        hint = f"; close names: {', '.join(f'torchvision:{c}' for c in close)}" if close else ""
        raise ModelError(f"no torchvision classification model is named {text!r}{hint}")
    return ModelSpec("torchvision", text, given)


def _from_hub(text: str, given: str) -> ModelSpec:
    if not _HUB_ID.fullmatch(text):
        raise ModelError(f"{text!r} is not a Hugging Face hub id: expected OWNER/NAME[@REVISION]")
    owner, _, repository = text.partition("/")
    # timm's own repositories are its registered models: their configuration needs no network.
    if owner == "timm" and "@" not in repository and _is_timm_name(repository):
        return _from_timm(repository, given)
    return ModelSpec("hub", text, given)
