"""Norms as objects: every kind gives the same rows fused, in torch, divided over ranks or new."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from torch import Tensor

import bytetx
from bytetx.checkpoint import family as family_files
from bytetx.checkpoint.norm_kinds import NORM_KINDS, NormKind
from bytetx.ops.linear import prepare_linear
from bytetx.ops.norm import NORMS, RowNorm
from bytetx.ops.registry import OPERATIONS, Operation

BERT = Path(family_files.models_folder(), "bert.toml").read_text()


def random_norm(kind: str, n: int) -> RowNorm:
    shift = torch.randn(n) if NORM_KINDS[kind].has_shift else None
    return NORMS[kind](torch.randn(n), shift, 1e-3)


def test_every_kind_has_facts_and_a_class() -> None:
    assert NORMS.keys() == NORM_KINDS.keys()


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_the_same_fused_and_in_torch(kind: str) -> None:
    torch.manual_seed(0)
    norm, x, residual, w = random_norm(kind, 24), *torch.randn(2, 5, 24), torch.randn(24, 24)
    wanted, sums = norm.in_torch(x + residual), torch.empty_like(x)
    torch.testing.assert_close(norm(x, residual=residual, sum_out=sums), wanted)
    torch.testing.assert_close(sums, x + residual)
    out = x.clone()
    assert norm(out, residual=residual, out=out) is out
    torch.testing.assert_close(out, wanted)
    after = norm.after_linear(x, prepare_linear(w, prepack=True), residual=residual)
    torch.testing.assert_close(after, norm.in_torch(x @ w.T + residual), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_of_divided_features_sums_its_statistics(kind: str) -> None:
    """Two ranks one after the other: the first call of each keeps its sums for the second."""
    torch.manual_seed(0)
    norm, x = random_norm(kind, 24), torch.randn(5, 24) + 100
    parts = (slice(0, 10), slice(10, 24))
    kept: list[Tensor] = []

    def keep(sums: Tensor) -> Tensor:
        kept.append(sums)
        return sums

    def run(part: slice, sum_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        shift = None if norm.bias is None else norm.bias[part]
        local = NORMS[kind](norm.weight[part], shift, norm.eps)
        return local.over_ranks(x[:, part], sum_ranks, 24)

    for part in parts:
        run(part, keep)
    assert kept[0].shape == (5, NORM_KINDS[kind].num_sums)
    total = kept[0] + kept[1]
    found = torch.cat([run(part, lambda _: total) for part in parts], dim=1)
    torch.testing.assert_close(found, norm.in_torch(x), atol=1e-4, rtol=1e-4)


PLAIN_NORM = Operation("plain_norm")
OPERATIONS.pop("plain_norm")  # so that reports do not show it


@PLAIN_NORM.in_torch()
def run_plain_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None,
    fp8_out: None,
) -> Tensor:
    h = x if residual is None else x + residual
    normed = PlainNorm(weight, bias, eps).in_torch(h)
    if sum_out is not None:
        sum_out.copy_(h)
    return normed if out is None else out.copy_(normed)


class PlainNorm(RowNorm):
    """A kind without kernels, added as a family's author would."""

    __slots__ = ()
    operation = PLAIN_NORM

    def in_torch(self, h: Tensor) -> Tensor:
        centered = h - h.mean(1, keepdim=True)
        rows = centered * torch.rsqrt(centered.square().mean(1, keepdim=True) + self.eps)
        return rows * self.weight + (0 if self.bias is None else self.bias)

    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        raise NotImplementedError


def test_a_new_kind_is_one_class_and_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own = save_checkpoint(tmp_path / "model"), tmp_path / "own"
    texts = ["a fox", "the quick brown fox jumps"]
    wanted = bytetx.load(folder, device="cpu").hidden_states(texts)
    monkeypatch.setitem(NORM_KINDS, "plain", NormKind(True, False, 2))
    monkeypatch.setitem(NORMS, "plain", PlainNorm)
    values = family_files._CLOSED_VALUES
    monkeypatch.setitem(values, "norm", tuple(NORM_KINDS))  # read from the table at import
    own.mkdir()
    assert 'norm = "layer_norm"' in BERT
    (own / "own.toml").write_text(BERT.replace('norm = "layer_norm"', 'norm = "plain"'))
    found = bytetx.load(folder, device="cpu", families=own).hidden_states(texts)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
