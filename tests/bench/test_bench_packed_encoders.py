"""packed-encoders as a rival in a process of its own: times, comparison, and every failure."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import packed_encoders
from benchmarks.cli import app
from benchmarks.whole_models import MODERNBERT_SIZES, ModernBert, TokenInputs
from bytetx.errors import OptionError

pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 5,  # the first and the fourth see all tokens
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
# The interface of packed-encoders 0.2.0, each sequence through transformers' own forward pass.
PACKAGE = """
from dataclasses import dataclass
import torch
print("a line of its own")
assert __file__.startswith({folder!r}), __file__

@dataclass(frozen=True)
class PackedBatch:
    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor = None
    max_seqlen: int = None
    position_ids: torch.Tensor = None

def pack(model):
    from flash_attn import flash_attn_varlen_func
    import module_of_a_pth_file
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.config.global_attn_every_n_layers == 3
    return model

def get_engine(model):
    return Engine(model)

class Engine:
    def __init__(self, model):
        self.model = model

    def forward_packed(self, batch):
        assert batch.cu_seqlens.dtype == torch.int32 and batch.input_ids.dtype == torch.int64
        assert int(batch.cu_seqlens.diff().max()) == batch.max_seqlen
        seqlens = batch.cu_seqlens.diff().tolist()
        ends = (batch.cu_seqlens[1:] - 1).long()
        assert batch.position_ids[ends].tolist() == [n - 1 for n in seqlens]
        sequences = batch.input_ids.split(seqlens)
        rows = [self.model(ids[None]).last_hidden_state[0] for ids in sequences]
        return torch.cat(rows) {end}
"""


def make_package(folder: Path, end: str = "") -> Path:
    package = folder / "packed_encoders"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE.format(folder=str(folder), end=end))
    (folder / "more").mkdir()
    (folder / "more" / "module_of_a_pth_file.py").touch()
    (folder / "more.pth").write_text("more\n")
    return folder


@pytest.fixture(scope="module")
def model() -> ModernBert:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODERNBERT_SIZES, "modernbert-base", TINY)
        return ModernBert("modernbert-base", torch.float32, [], device="cpu")


@torch.inference_mode()
def measure(model: ModernBert, folder: Path | None, notes: list[str]) -> dict[str, float]:
    inputs = TokenInputs(np.array([3, 40, 1, 17]), vocab_size=100, device="cpu")
    ours = model.transformer.forward(inputs.batch)
    return packed_encoders.measure(model.padded, inputs, ours, folder=folder, notes=notes)


def test_its_time_comes_from_its_own_process(model: ModernBert, tmp_path: Path) -> None:
    notes: list[str] = []
    found = measure(model, make_package(tmp_path / "packages"), notes)
    assert notes == [] and found.keys() == {"packed-encoders"}
    assert 0 < found["packed-encoders"] < 60e6


@pytest.mark.parametrize(
    ("end", "note"),
    [
        ("* 0.5", "packed-encoders left out: its relative distance to ours is 5.0e-01"),
        ("+ missing", "packed-encoders left out: NameError: name 'missing' is not defined"),
    ],
)
def test_a_wrong_result_and_a_failure_are_noted(
    model: ModernBert, tmp_path: Path, end: str, note: str
) -> None:
    notes: list[str] = []
    assert measure(model, make_package(tmp_path / "packages", end), notes) == {}
    assert notes == [note]


def test_a_missing_package_is_noted(model: ModernBert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_encoders, "_MODULE", "no_such_package")
    notes: list[str] = []
    assert measure(model, None, notes) == {}
    assert notes[0].startswith("packed-encoders left out: not installed; --packed-encoders FOLDER")


def test_a_process_that_hangs_is_ended(
    model: ModernBert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_encoders, "_TIMEOUT_SECONDS", 0.05)
    notes: list[str] = []
    assert measure(model, make_package(tmp_path / "packages"), notes) == {}
    assert notes == ["packed-encoders left out: not done after 0 s"]


def test_wrong_options_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="pip install --target"):
        packed_encoders.check_folder(tmp_path)
    packed_encoders.check_folder(make_package(tmp_path / "packages"))
    packed_encoders.check_folder(None)
    for words in (
        ["--packed-encoders", str(tmp_path)],
        ["--device", "cpu", "--packed-encoders", "."],
    ):
        found = CliRunner().invoke(app, ["encoder", *words])
        assert found.exit_code == 2 and "Traceback" not in found.output
        assert "--packed-encoders needs a" in found.output
