"""GLiNER2's config.json: the head that fills schemas, of spans (2) or of boundaries (2.5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytetx.checkpoint.side_files import (
    FLAG,
    TABLE,
    TEXT,
    Field,
    check_fields,
    integer,
    number,
    one_of,
    read_json,
)
from bytetx.errors import CheckpointError

# How the row of a word is made of those of its tokens, as a mode of ops.pooling.
POOLING = {"first": "cls", "last": "lasttoken", "mean": "mean", "max": "max"}

_WIDTH = integer(1, 1 << 14)
_SPAN_FIELDS: dict[str, Field] = {
    "max_width": integer(1, 1 << 10),
    "span_mode": one_of("markerV0"),
}
_SCHEMA_FIELDS: dict[str, Field] = {
    "architecture": one_of("span", "boundary"),
    "boundary_head": TABLE,
    "config_version": integer(0),
    "counting_layer": one_of("count_lstm", "count_lstm_moe", "count_lstm_v2"),
    "max_len": integer(1),
    "max_width": integer(1, 1 << 10),
    "span_head": TABLE,
    "token_pooling": TEXT,
}
_BOUNDARY_FIELDS: dict[str, Field] = {
    "abstention_threshold": number(0, 1),
    "adaptive_threshold": FLAG,
    "boundary_attention_heads": integer(1, 1 << 10),
    "boundary_attention_layers": integer(0, 64),
    "boundary_attention_window": integer(0),
    "boundary_dim": _WIDTH,
    "boundary_ffn_multiplier": number(1e-6, 1 << 10),
    "boundary_refinement_layers": integer(0, 64),
    "candidate_attention_layers": integer(0, 64),
    "candidate_pool": TEXT,
    "classification_temperature": number(1e-6),
    "content_dim": _WIDTH,
    "content_soft_max_pool": FLAG,
    "directional_relation_states": FLAG,
    "enable_abstention": FLAG,
    "enable_records": FLAG,
    "enable_relations": FLAG,
    "enable_span_content": FLAG,
    "min_pool_per_query": integer(0, 1 << 16),
    "overlap_policy": one_of("flat", "nested", "longest"),
    "pair_dim": _WIDTH,
    "pair_temperature": number(1e-6),
    "pool_boundary_top_k": integer(1, 1 << 10),
    "pool_size": integer(1, 1 << 16),
    "query_attention_layers": integer(0, 64),
    "relation_argument_proposal_threshold": number(0, 1),
    "relation_biaffine_content": FLAG,
    "relation_heads_per_type": integer(1, 1 << 10),
    "relation_pair_cap": integer(1, 1 << 16),
    "relation_tails_per_type": integer(1, 1 << 10),
    "relation_temperature": number(1e-6),
    "use_inside_evidence": FLAG,
}


@dataclass(frozen=True, slots=True)
class SchemaSpec:
    """A GLiNER2 head: a schema comes before a text, and spans of words are scored for its fields.

    max_words: of a text, None for no limit.  pooling: a mode of ops.pooling, of a word's tokens.
    """

    max_words: int | None
    pooling: str


@dataclass(frozen=True, slots=True)
class SpanSchemaSpec(SchemaSpec):
    """Every span of few words is scored.

    max_width: words of a span.  counter: what tells the instances of a structure apart.
    """

    max_width: int
    counter: str


@dataclass(frozen=True, slots=True)
class BoundaryRelationSpec:
    """Relations between candidates.

    max_heads, max_tails: candidates for each relation; max_pairs: of these.  threshold: the least
    score of a head or tail.  is_directional: a relation is read as its head and its tail, else as
    their mean.  reads_content: the words inside are read, too.  temperature: of the scores.
    """

    max_heads: int
    max_tails: int
    max_pairs: int
    threshold: float
    is_directional: bool
    reads_content: bool
    temperature: float


@dataclass(frozen=True, slots=True)
class BoundarySpec(SchemaSpec):
    """Spans of any length, of the likeliest starts and ends: candidates, one pool for all fields.

    size, pair_size: features of a boundary between words, and of a candidate.
    inner_sizes: of the hidden layers behind the attention of boundaries.
    num_attention_layers, num_heads, window: of boundaries; a window of 0 is no window.
    content_size: features of the words inside; 0: they are not read.  takes_largest: their largest
    are read, too, not the mean alone.
    top_k: starts, and ends.  pool_size: candidates; min_pool: those that each field chooses first.
    abstains_above: a text has no such entity where the chance of that is above it; None: it is not
    asked.  overlap: flat, nested or longest.  temperature, class_temperature: what logits
    of spans and of classes are divided by.
    """

    size: int
    pair_size: int
    inner_sizes: tuple[int, ...]
    num_attention_layers: int
    num_heads: int
    window: int
    content_size: int
    takes_largest: bool
    reads_inside: bool
    top_k: int
    pool_size: int
    min_pool: int
    abstains_above: float | None
    overlap: str
    temperature: float
    class_temperature: float
    relations: BoundaryRelationSpec | None


def read_schema_spec(path: Path) -> SpanSchemaSpec | BoundarySpec:
    """Raises CheckpointError for damaged files and for heads that are not read."""
    content = read_json(path, _SCHEMA_FIELDS)
    given = {key: value for key, value in content.items() if value is not None}
    pooling = POOLING.get(given.get("token_pooling", "first"), "cls")
    max_words = given.get("max_len")
    if given.get("architecture", "span") == "boundary":
        return _read_boundary(path, given, max_words, pooling)
    head = given.get("span_head", {})
    check_fields(f"{path}: span_head", head, _SPAN_FIELDS)
    width = head.get("max_width", given.get("max_width", 8))
    return SpanSchemaSpec(max_words, pooling, width, given.get("counting_layer", "count_lstm"))


def _read_boundary(
    path: Path, content: Mapping[str, Any], max_words: int | None, pooling: str
) -> BoundarySpec:
    where, table = f"{path}: boundary_head", content.get("boundary_head", {})
    check_fields(where, table, _BOUNDARY_FIELDS)
    given = {key: value for key, value in table.items() if value is not None}
    _refuse_others(where, given)
    size = given.get("boundary_dim", 128)
    inner = max(1, int(size * float(given.get("boundary_ffn_multiplier", 2.0))))
    num_heads = given.get("boundary_attention_heads", 4)
    num_layers = given.get("boundary_attention_layers", 0)
    if num_layers and size % num_heads:
        raise CheckpointError(
            f"{where}: boundary_dim {size} must be a multiple of boundary_attention_heads "
            f"{num_heads}"
        )
    return BoundarySpec(
        max_words=max_words,
        pooling=pooling,
        size=size,
        pair_size=given.get("pair_dim", 128),
        inner_sizes=(inner,) * given.get("boundary_refinement_layers", 1),
        num_attention_layers=num_layers,
        num_heads=num_heads,
        window=given.get("boundary_attention_window", 0),
        content_size=given.get("content_dim", 64) if given.get("enable_span_content") else 0,
        takes_largest=given.get("content_soft_max_pool", False),
        reads_inside=given.get("use_inside_evidence", True),
        top_k=given.get("pool_boundary_top_k", 64),
        pool_size=given.get("pool_size", 384),
        min_pool=given.get("min_pool_per_query", 8),
        abstains_above=(
            float(given.get("abstention_threshold", 0.5))
            if given.get("enable_abstention", True)
            else None
        ),
        overlap=given.get("overlap_policy", "flat"),
        temperature=float(given.get("pair_temperature", 1.0)),
        class_temperature=float(given.get("classification_temperature", 1.0)),
        relations=_read_relations(content, given),
    )


def _read_relations(
    content: Mapping[str, Any], given: Mapping[str, Any]
) -> BoundaryRelationSpec | None:
    # Configs of an older version that do not name them are of models without.
    by_default = content.get("config_version", 0) >= 3
    if not given.get("enable_relations", by_default):
        return None
    return BoundaryRelationSpec(
        given.get("relation_heads_per_type", 32),
        given.get("relation_tails_per_type", 32),
        given.get("relation_pair_cap", 128),
        float(given.get("relation_argument_proposal_threshold", 0.0)),
        given.get("directional_relation_states", False),
        given.get("relation_biaffine_content", False),
        float(given.get("relation_temperature", 1.0)),
    )


def _refuse_others(where: str, given: Mapping[str, Any]) -> None:
    """Refuses what no published model has."""
    pool = given.get("candidate_pool", "per_query")
    if pool != "shared":
        raise CheckpointError(
            f"{where}: candidate_pool {pool!r:.120} is not supported; bytetx runs models whose "
            "fields share one pool ('shared'), as the published ones do"
        )
    for key, default in (("candidate_attention_layers", 2), ("query_attention_layers", 1)):
        if given.get(key, default):
            raise CheckpointError(
                f"{where}: {key} {given.get(key, default)} is not supported; bytetx runs models "
                "whose candidates do not attend to each other (0), as the published ones"
            )
    if given.get("adaptive_threshold", False):
        raise CheckpointError(f"{where}: adaptive_threshold true is not supported")
