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

import bytetx
from bytetx.checkpoint import saved_tensor
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import build_spec
from bytetx.checkpoint.weights import Weights, read_header
from bytetx.errors import CheckpointError
from bytetx.nn import loading
from bytetx.runtime import device_memory

IDS = random_ids([9, 2])
ONE = b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


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


def with_header(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def damaged_files() -> dict[str, Callable[[bytes], bytes]]:
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


def damaged_layouts() -> dict[str, Callable[[bytes], bytes]]:
    """Layouts of tensors that a reader would find, though they share bytes or names."""
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "offsets of bools": lambda raw: with_header(
            {"a": one | {"data_offsets": [False, 4]}}, b"0000"
        ),
        "the same bytes twice": lambda raw: with_header({"a": one, "b": one}, b"0000"),
        "bytes that overlap": lambda raw: with_header(
            {
                "a": one | {"shape": [2], "data_offsets": [0, 8]},
                "b": one | {"shape": [2], "data_offsets": [4, 12]},
            },
            bytes(12),
        ),
        "bytes of no tensor": lambda raw: with_header(
            {"a": one, "b": one | {"data_offsets": [8, 12]}}, bytes(12)
        ),
        "bytes before the first tensor": lambda raw: with_header(
            {"a": one | {"data_offsets": [4, 8]}}, bytes(8)
        ),
        "one name twice": lambda raw: with_header(
            b'{"a":%b,"a":%b}' % (ONE, ONE.replace(b"[0, 4]", b"[4, 8]")), bytes(8)
        ),
        "one entry twice": lambda raw: with_header(b'{"a":%b,"a":%b}' % (ONE, ONE), bytes(4)),
        "one key of an entry twice": lambda raw: with_header(
            b'{"a":{"shape":[2],%b}' % ONE[1:], bytes(4)
        ),
    }


def test_overlaps_and_gaps_say_which_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for damage, message in [
        ("the same bytes twice", "tensor 'b' overlaps tensor 'a'"),
        ("bytes of no tensor", "tensor 'b' leaves a gap behind tensor 'a'"),
        ("one name twice", "'a' is described twice"),
    ]:
        path.write_bytes(damaged_layouts()[damage](b""))
        with pytest.raises(CheckpointError, match=message):
            read_header(path)


@pytest.mark.feature("Checkpoints", "damaged files are named")
@pytest.mark.parametrize("damage", damaged_files() | damaged_layouts())
def test_damaged_files(damage: str, bert: Path) -> None:
    path = bert / "model.safetensors"
    path.write_bytes((damaged_files() | damaged_layouts())[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
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


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = save(tiny_model("bert"), tmp_path / "bert", max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    one, other = sorted(set(index["weight_map"].values()))[:2]
    tensors = load_file(folder / other) | dict([next(iter(load_file(folder / one).items()))])
    save_file(tensors, folder / other, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"is saved twice: as .* in .*{one} and .*{other}"):
        load(folder)


def test_an_index_that_names_a_tensor_twice(tmp_path: Path) -> None:
    folder = save(tiny_model("bert"), tmp_path / "bert", max_shard_size="60KB")
    path = folder / "model.safetensors.index.json"
    path.write_text(
        path.read_text().replace('"weight_map": {', '"weight_map": {"pooler.dense.bias": "x",')
    )
    with pytest.raises(CheckpointError, match="the key 'pooler.dense.bias' has two values"):
        load(folder)


@pytest.mark.parametrize("name", ["layers.0.q.qweight", "a.SCB", "a.absmax", "a.weight_scale"])
def test_quantised_weights_are_named(name: str, bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors") | {name: torch.zeros(4, dtype=torch.int32)}
    save_file(tensors, bert / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"holds weights quantised by .*'{name}'.*float16"):
        load(bert)


def test_weights_larger_than_the_memory(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            CheckpointError,
            match=r"the weights take 0.0 GiB in torch.float32, cpu has 0.0 GiB; load",
        ),
    ):
        patch.setattr(device_memory, "memory_bytes", lambda device: 1000)
        bytetx.load(bert)
    assert 1 << 20 < device_memory.memory_bytes(torch.device("cpu")) < 1 << 60


def test_memory_that_ends_while_weights_are_read(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise as mmap, numpy and torch do where no memory is left."""
    errors = [
        OSError(12, "Cannot allocate memory"),
        MemoryError("no memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ]
    for error in errors:

        def full(shape: tuple[int, ...], dtype: torch.dtype, error: Exception = error) -> None:
            raise error

        with (
            monkeypatch.context() as patch,
            pytest.raises(CheckpointError, match="there is no memory for tensor 'emb.*bytes"),
        ):
            patch.setattr(saved_tensor, "_allocate", full)
            bytetx.load(bert)
    for error in errors[1:]:

        def cannot(*arguments: object, error: Exception = error, **options: object) -> None:
            raise error

        with (
            monkeypatch.context() as patch,
            pytest.raises(
                CheckpointError, match="the weights do not fit the memory of cpu in torch.float32"
            ),
        ):
            patch.setattr(loading.Transformer, "from_tensors", cannot)
            bytetx.load(bert)


def test_a_sparse_file_of_a_tebibyte(tmp_path: Path) -> None:
    """Its header is true, so that only the memory says no."""
    folder = save(tiny_model("bert"), tmp_path / "bert")
    header = {"embeddings.word_embeddings.weight": {"dtype": "F32"}}
    entry = header["embeddings.word_embeddings.weight"]
    entry |= {"shape": [60, 1 << 32], "data_offsets": [0, 60 << 34]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + (60 << 34))
    with pytest.raises(CheckpointError, match=r"the weights take 960.0 GiB in torch.float32"):
        bytetx.load(folder)


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
