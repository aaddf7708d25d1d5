"""Files that would stall or fill the machine are refused before they are read, in one line."""

import json
import os
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from elsa_core.base.reading import parse_json, read_json
from elsa_core.errors import ModelError
from elsa_core.loading.loader import load_model
from elsa_core.loading.plan import read_plan
from elsa_core.loading.weights import read_checkpoint, read_header, read_safetensors

READERS = [read_header, read_safetensors, read_checkpoint, read_json, read_plan]


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file(tmp_path: Path, reader: Any) -> None:
    """A FIFO blocked and /dev/zero was read until the memory was full."""
    fifo, device = tmp_path / "fifo", tmp_path / "device"
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    for path, kind in ((fifo, "a FIFO"), (device, "a device"), (tmp_path, "a directory")):
        with pytest.raises(ModelError, match=f"cannot be read: it is {kind}"):
            reader(path)
    with pytest.raises(ModelError, match="No such file"):
        reader(tmp_path / "missing")


def test_a_plan_that_is_a_fifo_is_not_passed_over(tmp_path: Path) -> None:
    model = timm.create_model("test_vit")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    os.mkfifo(tmp_path / "elsa_plan.json")
    with pytest.raises(ModelError, match=r"elsa_plan\.json cannot be read: it is a FIFO"):
        load_model(tmp_path)


# --- memory ------------------------------------------------------------------------------------


def test_a_tensor_that_repeats_its_memory(tmp_path: Path) -> None:
    """1.6 kB with a stride of 0 became 14.8 GB."""
    path = tmp_path / "model.pth"
    torch.save({"w": torch.zeros(1).expand(60_000, 60_000)}, path)
    assert path.stat().st_size < 4096
    with pytest.raises(ModelError, match=r"'w' of shape \[60000, 60000\] is a view that repeats"):
        read_checkpoint(path)
    torch.save({f"w{i}": torch.zeros(1).expand(2**22) for i in range(8)}, path)
    with pytest.raises(ModelError, match="is a view that repeats"):
        read_checkpoint(path)
    torch.save({"w": torch.arange(9).expand(1, -1), "v": torch.ones(1).expand(99)}, path)
    assert read_checkpoint(path).shapes == {"w": (1, 9), "v": (99,)}


def test_a_compressed_checkpoint(tmp_path: Path) -> None:
    """0.8 MB of deflated zeros became 7.9 GB."""
    plain, deflated = tmp_path / "plain.pth", tmp_path / "deflated.pth"
    torch.save({"w": torch.zeros(1000)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    assert torch.load(deflated)["w"].shape == (1000,)  # torch itself reads it
    with pytest.raises(ModelError, match=r"data\.pkl' in it is compressed"):
        read_checkpoint(deflated)


def test_members_that_share_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"w": torch.zeros(4000)}, path)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record = next(m for m in archive.infolist() if m.filename.endswith("data/0"))
    central = raw.rindex(record.filename.encode()) - 46
    assert raw[central : central + 4] == b"PK\x01\x02"
    for offset in (20, 24):  # both sizes, in the directory at the end
        raw[central + offset : central + offset + 4] = struct.pack("<I", 2**31 - 1)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="members of its archive overlap"):
        read_checkpoint(path)


def sparse(path: Path, shapes: dict[str, list[int]]) -> Path:
    """A file of zeros that takes no space on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return path


@pytest.mark.parametrize("arch", [None, "test_vit"])
def test_a_sparse_file_is_judged_by_its_header(tmp_path: Path, arch: str | None) -> None:
    """Gigabytes of holes were read before the architecture was looked at."""
    shapes = {name: list(t.shape) for name, t in timm.create_model("test_vit").state_dict().items()}
    path = sparse(tmp_path / "model.safetensors", {**shapes, "zeros": [2**29]})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"no known architecture|test_vit: \d{9} numbers"):
        load_model(path, arch=arch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_more_than_the_memory_holds(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors", {"w": [2**38]})
    with pytest.raises(ModelError, match=r"holds 1024\.0 GiB of tensors; this machine has"):
        read_safetensors(path)


# --- texts -------------------------------------------------------------------------------------


def test_numbers_and_nesting_of_thousands(tmp_path: Path) -> None:
    for text, words in (
        ('{"a": ' + "9" * 5000 + "}", "a number in it has thousands of digits"),
        ('{"a":' * 50_000, "it is nested too deeply"),
    ):
        with pytest.raises(ModelError, match=f"config is not JSON: {words}"):
            parse_json(text, "config")
        raw = text.encode()
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
        with pytest.raises(ModelError, match="invalid JSON"):
            read_header(tmp_path / "m.safetensors")


def test_names_of_thousands(tmp_path: Path) -> None:
    """One of 80 kB took 2.3 GB, and a block's number of 5000 digits was a traceback."""
    path = tmp_path / "model.safetensors"
    state = timm.create_model("test_vit").state_dict()
    for name in ("1." * 40_000 + "x", "blocks." + "9" * 5000 + ".x"):
        save_file({**state, name: torch.ones(1)}, path)
        for arch in (None, "test_vit"):
            with pytest.raises(ModelError, match=rf"a name of {len(name)} characters; the limit"):
                load_model(path, arch=arch)
        torch.save({**state, name: torch.ones(1)}, tmp_path / "model.pth")
        with pytest.raises(ModelError, match=rf"a name of {len(name)} characters; the limit"):
            load_model(tmp_path / "model.pth")
    for name in ("blocks." + "9" * 900 + ".x", "1." * 490 + "x"):
        save_file({**state, name: torch.ones(1)}, path)
        with pytest.raises(ModelError, match=r"does not fit test_vit: 1 unexpected"):
            load_model(path, arch="test_vit")


# --- links -------------------------------------------------------------------------------------


def shard_set(directory: Path) -> Path:
    directory.mkdir()
    save_file({"w": torch.ones(2)}, directory / "model-1.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    return index


def test_a_link_in_a_shard_set_is_refused(tmp_path: Path) -> None:
    index = shard_set(tmp_path / "set")
    shard = index.parent / "model-1.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelError, match="which is a link: refused"):
        read_safetensors(index)


def test_links_of_the_hubs_cache_are_read(tmp_path: Path) -> None:
    """Its snapshots hold links, the index's and the shards', into one folder of blobs."""
    blobs = shard_set(tmp_path / "blobs").parent
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert read_safetensors(snapshot / "model.safetensors.index.json").shapes == {"w": (2,)}


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "model.safetensors"])
def test_a_link_that_no_file_system_follows(tmp_path: Path, name: str) -> None:
    """To ask whether it is a file raised OSError, an internal error for who had typed the name."""
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("x" * 300)
    with pytest.raises(ModelError, match=rf"{tmp_path.name} cannot be read: .*{name}"):
        load_model(tmp_path)


def test_a_link_in_a_bundle_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "model.safetensors")
    (bundle / "config.json").write_text('{"architecture": "test_vit"}')
    (bundle / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert load_model(bundle).name == "test_vit"
    (bundle / "manifest.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is a link, which a bundle"):
        load_model(bundle)
