"""What is generated for each reader, and what its answer must be."""

import contextlib
import copy
import hashlib
import io
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from elsa_cli import config
from elsa_cli.commands import patch
from elsa_cli.main import all_commands, run
from elsa_core.backends import compiler, native
from elsa_core.base.images import read_folder
from elsa_core.exporting import archive
from elsa_core.exporting.manifest import inside, parse_manifest
from elsa_core.exporting.verify import verify
from elsa_core.loading.plan import read_plan
from elsa_core.loading.weights import read_safetensors

from .engine import Target, answered

# --- pieces --------------------------------------------------------------------------------------

LONG = st.sampled_from(("9" * 5000, "x" * 5000, "é" * 300, "../" * 50 + "x", "\x1b[2J", "a\nb", ""))
TEXT = st.text(max_size=20) | LONG
NUMBERS = st.integers(-3, 70) | st.sampled_from((2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXT,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(TEXT, each, max_size=4),
    max_leaves=6,
)
Change = tuple[str, float, bytes]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("flip", "insert", "cut", "delete", "replace", "double")),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8) | st.sampled_from((b"[" * 3000, b"\0" * 64, b"\xff" * 8)),
    ),
    max_size=4,
)


def changed(content: bytes, changes: list[Change]) -> bytes:
    """`content` after each change at its place, a fraction of the length."""
    for what, where, piece in changes:
        at = int(where * len(content))
        end = at + len(piece)
        if what == "flip" and at < len(content):
            flipped = content[at] ^ (1 << (piece[0] % 8))
            content = content[:at] + bytes([flipped]) + content[at + 1 :]
        elif what == "insert":
            content = content[:at] + piece + content[at:]
        elif what == "cut":
            content = content[:at]
        elif what == "delete":
            content = content[:at] + content[end:]
        elif what == "replace":
            content = content[:at] + piece + content[end:]
        elif what == "double":
            content = content[:at] + content[at:end] * 2 + content[end:]
    return content


def replaced(content: Any, path: list[int], value: Any) -> Any:
    """A copy of plain data in which the value at a path, keys counted, is another."""
    if not path or not isinstance(content, dict | list) or not content:
        return value
    result = copy.copy(content)
    keys = list(result) if isinstance(result, dict) else list(range(len(result)))
    key = keys[path[0] % len(keys)]
    result[key] = replaced(content[key], path[1:], value)
    return result


# --- weights -------------------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float16),
    "c": torch.tensor(7),
}  # fmt: skip
SAFETENSORS = save(TENSORS)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "F16", "I64", "U8", "BOOL", "F8_E4M3")) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(0, 32), min_size=2, max_size=2) | JSON,
    }
)
HEADER = st.dictionaries(st.sampled_from(("a", "b", "__metadata__")) | TEXT, ENTRY | JSON)


def _safetensors(header: Any, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def check_safetensors(content: bytes, folder: Path) -> None:
    path = folder / "w.safetensors"
    path.write_bytes(content)
    # the header is read first, the tensors when they are asked for
    weights = answered(lambda: read_safetensors(path))
    if weights is None or answered(lambda: weights.tensors) is None:
        return
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    assert len(header) >= len(weights.tensors) > 0
    for name, tensor in weights.tensors.items():
        entry = header.get(name)
        if entry is None:  # a wrapper's prefix was dropped
            continue
        start, stop = entry["data_offsets"]
        assert list(tensor.shape) == entry["shape"]
        assert tensor.flatten().view(torch.uint8).numpy().tobytes() == data[start:stop]


SHARD_NAMES = ("1.safetensors", "2.safetensors", "../1.safetensors", "/etc/passwd", "1.SAFETENSORS")
INDEX = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
INDEXES = st.one_of(
    st.builds(lambda changes: changed(json.dumps(INDEX).encode(), changes), CHANGES),
    st.builds(
        lambda names: json.dumps({"weight_map": names}).encode(),
        st.dictionaries(
            st.sampled_from(("a", "b", "c", "d")), st.sampled_from(SHARD_NAMES) | JSON, max_size=4
        ),
    ),
    st.builds(lambda value: json.dumps(value).encode(), JSON),
)


def check_shards(content: bytes, folder: Path) -> None:
    (folder / "1.safetensors").write_bytes(save({name: TENSORS[name] for name in "ab"}))
    (folder / "2.safetensors").write_bytes(save({"c": TENSORS["c"]}))
    path = folder / "model.safetensors.index.json"
    path.write_bytes(content)
    weights = answered(lambda: read_safetensors(path))
    if weights is not None and answered(lambda: weights.tensors) is not None:
        expected = json.loads(content)["weight_map"]
        assert weights.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, TENSORS[n]) for n, tensor in weights.tensors.items())


# --- plans and manifests -------------------------------------------------------------------------

PLAN = {
    "schema_version": 1, "elsa_version": "0", "precision": "strict", "backend": "auto",
    "include": [], "exclude": [], "sites": ["blocks.0.attn"], "kept": {"blocks.1.attn": "slow"},
}  # fmt: skip
PATHS = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def documents(base: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A JSON document with one or two values replaced, or changed as bytes."""
    return st.one_of(
        st.builds(
            lambda path, value: json.dumps(replaced(base, path, value)).encode(), PATHS, JSON
        ),
        st.builds(lambda changes: changed(json.dumps(base).encode(), changes), CHANGES),
        st.builds(lambda value: json.dumps(value).encode(), JSON),
    )


def check_plan(content: bytes, folder: Path) -> None:
    path = folder / "elsa_plan.json"
    path.write_bytes(content)
    plan = answered(lambda: read_plan(path))
    if plan is not None:
        given = json.loads(content)
        assert plan.sites and list(plan.sites) == given["sites"]
        assert all(isinstance(each, str) for each in (*plan.include, *plan.exclude, *plan.sites))


FILES = {"model.onnx": b"graph" * 20, "lib/x.so": b"\x7fELF" * 9, "load.py": b"print()\n"}
MANIFEST = {
    "kind": "elsa-bundle", "schema_version": 1, "elsa_version": "0",
    "model": {"name": "m", "weights": "w", "dtype": "float32", "device": "cpu"},
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 8, 8]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 10]}],
    "operators": {},
    "artefacts": {"onnx": {"file": "model.onnx", "operators": [], "runtime": {"torch": ">=2"}}},
    "artefacts_libraries": {"torch": [], "onnxruntime": ["lib/x.so"]},
    "reference": {"batch_sizes": [1], "original_norms": {}, "eps": 1e-7},
    "files": {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    },
}  # fmt: skip


def check_manifest(content: bytes, folder: Path) -> None:
    manifest = answered(lambda: parse_manifest(content, "manifest.json"))
    if manifest is None:
        return
    assert manifest.raw == content and all(map(inside, manifest.files))
    for name in manifest.files:
        assert (folder / name).resolve().is_relative_to(folder.resolve())
    assert all(each["file"] in manifest.files for each in manifest.artefacts.values())


# --- zips ----------------------------------------------------------------------------------------

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from((*FILES, "manifest.json", "manifest.sig", "lib/", "../x", "/x")) | TEXT,
        st.binary(max_size=64) | st.sampled_from((*FILES.values(), bytes(1 << 16))),
        st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
                         zipfile.ZIP_LZMA)),
        st.sampled_from((0, 0o100644, 0o120777, 0o020666)),
    ),
    max_size=3,
)  # fmt: skip
ZIPS = st.tuples(documents(MANIFEST) | st.just(json.dumps(MANIFEST).encode()), ENTRIES, CHANGES)


def _packed(manifest: bytes, entries: list[tuple[str, bytes, int, int]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        plain = [(name, content, zipfile.ZIP_STORED, 0) for name, content in FILES.items()]
        for name, content, method, mode in [("manifest.json", manifest, 0, 0), *plain, *entries]:
            info = zipfile.ZipInfo(name.replace("\0", "") or "empty")
            info.external_attr, info.compress_type = mode << 16, method
            made.writestr(info, content)
    return file.getvalue()


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def check_zip(given: tuple[bytes, list[Any], list[Change]], folder: Path) -> None:
    manifest, entries, changes = given
    try:
        packed = _packed(manifest, entries)
    except (UnicodeEncodeError, struct.error, ValueError):  # names that no zip holds
        return
    path = folder / "b.zip"
    path.write_bytes(changed(packed, changes))
    scratch = folder / "scratch"
    scratch.mkdir()
    with _temporary(scratch):
        report = answered(lambda: verify(path, run=False))
    assert sorted(each.name for each in folder.iterdir()) == ["b.zip", "scratch"]
    assert list(scratch.iterdir()) == []
    if report is None or not report.ok:
        return
    # Whoever unpacks it plainly gets what the manifest promises, and nothing else.
    plain = folder / "plain"
    with zipfile.ZipFile(path) as file:
        file.extractall(plain)
    wanted = report.manifest["files"]
    for each in plain.rglob("*"):
        name = each.relative_to(plain).as_posix()
        if each.is_file() and name not in ("manifest.json", "manifest.sig"):
            assert hashlib.sha256(each.read_bytes()).hexdigest() == wanted[name]["sha256"]


# --- images --------------------------------------------------------------------------------------


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").resize((24, 16)).convert("RGB").save(file, kind)
    return file.getvalue()


PICTURES = {"png": _picture("PNG"), "jpg": _picture("JPEG"), "bmp": _picture("BMP")}
IMAGES = st.tuples(st.sampled_from(tuple(PICTURES)), st.sampled_from(tuple(PICTURES)), CHANGES)


def check_image(given: tuple[str, str, list[Change]], folder: Path) -> None:
    kind, suffix, changes = given
    (folder / f"x.{suffix}").write_bytes(changed(PICTURES[kind], changes))
    ones = (1.0, 1.0, 1.0)
    images = answered(lambda: read_folder(folder, (3, 8, 8), ones, ones).images)
    assert images is None or (images.shape == (1, 3, 8, 8) and images.isfinite().all())


# --- configuration and environment ---------------------------------------------------------------

KEYS = st.sampled_from(("seed", "img-size", "dtype", "include", "check", "force", "output", "x.y"))
VALUES = st.one_of(
    st.builds(json.dumps, st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3)),
    st.sampled_from(
        ("1", "-1", "0x" + "f" * 5000, "9" * 5000, "nan", "1e999", "true", "[[[1]]]", "{a={b=1}}",
         "[" * 5000, "{a=" * 3000, "1979-05-27T07:32:00Z", "''", "'~nobody/x'", '"\\u0000"')
    ),
)  # fmt: skip
LINES = st.lists(
    st.builds(lambda key, value: f"{key} = {value}", KEYS, VALUES)
    | st.sampled_from(("[patch]", "[nothing]", "[[patch]]", "[patch.include]")),
    max_size=5,
)
TOMLS = st.one_of(
    st.builds(lambda lines: "\n".join(lines).encode(), LINES),
    st.builds(
        lambda lines, changes: changed("\n".join(lines).encode(), changes), LINES, CHANGES
    ),
)  # fmt: skip


def check_toml(content: bytes, folder: Path) -> None:
    (folder / "elsa.toml").write_bytes(content)

    def read() -> dict[str, Any]:
        found = config.find(folder, lambda line: None)
        assert found is not None
        path, table = found
        return config.defaults(path, table, patch.command, all_commands(), lambda line: None)

    values = answered(read)
    if values is not None:
        assert not {"force", "output", "plan"} & values.keys()
        assert all(isinstance(value, str | bool | list) for value in values.values())


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _without_work(command: Any) -> Iterator[list[dict[str, Any]]]:
    """The command's own function is not run; what it would have been given is told."""
    seen: list[dict[str, Any]] = []
    before, command.callback = command.callback, lambda **given: seen.append(given)
    try:
        yield seen
    finally:
        command.callback = before


PLAIN = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=20)
OPTIONS = ("ELSA_DTYPE", "ELSA_IMG_SIZE", "ELSA_SEED", "ELSA_DEVICE", "ELSA_CHECK", "ELSA_IMAGES",
           "ELSA_FORCE", "ELSA_OUTPUT", "ELSA_BATCH_SIZE", "ELSA_INCLUDE")  # fmt: skip
# A compiler that is asked for its version runs: none of these does anything else.
COMPILERS = ("", " ", 'g++ "', "g++ \\", "no-such-compiler", "/dev/null", "\x01", "é", "false")
VARIABLES = st.fixed_dictionaries(
    {},
    optional={name: PLAIN | st.sampled_from(("1", "bf16", "9" * 5000, "~x/y")) for name in OPTIONS}
    | {"CXX": st.sampled_from(COMPILERS), "ELSA_CACHE_DIR": PLAIN | st.just("/x" * 300)},
)


def check_environment(variables: dict[str, str], folder: Path) -> None:
    try:
        for value in variables.values():
            os.fsencode(value)
    except UnicodeEncodeError:  # no environment holds it
        return
    with (
        _environment(variables),
        _without_work(patch.command) as seen,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        code = run(["patch", "vit"])
        facts = compiler.status(native.recipe())
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) in {(0, 0), (2, 1)}, variables
    assert all(not given["force"] and given["output"] is None for given in seen)
    assert facts["built"] in {True, False}


_WEIGHTS = st.builds(lambda changes: changed(SAFETENSORS, changes), CHANGES)
_WEIGHTS |= st.builds(_safetensors, HEADER, st.binary(max_size=32))
TARGETS = (
    Target("safetensors", _WEIGHTS, check_safetensors),
    Target("shard index", INDEXES, check_shards),
    Target("plan", documents(PLAN), check_plan),
    Target("manifest", documents(MANIFEST), check_manifest),
    Target("zip", ZIPS, check_zip),
    Target("image", IMAGES, check_image),
    Target("toml", TOMLS, check_toml),
    Target("environment", VARIABLES, check_environment),
)
# Every strategy holds good inputs: a reader that refuses all of them would pass otherwise.
GOOD: dict[str, Any] = {
    "safetensors": SAFETENSORS, "shard index": json.dumps(INDEX).encode(), "toml": b"seed = 3",
    "plan": json.dumps(PLAN).encode(), "manifest": json.dumps(MANIFEST).encode(),
}  # fmt: skip


def good_zip(folder: Path) -> Path:
    """A bundle as `archive.write_zip` packs it, which verifies."""
    bundle = folder / "bundle"
    (bundle / "lib").mkdir(parents=True)
    for name, content in FILES.items():
        (bundle / name).write_bytes(content)
    (bundle / "manifest.json").write_text(json.dumps(MANIFEST))
    archive.write_zip(bundle, folder / "good.zip")
    return folder / "good.zip"
