"""Model names for the shell's completion, found without importing timm, open_clip or torch:
scanning the sources takes some 50 ms, less than an import of timm by a factor of 50."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

_MODEL = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)
_TAGGED = re.compile(r"^ {4}['\"](\w+\.\w+)['\"]\s*:", re.MULTILINE)
_VISION = re.compile(r"^def ((?:vit|swin|maxvit)_\w+)\(", re.MULTILINE)
# Where a library names its models: folder, files, and what is a name in them (none: their own).
_SOURCES: dict[str, tuple[str, str, re.Pattern[str] | None]] = {
    "timm": ("models", "*.py", _MODEL), "open_clip": ("model_configs", "*.json", None),
    "torchvision": ("models", "*.py", _VISION),
}  # fmt: skip

# As `profiling.runs.variants.BASELINES`, which imports torch. A test compares them.
BASELINES = (
    "eager", "control", "sdpa", "compile", "eager+graph", "sdpa+graph", "compile+graph", "all",
)  # fmt: skip
# As `elsa_core.backends.triton.pack.cases.architectures`; a test compares them too.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class _Bash(BashComplete):
    # Bash splits words at colons, which would cut `open_clip:ViT-B-32` in three.
    source_template = (
        BashComplete.source_template.rstrip() + '\nCOMP_WORDBREAKS="${COMP_WORDBREAKS//:}"\n'
    )

    # Click would run bash to learn its version; whoever asks for the script has bash.
    _check_version = staticmethod(lambda: None)


add_completion_class(_Bash, "bash")


def models(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """What MODEL may continue as: names of timm, open_clip and torchvision, else files."""
    if incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="file")]
    source, colon, start = incomplete.partition(":")
    if not colon:
        prefixes = [p for p in ("open_clip:", "timm:", "torchvision:") if p.startswith(incomplete)]
        names = sorted(known("timm", incomplete)) + (prefixes if incomplete else [])
    else:
        found = known(source, start) if source in _SOURCES else ()
        names = sorted(f"{source}:{name}" for name in found)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def among(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    """Fixed names that begin so; of several with commas between them, the last one is completed."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{name}")
        for name in names
        if name.startswith(last) and name not in taken
    ]


def sources(library: str, inside: str, kind: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files of an installed package, found without importing it."""
    spec = importlib.util.find_spec(library)
    folders = spec.submodule_search_locations if spec else None
    for file in Path(folders[0], inside).glob(kind) if folders else ():
        yield file.stem, file.read_text(encoding="utf-8", errors="replace")


def known(library: str, start: str = "") -> set[str]:
    folder, kind, pattern = _SOURCES[library]
    if library == "timm" and "." in start:
        # Tags double the list; they matter once somebody has typed the dot.
        pattern = _TAGGED
    names: set[str] = set()
    for file, text in sources(library, folder, kind):
        names |= {file} if pattern is None else set(pattern.findall(text))
    return {name for name in names if name.startswith(start)}
