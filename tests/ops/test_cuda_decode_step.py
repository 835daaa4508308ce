"""The decode step of one sequence as one kernel, against float64 and torch in bf16."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from bytetx.ops.decode_step import StepLayer, StepWeights, decode_step, make_workspace

pytestmark = pytest.mark.gpu

PAGE = 16
MOST_KEYS = 9000
NUM_PAGES = MOST_KEYS // PAGE + 8
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    has_bias: bool = False

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


QWEN3 = Sizes(1024, 3072, 16, 8, 128)
SIZES = {
    "qwen3-0.6b": QWEN3,
    "qwen2.5-0.5b": Sizes(896, 4864, 14, 2, 64, has_bias=True),
    "smollm2-135m": Sizes(576, 1536, 9, 3, 64),
    "smollm2-360m": Sizes(960, 2560, 15, 5, 64),
}


def random(*shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
    return (mean + std * torch.randn(*shape, device="cuda")).to(torch.bfloat16)


def random_layer(sizes: Sizes) -> StepLayer:
    hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
    pages = (NUM_PAGES, PAGE, sizes.kv_heads, head_dim)
    norms = (random(n, std=0.1, mean=1.0) for n in (hidden, hidden, head_dim, head_dim))
    return StepLayer(
        random(sizes.qkv_rows, hidden),
        random(hidden, sizes.heads * head_dim),
        random(2 * inner, hidden),
        random(hidden, inner),
        *norms,
        random(sizes.qkv_rows, std=0.3) if sizes.has_bias else None,
        random(*pages, std=1.0),
        random(*pages, std=1.0),
    )


def random_weights(sizes: Sizes) -> StepWeights:
    torch.manual_seed(0)
    half = torch.arange(0, sizes.head_dim, 2, device="cuda") / sizes.head_dim
    angles = torch.arange(MOST_KEYS, device="cuda")[:, None] * 1e6**-half
    found = StepWeights(
        tuple(random_layer(sizes) for _ in range(3)),
        random(sizes.hidden, std=0.1, mean=1.0),
        angles.cos(),
        angles.sin(),
        eps=EPS,
        softmax_scale=sizes.head_dim**-0.5,
    )
    assert found.workspace_bytes > 0
    return found


@pytest.fixture(scope="module", params=SIZES)
def any_weights(request: pytest.FixtureRequest) -> StepWeights:
    return random_weights(SIZES[request.param])


@pytest.fixture(scope="module")
def weights() -> StepWeights:
    return random_weights(QWEN3)


class Case:
    """A sequence of num_keys keys, the last of which is new, on pages in random order."""

    def __init__(self, num_keys: int, hidden_size: int = QWEN3.hidden):
        torch.manual_seed(num_keys)
        self.num_keys = num_keys
        self.x = random(1, hidden_size, std=1.0)
        self.table = torch.randperm(NUM_PAGES, device="cuda", dtype=torch.int32)[None]
        last = num_keys - 1
        self.slot = int(self.table[0, last // PAGE]) * PAGE + last % PAGE

    def run(self, w: StepWeights, workspace: Tensor, *, slot: int | None = None) -> Tensor:
        slot = self.slot if slot is None else slot
        position, keys, slots = (
            torch.full([1], n, dtype=torch.int32, device="cuda")  # in a graph, too
            for n in (self.num_keys - 1, self.num_keys, slot)
        )
        return decode_step(
            self.x,
            w,
            position_ids=position,
            kv_seqlens=keys,
            slot_mapping=slots,
            page_table=self.table,
            workspace=workspace,
        )

    def rows_of(self, cache: Tensor) -> Tensor:
        """Earlier keys or values, [num_keys - 1, num_kv_heads, head_dim]."""
        tokens = torch.arange(self.num_keys - 1, device="cuda")
        slots = self.table[0].long()[tokens // PAGE] * PAGE + tokens % PAGE
        return cache.flatten(0, 1)[slots]

    def expected(self, w: StepWeights, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The hidden states, and the new key and value of each layer, in this dtype."""
        x, news = self.x[0].to(dtype), []
        cos, sin = (t[self.num_keys - 1].to(dtype) for t in (w.cos, w.sin))
        for layer in w.layers:
            qkv = layer.qkv.to(dtype) @ norm(x, layer.attn_norm)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias.to(dtype)
            heads = [w.num_heads, w.num_kv_heads, w.num_kv_heads]
            q, k, v = qkv.view(-1, w.head_dim).split(heads)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            news += [k, v]
            keys = torch.cat([self.rows_of(layer.k_cache).to(dtype), k[None]])
            values = torch.cat([self.rows_of(layer.v_cache).to(dtype), v[None]])
            groups = q.view(w.num_kv_heads, -1, w.head_dim)
            scores = torch.einsum("hgd,khd->hgk", groups, keys) * w.softmax_scale
            chances = scores.softmax(-1)
            attended = torch.einsum("hgk,khd->hgd", chances, values).flatten()
            x = x + layer.attn_out.to(dtype) @ attended
            both = layer.ffn_in.to(dtype) @ norm(x, layer.ffn_norm)
            gates, ups = both.view(-1, 2, 32).unbind(1)
            x = x + layer.ffn_out.to(dtype) @ (silu(gates) * ups).flatten()
        return norm(x, w.final_norm), news


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(
        x.dtype
    )


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


# Below and above what one CTA takes of a KV head, the CTAs' block of keys, the table of places.
LENGTHS = [1, 2, 17, 64, 65, 66, 500, 1100, 4000, MOST_KEYS]


@pytest.mark.feature("Arithmetic", "one kernel for a decode step")
@pytest.mark.parametrize("num_keys", LENGTHS)
@pytest.mark.parametrize("has_norms", [True, False])
def test_it_is_as_exact_as_torch(any_weights: StepWeights, num_keys: int, has_norms: bool) -> None:
    """Twice torch's error in bf16 at most; the new keys and values, too; nothing else changes."""
    weights = any_weights
    if not has_norms:
        bare = (layer._replace(q_norm=None, k_norm=None) for layer in weights.layers)
        weights = replace(weights, layers=tuple(bare))
    case, workspace = Case(num_keys, weights.hidden_size), make_workspace(weights)
    for layer in weights.layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache.flatten(0, 1)[case.slot] = torch.nan
    caches = [t for layer in weights.layers for t in (layer.k_cache, layer.v_cache)]
    before = [t.clone() for t in caches]
    exact, news = case.expected(weights, torch.float64)
    plain, plain_news = case.expected(weights, torch.bfloat16)
    out = case.run(weights, workspace)
    assert error(out[0], exact) <= 2 * error(plain, exact)
    assert torch.equal(case.run(weights, workspace), out)
    for cache, old, new, plain_new in zip(caches, before, news, plain_news, strict=True):
        rows = cache.flatten(0, 1)
        assert error(rows[case.slot], new) <= 2 * error(plain_new, new)
        rows[case.slot] = torch.nan
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
        rows[case.slot] = 0.0


def test_a_token_without_a_slot_is_not_written(weights: StepWeights) -> None:
    case, workspace = Case(100), make_workspace(weights)
    caches = [t for layer in weights.layers for t in (layer.k_cache, layer.v_cache)]
    before = [t.clone() for t in caches]
    out = case.run(weights, workspace, slot=-1)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))
    assert torch.equal(case.run(weights, workspace), out)


def test_graphs_give_the_same_bits_every_time(any_weights: StepWeights) -> None:
    weights = any_weights
    case, workspace = Case(700, weights.hidden_size), make_workspace(weights)
    wanted = case.run(weights, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(weights, workspace)
    for _ in range(200):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


def test_other_sizes_have_no_kernel(weights: StepWeights) -> None:
    first = weights.layers[0]
    wide = first._replace(ffn_in=random(2 * 4096, QWEN3.hidden), ffn_out=random(QWEN3.hidden, 4096))
    assert replace(weights, layers=(wide,)).workspace_bytes == 0
    assert replace(weights, layers=(first, wide)).workspace_bytes == 0
    half = first._replace(qkv=first.qkv.half())
    assert replace(weights, layers=(half,)).workspace_bytes == 0
    assert replace(weights, layers=(first,) * 65).workspace_bytes == 0
    biased = first._replace(qkv_bias=random(QWEN3.qkv_rows))
    assert replace(weights, layers=(biased,)).workspace_bytes == 0


def test_all_layers_have_a_bias_or_none() -> None:
    weights = random_weights(SIZES["qwen2.5-0.5b"])
    first = weights.layers[0]
    bare = first._replace(qkv_bias=None)
    assert replace(weights, layers=(bare,)).workspace_bytes == weights.workspace_bytes
    assert replace(weights, layers=(first, bare)).workspace_bytes == 0


def test_operands_of_another_shape_are_refused(weights: StepWeights) -> None:
    case, workspace = Case(3), make_workspace(weights)
    with pytest.raises(ValueError, match="workspace must have"):
        case.run(weights, workspace[:-1])
    case.x = case.x[:, :-8]
    with pytest.raises(ValueError, match="x must"):
        case.run(weights, workspace)
