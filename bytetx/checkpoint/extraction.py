"""GLiNER's files: gliner_config.json describes the encoder and the head that extracts spans."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytetx.checkpoint.families import Families
from bytetx.checkpoint.files import (
    GLINER,
    GLINER2,
    GLINER_CONFIG,
    GLINER_SAVE,
    as_encoder,
    refuse_own_code,
)
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.schema_spec import POOLING, SchemaSpec, read_schema_spec
from bytetx.checkpoint.side_files import (
    FLAG,
    TABLE,
    TEXT,
    Field,
    check_fields,
    integer,
    one_of,
    read_json,
)
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError

# What the names of the encoder's tensors begin with in a GLiNER model's file.
_ENCODER = "token_rep_layer.bert_layer.model."
_ENCODER2 = "encoder."
LABELS_ENCODER = "token_rep_layer.labels_encoder.model."
LABELS_TOKENIZER = "labels_tokenizer"
# An encoder without a table of positions reads texts of any length; attention's memory ends them.
_MOST_POSITIONS = 1 << 14
_TOKEN_LEVEL = ("token_level", "token-level")
_MARKERS = ("marker", "markerV0", "markerV1")
# Attention between labels and words, by who attends to whom: l are labels, t words of the text.
FUSIONS = ("l2l", "t2t", "l2t", "t2l")

# How likely two spans are to have a relation, before it is asked which one.
ADJACENCIES = ("dot", "mlp", "attention", "bilinear", "gcn", "gat")

_FIELDS: dict[str, Field] = {
    "class_token_index": integer(-1),
    "embed_ent_token": FLAG,
    "embed_rel_token": FLAG,
    "encoder_config": TABLE,
    "ent_token": TEXT,
    "fuse_layers": FLAG,
    "hidden_size": integer(1),
    "labels_encoder": TEXT,
    "labels_encoder_config": TABLE,
    "max_len": integer(1),
    "max_width": integer(1, 1 << 10),
    "num_post_fusion_layers": integer(1, 64),
    "num_rnn_layers": integer(0, 64),
    "post_fusion_schema": TEXT,
    "precomputed_prompts_mode": FLAG,
    "rel_token": TEXT,
    "relations_layer": one_of(*ADJACENCIES, "attn", "none"),
    "represent_spans": FLAG,
    "sep_token": TEXT,
    "span_mode": TEXT,
    "subtoken_pooling": TEXT,
    "words_splitter_type": TEXT,
}
# Keys of kinds of models that are not read, and what they say.
_OTHER_KINDS = {
    "labels_decoder": "labels are generated",
    "triples_layer": "triples have a scorer of their own",
    "decoder_config": "the text model is a causal one",
    "span_encoder_config": "a second encoder reads the words",
}


@dataclass(frozen=True, slots=True)
class LabelsSpec:
    """An encoder of its own for labels (a bi-encoder).  folder: of its tokenizer."""

    encoder: ModelSpec
    folder: Path


@dataclass(frozen=True, slots=True)
class RelationSpec:
    """Relations between spans: their names follow the labels, each with its marker, before a
    second separator.

    reads_label: a relation is the token behind its marker.  adjacency: one of ADJACENCIES; None
    asks of each pair which relations it has.
    """

    marker: str
    reads_label: bool
    adjacency: str | None


@dataclass(frozen=True, slots=True)
class ExtractionSpec:
    """A GLiNER head: labels come before a text in its prompt, and spans of words are scored.

    A prompt is the marker and the words of each label, then the separator; none where labels have
    an encoder of their own.
    hidden_size: of words and labels; the encoder's rows are projected to it where they have another
    size.  max_words: of a text.  max_width: words of a span, None where each word has scores of its
    own.  markers: how a span is made of its ends: marker, markerV0, markerV1.
    num_lstm_layers: over the words, 0 for none.  pooling: a mode of ops.pooling, of a word's
    tokens.  reads_label: a label is the token behind its marker.
    fusion: layers of attention between labels and words, each some of FUSIONS.
    """

    hidden_size: int
    max_words: int
    max_width: int | None
    markers: str
    num_lstm_layers: int
    pooling: str
    marker: str
    separator: str
    reads_label: bool
    labels: LabelsSpec | None = None
    fusion: tuple[tuple[str, ...], ...] = ()
    relations: RelationSpec | None = None


def is_extractor(spec: ModelSpec) -> bool:
    """Whether the model is the encoder of a GLiNER checkpoint."""
    return spec.architectures in ((GLINER,), (GLINER2,))


def read_extraction(
    folder: Path, spec: ModelSpec, families: Families
) -> ExtractionSpec | SchemaSpec | None:
    """The head of a GLiNER checkpoint; None of others.

    spec: of the encoder.  families: of the labels' encoder, too.
    Raises CheckpointError for damaged files and for kinds of models that are not read.
    """
    if not is_extractor(spec):
        return None
    if spec.architectures == (GLINER2,):
        return read_schema_spec(folder / "config.json")
    path = folder / GLINER_CONFIG
    content = read_json(path)
    check_fields(path, content, _FIELDS)
    given = {key: value for key, value in content.items() if value is not None}
    _refuse_others(path, given)
    mode = given.get("span_mode", "markerV0")
    is_token_level = mode in _TOKEN_LEVEL
    if not is_token_level and mode not in _MARKERS:
        raise CheckpointError(
            f"{path}: span_mode {mode!r:.120} is not supported; bytetx runs "
            f"{', '.join(_MARKERS)} and token_level"
        )
    pooling = given.get("subtoken_pooling", "first")
    if pooling not in POOLING:
        raise CheckpointError(
            f"{path}: subtoken_pooling must be one of {', '.join(POOLING)}, got {pooling!r:.120}"
        )
    labels = _read_labels(path, given, families)
    return ExtractionSpec(
        hidden_size=given.get("hidden_size", 512),
        max_words=given.get("max_len", 384),
        max_width=None if is_token_level else given.get("max_width", 12),
        markers=mode,
        # The package makes the LSTM of a bi-encoder, too, and never runs it.
        num_lstm_layers=given.get("num_rnn_layers", 1) if labels is None else 0,
        pooling=POOLING[pooling],
        marker=given.get("ent_token", "<<ENT>>"),
        separator=given.get("sep_token", "<<SEP>>"),
        reads_label=not given.get("embed_ent_token", True),
        labels=labels,
        fusion=() if labels is None else _read_fusion(path, given),
        relations=_read_relations(given),
    )


def _read_relations(given: Mapping[str, Any]) -> RelationSpec | None:
    kind = given.get("relations_layer")
    if kind is None:
        return None
    names = {"none": None, "attn": "attention"}
    return RelationSpec(
        given.get("rel_token", "<<REL>>"),
        not given.get("embed_rel_token", True),
        names.get(kind, kind),
    )


def _read_labels(path: Path, given: Mapping[str, Any], families: Families) -> LabelsSpec | None:
    name = given.get("labels_encoder")
    if not name:
        return None
    config = given.get("labels_encoder_config")
    folder = path.parent / LABELS_TOKENIZER
    if not config or not folder.is_dir():
        lacks = f"{path} has no labels_encoder_config" if not config else f"{folder} is not there"
        raise CheckpointError(
            f"{lacks}, and labels have an encoder of their own, {name!r:.120}; save the model "
            f"again, in that folder: {GLINER_SAVE}"
        )
    config = as_encoder(path, config)
    refuse_own_code(path.parent, config, families)
    return LabelsSpec(encoder_spec(build_spec(config, families)), folder)


def _read_fusion(path: Path, given: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    schema = given.get("post_fusion_schema", "")
    layer = tuple(schema.split("-")) if schema else ()
    for kind in layer:
        if kind not in FUSIONS:
            raise CheckpointError(
                f"{path}: post_fusion_schema must be of {', '.join(FUSIONS)} with '-' between, got "
                f"{schema!r:.120}"
            )
    num_layers: int = given.get("num_post_fusion_layers", 1)
    return (layer,) * num_layers if layer else ()


def _refuse_others(path: Path, given: Mapping[str, Any]) -> None:
    for key, meaning in _OTHER_KINDS.items():
        if given.get(key):
            raise CheckpointError(
                f"{path}: {key} says that {meaning}, which bytetx does not run yet"
            )
    for key in ("fuse_layers", "precomputed_prompts_mode", "represent_spans"):
        if given.get(key):
            raise CheckpointError(f"{path}: {key} true is not supported")
    splitter = given.get("words_splitter_type", "whitespace")
    if splitter != "whitespace":
        raise CheckpointError(
            f"{path}: words_splitter_type {splitter!r:.120} is not supported; bytetx splits words "
            "as 'whitespace' does"
        )


def encoder_spec(spec: ModelSpec) -> ModelSpec:
    """The spec of an encoder whose tensors lie in a GLiNER model's file; another as it is."""
    if not is_extractor(spec):
        return spec
    prefix = _ENCODER if spec.architectures == (GLINER,) else _ENCODER2
    positions = spec.max_positions
    if "position" not in spec.embeddings and spec.layer_spec.disentangled is not None:
        positions = max(positions, _MOST_POSITIONS)
    return replace(spec, prefixes=(*spec.prefixes, prefix), max_positions=positions)
