"""Files that are damaged, absent or in another format: a CheckpointError, never anything else."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import load, one_thread, random_ids, same_rows, save, tiny_model  # noqa: F401

from bytetx.config import load_config
from bytetx.errors import CheckpointError
from bytetx.spec import build_spec
from bytetx.weights import Weights, read_header

IDS = random_ids([9, 2])


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(tiny_model("bert"), tmp_path / "bert")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_what_to_do(name: str, bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    (bert / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(
        CheckpointError, match=f"pickle weights \\({name}\\), which can run"
    ) as caught:
        load(bert)
    code = re.search(r'python -c "(.*)"$', str(caught.value)).group(1)
    assert "t.BertModel.from_pretrained('.').save_pretrained('.')" in code


def test_the_conversion_that_is_offered_works(bert: Path) -> None:
    wanted = load(bert)
    torch.save(load_file(bert / "model.safetensors"), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load(bert)
    code = re.search(r'python -c "(.*)"$', str(caught.value)).group(1)
    subprocess.run([sys.executable, "-c", code], cwd=bert, check=True, capture_output=True)
    assert same_rows(wanted, load(bert))


def test_a_folder_without_weights(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors .*; it has: config.json"):
        load(bert)


def damaged_files() -> dict[str, Callable[[bytes], bytes]]:
    def with_header(header: object, data: bytes = b"") -> bytes:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(raw).to_bytes(8, "little") + raw + data

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "no byte": lambda raw: b"",
        "seven bytes": lambda raw: raw[:7],
        "within the header": lambda raw: raw[:200],
        "within the data": lambda raw: raw[:-100],
        "one byte short": lambda raw: raw[:-1],
        "one byte more": lambda raw: raw + b"\0",
        "zeros": lambda raw: bytes(len(raw)),
        "noise": lambda raw: bytes(range(256)) * 20,
        "huge header": lambda raw: b"\xff" * 7 + b"\x7f" + raw[8:],
        "header of a list": lambda raw: with_header([1]),
        "header not UTF-8": lambda raw: with_header(b'{"\xff": 1}'),
        "header too deep": lambda raw: with_header(b"[" * 100_000),
        "entry of a number": lambda raw: with_header({"a": 1}),
        "negative shape": lambda raw: with_header({"a": one | {"shape": [-1]}}, b"0000"),
        "shape of bools": lambda raw: with_header({"a": one | {"shape": [True]}}, b"0000"),
        "shape too large": lambda raw: with_header({"a": one | {"shape": [2**62, 2**62]}}, b"0000"),
        "negative offset": lambda raw: with_header({"a": one | {"data_offsets": [-4, 0]}}, b"0000"),
        "offsets reversed": lambda raw: with_header({"a": one | {"data_offsets": [4, 0]}}, b"0000"),
        "offsets beyond": lambda raw: with_header(
            {"a": one | {"data_offsets": [96, 100]}}, b"0000"
        ),
        "three offsets": lambda raw: with_header({"a": one | {"data_offsets": [0, 4, 4]}}, b"0000"),
    }


@pytest.mark.parametrize("damage", damaged_files())
def test_damaged_files(damage: str, bert: Path) -> None:
    path = bert / "model.safetensors"
    path.write_bytes(damaged_files()[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match="model.safetensors is not a whole safetensors file"):
        load(bert)


def test_a_git_lfs_pointer(bert: Path) -> None:
    (bert / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, .*; run `git lfs pull`"):
        load(bert)


def test_a_file_cut_short_after_it_was_opened(bert: Path) -> None:
    spec = build_spec(load_config(bert))
    weights = Weights(bert, spec)
    path = bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-60_000])
    with pytest.raises(CheckpointError, match="ends within tensor"):
        for name in weights:
            weights[name]
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        weights["embeddings.LayerNorm.bias"]


def test_headers_agree_with_the_safetensors_package(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    saved = {tensor.name: tensor.read() for tensor in read_header(bert / "model.safetensors")}
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}, path)
    saved = {tensor.name: tensor.read() for tensor in read_header(path)}
    assert saved["scalar"].item() == 2.5
    assert saved["empty"].shape == (0, 3)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzzed")
    model = tiny_model("mpnet", hidden_size=6, num_hidden_layers=1, intermediate_size=4)
    raw = (save(model, folder) / "model.safetensors").read_bytes()
    return folder, raw


def load_or_refuse(folder: Path) -> None:
    """Loads and runs; only a CheckpointError may come out, whatever the files say."""
    try:
        loaded = load(folder)
    except CheckpointError:
        return
    loaded.rows(IDS)


@settings(max_examples=300)
@given(st.data())
def test_flipped_header_bytes(fuzzed: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, original = fuzzed
    raw = bytearray(original)
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header_bytes - 1))] ^= data.draw(st.integers(1, 255))
    (folder / "model.safetensors").write_bytes(raw)
    load_or_refuse(folder)


@settings(max_examples=150)
@given(st.data())
def test_mutated_config_values(fuzzed: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, original = fuzzed
    (folder / "model.safetensors").write_bytes(original)
    config = json.loads((folder / "config.json").read_text())
    value = st.none() | st.booleans() | st.integers() | st.integers(0, 80) | st.floats() | st.text()
    key = data.draw(st.sampled_from(sorted(config)))
    changed = config | {key: data.draw(value | st.lists(value, max_size=2))}
    try:
        (folder / "config.json").write_text(json.dumps(changed))
        load_or_refuse(folder)
    finally:
        (folder / "config.json").write_text(json.dumps(config))
