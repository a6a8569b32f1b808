"""Files in safetensors' format: read as they were written, and never more than an error, however damaged."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.server.worker.storage.tensor_file import TYPES, open_tensors, write_tensors

LABELS = {"name": "a ü", "digest": "x"}


def tensors() -> dict[str, torch.Tensor]:
    found = {f"of {name}": torch.arange(6).reshape(2, 1, 3).to(getattr(torch, name)) for name in TYPES}
    return found | {"empty": torch.empty(0, 4), "scalar": torch.tensor(7)}


def write(path: Path) -> None:
    with open(path, "wb") as file:
        write_tensors(file, tensors(), LABELS)


def test_what_is_written_is_read_and_is_safetensors_format(tmp_path: Path) -> None:
    write(tmp_path / "ours")
    save_file(tensors(), tmp_path / "theirs", LABELS)
    loaded = load_file(tmp_path / "ours")
    with safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == LABELS
    for name in ("ours", "theirs"):
        with open_tensors(tmp_path / name) as file:
            assert file.labels == LABELS and file.entries.keys() == tensors().keys() == loaded.keys()
            for key, tensor in tensors().items():
                for found in (file.tensor(key), loaded[key]):
                    assert found.dtype == tensor.dtype and found.shape == tensor.shape
                    assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
                if "float8" not in key and "bfloat16" not in key:
                    assert np.array_equal(file.array(key), tensor.numpy())


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """A process that had mapped it would end."""
    path = tmp_path / "file"
    save_file({"large": torch.zeros(1 << 20)}, path)
    with open_tensors(path) as file:
        os.truncate(path, 1 << 20)
        with pytest.raises(ValueError, match="end is missing"):
            file.tensor("large")


@given(st.data())
def test_a_damaged_file_is_an_error_or_other_tensors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content) - 1, 1500)))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    with contextlib.suppress(ValueError, OSError), open_tensors(path) as file:
        for name, entry in file.entries.items():
            with contextlib.suppress(ValueError):
                assert [*file.tensor(name).shape] == entry.shape


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "[" * 5000,
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        '{"__metadata__": {"x": 1}}',
    ],
)
def test_an_odd_header_is_an_error(tmp_path: Path, header: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4 if "F99" in header else 0))
    with pytest.raises(ValueError, match="its"), open_tensors(path) as file:
        file.tensor("a")
