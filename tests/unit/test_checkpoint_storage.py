"""What a checkpoint's files may do to who reads them: nothing but give numbers."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from meshtune.checkpoint import folder
from meshtune.checkpoint.checksums import CHECKSUMS, checksum_of, sealed
from meshtune.checkpoint.loading import load_weights
from meshtune.checkpoint.state import model_state
from meshtune.checkpoint.storage import TENSORS, Writer
from meshtune.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Fires:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"))


def save(run: Path) -> Path:
    torch.manual_seed(0)
    beside = folder.begin(run, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model_state(net()), storage_writer=Writer(beside))
    return folder.publish(beside, 1, {})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "step-1"))


def rewrite(file: Path, content: bytes) -> None:
    """Replace a file, its size and its checksum in the manifest, as who forges a checkpoint would."""
    file.write_bytes(content)
    values = manifest_of(file.parent)
    values["files"][file.name], values[CHECKSUMS][file.name] = len(content), checksum_of(file)
    forge(file.parent, values)


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((checkpoint / folder.MANIFEST).read_text(encoding="utf-8"))
    del values["manifest_crc32"]
    return values


def forge(checkpoint: Path, manifest: dict[str, Any]) -> None:
    (checkpoint / folder.MANIFEST).write_text(json.dumps(sealed(manifest)), encoding="utf-8")


def test_tensors_come_back_to_the_bit(checkpoint: Path) -> None:
    """Of every rank of tensor: a matrix, vectors, and the counter of a batch norm, which has no dimension."""
    torch.manual_seed(0)
    wanted = net()
    torch.manual_seed(1)
    found = net()
    load_weights(checkpoint, found)
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in wanted.state_dict().items())


def test_nothing_is_unpickled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even torch's own table of contents, which is there for torch's tools."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was loaded")

    assert (checkpoint / ".metadata").is_file()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    load_weights(checkpoint, net())


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pickle_in_its_place_is_not_run(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Plain, or as torch.save writes it, of the size that the manifest states."""
    mark = tmp_path / "fired"
    packed = io.BytesIO()
    torch.save(Fires(mark), packed)
    for content in (pickle.dumps(Fires(mark)), packed.getvalue()):
        size = (checkpoint / name).stat().st_size
        rewrite(checkpoint / name, content.ljust(size, b"\0"))
        if name == ".metadata":
            load_weights(checkpoint, net())
        else:
            with pytest.raises(CheckpointError, match="cannot be read"):
                load_weights(checkpoint, net())
        assert not mark.exists()


def test_a_tensors_place_may_not_hold_another_pickle(checkpoint: Path, tmp_path: Path) -> None:
    """A well-formed archive that tensors.json points at, in the middle of the file."""
    packed = io.BytesIO()
    torch.save(Fires(tmp_path / "fired"), packed)
    data = checkpoint / "__0_0.distcp"
    start = data.stat().st_size
    rewrite(data, data.read_bytes() + packed.getvalue())
    contents = json.loads((checkpoint / TENSORS).read_text(encoding="utf-8"))
    contents["model.0.bias"]["chunks"][0].update(start=start, length=len(packed.getvalue()))
    rewrite(checkpoint / TENSORS, json.dumps(contents).encode())
    with pytest.raises(CheckpointError, match="holds something else than tensors, which is not read"):
        load_weights(checkpoint, net())
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "..\\outside", "C:\\outside", "a/../../outside", "", "a\0b"]
)
def test_no_name_leads_out_of_the_folder(checkpoint: Path, name: str) -> None:
    """Neither one in the manifest nor one in the table of tensors."""
    (checkpoint.parent / "outside").write_bytes(b"x" * 4096)
    contents = json.loads((checkpoint / TENSORS).read_text(encoding="utf-8"))
    contents["model.0.bias"]["chunks"][0].update(file=name, start=0, length=8)
    rewrite(checkpoint / TENSORS, json.dumps(contents).encode())
    with pytest.raises(CheckpointError, match="is not the name of a file inside"):
        load_weights(checkpoint, net())
    manifest = manifest_of(checkpoint)
    manifest["files"][name] = 4096
    forge(checkpoint, manifest)
    with pytest.raises(CheckpointError, match="is not the name of a file inside"):
        folder.read(checkpoint)


@pytest.mark.skipif(os.name != "posix", reason="links need a right on Windows")
def test_a_link_that_leads_out_is_refused(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    data.rename(checkpoint.parent / "elsewhere")
    data.symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=r"'__0_0\.distcp' is a link that leads out of"):
        folder.read(checkpoint)


@pytest.mark.skipif(os.name != "posix", reason="links need a right on Windows")
def test_a_checkpoint_may_be_a_link_itself(checkpoint: Path) -> None:
    """Whose owner has moved it to a larger disk."""
    link = checkpoint.parent / "link"
    link.symlink_to(checkpoint)
    load_weights(link, net())


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents["model.0.weight"].update(values)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda contents: contents.pop("model.0.weight"), "model.0.weight is not in the checkpoint"),
        (change(chunks=[]), "model.0.weight has 12 elements, of which 0 are in its files"),
        (change(dtype="float64"), "model.0.weight is torch.float64"),
        (change(dtype="load"), "has dtype 'load', which is none of torch's"),
        (change(shape=[2, 3]), r"of shape \(2, 3\) cannot hold \(4, 3\) at \(0, 0\)"),
        (change(shape=None), "is damaged"),
        (lambda contents: contents["model.0.weight"]["chunks"][0].update(start=1 << 40), "which has no such"),
        (lambda contents: contents["model.0.weight"]["chunks"][0].pop("file"), "is damaged"),
    ],
)
def test_a_damaged_table_of_tensors_is_refused(
    checkpoint: Path, damage: Callable[[dict[str, Any]], Any], says: str
) -> None:
    """C73: and nothing keeps the value that it was made with."""
    contents = json.loads((checkpoint / TENSORS).read_text(encoding="utf-8"))
    damage(contents)
    rewrite(checkpoint / TENSORS, json.dumps(contents).encode())
    with pytest.raises(CheckpointError, match=says):
        load_weights(checkpoint, net())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "has checkpoint format"),
        ('{"format": 1, "step": 1, "files": {}}', "has checkpoint format 1; this version reads 2"),
        ('{"format": 2, "step": 1}', "is damaged: 'files'"),
        ('{"format": 2, "step": "x", "files": {}}', "is damaged"),
        ('{"format": 2, "step": 1, "files": ["a"]}', "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(checkpoint: Path, content: str, says: str) -> None:
    (checkpoint / folder.MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=says):
        folder.read(checkpoint)
