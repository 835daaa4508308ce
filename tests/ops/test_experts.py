"""A mixture of experts against its definition, whichever way its products run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytetx.ops import experts, native
from bytetx.ops.experts import ExpertsWeight, Fp8Stack, route, run_experts, stack_experts
from bytetx.ops.fp8_linear import Fp8LinearWeight, e4m3_copy, prepare_fp8_linear
from bytetx.ops.gated import GatedWeight, in_turn, prepare_gated
from bytetx.ops.linear import LinearWeight, linear, prepare_linear
from bytetx.ops.quantize import quantize_rows
from bytetx.ops.reference import activate

NUM_EXPERTS, HIDDEN, INNER = 5, 24, 32


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(*, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """router, gates, values [num_experts, inner, hidden], out [num_experts, hidden, inner]"""
    shape = (NUM_EXPERTS, INNER, HIDDEN)
    gates, values = (random(*shape, seed=seed, dtype=dtype) / 5 for seed in (1, 2))
    out = random(NUM_EXPERTS, HIDDEN, INNER, seed=3, dtype=dtype) / 6
    return random(NUM_EXPERTS, HIDDEN, seed=4, dtype=dtype) / 3, gates, values, out


def experts_of(
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    top_k: int = 2,
    normalizes: bool = True,
    is_gated: bool = True,
    prepack: bool = False,
) -> ExpertsWeight:
    router, gates, values, out = parts
    first = tuple(
        prepare_gated(gate, up, prepack=prepack)
        if is_gated
        else prepare_linear(up, prepack=prepack)
        for gate, up in zip(gates, values, strict=True)
    )
    return ExpertsWeight(
        router=prepare_linear(router, prepack=prepack),
        first=first,
        out=tuple(prepare_linear(one, prepack=prepack) for one in out),
        top_k=top_k,
        normalizes=normalizes,
    )


def expected(
    x: Tensor, parts: tuple[Tensor, ...], *, top_k: int, normalizes: bool, is_gated: bool
) -> Tensor:
    """Row by row in f64."""
    router, gates, values, out = (part.double() for part in parts)
    sums = []
    for row in x.double():
        weights, chosen = torch.softmax(router @ row, 0).topk(top_k)
        if normalizes:
            weights = weights / weights.sum()
        total = torch.zeros_like(row)
        for weight, e in zip(weights, chosen, strict=True):
            inner = values[e] @ row
            inner = (
                activate(gates[e] @ row, "silu") * inner if is_gated else activate(inner, "gelu")
            )
            total += weight * (out[e] @ inner)
        sums.append(total)
    return torch.stack(sums) if sums else x.double()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("top_k", "normalizes"), [(1, False), (2, True), (2, False), (5, True)])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
@pytest.mark.parametrize("prepack", [False, True])
def test_weighted_sum(
    num_rows: int, top_k: int, normalizes: bool, is_gated: bool, prepack: bool
) -> None:
    parts, x = tensors(), random(num_rows, HIDDEN, seed=num_rows)
    choices = {"top_k": top_k, "normalizes": normalizes, "is_gated": is_gated}
    w = experts_of(parts, prepack=prepack, **choices)
    found = run_experts(x, w, activation="silu" if is_gated else "gelu")
    assert found.dtype == torch.float32 and found.shape == x.shape
    assert torch.allclose(found.double(), expected(x, parts, **choices), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prepack", [False, True])
def test_no_row_depends_on_another(prepack: bool, dtype: torch.dtype) -> None:
    w = experts_of(tensors(dtype=dtype), prepack=prepack)
    x = random(37, HIDDEN, seed=5, dtype=dtype)
    found = run_experts(x, w, activation="silu")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(6))
    assert torch.equal(run_experts(x[order], w, activation="silu"), found[order])
    for i in range(len(x)):
        assert torch.equal(run_experts(x[i : i + 1], w, activation="silu")[0], found[i])


def test_equal_weights_are_chosen_as_torch_does_wherever_a_row_lies() -> None:
    router, *rest = tensors()
    router[3] = router[1]
    router[4] = router[1]
    w = experts_of((router, *rest), normalizes=False)
    x = random(1, HIDDEN, seed=7)
    probabilities = torch.softmax(linear(x, w.router), -1)
    assert (probabilities[0, [3, 4]] == probabilities[0, 1]).all()
    wanted = probabilities.topk(2).indices[0]
    for num_rows in (1, 2, 63):
        weights, chosen = route(x.expand(num_rows, -1).contiguous(), w)
        assert weights.dtype == torch.float32
        assert (chosen == wanted).all()


def grouped_on_cpu(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The definition of a grouped product."""
    found, start = a.new_empty((a.shape[0], b.shape[2])), 0
    for one, end in zip(b, ends.tolist(), strict=True):
        found[start:end] = a[start:end] @ one
        start = end
    assert ends.dtype == torch.int32 and start == a.shape[0]
    return found


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_one_grouped_product_gives_the_same(
    num_rows: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x = experts_of(tensors(), is_gated=is_gated), random(num_rows, HIDDEN, seed=8)
    activation = "silu" if is_gated else "gelu"
    assert stack_experts(w) is w  # on a CPU each expert runs alone
    wanted = run_experts(x, w, activation=activation)
    grouped: Callable[[torch.device], object] = lambda device: grouped_on_cpu  # noqa: E731
    monkeypatch.setattr(experts, "_takes_grouped", lambda w: True)
    monkeypatch.setattr(experts, "_torch_grouped_mm", grouped)
    stacked = stack_experts(w)
    assert stacked.first_stack is not None and stacked.out_stack is not None
    first = stacked.first[2].fused if is_gated else stacked.first[2]
    assert first.weight.data_ptr() == stacked.first_stack[2].data_ptr()  # held once
    found = run_experts(x, stacked, activation=activation)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("limit", [0.0, 0.4])
@pytest.mark.parametrize("inner", [32, 20])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_biases_and_clamped_gates(
    is_grouped: bool, inner: int, limit: float, has_biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates in blocks with their values, and in one block; against the definition in f64."""
    router, gates, values, out = tensors()
    gates, values, out = gates[:, :inner], values[:, :inner], out[:, :, :inner]
    gate_bias, value_bias, out_bias = (
        random(NUM_EXPERTS, n, seed=seed) / 2
        for n, seed in ((inner, 11), (inner, 12), (HIDDEN, 13))
    )
    router_bias, x = random(NUM_EXPERTS, seed=14), random(37, HIDDEN, seed=15)
    w = experts_of((router, gates, values, out))
    first = w.first[0]
    assert isinstance(first, GatedWeight) and first.block == (32 if inner == 32 else inner)
    both = in_turn(gate_bias.t(), value_bias.t(), first.block).t().contiguous()
    w = replace(
        w,
        router=prepare_linear(router, router_bias, prepack=False),
        first_bias=both if has_biases else None,
        out_bias=out_bias if has_biases else None,
        gate_limit=limit,
        gate_alpha=1.7,
    )
    if is_grouped:
        monkeypatch.setattr(experts, "_takes_grouped", lambda w: True)
        monkeypatch.setattr(experts, "_torch_grouped_mm", lambda device: grouped_on_cpu)
        w = stack_experts(w)
    found = run_experts(x, w, activation="silu").double()
    scores = x.double() @ router.double().t() + router_bias
    top, chosen = scores.topk(2, dim=1)
    scale = float(has_biases)
    for row, weights, own, ours in zip(x.double(), top.softmax(1), chosen, found, strict=True):
        total = torch.zeros_like(row)
        for weight, e in zip(weights, own, strict=True):
            gate = gates[e].double() @ row + scale * gate_bias[e]
            value = values[e].double() @ row + scale * value_bias[e]
            if limit:
                gate = gate.clamp(max=limit)
                value = value.clamp(-limit, limit) + 1
                inside = value * gate * torch.sigmoid(1.7 * gate)
            else:
                inside = activate(gate, "silu") * value
            total += weight * (out[e].double() @ inside + scale * out_bias[e])
        assert torch.allclose(ours, total, rtol=0, atol=1e-5)


def test_a_router_in_f32_chooses_experts_of_half_types_by_f32_scores() -> None:
    parts = tensors(dtype=torch.bfloat16)
    w = experts_of(parts)
    x = random(200, HIDDEN, seed=16, dtype=torch.bfloat16)
    w = replace(w, router=prepare_linear(parts[0].float(), prepack=False))
    weights, chosen = route(x, w)
    wanted = (x.float() @ parts[0].float().t()).softmax(-1).topk(2)
    assert torch.equal(chosen, wanted.indices)
    assert torch.allclose(weights.sum(1), torch.ones(200))
    assert run_experts(x, w, activation="silu").shape == x.shape


def test_what_is_not_a_row_of_the_model() -> None:
    w = experts_of(tensors())
    with pytest.raises(ValueError, match="x must"):
        run_experts(random(3, HIDDEN + 1, seed=9), w, activation="silu")
    with pytest.raises(ValueError, match="x must"):
        run_experts(random(3, HIDDEN, seed=9).double(), w, activation="silu")
    with pytest.raises(ValueError, match="activation must be one of gelu"):
        run_experts(random(3, HIDDEN, seed=9), w, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 37, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu(num_rows: int, dtype: torch.dtype) -> None:
    parts = tuple(part.cuda() for part in tensors(dtype=dtype))
    x = random(num_rows, HIDDEN, seed=num_rows, dtype=dtype).cuda()
    w = stack_experts(experts_of(parts))
    found = run_experts(x, w, activation="silu").cpu()
    choices = {"top_k": 2, "normalizes": True, "is_gated": True}
    own = tuple(part.cpu() for part in parts)
    wanted = expected(x.cpu(), own, **choices)
    # Rows whose second and third expert are nearly as likely may take either of them.
    errors = (found.double() - wanted).abs().amax(1) if num_rows else torch.zeros(1)
    assert errors.median() < 0.02 and (errors > 0.05).double().mean() < 0.1


def in_fp8(w: LinearWeight) -> Fp8LinearWeight:
    return prepare_fp8_linear(w.weight, w.bias)


def fp8_tensors() -> tuple[Tensor, ...]:
    """As tensors(), bf16, of sizes that grouped products of E4M3 take."""
    shape = (NUM_EXPERTS, 64, 48)
    gates, values = (random(*shape, seed=seed, dtype=torch.bfloat16) / 7 for seed in (21, 22))
    out = random(NUM_EXPERTS, 48, 64, seed=23, dtype=torch.bfloat16) / 8
    return random(NUM_EXPERTS, 48, seed=24, dtype=torch.bfloat16) / 3, gates, values, out


def fp8_expected(x: Tensor, w: ExpertsWeight) -> Tensor:
    """The definition in f64 of the rounded weights and rows; inner rows are rounded as they run."""
    weights, chosen = route(x, w)
    codes, scale = quantize_rows(x)
    rows = codes.double() * scale.double()[:, None]
    sums = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for i, (own, ids) in enumerate(zip(weights.double(), chosen.tolist(), strict=True)):
        for weight, e in zip(own, ids, strict=True):
            first, out = w.first[e], w.out[e]
            assert isinstance(first, GatedWeight) and isinstance(first.fused, Fp8LinearWeight)
            assert isinstance(out, Fp8LinearWeight)
            both = (first.fused.rows.double() * first.fused.scale.double()[:, None]) @ rows[i]
            both = both.to(x.dtype).double()
            gates, values = both.view(-1, 2, first.block).unbind(1)
            inner = (activate(gates, "silu") * values).reshape(1, -1)
            inner_codes, inner_scale = quantize_rows(inner.to(x.dtype))
            inner = inner_codes.double() * inner_scale.double()
            sums[i] += weight * ((out.rows.double() * out.scale.double()[:, None]) @ inner[0])
    return sums


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """An inner number on the edge of two codes may take the other one, an eighth off: with sums
    that are 2^-9 off, as in bf16, one of 32 does."""
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 2.0**-3 * 32**-0.5


def fp8_grouped_on_cpu(rows: Tensor, scale: Tensor, stack: Fp8Stack, ends: Tensor) -> Tensor:
    weights = stack.rows.float() * stack.scale[..., None]
    found = grouped_on_cpu(rows.float() * scale[:, None], weights.transpose(1, 2), ends)
    return found.bfloat16()


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_experts_in_e4m3(num_rows: int, is_grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_grouped:
        monkeypatch.setattr(experts, "_takes_grouped", lambda w: True)
        monkeypatch.setattr(experts, "_torch_grouped_mm", lambda device: grouped_on_cpu)
        monkeypatch.setattr(experts, "_fp8_grouped_mm", fp8_grouped_on_cpu)
    w = experts_of(fp8_tensors()).converted(in_fp8)
    assert isinstance(w.first_stack, Fp8Stack) == is_grouped
    if isinstance(w.out_stack, Fp8Stack):
        assert w.out[2].rows.data_ptr() == w.out_stack.rows[2].data_ptr()  # held once
    x = random(num_rows, 48, seed=25, dtype=torch.bfloat16)
    found = run_experts(x, w, activation="silu")
    if num_rows:
        assert_near(found, fp8_expected(x, w))
        e4m3_copy(x)  # as a norm leaves it
        assert torch.equal(run_experts(x, w, activation="silu"), found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_e4m3_on_a_gpu(dtype: torch.dtype) -> None:
    if native.why_no_kernel("fp8_linear", torch.device("cuda")) is not None:
        pytest.skip("no kernel for this GPU")
    parts = tuple(part.to("cuda", dtype) for part in fp8_tensors())
    w = experts_of(parts).converted(in_fp8)
    assert (w.first_stack is not None) == (dtype == torch.bfloat16)
    for num_rows in (1, 37, 300):
        x = random(num_rows, 48, seed=26).to("cuda", dtype)
        found = run_experts(x, w, activation="silu")
        assert_near(found, fp8_expected(x, w))
        alone = run_experts(x[:1].clone(), w, activation="silu")
        assert torch.equal(alone, found[:1])
