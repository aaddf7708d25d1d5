"""A misspelt MODEL answered from the libraries' files: importing torch and timm takes seconds.

Only what is certainly wrong is refused here; everything else is for the loader to decide.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from elsa_cli import completion
from elsa_cli.errors import ModelFileError

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".pth", ".pt", ".bin", ".ckpt", ".tar")
# What can only be meant as a file, as the loader sees it, though it is none of a model.
_OTHERS = (".onnx", ".txt", ".json")
_SUFFIX = re.compile(r"\.[a-z]{1,12}\d?", re.IGNORECASE)
_EXPECTED = "files of weights end in .safetensors, .pth, .pt, .bin or .ckpt"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# What papers and torch.hub call models, in timm's words.
_SIZES = {"ti": "tiny", "t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge",
          "g": "giant"}  # fmt: skip
_SHORT = re.compile(r"vit[-_]?(ti|t|s|b|l|h|g)[-_/]?(\d+)")
_ASKED_FOR = {"clip": "open_clip:ViT-B-32", "openclip": "open_clip:ViT-B-32"}
_SHOWN = 4
_LONGEST_LABELS = 16 * 2**20


@dataclass(frozen=True)
class _Spelling:
    """How MODEL spells a library's names: the prefix, and what is cut off a name as its tag, from
    there on. `shortened`: a name may end at an underscore. `owner`: of its repositories on the
    hub."""

    library: str
    prefix: str
    tag: str = "."
    shortened: bool = False
    owner: str = ""


# As `elsa_core.loading.libraries.LIBRARIES`, which imports torch. A test compares them.
_SPELLINGS = (
    _Spelling("timm", "", shortened=True, owner="timm"),
    _Spelling("open_clip", "open_clip:", tag="/"),
    _Spelling("torchvision", "torchvision:"),
)
# What a colon may follow beside a library's name.
_PLACES = ("hf-hub", "local-dir", "python")
LIBRARIES = {spelling.library: spelling for spelling in _SPELLINGS}


def check(text: str) -> None:
    """Refuse a MODEL that is no file and no name of an installed library, with close names."""
    given = text.strip()
    if not given or "\0" in given:
        return
    prefix, colon, rest = given.partition(":")
    library = prefix.replace("-", "_")
    if colon and (library in LIBRARIES or prefix in _PLACES) and not rest:
        hint = f"; `elsa list '{library}:*'` names them" if library in LIBRARIES else ""
        raise ModelFileError(f"{given!r} names no model after the colon{hint}")
    if colon:
        if library in LIBRARIES and not rest.startswith("hf-hub:"):
            _check_name(library, rest, given)
        return
    owner, slash, _ = given.partition("/")
    is_path = given.startswith((".", "/", "~")) or given.lower().endswith((*_WEIGHTS, *_OTHERS))
    if exists(given):
        return
    if is_path or (slash and owner not in {one.owner for one in _SPELLINGS}):
        hub = ""
        if _HUB_ID.fullmatch(given) and not given.startswith(".") and not given.endswith(_WEIGHTS):
            hub = f"; for a model of the Hugging Face hub write hf-hub:{given}"
        raise ModelFileError(f"no such file or directory: {given}{hub}")
    if not slash and "\\" not in given:
        _check_name(_SPELLINGS[0].library, given, given)


def check_file(path: Path | None, what: str) -> None:
    if path is not None and not exists(path):
        raise ModelFileError(f"{path}: no such {what}")


def exists(given: str | Path) -> bool:
    """Whether there is such a path; a path that cannot be looked up is for the reader."""
    try:
        path = Path(given).expanduser()
        return path.is_symlink() or path.exists()
    except (OSError, RuntimeError, ValueError):
        return True


def _check_name(library: str, name: str, given: str) -> None:
    names, spelling = completion.known(library), LIBRARIES[library]
    if not names or name.replace("/", "-") in names:
        return  # not installed, or right
    if spelling.tag == "/":
        bare = (name.rpartition("/")[0] or name).replace("/", "-")
    else:
        bare = name.partition(spelling.tag)[0]
    # Not every model is offered for completion, and deprecated names are keys of a table.
    word = re.escape(bare)
    held = re.compile(rf"^def {word}\(|^ {{4}}['\"]{word}['\"]\s*:", re.MULTILINE)
    sources = completion.sources(library, "models", "*.py")
    if bare in names or any(held.search(text) for _, text in sources):
        return
    if spelling.shortened and any(each.startswith(f"{bare.rstrip('_')}_") for each in names):
        return  # an alias
    what = f"no file and no {library}" if given == name else f"no {library}"
    close = ", ".join(close_names(bare, library if given != name else None))
    hint = f"close names: {close}" if close else f"`elsa list '{library}:*'` names them"
    if given == name and not close and _SUFFIX.fullmatch(Path(given).suffix):
        hint = f"{_EXPECTED}; `elsa list` names models"
    raise ModelFileError(f"{what} model is named {given[:80]!r}; {hint}")


def close_names(name: str, library: str | None = None) -> list[str]:
    """Names that a user may have meant, the likeliest first, as they are typed for MODEL."""
    shown = {
        f"{LIBRARIES[source].prefix}{each}": each
        for source in ([library] if library else LIBRARIES)
        for each in completion.known(source)
    }
    spelt = _SHORT.sub(lambda m: f"vit_{_SIZES[m.group(1)]}_patch{m.group(2)}", name.lower())
    words_of = re.compile(r"[a-z0-9]+")
    words = words_of.findall(spelt)
    plain = "".join(words_of.findall(name.lower()))
    found = [_ASKED_FOR[plain]] if _ASKED_FOR.get(plain) in shown else []
    # The shortest first: variants have longer names.
    ranked = sorted(shown.items(), key=lambda pair: (len(pair[0]), pair[0]))
    squashed = [(typed, "".join(words_of.findall(each.lower()))) for typed, each in ranked]
    found += [typed for typed, each in squashed if each == plain]
    found += [typed for typed, each in squashed if each.startswith(plain)]
    found += [typed for typed, each in ranked if all(w in each.lower() for w in words)]
    by_name = {each: typed for typed, each in reversed(shown.items())}
    near = difflib.get_close_matches(name, list(by_name), n=_SHOWN, cutoff=0.6)
    found += [by_name[each] for each in near]
    return list(dict.fromkeys(found))[:_SHOWN]


def classes(path: Path | None) -> tuple[str, ...]:
    """The names of classes that the file of --labels holds, one a line; none without it."""
    if path is None:
        return ()
    check_file(path, "file of labels")
    from elsa_core.base.reading import read_text

    return tuple(read_text(path, _LONGEST_LABELS).removeprefix("\ufeff").splitlines())
