"""Builds a generation engine for a checkpoint: its sizes, its cache and its parts."""

import os
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch

from bytetx.arguments import check_draft_size, check_num_seqs, check_positive
from bytetx.checkpoint.byte_level import (
    TokenBytes,
    joins_tokens,
    special_tokens,
    token_bytes,
    token_pieces,
)
from bytetx.errors import DeviceMemoryError, InputError, OptionError
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.guidance import GrammarCompiler
from bytetx.generate.model_runner import ModelRunner
from bytetx.generate.output_processor import (
    ByteDetokenizer,
    DetokenizerFactory,
    SpecialTokens,
    WindowDetokenizer,
)
from bytetx.generate.scheduler import Scheduler
from bytetx.nn.batch_invariance import check_invariant_generation
from bytetx.nn.coded_cache import has_coded_cache
from bytetx.nn.heads import LmHead
from bytetx.nn.held_memory import parts_of, weights_bytes
from bytetx.nn.kv_cache import KvCache, allocate_cache, page_bytes
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.mixers import allocate_states, state_bytes
from bytetx.ops.linear import LinearWeight, primitives_bytes
from bytetx.ops.native import tile_rows
from bytetx.ops.paged import MAX_RESTORED_BYTES
from bytetx.runtime.faults import is_out_of_memory
from bytetx.runtime.paged_layout import MAX_MIXED_TOKENS

T = TypeVar("T")

PAGE_SIZE = 16  # tokens: a sequence wastes half a page on average, and only full pages are shared
_TYPICAL_TOKENS = 1024  # tokens of a sequence, prompt and output together
_CPU_SEQS, _CUDA_SEQS = 64, 256
# The most tokens of a step with drafts. On a CPU so many rows take twice the time of one, which
# reads the weights (100 M of them in f32, AMD EPYC with AVX-512, 2026-11-25). For a GPU it is what
# an H100 computes in bf16 while it reads them, by its data sheet. With more rows, one that is
# dropped takes about as long as one that is kept.
_CPU_DRAFT_STEP, _CUDA_DRAFT_STEP = 16, 256
_CUBLAS_BYTES = 32 << 20  # torch's cuBLAS workspace on Hopper, once for graphs and once without
# A CPU's other memory belongs to the caller; on a GPU the activations of a step need some.
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.8


@dataclass(frozen=True, slots=True)
class GenerationSizes:
    """The sizes of an engine and the memory that they need.

    max_num_seqs: sequences that run at a time.  token_budget: tokens per step.  num_pages: pages of
    the cache, of page_size tokens each.  cache_bytes: of all pages, and of what
    layers without attention remember.  weights_bytes: of the model.
    workspace_bytes: the most that a step needs while it runs; on a GPU with the memory of graphs.
    primitives_bytes: the most that oneDNN keeps on a CPU, after steps of many sizes.
    num_speculative_tokens: the most tokens of a draft.  max_samples: tokens that a step samples.
    """

    max_num_seqs: int
    token_budget: int
    page_size: int
    num_pages: int
    cache_bytes: int
    weights_bytes: int
    workspace_bytes: int
    primitives_bytes: int
    num_speculative_tokens: int
    max_samples: int

    @property
    def total_bytes(self) -> int:
        """The most device memory that generation needs."""
        held = self.weights_bytes + self.cache_bytes
        return held + self.workspace_bytes + self.primitives_bytes

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values fit the cache."""
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        most = self.num_speculative_tokens
        drafts = f", drafts of at most {most} tokens" if most else ""
        primitives = f"primitives {self.primitives_bytes / 2**20:,.1f} MiB, "
        return (
            f"weights {self.weights_bytes / 2**20:,.1f} MiB, key-value cache "
            f"{self.cache_bytes / 2**20:,.1f} MiB ({self.kv_cache_tokens:,} tokens), workspace "
            f"{self.workspace_bytes / 2**20:,.1f} MiB, {primitives * (self.primitives_bytes > 0)}"
            f"at most {self.max_num_seqs} sequences and {self.token_budget:,} tokens per step"
            f"{drafts}"
        )


def generation_sizes(
    checkpoint: LoadedCheckpoint,
    *,
    token_budget: int,
    kv_cache_tokens: int | None = None,
    max_num_seqs: int | None = None,
    num_speculative_tokens: int = 0,
) -> GenerationSizes:
    """The sizes of an engine with these options; None is a size that fits the device.

    kv_cache_tokens: by default what max_num_seqs sequences of typical length need, at most a share
    of the memory (on a GPU, of the free memory).  max_num_seqs: at most token_budget.
    num_speculative_tokens: the most tokens of a draft; 0: there are none.
    Raises InputError where one is not a positive integer, or num_speculative_tokens out of range;
    OptionError where a batch-invariant model cannot generate so, or a model cannot take drafts.
    """
    spec, device = checkpoint.spec, checkpoint.device
    if checkpoint.batch_invariant:
        check_invariant_generation(spec, device)
    is_cuda = device.type == "cuda"
    if max_num_seqs is None:
        max_num_seqs = min(_CUDA_SEQS if is_cuda else _CPU_SEQS, token_budget)
    check_num_seqs(max_num_seqs, token_budget)
    check_draft_size(num_speculative_tokens)
    if num_speculative_tokens and not spec.takes_drafts:
        raise OptionError(
            f"num_speculative_tokens must be 0 for {spec.family}: its layers without attention "
            "cannot undo a rejected guess"
        )
    max_samples = max_num_seqs
    if num_speculative_tokens:
        most = max_num_seqs * (1 + num_speculative_tokens)
        max_samples = max(max_num_seqs, min(most, _draft_step(device), token_budget))
    # A slot more than sequences, for padding rows.
    states_bytes = (max_num_seqs + 1) * state_bytes(spec, checkpoint.dtype)
    bytes_each = page_bytes(
        num_layers=spec.num_attention_layers,
        page_size=PAGE_SIZE,
        num_kv_heads=checkpoint.transformer.blocks.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=checkpoint.dtype,
        has_codes=has_coded_cache(checkpoint),
    )
    if kv_cache_tokens is None:
        wanted = max_num_seqs * min(spec.max_positions, _TYPICAL_TOKENS)
        fitting = (_cache_limit_bytes(device) - states_bytes) // bytes_each * PAGE_SIZE
        kv_cache_tokens = max(min(wanted, fitting), 1)
    check_positive("kv_cache_tokens", kv_cache_tokens)
    num_pages = -(-kv_cache_tokens // PAGE_SIZE)
    return GenerationSizes(
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        cache_bytes=num_pages * bytes_each + states_bytes,
        weights_bytes=weights_bytes([checkpoint.transformer, checkpoint.heads]),
        workspace_bytes=_workspace_bytes(checkpoint, token_budget, max_samples),
        primitives_bytes=_primitives_bytes(checkpoint, token_budget),
        num_speculative_tokens=num_speculative_tokens,
        max_samples=max_samples,
    )


def build_engine(
    checkpoint: LoadedCheckpoint,
    head: LmHead,
    sizes: GenerationSizes,
    *,
    seed: int | None = None,
    cuda_graphs: bool = True,
) -> GenerationEngine:
    """An engine with its own cache.

    seed: of the generator of seeds, for requests without a seed.  cuda_graphs: as for `load`.
    """
    cache = _allocate(sizes, checkpoint)
    scheduler = Scheduler(
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        token_budget=sizes.token_budget,
        max_num_seqs=sizes.max_num_seqs,
        max_positions=checkpoint.spec.max_positions,
        # A prefix that is found would have to leave the states behind it, too.
        caches_prefixes=checkpoint.executor.shares_pages and not cache.states,
        max_shared_prompt=checkpoint.spec.max_plain_prompt,
        num_speculative_tokens=sizes.num_speculative_tokens,
        max_draft_step=_draft_step(checkpoint.device),
    )
    runner = ModelRunner(
        checkpoint.transformer,
        head,
        executor=checkpoint.executor,
        cache=cache,
        max_num_seqs=sizes.max_num_seqs,
        max_samples=sizes.max_samples,
        device=checkpoint.device,
        cuda_graphs=cuda_graphs,
    )
    return GenerationEngine(
        runner,
        scheduler,
        new_detokenizer=detokenizer_factory(checkpoint),
        special_tokens=_special_tokens(checkpoint),
        eos_token_ids=checkpoint.generation.eos_token_ids,
        defaults=checkpoint.generation.sampling,
        compiler=_grammar_compiler(checkpoint),
        seed=seed,
    )


def _grammar_compiler(checkpoint: LoadedCheckpoint) -> GrammarCompiler:
    eos_token_ids = checkpoint.generation.eos_token_ids
    if checkpoint.tokenizer is None:
        return GrammarCompiler(None, eos_token_ids=eos_token_ids)
    backend, vocab_size = checkpoint.tokenizer.backend, checkpoint.spec.vocab_size

    def tokens() -> tuple[list[bytes], frozenset[int]]:
        if not joins_tokens(backend):
            raise InputError(
                "structured_outputs: what a token of this tokenizer adds to a text depends on the "
                "one behind it (its decoder is BPEDecoder or CTC), so no form can be held"
            )
        found = TokenBytes(backend)
        return [found[token] for token in range(vocab_size)], found.special_ids

    return GrammarCompiler(tokens, eos_token_ids=eos_token_ids)


def _special_tokens(checkpoint: LoadedCheckpoint) -> SpecialTokens | None:
    if checkpoint.tokenizer is None:
        return None
    texts = special_tokens(checkpoint.tokenizer.backend)

    @cache
    def factory() -> DetokenizerFactory:  # its table is for the few requests that show them
        made = detokenizer_factory(checkpoint, skip_special_tokens=False)
        assert made is not None  # there is a tokenizer
        return made

    return SpecialTokens(texts, lambda context: factory()(context)) if texts else None


def detokenizer_factory(
    checkpoint: LoadedCheckpoint, *, skip_special_tokens: bool = True
) -> DetokenizerFactory | None:
    """Makes detokenizers that skip special tokens, and ids that the tokenizer does not have.

    None where the checkpoint has no tokenizer.
    """
    if checkpoint.tokenizer is None:
        return None
    tokenizer, backend = checkpoint.tokenizer, checkpoint.tokenizer.backend
    known = token_bytes(backend, skip_special_tokens=skip_special_tokens)
    if known is not None:
        known += [b""] * (checkpoint.spec.vocab_size - len(known))
        return partial(ByteDetokenizer, known)

    decode = partial(tokenizer.decode_plain, skip_special_tokens=skip_special_tokens)
    pieces = token_pieces(backend, skip_special_tokens=skip_special_tokens)
    if pieces is not None:
        pieces += [""] * (checkpoint.spec.vocab_size - len(pieces))
    return partial(WindowDetokenizer, decode, pieces=pieces)


def _allocate(sizes: GenerationSizes, checkpoint: LoadedCheckpoint) -> KvCache:
    """The cache; DeviceMemoryError where it does not fit the device."""
    spec = checkpoint.spec
    try:
        cache = allocate_cache(
            num_layers=spec.num_attention_layers,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_kv_heads=checkpoint.transformer.blocks.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=checkpoint.dtype,
            has_codes=has_coded_cache(checkpoint),
            device=checkpoint.device,
        )
        states = allocate_states(
            spec, sizes.max_num_seqs + 1, dtype=checkpoint.dtype, device=checkpoint.device
        )
        return replace(cache, states=states)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"a key-value cache of {sizes.kv_cache_tokens:,} tokens ({sizes.cache_bytes:,} bytes) "
            f"does not fit the memory of {checkpoint.device}; lower kv_cache_tokens"
        ) from error


def _draft_step(device: torch.device) -> int:
    return _CUDA_DRAFT_STEP if device.type == "cuda" else _CPU_DRAFT_STEP


def _cache_limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)


def _workspace_bytes(checkpoint: LoadedCheckpoint, token_budget: int, max_samples: int) -> int:
    """Activations of a full step, and the logits of all samples with two f32 copies of them.

    On a GPU the graphs of small steps hold activations and logits of their own, and keys and values
    of codes are restored, those of one layer at a time.
    """
    spec, itemsize = checkpoint.spec, checkpoint.dtype.itemsize
    if checkpoint.device.type == "cpu":
        token_budget, max_samples = tile_rows(token_budget), tile_rows(max_samples)
    logits = max_samples * spec.vocab_size
    step = spec.workspace_bytes(token_budget, itemsize) + logits * (itemsize + 2 * 4)
    if checkpoint.device.type == "cuda":
        step += 2 * _CUBLAS_BYTES
        captured = max(max_samples, min(MAX_MIXED_TOKENS, token_budget))
        step += spec.workspace_bytes(captured, itemsize) + logits * itemsize
        if has_coded_cache(checkpoint):
            step += MAX_RESTORED_BYTES
    return step


def _primitives_bytes(checkpoint: LoadedCheckpoint, token_budget: int) -> int:
    if checkpoint.device.type != "cpu":
        return 0
    linears = parts_of([checkpoint.transformer, checkpoint.heads.lm], LinearWeight)
    return primitives_bytes(linears, most_rows=token_budget)
