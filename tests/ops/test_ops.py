"""Every op on every backend and instruction set against float64, at odd sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.ops import attention, embedding, linear, native, norm, pooling, reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SEQLENS = [5, 0, 1, 300, 0, 33]  # empty, single, one long among short, no multiple of a tile
LONG = [5, 0, 1, 3000, 0, 129]  # long enough that several CTAs share a sequence
EPS = 1e-12


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one set of inputs: how each backend runs it, and what plain torch would do."""

    reference: Callable[[], Tensor]
    kernel: Callable[[str], Tensor] | None  # by instruction set
    public: Callable[[], Tensor]
    torch: Callable[[torch.dtype], Tensor]  # all inputs converted to the dtype first


def cu_seqlens_of(seqlens: list[int]) -> Tensor:
    return torch.tensor([0, *seqlens]).cumsum(0).int()


def per_sequence(seqlens: list[int]) -> list[slice]:
    ends = torch.tensor(seqlens).cumsum(0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, seqlens, strict=True)]


def norm_case(
    dtype: torch.dtype, device: str, op: str, width: int, has_residual: bool, keeps_sum: bool
) -> Case:
    """keeps_sum: rows of the result are followed by those of x + residual."""
    x, other = (torch.randn(2, 71, width) * 3 + 5).to(device, dtype)
    weight, bias = torch.randn(2, width).to(device, dtype)
    residual = other if has_residual else None
    kw = {"eps": EPS, "residual": residual}
    is_layer = op == "layer_norm"
    parameters = (weight, bias) if is_layer else (weight,)

    def with_sum(run: Callable[..., Tensor]) -> Tensor:
        out, sum_out = torch.full((2, *x.shape), torch.nan, dtype=dtype, device=device)
        normalized = run(out=out, sum_out=sum_out if keeps_sum else None)
        return torch.cat((normalized, sum_out)) if keeps_sum else normalized

    def in_torch(to: torch.dtype) -> Tensor:
        h = x.to(to) + residual.to(to) if has_residual else x.to(to)
        values = [t.to(to) for t in parameters]
        normalized = (F.layer_norm if is_layer else F.rms_norm)(h, (width,), *values, eps=EPS)
        return torch.cat((normalized, h)) if keeps_sum else normalized

    run = partial(norm.run_kernel, op, x, weight, bias if is_layer else None, **kw)
    public = partial(getattr(norm, op), x, *parameters, **kw)

    def plain() -> Tensor:
        normalized = getattr(reference, op)(x, *parameters, **kw)
        return torch.cat((normalized, (x.float() + other).to(dtype))) if keeps_sum else normalized

    return Case(plain, lambda isa: with_sum(partial(run, isa=isa)),
                lambda: with_sum(public), in_torch)  # fmt: skip


def embed_case(
    dtype: torch.dtype, device: str, width: int, num_tables: int, norms: bool, given: bool
) -> Case:
    sizes = (1000, 70, 2)
    tables = [torch.randn(n, width).to(device, dtype) if i < num_tables else None
              for i, n in enumerate(sizes)]  # fmt: skip
    ids = [torch.randint(n, (71,), dtype=torch.int32, device=device) for n in sizes]
    weight, bias = torch.randn(2, width).to(device, dtype) if norms else (None, None)
    rows = torch.randn(71, width).to(device, dtype) if given else None  # instead of words
    kw = {"norm_weight": weight, "norm_bias": bias, "eps": EPS, "inputs_embeds": rows}

    def in_torch(to: torch.dtype) -> Tensor:
        used = [t.to(to)[i.long()] for t, i in zip(tables, ids, strict=True) if t is not None]
        h = sum(used[1:], rows.to(to) if given else used[0])
        return F.layer_norm(h, (width,), weight.to(to), bias.to(to), EPS) if norms else h

    by_name = dict(zip(("word", "position", "token_type"), tables, strict=True))
    run = partial(embedding.run_kernel, ids, tables)
    return Case(
        partial(reference.embed, *ids, **by_name, **kw),
        lambda isa: run(**kw, isa=isa),
        partial(embedding.embed, *ids, **by_name, **kw),
        in_torch,
    )


def pool_case(
    dtype: torch.dtype, device: str, width: int, mode: str, skip: bool, seqlens: list[int]
) -> Case:
    x = torch.randn(sum(seqlens), width).to(device, dtype)
    cu_seqlens = cu_seqlens_of(seqlens).to(device)
    first = [2, 0, 1, 7, 3, 0] if skip else [0] * len(seqlens)
    first_tokens = torch.tensor(first, dtype=torch.int32, device=device) if skip else None
    kw = {"mode": mode, "first_tokens": first_tokens, "normalize": skip}

    def in_torch(to: torch.dtype) -> Tensor:
        rows = [x[s].to(to) for s in per_sequence(seqlens)]
        pooled = [pool_one(r, mode, n) for r, n in zip(rows, first, strict=True)]
        eps = max(1e-12, torch.finfo(to).tiny)
        return F.normalize(torch.stack(pooled), dim=-1, eps=eps) if skip else torch.stack(pooled)

    run = partial(pooling.run_kernel, x, cu_seqlens, **kw)
    return Case(
        partial(reference.pool, x, cu_seqlens, **kw),
        lambda isa: run(isa=isa),
        partial(pooling.pool, x, cu_seqlens, **kw),
        in_torch,
    )


def pool_one(x: Tensor, mode: str, skip: int) -> Tensor:
    """sentence-transformers' pooling of one sequence, as its definition says it."""
    weights = torch.arange(1, len(x) + 1, dtype=torch.float64, device=x.device)[skip:, None]
    weights = (weights / weights.mean()).to(x.dtype)  # their sum would overflow f16
    x = x[skip:]
    if len(x) == 0:
        return x.new_zeros(x.shape[1])
    return {
        "cls": lambda: x[0],
        "lasttoken": lambda: x[-1],
        "max": lambda: x.max(0).values,
        "mean": lambda: x.mean(0),
        "mean_sqrt_len_tokens": lambda: x.sum(0) / len(x) ** 0.5,
        "weightedmean": lambda: (x * weights).mean(0),
    }[mode]()


def attention_case(
    dtype: torch.dtype, device: str, head_dim: int, bias: str, softcap: float = 0.0
) -> Case:
    num_heads, longest = 3, max(SEQLENS)
    qkv = torch.randn(sum(SEQLENS), 3 * num_heads * head_dim).to(device, dtype)
    q, k, v = (t.unflatten(1, (num_heads, head_dim)) for t in qkv.chunk(3, dim=1))
    cu_seqlens = cu_seqlens_of(SEQLENS).to(device)
    span = longest + 9
    table = torch.randn(num_heads, 2 * span - 1, device=device) if bias != "none" else None
    holes = torch.cat([torch.arange(n) + min(3, n // 2) for n in SEQLENS]).int().to(device)
    positions = holes if bias == "holes" else None
    scale = head_dim**-0.5
    kw = {"max_seqlen": longest, "relative_bias": table, "bias_positions": positions}
    kw["softcap"] = softcap
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)

    def in_torch(to: torch.dtype) -> Tensor:
        done = torch.empty(q.shape, dtype=to, device=device)
        for rows in per_sequence(SEQLENS):
            mask, at = None, holes[rows].long()
            if table is not None:
                mask = table[:, at[None, :] - at[:, None] + span - 1].to(to)
            heads = [t[rows].to(to).transpose(0, 1) for t in (q, k, v)]
            attend = partial(capped_attention, softcap=softcap)
            attend = attend if softcap else F.scaled_dot_product_attention
            done[rows] = attend(*heads, attn_mask=mask).transpose(0, 1)
        return done

    run = partial(attention.run_kernel, q, k, v, cu_seqlens, softmax_scale=scale, **kw)
    return Case(
        partial(reference.varlen_attention, q, k, v, cu_seqlens, softmax_scale=scale, **kw),
        lambda isa: run(out=out, isa=isa),
        partial(attention.varlen_attention, q, k, v, cu_seqlens, **kw, out=out),
        in_torch,
    )


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, softcap: float
) -> Tensor:
    """Gemma 2's attention of [num_heads, seqlen, head_dim], in the operands' dtype throughout."""
    scores = softcap * torch.tanh(q @ k.transpose(1, 2) * q.shape[2] ** -0.5 / softcap)
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v


def linear_case(
    dtype: torch.dtype, device: str, rows: int, activation: str, prepack: bool, residual: bool
) -> Case:
    x, other = torch.randn(rows, 100).to(device, dtype), torch.randn(rows, 51).to(device, dtype)
    weight = (torch.randn(51, 100) / 10).to(device, dtype)
    bias = torch.randn(51).to(device, dtype)
    added = other if residual else None
    prepared = linear.prepare_linear(weight, bias, prepack=prepack)

    def in_torch(to: torch.dtype) -> Tensor:
        d = reference.activate(F.linear(x.to(to), weight.to(to), bias.to(to)), activation)
        return d + other.to(to) if residual else d

    plain = partial(reference.linear, x, weight, bias, activation=activation, residual=added)
    public = partial(linear.linear, x, prepared, activation=activation, residual=added)
    return Case(plain, None, public, in_torch)


CASES: dict[str, Callable[[torch.dtype, str], Case]] = {
    **{
        f"{op}-{width}-{'residual' if has_residual else 'plain'}{'-sum' if keeps_sum else ''}": (
            partial(norm_case, op=op, width=width, has_residual=has_residual, keeps_sum=keeps_sum)
        )
        for op in ("layer_norm", "rms_norm")
        for width, has_residual, keeps_sum in [
            (1, False, False),
            (7, True, False),
            (33, True, True),
            (384, True, True),
            (768, True, False),
            (1000, False, False),
            (2048, True, True),
            (16390, True, True),
        ]
    },
    **{
        f"embed-{width}-{num_tables}-{'norm' if norms else 'sum'}-{'rows' if given else 'ids'}": (
            partial(embed_case, width=width, num_tables=num_tables, norms=norms, given=given)
        )
        for width, num_tables, norms, given in [
            (384, 3, True, False),
            (50, 2, True, True),
            (33, 1, False, False),
            (1024, 2, False, True),
            (1032, 3, True, False),
            (16390, 3, True, False),
        ]
    },
    **{
        f"pool-{width}-{mode}-{'skip' if skip else 'all'}-{max(seqlens)}": partial(
            pool_case, width=width, mode=mode, skip=skip, seqlens=seqlens
        )
        for width, skip, seqlens in [
            (384, True, SEQLENS),
            (21, False, SEQLENS),
            (2050, False, SEQLENS),
            (776, True, LONG),
            (33, True, LONG),
            (264, False, LONG),
        ]
        for mode in pooling.POOLING_MODES
    },
    **{
        f"attention-{head_dim}-{bias}": partial(attention_case, head_dim=head_dim, bias=bias)
        for head_dim in (32, 64, 20, 128)
        for bias in ("none", "index", "holes")
    },
    **{
        f"attention-{head_dim}-{bias}-softcap": partial(
            attention_case, head_dim=head_dim, bias=bias, softcap=1.5
        )
        for head_dim, bias in [(64, "none"), (80, "index"), (256, "none")]
    },
    **{
        f"linear-{rows}-{activation}-{prepack}-{residual}": partial(
            linear_case, rows=rows, activation=activation, prepack=prepack, residual=residual
        )
        for rows in (1, 37)
        for activation in linear.ACTIVATIONS
        for prepack, residual in [(True, True), (False, False)]
    },
}


def assert_as_exact_as_torch(got: Tensor, case: Case, dtype: torch.dtype) -> None:
    """err(ours) <= 2 * err(torch in the same dtype) + one unit in the last place of the result.

    Errors are root mean squares: the largest of a few hundred errors is luck, on either side, so it
    is held to twice that again. The unit is there because torch may happen to round to the nearest.
    """
    exact = case.torch(torch.float64)
    theirs = case.torch(dtype).double() - exact
    ours = got.double() - exact
    assert got.isfinite().all()
    if exact.numel() == 0:
        return
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + unit
    assert ours.abs().max() <= 4 * theirs.abs().max() + unit


@pytest.mark.feature("Arithmetic", "native kernels for CPUs as exact as torch")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_op_is_as_exact_as_torch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype, "cpu")
    assert_as_exact_as_torch(case.reference(), case, dtype)
    assert_as_exact_as_torch(case.public(), case, dtype)
    if case.kernel is None or "16390" in name:  # wider than a kernel's rows: the reference ran
        return
    for isa in native.available_isas():
        assert_as_exact_as_torch(case.kernel(isa), case, dtype)


@pytest.mark.parametrize("name", CASES)
def test_float16_runs_without_kernels(name: str) -> None:
    case = CASES[name](F16, "cpu")
    assert_as_exact_as_torch(case.public(), case, F16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_op_on_cuda_is_as_exact_as_torch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype, "cuda")
    assert_as_exact_as_torch(case.reference(), case, dtype)
    assert_as_exact_as_torch(case.public(), case, dtype)
