"""The heads of a checkpoint: the one that config.json names, or those whose tensors are there."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bytetx.checkpoint.decision_heads import DecisionHeadSpec
from bytetx.checkpoint.extraction import ExtractionSpec
from bytetx.checkpoint.schema_spec import BoundarySpec, SchemaSpec, SpanSchemaSpec
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import CheckpointError
from bytetx.nn.boundary_head import load_boundary_head
from bytetx.nn.extraction import ExtractionHead, load_extraction
from bytetx.nn.heads import (
    ClassificationHead,
    DecisionHead,
    LmHead,
    MaskedLMHead,
    load_decision,
    load_lm,
    load_masked_lm,
    load_question_answering,
    load_ranking,
    load_sequence_classification,
    load_token_classification,
)
from bytetx.nn.schema_head import SchemaHead, load_schema_head
from bytetx.nn.tensors import TensorLoader
from bytetx.nn.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that the checkpoint has; None for those it has not."""

    sequence: ClassificationHead | None = None
    token: ClassificationHead | None = None
    masked_lm: MaskedLMHead | None = None
    lm: LmHead | None = None
    question_answering: ClassificationHead | None = None
    decision: DecisionHead | None = None
    extraction: ExtractionHead | SchemaHead | None = None
    ranking: ClassificationHead | None = None


def load_heads(
    spec: ModelSpec,
    load: TensorLoader,
    transformer: Transformer,
    *,
    may_lack: bool,
    decision: DecisionHeadSpec | None,
    label_ids: Sequence[int],
    extraction: ExtractionSpec | SchemaSpec | None = None,
) -> Heads:
    """The head that `architectures` names; where it names none, those whose tensors are there.

    may_lack: sentence-transformers saves a model without its head and leaves the name of the class
    that it was trained from.  A decision head beside a trunk comes with those of the trunk.
    """
    if decision is not None and decision.file is not None:
        trunk = load_heads(
            spec, load, transformer, may_lack=True, decision=None, label_ids=label_ids
        )
        return replace(trunk, decision=load_decision(spec, load, decision))
    if isinstance(extraction, BoundarySpec):
        return Heads(extraction=load_boundary_head(extraction, load, size=spec.output_size))
    if isinstance(extraction, SpanSchemaSpec):
        return Heads(extraction=load_schema_head(extraction, load, size=spec.output_size))
    if isinstance(extraction, ExtractionSpec):
        return Heads(extraction=load_extraction(extraction, load, spec))
    blocks = transformer.blocks

    def lm() -> LmHead | None:
        table = transformer.embeddings
        return load_lm(
            spec, load, word=table.word, coded=table.coded, blocks=blocks, label_ids=label_ids
        )

    def masked_lm() -> MaskedLMHead | None:
        return load_masked_lm(spec, load, word=transformer.embeddings.word, blocks=blocks)

    architecture = spec.architectures[0] if spec.architectures else ""
    heads_by_ending: dict[str, tuple[str, Callable[[], Heads]]] = {
        "ForSequenceClassification": (
            "sequence",
            lambda: Heads(sequence=load_sequence_classification(spec, load)),
        ),
        "ForTokenClassification": (
            "token",
            lambda: Heads(token=load_token_classification(spec, load)),
        ),
        "ForQuestionAnswering": (
            "question_answering",
            lambda: Heads(question_answering=load_question_answering(spec, load)),
        ),
        "ForMaskedLM": ("masked_lm", lambda: Heads(masked_lm=masked_lm())),
        "ForPreTraining": ("masked_lm", lambda: Heads(masked_lm=masked_lm())),
        "ForCausalLM": ("lm", lambda: Heads(lm=lm())),
        "LMHeadModel": ("lm", lambda: Heads(lm=lm())),
        "ForRanking": ("ranking", lambda: Heads(ranking=load_ranking(spec, load))),
        "ForDecision": ("decision", lambda: Heads(decision=load_decision(spec, load, decision))),
    }
    # The text model of a multimodal checkpoint, saved beside other models.
    if "lm" in spec.heads:
        heads_by_ending["ForConditionalGeneration"] = heads_by_ending["ForCausalLM"]
    for ending, (kind, load_head) in heads_by_ending.items():
        if architecture.endswith(ending):
            heads = load_head()
            if kind == "lm" and spec.is_bidirectional:  # it was trained from a causal model
                return heads
            if heads == Heads() and ending != "ForPreTraining" and not may_lack:
                raise CheckpointError(_no_head(spec, architecture, kind))
            return heads
    is_headed = "For" in architecture or architecture.endswith("DoubleHeadsModel")
    if is_headed and not may_lack:
        raise CheckpointError(_unknown_head(spec, architecture))
    if architecture:
        return Heads()
    sequence = load_sequence_classification(spec, load)
    token = load_token_classification(spec, load) if sequence is None else None
    is_classifier = sequence is not None or token is not None
    answers = None if is_classifier else load_question_answering(spec, load)
    return Heads(sequence, token, masked_lm(), lm(), answers)


def _no_head(spec: ModelSpec, architecture: str, kind: str) -> str:
    names = {"sequence": "sequence_classification", "token": "token_classification"}
    if kind != "decision" and names.get(kind, kind) not in spec.heads:
        known = ", ".join(spec.heads) or "none"
        return (
            f"config.json says {architecture}, a head that bytetx does not have for "
            f"{spec.family}; it has: {known}"
        )
    return f"config.json says {architecture}, but the checkpoint lacks that head's tensors"


def _unknown_head(spec: ModelSpec, architecture: str) -> str:
    """The error text for a head that bytetx does not have: it names those that it has."""
    stem = re.split("For|DoubleHeads", architecture)[0]
    names = {"sequence_classification": f"{stem}ForSequenceClassification"}
    names |= {"token_classification": f"{stem}ForTokenClassification"}
    names |= {"question_answering": f"{stem}ForQuestionAnswering"}
    names |= {"masked_lm": f"{stem}ForMaskedLM", "lm": f"{stem}ForCausalLM"}
    known = ", ".join(name for head, name in names.items() if head in spec.heads)
    return (
        f"config.json says {architecture}, a head that bytetx does not have; for {spec.family} it "
        f"runs {known}. The layers below the head can run without it, for embed and hidden_states: "
        f'in a copy of config.json, set "architectures": ["{stem}Model"]'
    )
