"""What a command line names, looked at before seconds go into imports and minutes into work: MODEL,
files to read, files to write.

A misspelt MODEL is answered from the libraries' files. Only what is certainly wrong is refused
here; everything else is for the loader to decide.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from elsa_cli import completion
from elsa_cli.errors import ModelFileError, PlaceError, TargetError

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
_PLOTS = (".png", ".svg")
_LONGEST_LABELS = 16 * 2**20


# How MODEL spells a library's names: with a prefix, or as they are. The libraries and the owners of
# their repositories on the hub are those of `elsa_core.loading.libraries.LIBRARIES`, which imports
# torch. A test compares them.
PREFIXES = {"timm": "", "open_clip": "open_clip:", "torchvision": "torchvision:"}
OWNERS = ("timm",)
# What a colon may follow beside a library's name.
_PLACES = ("hf-hub", "local-dir", "python")


def check(text: str) -> None:
    """Refuse a MODEL that is no file and no name of an installed library, with close names."""
    given = text.strip()
    if not given or "\0" in given:
        return
    prefix, colon, rest = given.partition(":")
    library = prefix.replace("-", "_")
    if colon and (library in PREFIXES or prefix in _PLACES) and not rest:
        hint = f"; `elsa list '{library}:*'` names them" if library in PREFIXES else ""
        raise ModelFileError(f"{given!r} names no model after the colon{hint}")
    if colon:
        if library in PREFIXES and not rest.startswith("hf-hub:"):
            _check_name(library, rest, given)
        return
    owner, slash, _ = given.partition("/")
    is_path = given.startswith((".", "/", "~")) or given.lower().endswith((*_WEIGHTS, *_OTHERS))
    if exists(given):
        return
    spoken = _SHORT.fullmatch(given.lower()) is not None  # ViT-B/16
    if is_path or (slash and owner not in OWNERS and not spoken):
        hub = ""
        if _HUB_ID.fullmatch(given) and not given.startswith(".") and not given.endswith(_WEIGHTS):
            hub = f"; for a model of the Hugging Face hub write hf-hub:{given}"
        raise ModelFileError(f"no such file or directory: {given}{hub}")
    if spoken or (not slash and "\\" not in given):
        _check_name("timm", given, given)


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
    names = completion.known(library)
    if not names or name.replace("/", "-") in names:
        return  # not installed, or right
    bare = name.partition(".")[0]
    if library == "open_clip":  # whose tags follow a slash
        bare = (name.rpartition("/")[0] or name).replace("/", "-")
    # Not every model is offered for completion, and deprecated names are keys of a table.
    word = re.escape(bare)
    held = re.compile(rf"^def {word}\(|^ {{4}}['\"]{word}['\"]\s*:", re.MULTILINE)
    sources = completion.sources(library, "models", "*.py")
    if bare in names or any(held.search(text) for _, text in sources):
        return
    if library == "timm" and any(each.startswith(f"{bare.rstrip('_')}_") for each in names):
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
        f"{PREFIXES[source]}{each}": each
        for source in ([library] if library else PREFIXES)
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
    if plain:  # else every name would begin so
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


def check_new(path: Path, force: bool, hint: str = "") -> None:
    """Refuse a file that exists, unless `force`, and one that cannot be written; `hint` is another
    way out."""
    if path.exists() and not force:
        raise TargetError(f"{path} exists; use --force to replace it{hint}")
    check_writable(path)


def check_folder(output: Path, force: bool, *, zipped: bool = False) -> Path:
    """Refuse a directory that exists, unless `force`, and one that cannot be made; with `zipped` a
    file, whose name ends in .zip. Returns what is to be written."""
    if zipped and output.suffix != ".zip":
        output = Path(f"{output}.zip")
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError:  # safetensors and TorchScript could not read it
        raise TargetError(f"{output}: this name is no UTF-8 text; give another -o") from None
    if zipped and output.is_dir():
        raise TargetError(f"{output} is a directory; with --zip, -o names a file")
    if output.exists() and not force:
        raise TargetError(f"{output} exists; give another -o, or --force to replace it")
    if output.exists() and not zipped and not output.is_dir():
        raise TargetError(f"{output} is not a directory; --force replaces directories only")
    check_writable(output, next(p for p in output.absolute().parents if os.path.lexists(p)))
    return output


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything heavy is imported."""
    if path.suffix.lower() not in _PLOTS:
        raise TargetError(f"{path}: a plot is a {' or '.join(_PLOTS)} file")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlaceError("plots need matplotlib: pip install 'elsa-attention[plot]'")


def check_writable(path: Path, folder: Path | None = None) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=".elsa-", dir=folder or path.parent):
            pass
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error.strerror}") from None
