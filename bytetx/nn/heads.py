"""Heads on packed rows: first-token classifiers, token tags, masked-LM and LM logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bytetx.checkpoint.decision_heads import DecisionHeadSpec
from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import HeadSpec, ModelSpec
from bytetx.errors import CheckpointError
from bytetx.nn.blocks import Blocks
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.coded_linear import CodedWeight
from bytetx.ops.linear import LinearWeight, linear, prepare_linear
from bytetx.ops.log_softmax import log_softmax
from bytetx.ops.norm import RowNorm
from bytetx.ops.pooling import pool
from bytetx.packed import PackedBatch

# Logits of one block of rows: 128 MiB are 110 rows of a vocabulary of 151 936, twice in f32.
_MAX_LOGITS_BYTES = 128 << 20
# A tied head that is laid out for oneDNN is a copy of the word embedding. The logits of 32 rows of
# GPT-2 take 16 instead of 24 ms with it, on two cores, of a step of 60 ms.
MAX_COPIED_HEAD_BYTES = 1 << 30

# (this rank's part of a head, rows) -> logits of the whole head.
HeadPlacement = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


# Numbers of a vector of a listwise reranker, as its authors fix it.
RANKING_SIZE = 512


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """(dense -> activation -> norm ->) out, on rows of sequences or of tokens.

    pooling: as of HeadSpec.
    """

    dense: LinearWeight | None
    activation: str
    out: LinearWeight | None
    norm: RowNorm | None = None
    pooling: str = "cls"

    @torch.inference_mode()
    def classify(self, hidden_states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """hidden_states [total_tokens, hidden_size] -> [batch_size, num_labels], f32 if late."""
        if self.pooling == "late":
            return pool(self.forward(hidden_states), batch.cu_seqlens, mode="mean")
        mode = "lasttoken" if self.pooling == "last" else self.pooling
        rows = pool(hidden_states, batch.cu_seqlens, mode=mode)
        return self.forward(rows.to(hidden_states.dtype))

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, hidden_size] -> [n, num_labels], or [n, hidden_size] for a bare pooler."""
        if self.dense is not None:
            rows = _activated(rows, self.dense, self.activation)
        if self.norm is not None:
            rows = self.norm(rows)
        return rows if self.out is None else linear(rows, self.out)


@dataclass(frozen=True, slots=True)
class MaskedLMHead:
    """(dense -> activation -> norm ->) decoder over the vocabulary.

    second_dense: another layer of the kind of dense, right after its activation.

    blocks: where the vocabulary is sharded over a group, every rank calls forward.
    placement: runs forward where this rank tells the others to call it; None: all call it alike.
    """

    dense: LinearWeight | None
    activation: str
    norm: RowNorm | None
    decoder: LinearWeight
    blocks: Blocks | None = None
    placement: HeadPlacement | None = None
    second_dense: LinearWeight | None = None

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, hidden_size] -> logits [n, vocab_size]."""
        return self._run(rows) if self.placement is None else self.placement(self._run, rows)

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            rows = _activated(rows, self.dense, self.activation)
        if self.second_dense is not None:
            rows = _activated(rows, self.second_dense, self.activation)
        if self.norm is not None:
            rows = self.norm(rows)
        logits = linear(rows, self.decoder)
        return logits if self.blocks is None else self.blocks.gather_vocab(logits)


@dataclass(frozen=True, slots=True)
class LabelRows:
    """Some rows of a decoder, whose logits take no product with the vocabulary.

    token_ids: of the rows, by their place.  weight: [at least as many, embedding_size].
    """

    token_ids: Sequence[int]
    weight: LinearWeight


@dataclass(frozen=True, slots=True)
class LmHead:
    """Logits of the next token, on the rows given.

    blocks, placement: as of MaskedLMHead.
    divisor: of the logits.  softcap: logits x become softcap * tanh(x / softcap); 0: they stay.
    labels: the rows of tokens that questions are answered by.
    """

    decoder: LinearWeight | CodedWeight
    vocab_size: int
    blocks: Blocks | None = None
    divisor: float = 1.0
    softcap: float = 0.0
    placement: HeadPlacement | None = None
    labels: LabelRows | None = None

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, embedding_size] -> logits [n, vocab_size] in the model's dtype."""
        return self._run(rows) if self.placement is None else self.placement(self._run, rows)

    @torch.inference_mode()
    def token_logits(self, rows: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """rows [n, embedding_size] -> f32 [n, len(token_ids)], the logits of these tokens alone.

        Where they are all among `labels` nothing else of the vocabulary is multiplied.
        """
        labels = self.labels
        if labels is not None and set(token_ids) <= set(labels.token_ids):
            columns = [labels.token_ids.index(token_id) for token_id in token_ids]
            logits = replace(self, decoder=labels.weight, blocks=None)._run(rows)
            return _columns(logits, columns)
        pieces = rows.split(logits_block(self.vocab_size)) if len(rows) else [rows]
        return torch.cat([_columns(self.forward(some), token_ids) for some in pieces])

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.matmul(rows)
        if self.divisor != 1.0:
            logits /= self.divisor
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.blocks is None else self.blocks.gather_vocab(logits)

    @torch.inference_mode()
    def log_likelihoods(
        self, x: torch.Tensor, targets: torch.Tensor, *, rows: torch.Tensor
    ) -> torch.Tensor:
        """f32 [n]: log p(targets[i] | x[rows[i]]); targets, rows: int64 [n].

        Rows are taken in blocks, so that the logits held at once stay near _MAX_LOGITS_BYTES.
        """
        block = logits_block(self.vocab_size)
        out = torch.empty(rows.shape[0], device=x.device)
        for first in range(0, rows.shape[0], block):
            some = slice(first, first + block)
            logprobs = log_softmax(self.forward(x[rows[some]]))
            out[some] = logprobs.gather(1, targets[some, None]).squeeze(1)
        return out


@dataclass(frozen=True, slots=True)
class DecisionHead:
    """Scores of the options of a question, from the row before its answer.

    offsets: by the type of a question, the score of its first option.
    softcap: as of LmHead.
    """

    out: LinearWeight
    offsets: Mapping[str, int]
    softcap: float = 0.0

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, hidden_size] -> f32 [n, num_verbalizers]."""
        scores = linear(rows, self.out)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores.float()


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Logits [num_rows, vocab_size] of rows x [num_rows, embedding_size], computed when indexed.

    Those of a long prompt are gigabytes: index slices of logits_block rows.
    """

    head: LmHead
    x: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return self.head.forward(self.x[rows])


def _activated(rows: torch.Tensor, weight: LinearWeight, activation: str) -> torch.Tensor:
    """linear(), where NaN stays NaN: a kernel's own relu may make 0 of it, and a finite logit."""
    if activation in ("relu", "relu2"):
        activated = linear(rows, weight).relu_()
        return activated if activation == "relu" else activated.square_()
    return linear(rows, weight, activation=activation)


def _columns(logits: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """Some columns, f32; a list of them as an index would be copied to the device."""
    if list(columns) == list(range(len(columns))):
        return logits[:, : len(columns)].float()
    return torch.stack([logits[:, column] for column in columns], dim=1).float()


def logits_block(vocab_size: int) -> int:
    """Rows whose logits, with what is computed of them in f32, stay near _MAX_LOGITS_BYTES."""
    return max(1, _MAX_LOGITS_BYTES // (8 * vocab_size))


def first_tokens(hidden_states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The first row of every sequence: [batch_size, hidden_size], zeros for an empty one."""
    return pool(hidden_states, batch.cu_seqlens, mode="cls").to(hidden_states.dtype)


def load_pooler(spec: ModelSpec, load: TensorLoader) -> ClassificationHead | None:
    """BERT's tanh pooler, or None where the family or the checkpoint has none."""
    return _classification(spec, load, "pooler", num_labels=0)


def load_sequence_classification(spec: ModelSpec, load: TensorLoader) -> ClassificationHead | None:
    """The head of a ...ForSequenceClassification checkpoint, or None where it has none."""
    return _classification(spec, load, "sequence_classification", num_labels=spec.num_labels)


def load_token_classification(spec: ModelSpec, load: TensorLoader) -> ClassificationHead | None:
    """The head of a ...ForTokenClassification checkpoint, or None where it has none."""
    return _classification(spec, load, "token_classification", num_labels=spec.num_labels)


def load_question_answering(spec: ModelSpec, load: TensorLoader) -> ClassificationHead | None:
    """The head of a ...ForQuestionAnswering checkpoint, or None where it has none."""
    return _classification(spec, load, "question_answering", num_labels=2, has_labels=False)


def load_ranking(spec: ModelSpec, load: TensorLoader) -> ClassificationHead | None:
    """The head of a ...ForRanking checkpoint, or None where it has none: without biases."""
    head = spec.heads.get("ranking")
    if head is None or not _has(load, head):
        return None
    assert head.dense and head.out  # families say so
    inner = spec.output_size // 2
    return ClassificationHead(
        dense=load.linear(head.dense, inner, spec.output_size, has_bias=False),
        activation=head.activation or "none",
        out=load.linear(head.out, RANKING_SIZE, inner, has_bias=False),
    )


def load_masked_lm(
    spec: ModelSpec,
    load: TensorLoader,
    *,
    word: torch.Tensor | None = None,
    blocks: Blocks | None = None,
) -> MaskedLMHead | None:
    """The head of a ...ForMaskedLM checkpoint, or None where it has none.

    blocks: the transformer's; of a sharded vocabulary, only the local part is read.
    word: the word embedding in use, whose memory a tied decoder shares that is not laid out for a
    CPU, where this process has all of it; None: it is read again.

    The decoder is the saved one; where none is saved and the config ties them, the word embedding.
    """
    head = spec.heads.get("masked_lm")
    if head is None or not _has(load, head):
        return None
    assert head.decoder  # families say so
    is_saved = head.decoder in load.tensors
    if head.dense is None and not is_saved and not _names_masked_lm(spec):
        return None  # tied, and nothing else tells it from a model without a head
    saved = [head.decoder] if is_saved or not spec.tie_word_embeddings else []
    bias = f"{head.decoder.removesuffix('.weight')}.bias"
    if bias not in load.tensors:  # tied to head.bias, and saved under that name
        bias = head.bias or ""
    stems = _head_tensors(spec, head)
    projection = _projection_name(spec, head, is_tied=not saved)
    needed = [*stems, *saved, *[bias] * (head.bias is not None)]
    load.require(needed if projection is None else [*needed, projection])
    decoder_name = saved[0] if saved else spec.embeddings["word"]
    part, shape = _local_vocab(blocks), (spec.vocab_size, spec.embedding_size)
    decoder_bias = None if head.bias is None else load.tensor(bias, shape[:1], part=part)
    is_shared = not saved and word is not None and word.shape == shape
    decoder = word if is_shared else load.tensor(decoder_name, shape, part=part)
    assert decoder is not None
    second = None
    if head.second_dense is not None:
        sizes = (spec.embedding_size, head.inner_size)
        second = load.linear(head.second_dense, *sizes, has_bias=head.dense_bias)
    dense = _dense(load, head, head.inner_size or spec.embedding_size, spec.hidden_size)
    if projection is not None:
        columns = load.tensor(projection, (spec.hidden_size, spec.embedding_size))
        dense = load.linear_from(columns.t().contiguous(), None)
    return MaskedLMHead(
        dense=dense,
        second_dense=second,
        activation=head.activation or "none",
        norm=_norm(spec, load, head, spec.embedding_size),
        decoder=load.linear_from(decoder, decoder_bias),
        blocks=blocks,
    )


def _projection_name(spec: ModelSpec, head: HeadSpec, *, is_tied: bool) -> str | None:
    """The tensor of head.projection; with a tied decoder that of the embedding."""
    if head.projection is None:
        return None
    return f"{spec.embeddings['project_in'] if is_tied else head.projection}.weight"


def _names_masked_lm(spec: ModelSpec) -> bool:
    return any(name.endswith("ForMaskedLM") for name in spec.architectures)


def _head_tensors(spec: ModelSpec, head: HeadSpec) -> list[str]:
    """Names of a head's tensors but those of its decoder."""
    parts = (
        (head.dense, head.dense_bias),
        (head.second_dense, head.dense_bias),
        (head.norm, spec.layer_spec.norm_bias),
        (head.out, head.out_bias),
    )
    found: list[str] = []
    for stem, has_bias in parts:
        if stem is not None:
            found += [f"{stem}.weight", *[f"{stem}.bias"] * has_bias]
    return found


def _dense(load: TensorLoader, head: HeadSpec, n: int, k: int) -> LinearWeight | None:
    return None if head.dense is None else load.linear(head.dense, n, k, has_bias=head.dense_bias)


def _norm(spec: ModelSpec, load: TensorLoader, head: HeadSpec, size: int) -> RowNorm | None:
    if head.norm is None:
        return None
    eps = head.norm_eps or 0.0
    return load.norm(head.norm, size, eps=eps, has_bias=spec.layer_spec.norm_bias)


def load_lm(
    spec: ModelSpec,
    load: TensorLoader,
    *,
    word: torch.Tensor,
    coded: CodedWeight | None = None,
    blocks: Blocks | None = None,
    label_ids: Sequence[int] = (),
) -> LmHead | None:
    """The head of a causal checkpoint, or None where the family or the checkpoint has none.

    word: the word embedding in use [vocab_size, embedding_size].  Where the config ties the head to
    it, the two share this memory, unless a decoder that differs was saved as well; on a CPU a
    head of at most MAX_COPIED_HEAD_BYTES is laid out for its GEMM, and held twice.
    coded: the word embedding in use where it has no more than 8 bits; the head has as many.
    blocks: the transformer's; of a sharded vocabulary, only the local part is read.
    label_ids: of the tokens that questions are answered by, each in the vocabulary.
    """
    head = spec.heads.get("lm")
    if head is None or not (spec.tie_word_embeddings or head.decoder in load.tensors):
        return None
    made = _lm_head(spec, load, head, word=word, coded=coded, blocks=blocks)
    return replace(made, labels=_label_rows(spec, load, head, label_ids)) if label_ids else made


# The Hopper kernels' step of columns: fewer rows of labels are filled up with the first one's.
_LABEL_STEP = 32


def _label_rows(
    spec: ModelSpec, load: TensorLoader, head: HeadSpec, token_ids: Sequence[int]
) -> LabelRows:
    """As many rows as a product takes in any case, so that their bits never depend on how many
    labels a question has."""
    assert head.decoder
    rows = [*token_ids, *[token_ids[0]] * (-len(token_ids) % _LABEL_STEP)]
    part = Part(0, tuple(range(row, row + 1) for row in rows))
    is_saved = head.decoder in load.tensors
    name = head.decoder if is_saved else spec.embeddings["word"]
    weight = load.tensor(name, (spec.vocab_size, spec.embedding_size), part=part)
    bias = None if head.bias is None else load.tensor(head.bias, (spec.vocab_size,), part=part)
    return LabelRows(tuple(token_ids), load.linear_from(weight, bias))


def _lm_head(
    spec: ModelSpec,
    load: TensorLoader,
    head: HeadSpec,
    *,
    word: torch.Tensor,
    coded: CodedWeight | None,
    blocks: Blocks | None,
) -> LmHead:
    assert head.decoder  # families say so
    part, shape = _local_vocab(blocks), (spec.vocab_size, spec.embedding_size)
    bias = None if head.bias is None else load.tensor(head.bias, shape[:1], part=part)
    more = (spec.vocab_size, blocks, spec.logits_divisor, spec.logits_softcap)
    if load.keeps_codes:
        kept = _kept_decoder(spec, load, head, coded)
        if kept is not None:
            return LmHead(replace(kept, bias=bias), *more)
    elif coded is not None:
        return LmHead(_coded_decoder(spec, load, head, coded, bias), *more)
    if not spec.tie_word_embeddings:
        return LmHead(load.linear_from(load.tensor(head.decoder, shape, part=part), bias), *more)
    if part is not None:
        word = word[:-1]  # without the row of zeros
    if head.decoder in load.tensors:
        saved = load.tensor(head.decoder, shape, part=part)
        if not torch.equal(saved, word):
            return LmHead(load.linear_from(saved, bias), *more)
    prepack = load.prepack and word.nbytes <= MAX_COPIED_HEAD_BYTES
    decoder = prepare_linear(word, bias, prepack=prepack, batch_invariant=load.batch_invariant)
    return LmHead(decoder, *more)


def _kept_decoder(
    spec: ModelSpec, load: TensorLoader, head: HeadSpec, coded: CodedWeight | None
) -> CodedWeight | None:
    """A head as it is saved, or the word embedding in use; None where it is of floats."""
    assert head.decoder
    if head.decoder not in load.tensors:
        return coded
    saved = load.kept_table(head.decoder, (spec.vocab_size, spec.embedding_size))
    if saved is None or coded is None or not spec.tie_word_embeddings:
        return saved
    return coded if torch.equal(saved.codes, coded.codes) else saved


def _coded_decoder(
    spec: ModelSpec,
    load: TensorLoader,
    head: HeadSpec,
    coded: CodedWeight,
    bias: torch.Tensor | None,
) -> CodedWeight:
    """A head of as many bits as the word embedding, whose memory a tied one shares."""
    assert head.decoder
    if head.decoder in load.tensors:
        shape = (spec.vocab_size, spec.embedding_size)
        saved = load.grouped(head.decoder, shape, bits=coded.bits)
        is_tied = spec.tie_word_embeddings and torch.equal(saved.codes, coded.codes)
        coded = coded if is_tied else saved
    return replace(coded, bias=bias)


def load_decision(
    spec: ModelSpec, load: TensorLoader, head: DecisionHeadSpec | None
) -> DecisionHead | None:
    """The decision head, or None where the config or, but for a file of its own, the weights have
    none.  A head without a bias (those that were trained for vLLM) has none here.
    """
    names = ("weight", "proj.weight")  # save_pretrained and readout.safetensors have the first
    name = next((name for name in names if name in load.tensors), None)
    if head is None or (name is None and head.file is None):
        return None
    if name is None:
        raise CheckpointError(
            f"{head.file}.safetensors holds no {' or '.join(names)}, the matrix of a decision head"
        )
    shape = (head.num_verbalizers, spec.output_size)
    if head.file is not None and (saved := tuple(load.tensors[name].shape)) != shape:
        raise CheckpointError(
            f"{head.file}.safetensors: {name} has shape {saved}, and the files beside it imply "
            f"{shape}; it is the head of another model"
        )
    weight = load.tensor(name, shape)
    has_bias = "proj.bias" in load.tensors
    bias = load.tensor("proj.bias", (head.num_verbalizers,)) if has_bias else None
    return DecisionHead(load.linear_from(weight, bias), head.offsets, head.softcap)


def _local_vocab(blocks: Blocks | None) -> Part | None:
    shard = None if blocks is None else blocks.shard
    return None if shard is None else Part(0, (shard.vocab,))


def _classification(
    spec: ModelSpec, load: TensorLoader, name: str, *, num_labels: int, has_labels: bool = True
) -> ClassificationHead | None:
    """has_labels: id2label names the classes."""
    head = spec.heads.get(name)
    if head is None or not _has(load, head):
        return None
    if num_labels and has_labels and list(spec.id2label) != list(range(num_labels)):
        raise CheckpointError(
            f"config.json: id2label must name the classes 0 to {num_labels - 1} without a hole, "
            f"got {list(spec.id2label)[:20]}"
        )
    load.require(_head_tensors(spec, head))
    hidden = spec.output_size
    return ClassificationHead(
        dense=_dense(load, head, hidden, hidden),
        activation=head.activation or "none",
        out=None
        if head.out is None
        else load.linear(head.out, num_labels, hidden, has_bias=head.out_bias),
        norm=_norm(spec, load, head, hidden),
        pooling=head.pooling,
    )


def _has(load: TensorLoader, head: HeadSpec) -> bool:
    """Whether the checkpoint has this head: the weight of its last layer before a tied decoder."""
    stems = [stem for stem in (head.dense, head.norm, head.out) if stem is not None]
    return all(f"{stem}.weight" in load.tensors for stem in stems)
