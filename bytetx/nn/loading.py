"""A checkpoint's folder -> everything a Model holds; the files are closed when it returns."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bytetx.arguments import DTYPE_ALIASES
from bytetx.checkpoint.chat_template import ChatTemplate, load_chat_template
from bytetx.checkpoint.decision_files import DecisionConfig, read_decision_config
from bytetx.checkpoint.decision_heads import (
    DecisionHeadSpec,
    check_mask,
    read_decision_head,
    trunk_config,
)
from bytetx.checkpoint.extraction import ExtractionSpec, encoder_spec, read_extraction
from bytetx.checkpoint.families import Families, read_families
from bytetx.checkpoint.files import load_config, refuse_own_code
from bytetx.checkpoint.generation_config import GenerationDefaults, read_generation_config
from bytetx.checkpoint.lora import merge_lora
from bytetx.checkpoint.router import RouterSpec, read_router
from bytetx.checkpoint.schema_spec import SchemaSpec
from bytetx.checkpoint.side_files import TEXT, check_fields
from bytetx.checkpoint.spec import ModelSpec, build_spec, saved_spec, token_logits_spec
from bytetx.checkpoint.staged_reader import StagedReader
from bytetx.checkpoint.static_embedding import load_static_tokenizer, static_spec
from bytetx.checkpoint.tag_calibration import TransitionBiases, read_transition_biases
from bytetx.checkpoint.task_adapters import TaskAdapters, read_task_adapters
from bytetx.checkpoint.tokenizer import Tokenizer, load_tokenizer
from bytetx.checkpoint.weights import Weights, report_unused
from bytetx.errors import CheckpointError, OptionError, shown
from bytetx.nn.batch_invariance import (
    check_batch_invariant,
    invariant_modules,
)
from bytetx.nn.blocks import Blocks
from bytetx.nn.checkpoint_heads import Heads, load_heads
from bytetx.nn.executor import Executor
from bytetx.nn.layer_mean import with_layer_mean
from bytetx.nn.quantization import SAVED, WEIGHT_FORMATS, memory_bits, wanted_format
from bytetx.nn.sentence_modules import (
    ACTIVATIONS,
    Dense,
    Module,
    Normalize,
    Projection,
    SentenceSpec,
    load_modules,
    load_route_spec,
    load_sentence_spec,
    load_static_weights,
)
from bytetx.nn.tensors import TensorLoader
from bytetx.nn.token_heads import load_token_head
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import LinearWeight, is_bf16_faster, prepare_linear
from bytetx.runtime.device_memory import check_fits
from bytetx.runtime.faults import is_out_of_memory
from bytetx.runtime.forking import check_device_after_fork

logger = logging.getLogger("bytetx")

_BF16_CAPABILITY = (8, 0)  # Ampere

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of texts that no transformer reads.
NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory. cross_encoder_activation: a torch.nn name, or None for the default.

    generation: defaults of a model that generates; load_generation reads them.
    token_weight: BGE-M3's layer [1, hidden_size] of sparse vectors.
    token_modules: what gives each token a vector, behind the transformer.
    pair_template: of the chats that a causal reranker scores.
    decisions: how it asks questions, with the template of decision_template.jinja, if any.
    tag_biases: of viterbi_calibration.json.  extraction: of a GLiNER model, version 1 or 2.
    tasks: the adapters of tasks, where the checkpoint has some, as its files have them.
    router, routes: of a model whose task chooses a route; what is loaded is the default one.
    static_weights: f32 [vocab_size], of a route of SparseStaticEmbedding without a transformer.
    unused_tensors: names in the files that nothing here reads.  num_parameters: in the files, of
    the whole model where ranks share it.  saved_formats: bytes in the files by format.
    quantization: a key of WEIGHT_FORMATS, or SAVED.  dequantised: formats whose tensors
    could have been kept as codes and are not, and why.
    batch_invariant: see nn/batch_invariance.py.  kv_cache_dtype: see nn/coded_cache.py.
    families: the folder of the caller's own families.
    """

    folder: Path
    spec: ModelSpec
    sentence: SentenceSpec
    modules: tuple[Module, ...]
    transformer: Transformer
    heads: Heads
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    cross_encoder_activation: str | None
    unused_tensors: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    quantization: str | None = None
    num_parameters: int = 0
    saved_formats: Mapping[str, int] = field(default_factory=dict)
    dequantised: Mapping[str, str] = field(default_factory=dict)
    token_weight: LinearWeight | None = None
    token_modules: tuple[Module, ...] = ()
    pair_template: ChatTemplate | None = None
    decisions: DecisionConfig = DecisionConfig()
    decision_template: ChatTemplate | None = None
    tag_biases: TransitionBiases | None = None
    extraction: ExtractionSpec | SchemaSpec | None = None
    tasks: TaskAdapters | None = None
    router: RouterSpec | None = None
    routes: Mapping[str, "LoadedCheckpoint"] = field(default_factory=dict)
    static_weights: np.ndarray | None = None
    batch_invariant: bool = False
    families: Path | None = None
    generation: GenerationDefaults = GenerationDefaults()
    kv_cache_dtype: str = "auto"
    executor: Executor = field(default_factory=Executor)

    @property
    def generates(self) -> bool:
        """Whether it continues prompts."""
        return self.heads.lm is not None and not self.spec.is_bidirectional

    @property
    def dtype_option(self) -> str | torch.dtype:
        """The dtype to load the same model with."""
        if self.quantization == SAVED:
            return "auto"
        return self.quantization or self.dtype


def load_checkpoint(
    folder: Path,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    batch_invariant: bool = False,
    families: Families | None = None,
    blocks: Blocks | None = None,
    on_tensor: Callable[[], None] | None = None,
    outline: LoadedCheckpoint | None = None,
    reads_weights: bool = True,
) -> LoadedCheckpoint:
    """Reads a checkpoint onto a device; "auto" as in bytetx.load. Raises CheckpointError.

    families: None are those of models/.
    blocks: of a rank of a group; only its shard is read.  on_tensor: called before each tensor is
    read.
    outline: the same checkpoint, loaded before; its tokenizer is used again.
    reads_weights: False checks the files' headers, and gives the transformer and its heads tensors
    without numbers (on torch's meta device): what there is and what it can do, but no result.
    """
    load = partial(
        _load,
        folder,
        device=device,
        dtype=dtype,
        batch_invariant=batch_invariant,
        families=families or read_families(),
        blocks=blocks,
        on_tensor=on_tensor,
        reads_weights=reads_weights,
    )
    router = read_router(folder)
    if router is None:
        tokenizer = None if outline is None else outline.tokenizer
        return load(load_sentence_spec(folder), tokenizer=tokenizer)
    loaded: dict[Path, LoadedCheckpoint] = {}
    routes: dict[str, LoadedCheckpoint] = {}
    specs = {name: load_route_spec(folder, router, name) for name in router.routes}
    for sentence in specs.values():
        weights_folder = sentence.adapter or sentence.folder
        if sentence.sparse_static is None and weights_folder not in loaded:
            loaded[weights_folder] = load(sentence)
    if not loaded:
        raise CheckpointError(f"{router.path}: no route has a Transformer module")
    for name, sentence in specs.items():
        weights_folder = sentence.adapter or sentence.folder
        checkpoint = loaded.get(weights_folder, next(iter(loaded.values())))
        routes[name] = _as_route(checkpoint, sentence)
    first = routes[router.default or next(iter(routes))]
    return replace(first, router=router, routes=routes)


def load_generation(checkpoint: LoadedCheckpoint, *, switch: str) -> LoadedCheckpoint:
    """The checkpoint with its generation_config.json, where it generates; logs what it says.

    switch: as of read_generation_config.
    """
    if not checkpoint.generates:
        return checkpoint
    folder, tokenizer = checkpoint.sentence.folder, checkpoint.tokenizer
    generation = read_generation_config(
        folder,
        load_config(folder),
        switch=switch,
        vocab_size=checkpoint.spec.vocab_size,
        tokenizer_eos=None if tokenizer is None else tokenizer.eos_token_id,
        has_tokenizer=tokenizer is not None,
    )
    logger.info("%s: %s", checkpoint.folder, generation)
    return replace(checkpoint, generation=generation)


def _as_route(checkpoint: LoadedCheckpoint, sentence: SentenceSpec) -> LoadedCheckpoint:
    """A checkpoint with the modules of another route; the transformer is shared, and of a static
    route none."""
    if sentence.sparse_static is None:
        modules = load_modules(sentence.modules, device=checkpoint.device)
        if checkpoint.batch_invariant:
            modules = invariant_modules(modules)
        tokenizer = _load_tokenizer(sentence, checkpoint.spec)
        return replace(checkpoint, sentence=sentence, modules=modules, tokenizer=tokenizer)
    weights = load_static_weights(sentence.sparse_static)
    tokenizer = load_tokenizer(
        sentence.sparse_static, max_positions=NO_LIMIT, adds_special_tokens=False
    )
    if tokenizer is None:
        raise CheckpointError(
            f"{sentence.sparse_static} has no tokenizer.json; save the model again"
        )
    return replace(
        checkpoint, sentence=sentence, modules=(), tokenizer=tokenizer, static_weights=weights
    )


def _load(
    folder: Path,
    sentence: SentenceSpec,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    batch_invariant: bool,
    families: Families,
    blocks: Blocks | None,
    on_tensor: Callable[[], None] | None,
    reads_weights: bool,
    tokenizer: Tokenizer | None = None,
) -> LoadedCheckpoint:
    device = resolve_device(device)
    config, spec, head = _read_spec(sentence, families)
    decisions = _read_decisions(sentence, head)
    extraction = read_extraction(sentence.folder, spec, families)
    tokenizer = tokenizer or _load_tokenizer(sentence, spec)
    weights, spec = _open_weights(sentence, spec, head, decisions.adapter, on_tensor=on_tensor)
    quantization = wanted_format(dtype, spec, weights, device, is_alone=blocks is None)
    saved = _preferred_dtype(spec, weights.dtype)
    dtype = resolve_dtype(dtype, device, saved=saved, overflows_float16=overflows_float16(spec))
    bits, parts = memory_bits(quantization, spec, weights, dtype), _num_parts(spec, blocks)
    check_fits(weights.num_parameters, dtype, device, parts=parts, bits=bits)
    tasks = read_task_adapters(
        sentence.folder, config, weights, spec, default=sentence.default_task
    )
    if batch_invariant:
        check_batch_invariant(
            spec,
            sentence,
            device=device,
            dtype=dtype,
            quantization=quantization,
            has_adapters=tasks is not None,
        )
    transformer, heads = _load_model(
        spec,
        weights if reads_weights else weights.without_numbers(),
        dtype=dtype,
        device=device if reads_weights else torch.device("meta"),
        blocks=blocks,
        quantization=quantization if reads_weights else None,
        may_lack_head=sentence.may_lack_head,
        batch_invariant=batch_invariant,
        decision_head=head,
        label_ids=_label_ids(sentence, spec, tokenizer, decisions),
        extraction=extraction,
    )
    transformer = with_layer_mean(transformer, sentence)
    modules, token_modules, token_weight = _load_sentence_parts(
        sentence, spec, weights, device=device, dtype=dtype, batch_invariant=batch_invariant
    )
    unused = tuple(weights.unused())
    report_unused(folder, unused)
    return LoadedCheckpoint(
        folder=folder,
        spec=spec,
        sentence=sentence,
        modules=modules,
        transformer=transformer,
        heads=heads,
        tokenizer=tokenizer,
        chat_template=_load_chat_template(sentence),
        decisions=decisions,
        decision_template=decisions.template(sentence.folder),
        tag_biases=read_transition_biases(folder),
        pair_template=_load_pair_template(sentence, spec),
        cross_encoder_activation=sentence.activation_fn or _cross_encoder_activation(config),
        unused_tensors=unused,
        device=device,
        dtype=dtype,
        quantization=quantization,
        num_parameters=weights.num_parameters,
        saved_formats=weights.formats,
        dequantised=dict(weights.dequantised),
        extraction=extraction,
        token_weight=token_weight,
        token_modules=token_modules,
        tasks=tasks,
        batch_invariant=batch_invariant,
        families=families.folder,
    )


def _read_spec(
    sentence: SentenceSpec, families: Families | None
) -> tuple[dict[str, Any], ModelSpec, DecisionHeadSpec | None]:
    """(config.json, spec, decision head) of the transformer, of an adapter's base model where there
    is one."""
    if sentence.static is not None:
        return {}, static_spec(sentence.folder, sentence.static), None
    families, config = families or read_families(), load_config(sentence.folder)
    refuse_own_code(sentence.folder, config, families)
    head = read_decision_head(sentence.folder, config)
    spec = build_spec(trunk_config(config, head), families)
    if sentence.splade is not None:
        spec = token_logits_spec(spec)
    spec = encoder_spec(spec)
    check_mask(head, family=spec.family, is_causal=spec.is_causal)
    return config, spec, head


def _read_decisions(sentence: SentenceSpec, head: DecisionHeadSpec | None) -> DecisionConfig:
    return read_decision_config(sentence.folder, {} if head is None else head.settings)


def _load_sentence_parts(
    sentence: SentenceSpec,
    spec: ModelSpec,
    weights: Weights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> tuple[tuple[Module, ...], tuple[Module, ...], LinearWeight | None]:
    """(modules, token_modules, token_weight), as of LoadedCheckpoint."""
    token_head = partial(
        load_token_head,
        sentence.folder,
        in_features=spec.output_size,
        dtype=dtype,
        device=device,
        batch_invariant=batch_invariant,
    )
    token_modules = _load_token_modules(sentence, spec, weights, device=device)
    projection = token_head("colbert_linear", out_features=None)
    if sentence.multi_vector is None and projection is not None:
        token_modules = (Projection(projection), Normalize())
    token_weight = token_head("sparse_linear", out_features=1)
    modules = load_modules(sentence.modules, device=device)
    if not batch_invariant:
        return modules, token_modules, token_weight
    return invariant_modules(modules), invariant_modules(token_modules), token_weight


def _num_parts(spec: ModelSpec, blocks: Blocks | None) -> int:
    """Ranks that hold a model's layers together."""
    if blocks is None:
        return 1
    parts = 1 if blocks.shard is None else blocks.shard.size
    if blocks.hidden is not None:
        parts *= spec.hidden_size // len(blocks.hidden)
    return parts * (1 if blocks.weight_gather is None else blocks.weight_gather.size)


def _open_weights(
    sentence: SentenceSpec,
    spec: ModelSpec,
    head: DecisionHeadSpec | None,
    adapter: str | None,
    *,
    on_tensor: Callable[[], None] | None,
) -> tuple[Weights, ModelSpec]:
    """(weights, the spec with the names that they have)

    head: that of decide, which may lie in a file of its own.
    adapter: the subfolder of the LoRA that the decision files name."""
    beside = [] if head is None or head.file is None else [f"{head.file}.safetensors"]
    weights = Weights(sentence.folder, spec, beside=beside, on_tensor=on_tensor)
    if sentence.adapter is not None:
        merge_lora(sentence.adapter, weights, spec)
    if adapter is not None:
        merge_lora(sentence.folder / adapter, weights, spec)
    return weights, saved_spec(spec, weights)


def reopen_weights(checkpoint: LoadedCheckpoint) -> Weights:
    """The tensors of a checkpoint that is in memory, of which only headers are read.

    Raises CheckpointError where its files are gone or were changed.
    """
    adapter = checkpoint.decisions.adapter
    return _open_weights(checkpoint.sentence, checkpoint.spec, None, adapter, on_tensor=None)[0]


def _label_ids(
    sentence: SentenceSpec, spec: ModelSpec, tokenizer: Tokenizer | None, decisions: DecisionConfig
) -> list[int]:
    """Tokens that a causal model answers by: labels of questions, and those of a reranker."""
    if tokenizer is None or "lm" not in spec.heads:
        return []
    found: list[int | None] = [*decisions.label_ids(tokenizer).values()]
    score = sentence.logit_score
    found += [] if score is None else [score.true_token_id, score.false_token_id]
    found += [tokenizer.backend.token_to_id(word) for word in ("yes", "no")]
    return list(dict.fromkeys(own for own in found if own is not None and own < spec.vocab_size))


def _load_chat_template(
    sentence: SentenceSpec, *, variables: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The adapter's, where it has one."""
    folders = (sentence.adapter, sentence.folder)
    found = (load_chat_template(folder, variables=variables) for folder in folders if folder)
    return next((template for template in found if template is not None), None)


def _load_pair_template(sentence: SentenceSpec, spec: ModelSpec) -> ChatTemplate | None:
    """The chat template of the pairs that LogitScore scores; None where they are no chats."""
    score = sentence.logit_score
    if score is None:
        return None
    both = (score.true_token_id, score.false_token_id)
    ids = [token_id for token_id in both if token_id is not None]
    if not spec.is_causal or any(token_id >= spec.vocab_size for token_id in ids):
        raise CheckpointError(
            f"LogitScore reads the logits of tokens {', '.join(map(str, ids))} of a causal model; "
            f"this one is {spec.family} with {spec.vocab_size} tokens"
        )
    if score.message_format is None:
        return None
    variables = {"add_generation_prompt": False, **score.variables}
    template = _load_chat_template(sentence, variables=variables)
    if template is None:
        raise CheckpointError(
            f"{sentence.folder} has no chat template, and its sentence_bert_config.json says that "
            "pairs are chats; add chat_template.jinja"
        )
    return template


def _load_tokenizer(sentence: SentenceSpec, spec: ModelSpec) -> Tokenizer | None:
    if sentence.static is not None:
        return load_static_tokenizer(sentence.folder, sentence.static)
    tokenizer = load_tokenizer(
        sentence.tokenizer_folder,
        max_positions=spec.max_positions,
        max_seq_length=sentence.max_seq_length,
        do_lower_case=sentence.do_lower_case,
    )
    if tokenizer is not None and sentence.multi_vector is not None:
        for prefix in sentence.multi_vector.prefixes:
            tokenizer.add_prefix(prefix)
    return tokenizer


def _load_token_modules(
    sentence: SentenceSpec, spec: ModelSpec, weights: Weights, *, device: torch.device
) -> tuple[Module, ...]:
    """In f32; a projection among the transformer's own tensors comes first."""
    multi_vector = sentence.multi_vector
    if multi_vector is None:
        return ()
    modules = load_modules(multi_vector.modules, device=device)
    name = multi_vector.projection
    if name is None:
        return modules
    loader = TensorLoader(
        weights.cast(torch.float32), dtype=torch.float32, device=device, prepack=False
    )
    loader.require([name])
    rows = weights.shape(name)[:1]
    weight = loader.tensor(name, (*rows, spec.output_size))
    projection = Dense(prepare_linear(weight, prepack=False), ACTIVATIONS["Identity"], False, None)
    return projection, *modules


def load_spec(folder: Path, families: Families | None = None) -> ModelSpec:
    """The spec of a checkpoint's config.json. families: None are those of models/.

    Raises CheckpointError.
    """
    return _read_spec(load_sentence_spec(folder), families)[1]


def saved_dtype(folder: Path, spec: ModelSpec) -> torch.dtype:
    return _preferred_dtype(spec, Weights(load_sentence_spec(folder).folder, spec).dtype)


def _preferred_dtype(spec: ModelSpec, saved: torch.dtype) -> torch.dtype:
    """The dtype that "auto" goes by: the saved one, unless the family names its half type."""
    return DTYPES.get(spec.half_dtype, saved)


def overflows_float16(spec: ModelSpec) -> bool:
    """Whether the family's hidden states are beyond float16's range."""
    return spec.half_dtype == "bfloat16"


def load_shard(
    folder: Path,
    blocks: Blocks,
    *,
    dtype: torch.dtype,
    device: torch.device,
    families: Families | None = None,
    on_tensor: Callable[[], None] | None = None,
) -> tuple[Transformer, Heads]:
    """Load the weights that one rank of a group computes with, and nothing else of a checkpoint.

    families: None are those of models/.  on_tensor: called before each tensor is read.
    """
    sentence = load_sentence_spec(folder)
    _, spec, head = _read_spec(sentence, families)
    adapter = _read_decisions(sentence, head).adapter
    weights, spec = _open_weights(sentence, spec, head, adapter, on_tensor=on_tensor)
    return _load_model(
        spec,
        weights,
        dtype=dtype,
        device=device,
        blocks=blocks,
        may_lack_head=sentence.may_lack_head,
        decision_head=head,
    )


def _load_model(
    spec: ModelSpec,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
    may_lack_head: bool,
    quantization: str | None = None,
    batch_invariant: bool = False,
    decision_head: DecisionHeadSpec | None = None,
    label_ids: Sequence[int] = (),
    extraction: ExtractionSpec | SchemaSpec | None = None,
) -> tuple[Transformer, Heads]:
    """may_lack_head: the head that `architectures` names may be absent.

    label_ids: as of load_lm.
    """
    weights, prepack = weights.cast(dtype), device.type == "cpu"
    reader = StagedReader(device) if device.type == "cuda" else None
    if reader is not None:
        weights = weights.read_by(reader)
    try:
        transformer = Transformer.from_tensors(
            spec,
            weights,
            dtype=dtype,
            device=device,
            prepack=prepack,
            blocks=blocks,
            quantization=quantization,
            batch_invariant=batch_invariant,
        )
        loader = TensorLoader(
            weights,
            dtype=dtype,
            device=device,
            prepack=prepack,
            batch_invariant=batch_invariant,
        )
        if quantization == SAVED:
            loader = loader.keeping_codes()
        heads = load_heads(
            spec,
            loader,
            transformer,
            may_lack=may_lack_head,
            decision=decision_head,
            label_ids=label_ids,
            extraction=extraction,
        )
        return transformer, heads
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"the weights do not fit the memory of {device} in {dtype}: {error}; free memory "
            "there, or load them in float16 or with tp"
        ) from error
    finally:
        if reader is not None:
            reader.close()


def check_placement(device: str, dtype: str) -> None:
    """Raises OptionError where no checkpoint could be loaded with these."""
    resolve_device(device)
    # For no device in particular: this process may yet fork, and a GPU is not asked before that.
    resolve_dtype(dtype, torch.device("meta"), saved=torch.float32)


def default_device() -> str:
    """The device that "auto" names: CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is default_device(). Raises OptionError for a device torch cannot use."""
    if device == "auto":
        check_device_after_fork(None)
        device = default_device()
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device must be auto, cpu or cuda[:index], got {shown(device)}"
        ) from error
    if resolved.type not in ("cpu", "cuda"):
        raise OptionError(f"device must be auto, cpu or cuda[:index], got {shown(device)}")
    if resolved.type == "cuda":
        check_device_after_fork(resolved)
        if (resolved.index or 0) >= torch.cuda.device_count():
            raise OptionError(
                f"device {shown(device)} was asked for, torch sees {torch.cuda.device_count()} "
                "CUDA devices; use device='cpu'"
            )
        resolved = torch.device("cuda", resolved.index or 0)
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device,
    *,
    saved: torch.dtype,
    overflows_float16: bool = False,
) -> torch.dtype:
    """ "auto" is float32 on a CPU; on CUDA the checkpoint's own half type, else float16.

    On a GPU before Ampere, which has no bfloat16, it is float16, or float32 for a model that
    overflows it, and bfloat16 raises OptionError.
    "fastest" is bfloat16 on a CPU that multiplies it faster than float32, elsewhere as "auto".
    The same holds for everything but the GEMMs with "fp8"; with "int8" and "int4" it is bfloat16
    where the CPU computes with it.
    """
    weight_format = WEIGHT_FORMATS.get(dtype) if isinstance(dtype, str) else None
    is_cpu = device.type == "cpu"
    if is_cpu and weight_format is not None and weight_format.dtype is not None:
        return weight_format.dtype()
    if dtype in ("auto", "fastest") or weight_format is not None:
        if is_cpu:
            return torch.bfloat16 if dtype == "fastest" and is_bf16_faster() else torch.float32
        if saved == torch.bfloat16 and _why_no_bf16(device) is not None:
            return torch.float32 if overflows_float16 else torch.float16
        return saved if saved in (torch.float16, torch.bfloat16) else torch.float16
    resolved = dtype
    if isinstance(dtype, str):
        resolved = DTYPES.get(DTYPE_ALIASES.get(dtype, dtype), dtype)
    if not isinstance(resolved, torch.dtype) or resolved not in DTYPES.values():
        *known, last = (*DTYPES, *DTYPE_ALIASES, *WEIGHT_FORMATS)
        raise OptionError(
            f"dtype must be auto, fastest, {', '.join(known)} or {last}, got {shown(dtype)}"
        )
    reason = _why_no_bf16(device) if resolved == torch.bfloat16 else None
    if reason is not None:
        raise OptionError(f"dtype bfloat16 cannot run on {device}: {reason}; use auto or float16")
    return resolved


def _why_no_bf16(device: torch.device) -> str | None:
    """torch emulates bfloat16 on GPUs before Ampere, many times slower than float32."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= _BF16_CAPABILITY:
        return None
    return f"GPUs compute with it from sm_80 on, and this one is sm_{major}{minor}"


def _cross_encoder_activation(config: Mapping[str, Any]) -> str | None:
    """The activation in config.json, under the key of newer or of older sentence-transformers."""
    given = config.get("sentence_transformers") or {}
    check_fields("config.json: sentence_transformers", given, {"activation_fn": TEXT})
    return given.get("activation_fn") or config.get("sbert_ce_default_activation_function")
