"""Whether the files of a checkpoint are those that were written."""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from meshtune.checkpoint import folder
from meshtune.checkpoint.checksums import CHECKSUMS, _shares, checksum_of, verify
from meshtune.checkpoint.state import model_state
from meshtune.checkpoint.storage import TENSORS, Writer
from meshtune.errors import CheckpointError

DATA = "__0_0.distcp"
FACTS = {"state": {"step": 4, "loss": float("nan"), "rate": 1e-5, "name": "größe", "rows": (1, 2)}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A checkpoint, and the checksums that its writer took."""
    beside = folder.begin(tmp_path_factory.mktemp("run"), 4)
    writer = Writer(beside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model_state(nn.Linear(40, 50)), storage_writer=writer)
    return folder.publish(beside, 4, FACTS, writer.checksums), writer.checksums


@pytest.fixture
def checkpoint(saved: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "step-4"))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0x01
    file.write_bytes(content)


def test_the_manifest_has_the_checksum_of_every_file(saved: tuple[Path, dict[str, str]]) -> None:
    path, taken = saved
    manifest = folder.read(path).manifest
    wanted = {f.name: f"{zlib.crc32(f.read_bytes()):08x}" for f in path.iterdir() if f.name != folder.MANIFEST}
    assert manifest[CHECKSUMS] == wanted
    assert set(wanted) == set(manifest["files"]) == {DATA, ".metadata", TENSORS}
    assert taken == {DATA: wanted[DATA]}, "taken while it was written, not from the disk"


def test_a_checkpoint_that_is_whole_is_taken(saved: tuple[Path, dict[str, str]]) -> None:
    """Whatever its manifest holds: values that JSON has no word for, letters beyond ASCII, tuples."""
    verify(folder.read(saved[0]))


@pytest.mark.parametrize("name", [DATA, ".metadata", TENSORS])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_changed_bit_is_found(checkpoint: Path, name: str, place: float) -> None:
    """And named with its file and step, though the file has the size that it should have."""
    file = checkpoint / name
    flip(file, min(int(place * file.stat().st_size), file.stat().st_size - 1))
    with pytest.raises(CheckpointError, match=rf"step-4 is damaged: {name} does not hold what was written"):
        verify(folder.read(checkpoint))


def test_no_bit_of_a_manifest_is_believed_unseen(checkpoint: Path) -> None:
    """A changed letter makes other JSON, or none; where it is still the same values, it is no damage."""
    file = checkpoint / folder.MANIFEST
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole)
        flip(file, place)
        try:
            found = folder.read(checkpoint).manifest
        except CheckpointError as error:
            assert "step-4 is" in str(error) and folder.MANIFEST in str(error)
        else:
            assert json.dumps(found) == json.dumps(json.loads(whole))


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk with bad blocks."""

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    complete = folder.read(checkpoint)
    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(CheckpointError, match=rf"step-4 is damaged: {DATA} cannot be read: .*Input/output error"):
        verify(complete)


def test_a_checkpoint_of_a_version_without_checksums_is_taken(checkpoint: Path) -> None:
    file = checkpoint / folder.MANIFEST
    values = json.loads(file.read_text(encoding="utf-8"))
    del values[CHECKSUMS], values["manifest_crc32"]
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    complete = folder.read(checkpoint)
    assert complete.step == 4
    verify(complete)


def test_ranks_share_the_reading() -> None:
    """Every file is read by one of them, and none has much more to read than another; the largest files are taken first."""
    sizes = {"a": 10, "b": 9, "c": 4, "d": 4, "e": 3, "f": 0}
    shares = _shares(sizes, 3)
    assert sorted(chain(*shares)) == sorted(sizes)
    assert sorted(sum(sizes[name] for name in share) for share in shares) == [9, 10, 11]
    assert _shares(sizes, 1) == [["a", "b", "c", "d", "e", "f"]]
    assert sum(map(bool, _shares({"a": 1}, 4))) == 1


def test_only_a_ranks_own_share_is_read(checkpoint: Path) -> None:
    complete = folder.read(checkpoint)
    flip(checkpoint / DATA, 100)
    reader = next(rank for rank in range(2) if DATA in _shares(complete.manifest["files"], 2)[rank])
    verify(complete, 1 - reader, 2)
    with pytest.raises(CheckpointError, match=DATA):
        verify(complete, reader, 2)


@pytest.mark.parametrize("size", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
def test_files_of_any_size_have_a_checksum(tmp_path: Path, size: int) -> None:
    """Empty, and around the size of the blocks in which they are read."""
    content = torch.arange(size, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(content)
    assert checksum_of(tmp_path / "file") == f"{zlib.crc32(content):08x}"
