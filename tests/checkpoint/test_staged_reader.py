"""Staged reading gives what reading on the host gives: parts, casts, buffers smaller than rows."""

from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from safetensors.torch import save_file

import bytetx
from bytetx.checkpoint import staged_reader
from bytetx.checkpoint.saved_tensor import Part, SavedTensor
from bytetx.checkpoint.staged_reader import StagedReader
from bytetx.checkpoint.weights import read_header
from bytetx.errors import CheckpointError

PARTS = [
    None,
    Part(0, (range(3, 40),)),
    Part(0, (range(0, 1), range(50, 90), range(7, 7))),
    Part(1, (range(5, 37),)),
    Part(1, (range(0, 3), range(30, 31))),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavedTensor]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("staged") / "model.safetensors"
    tensors = {
        "f32": torch.randn(97, 37),
        "bf16": torch.randn(97, 37).bfloat16(),
        "f16": torch.randn(97, 37).half(),
        "vector": torch.randn(1003).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 5),
        "ids": torch.arange(4),
    }
    save_file(tensors, path)
    return {tensor.name: tensor for tensor in read_header(path)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])  # less than a row, and than a tensor
def test_parts_and_casts(
    saved: dict[str, SavedTensor], buffer_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_reader, "_MIN_THREAD_BYTES", 100)  # several threads a buffer
    reader = StagedReader(torch.device(device), buffer_bytes=buffer_bytes)
    found = []
    for name in ("f32", "bf16", "f16"):
        for part in PARTS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                wanted = saved[name].read(dtype, part=part)
                found.append((reader.read(saved[name], dtype, part=part), wanted))
    for name in ("vector", "scalar", "empty"):
        wanted = saved[name].read(torch.float16)
        found.append((reader.read(saved[name], torch.float16), wanted))
    reader.close()
    for tensor, wanted in found:
        assert tensor.device.type == device
        assert tensor.shape == wanted.shape
        assert torch.equal(tensor.cpu(), wanted)


def test_what_cannot_be_read_is_told(saved: dict[str, SavedTensor], tmp_path: Path) -> None:
    reader = StagedReader(torch.device("cpu"), buffer_bytes=1000)
    with pytest.raises(CheckpointError, match="tensor 'ids' has dtype I64"):
        reader.read(saved["ids"], torch.float32)
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(100, 10)}, path)
    (tensor,) = read_header(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ends within tensor 'weight'; save it again"):
        reader.read(tensor, torch.float32)
    path.unlink()
    with pytest.raises(CheckpointError, match="tensor 'weight' cannot be read"):
        reader.read(tensor, torch.float32)
    reader.close()


@pytest.mark.gpu
def test_a_model_on_a_gpu_has_the_weights_of_the_file(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    on_gpu = bytetx.load(folder, device="cuda", dtype="float16").transformer
    on_cpu = bytetx.load(folder, device="cpu", dtype="float16").transformer
    assert torch.equal(on_gpu.embeddings.word.cpu(), on_cpu.embeddings.word)
    for ours, theirs in zip(on_gpu.layers.weights, on_cpu.layers.weights, strict=True):
        assert torch.equal(ours.qkv.weight.cpu(), theirs.qkv.weight)
