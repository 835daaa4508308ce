"""Model: a checkpoint with its tokenizer, weights and runner, and a method for each task."""

import logging
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import (
    check_names,
    check_token_budget,
    check_top_k,
    chosen_layers,
)
from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.generation_config import check_switch
from bytetx.encode.model_runner import Runner
from bytetx.encode.step import Task
from bytetx.errors import InputError, OptionError, shown
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.load import load_ranks
from bytetx.info import checkpoint_info, checkpoint_line
from bytetx.nn.loading import LoadedCheckpoint, default_token_budget, load_generation
from bytetx.parallel.grid import Grid
from bytetx.runtime.forking import computing
from bytetx.tasks.adapted import routed
from bytetx.tasks.answer import AnswerMixin
from bytetx.tasks.call import Call
from bytetx.tasks.chunks import Overflow
from bytetx.tasks.classify import ChunkScoresTask, ClassifyTask, raw, score_function
from bytetx.tasks.embed_all import EmbedAllMixin
from bytetx.tasks.embed_chunks import ChunkMixin
from bytetx.tasks.fill_mask import FillMaskTask, find_targets
from bytetx.tasks.generate import GenerationMixin
from bytetx.tasks.hidden_states import HiddenStatesTask
from bytetx.tasks.options import (
    ClassifyOptions,
    EmbedOptions,
    FillMaskOptions,
    No,
    OnError,
    Raise,
    Return,
    StatesOptions,
    TagOptions,
    TextOptions,
    Texts,
    Yes,
)
from bytetx.tasks.precision import Precision
from bytetx.tasks.rerank import RerankMixin
from bytetx.tasks.results import (
    Embeddings,
    Entity,
    Fill,
    Label,
    Likelihood,
    Results,
    Stream,
)
from bytetx.tasks.score import LikelihoodTask
from bytetx.tasks.search import Packed, Similarity, Vectors, similarity
from bytetx.tasks.tag import AGGREGATIONS, TagTask, merge_entities

if TYPE_CHECKING:
    from bytetx.executor.torchrun import TorchrunLeader

logger = logging.getLogger("bytetx")

R = TypeVar("R")


def load(
    path_or_id: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tp: "int | TorchrunLeader" = 1,
    grid: str | Grid | None = None,
    token_budget: int | None = None,
    cuda_graphs: bool = True,
    batch_invariant: bool = False,
    generation_config: str | Path = "auto",
    families: str | Path | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
    revision: str | None = None,
    local_files_only: bool = False,
) -> "Model":
    """Loads a Hugging Face checkpoint, with the head and the tokenizer that it has.

    path_or_id: the folder that save_pretrained wrote, or a hub id (revision and local_files_only
    as the hub knows them); a LoRA adapter is merged into its base model.
    device: "auto" is CUDA where there is one.  dtype: float32, bfloat16 or float16 (fp32, bf16,
    fp16); "auto" is float32 on a CPU, on CUDA the checkpoint's half type or else float16; fp8: an
    encoder's GEMMs multiply E4M3 rows, on Hopper GPUs; int8: 8-bit integers, on CPUs.
    tp: processes that share the layers, each on a GPU of its own (on "cpu", all on the CPU); the
    others are started here, hold their share alone and end with the Model or its close().
    grid: processes in data x z x y x x, as "data2.z2": data takes some texts of each batch, z as
    well and holds a part of each layer's weights, which are gathered a layer ahead; y is tp; x
    divides hidden features. "auto" is the one that bytetx.plan finds fastest for all GPUs;
    docs/distributed.md says when to use which.
    token_budget: tokens of one forward pass, which bound its memory; None is a good default.
    cuda_graphs: replay repeated steps as CUDA graphs where the GPU's kernels allow it; same bits.
    batch_invariant: a text's results have the same bits whatever else is in its batch, found
    prefixes and pieces of prompts included: on CPUs in float32, bfloat16 and int8, on Hopper GPUs
    in half types, which become slower; docs/batch_invariance.md.
    generation_config: where generation starts for the parameters that a request leaves unset:
    "auto" is the checkpoint's generation_config.json; "vllm" takes its end-of-text tokens alone, as
    vLLM's option of that name does; "none" does not read it; else the path of such a file.
    families: a folder of TOML files as models/ has them (docs/models.md): families of checkpoints
    that are added, and used in place of bytetx's own of the same model_type.
    group_timeout: with tp, seconds after which a process that is stopped ends the group with a
    GroupError; one that runs, but makes no progress, has ten times as long. math.inf: no limit.
    Raises CheckpointError where the checkpoint cannot be run, InputError for a wrong option.
    """
    switch = check_switch(generation_config)
    known = read_families(families)
    folder = resolve_checkpoint(path_or_id, revision=revision, local_files_only=local_files_only)
    with computing():
        checkpoint = load_ranks(
            folder,
            tp,
            grid=grid,
            device=device,
            dtype=dtype,
            token_budget=token_budget,
            group_timeout=group_timeout,
            batch_invariant=batch_invariant,
            families=known,
        )
    try:
        checkpoint = load_generation(checkpoint, switch=switch)
    except BaseException:
        checkpoint.executor.close()
        raise
    return Model(checkpoint, token_budget=token_budget, cuda_graphs=cuda_graphs)


class Model(GenerationMixin, EmbedAllMixin, ChunkMixin, RerankMixin, AnswerMixin):
    """A loaded checkpoint. Methods may be called from several threads.

    It is pickled as its folder and options, and loaded again in another process.  A forked child
    computes with one thread, or raises a ForkError: start processes by spawn.
    Every task takes any iterable of inputs (a str, a pair of str, or a sequence of token ids that
    already has its special tokens) and returns results in the caller's order. Common options:
    truncate: cut a text beyond the model's positions; else it is a TooLongError.
    overflow, stride: of embed, classify and tag: "error" and "truncate" are truncate's two values;
    "chunk" cuts a long text into chunks of the model's positions, which share stride tokens. A
    prompt is in the first chunk. Pairs and token ids are not cut into chunks.
    on_error: "raise" a bad text's InputError, or "return" it in place of that text's result.
    stream: return an iterator that reads inputs as needed, instead of all results at the end.
    show_progress: a bar on stderr that counts texts.
    """

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        *,
        token_budget: int | None = None,
        cuda_graphs: bool = True,
    ):
        super().__init__()
        if token_budget is None:
            token_budget = default_token_budget(checkpoint.spec, checkpoint.device)
        self.checkpoint = checkpoint
        self.token_budget, self.cuda_graphs = check_token_budget(token_budget), cuda_graphs
        self.spec, self.transformer = checkpoint.spec, checkpoint.transformer
        self.tokenizer, self.heads = checkpoint.tokenizer, checkpoint.heads
        self._is_closed = False
        self._routes = {
            name: Model(
                replace(route, router=checkpoint.router),
                token_budget=token_budget,
                cuda_graphs=cuda_graphs,
            )
            for name, route in checkpoint.routes.items()
        }
        self._runner = Runner(
            checkpoint.transformer,
            executor=checkpoint.executor,
            device=checkpoint.device,
            token_budget=self.token_budget,
            cuda_graphs=cuda_graphs,
        )

    def close(self) -> None:
        """Ends the workers of a model loaded with tp; the model cannot be used after that."""
        self._is_closed = True
        self._idle_engines.clear()  # their graphs hold collectives of the group
        self.checkpoint.executor.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({checkpoint_line(self.checkpoint, max_tokens=self.max_tokens)})"

    def __reduce__(self) -> tuple[Callable[[], "Model"], tuple[()]]:
        """Loads the same folder with the same options, where it is unpickled.

        Raises pickle.PicklingError for a model of several ranks and for one that was closed.
        """
        checkpoint = self.checkpoint
        if checkpoint.executor.has_workers:
            raise pickle.PicklingError(
                "a model loaded with tp cannot be pickled: its ranks belong to this process; load "
                "it in the other process"
            )
        if self._is_closed:
            raise pickle.PicklingError("a closed model cannot be pickled; load it again")
        again = partial(
            load,
            checkpoint.folder.resolve(),
            device=str(checkpoint.device),
            dtype=checkpoint.quantization or checkpoint.dtype,
            token_budget=self.token_budget,
            cuda_graphs=self.cuda_graphs,
            batch_invariant=checkpoint.batch_invariant,
            generation_config=checkpoint.generation.switch,
            families=checkpoint.families,
        )
        return again, ()

    def _cutting_left(self) -> "Model":
        """The same model for texts and pairs that lose their beginning where they are truncated."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        if self.tokenizer is not None:
            view.tokenizer = self.tokenizer.limited(self.tokenizer.max_tokens, direction="left")
        view._routes = {name: route._cutting_left() for name, route in self._routes.items()}
        return view

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included."""
        return self.spec.max_positions if self.tokenizer is None else self.tokenizer.max_tokens

    @overload
    def embed(
        self, texts: Texts, *, stream: No = ..., on_error: OnError = ..., **o: Unpack[EmbedOptions]
    ) -> Embeddings: ...

    @overload
    def embed(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[EmbedOptions]
    ) -> Stream[np.ndarray]: ...

    @overload
    def embed(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[EmbedOptions]
    ) -> Stream[np.ndarray | InputError]: ...

    @routed
    def embed(
        self,
        texts: Texts,
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Embeddings | Stream[Any]:
        """One vector a text, as sentence-transformers' encode gives it.

        task: of a checkpoint with adapters (Jina embeddings v3) the name of one; of one with a
        Router a task that has a route; else "query" or "document". It also takes the prompt of
        that name, where the checkpoint has one.
        prompt, prompt_name: text put before every str; None is the task's, else the checkpoint's
        default.
        dimensions: keep the first ones, and normalise again where the model normalises.
        pooling: mode (or modes, joined) instead of the checkpoint's.  normalize: None as the
        checkpoint says.  A failed text's vector is NaN (0 in integers), its error in `errors`.
        precision: float32, float16, int8, uint8, or binary and ubinary (int8 and uint8 with the
        signs of 8 dimensions in each byte), as sentence-transformers' quantize_embeddings.
        ranges: [2, dimensions], the minima and maxima that int8 and uint8 divide into 256 steps;
        None takes those of the vectors of this call, which a stream cannot know.
        overflow="chunk": the mean of the vectors of a long text's chunks; see embed_chunks.
        """
        if stream and precision in ("int8", "uint8") and ranges is None:
            raise OptionError(
                f"a stream with precision {precision} needs ranges (f32 [2, dimensions], minima "
                "and maxima), because its first vector comes before the last one is known"
            )
        call = self._embed_call(
            texts,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
            overflow=overflow,
            stride=stride,
            truncate=truncate,
            on_error=on_error,
        )
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    @overload
    def classify(
        self, texts: Texts, *, stream: No = ..., on_error: Raise = ..., **o: Unpack[ClassifyOptions]
    ) -> Results[list[Label]]: ...

    @overload
    def classify(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[ClassifyOptions]
    ) -> Stream[list[Label]]: ...

    @overload
    def classify(
        self, texts: Texts, *, stream: No = ..., on_error: Return, **o: Unpack[ClassifyOptions]
    ) -> Results[list[Label] | InputError]: ...

    @overload
    def classify(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[ClassifyOptions]
    ) -> Stream[list[Label] | InputError]: ...

    def classify(
        self,
        texts: Texts,
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """The checkpoint's labels for each text, best first.

        Scores are a softmax; with one label or a multi-label problem type a sigmoid each; for a
        regression, or with raw_scores, the logits themselves.  top_k: None keeps every label.
        overflow="chunk": the mean of the scores of a long text's chunks.
        """
        call = self._classify_call(
            texts,
            top_k=top_k,
            raw_scores=raw_scores,
            overflow=overflow,
            stride=stride,
            truncate=truncate,
            on_error=on_error,
        )
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _classify_call(
        self,
        texts: Texts,
        *,
        top_k: int | None,
        raw_scores: bool,
        overflow: Overflow | None,
        stride: int,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Results[Any]]:
        """Model.classify, ready to run."""
        check_top_k(top_k)
        head = self._need_head(self.heads.sequence, "sequence classification")
        scores = raw if raw_scores else score_function(self.spec)
        task = ClassifyTask(head, self._labels(), scores, top_k)
        reader = self._overflow_reader(
            overflow=overflow, stride=stride, truncate=truncate, on_error=on_error
        )
        job: Task[Any] = ChunkScoresTask(task) if reader.cuts else task
        return Call(
            "classify",
            texts,
            job,
            reader,
            self._list_sink,
            merge=task.mean if reader.cuts else None,
        )

    @overload
    def tag(
        self, texts: Texts, *, stream: No = ..., on_error: Raise = ..., **o: Unpack[TagOptions]
    ) -> Results[list[Entity]]: ...

    @overload
    def tag(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[TagOptions]
    ) -> Stream[list[Entity]]: ...

    @overload
    def tag(
        self, texts: Texts, *, stream: No = ..., on_error: Return, **o: Unpack[TagOptions]
    ) -> Results[list[Entity] | InputError]: ...

    @overload
    def tag(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[TagOptions]
    ) -> Stream[list[Entity] | InputError]: ...

    def tag(
        self,
        texts: Texts,
        *,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """Tags of the tokens of each text, with character offsets.

        aggregation: none (every token), simple (runs of one tag), or first, average, max (one tag
        a word, then runs); as Hugging Face's token-classification pipeline.
        overflow="chunk": as that pipeline with a stride; not with aggregation none.
        """
        call = self._tag_call(
            texts,
            aggregation=aggregation,
            ignore_labels=ignore_labels,
            overflow=overflow,
            stride=stride,
            truncate=truncate,
            on_error=on_error,
        )
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _tag_call(
        self,
        texts: Texts,
        *,
        aggregation: str,
        ignore_labels: Collection[str],
        overflow: Overflow | None,
        stride: int,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Results[Any]]:
        """Model.tag, ready to run."""
        if aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise OptionError(f"aggregation must be one of {known}, got {shown(aggregation)}")
        check_names("ignore_labels", ignore_labels)
        head = self._need_head(self.heads.token, "token classification")
        tokenizer = self._need_tokenizer()
        task = TagTask(head, tokenizer, self._labels(), aggregation, ignore_labels)
        reader = self._overflow_reader(
            overflow=overflow, stride=stride, truncate=truncate, on_error=on_error
        )
        if reader.cuts and aggregation == "none":
            raise OptionError(
                "overflow='chunk' needs an aggregation other than none: chunks overlap, and only "
                "entities are merged"
            )
        reader.with_alignment = True
        return Call(
            "tag",
            texts,
            task,
            reader,
            self._list_sink,
            merge=merge_entities if reader.cuts else None,
        )

    @overload
    def fill_mask(
        self, texts: Texts, *, stream: No = ..., on_error: Raise = ..., **o: Unpack[FillMaskOptions]
    ) -> Results[list[Fill]]: ...

    @overload
    def fill_mask(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[FillMaskOptions]
    ) -> Stream[list[Fill]]: ...

    @overload
    def fill_mask(
        self, texts: Texts, *, stream: No = ..., on_error: Return, **o: Unpack[FillMaskOptions]
    ) -> Results[list[Fill] | InputError]: ...

    @overload
    def fill_mask(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[FillMaskOptions]
    ) -> Stream[list[Fill] | InputError]: ...

    def fill_mask(
        self,
        texts: Texts,
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """The top_k best tokens for every mask token of each text.

        targets: score these words only, by their probability in the full vocabulary.
        """
        call = self._fill_mask_call(
            texts, top_k=top_k, targets=targets, truncate=truncate, on_error=on_error
        )
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _fill_mask_call(
        self,
        texts: Texts,
        *,
        top_k: int,
        targets: Sequence[str] | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Results[Any]]:
        """Model.fill_mask, ready to run."""
        check_top_k(top_k, may_be_none=False)
        if targets is not None and not isinstance(targets, str):
            check_names("targets", targets)
        head = self._need_head(self.heads.masked_lm, "masked language model")
        tokenizer = self._need_tokenizer()
        if tokenizer.mask_token_id is None:
            raise InputError("this checkpoint's tokenizer names no mask token")
        target_ids = None
        if targets is not None:
            target_ids = find_targets(tokenizer, targets).to(self.checkpoint.device)
        reader = self._reader(truncate=truncate, on_error=on_error)
        reader.needs_mask = True
        task = FillMaskTask(head, tokenizer, top_k, target_ids)
        return Call("fill_mask", texts, task, reader, self._list_sink)

    @overload
    def score(
        self, texts: Texts, *, stream: No = ..., on_error: Raise = ..., **o: Unpack[TextOptions]
    ) -> Results[Likelihood]: ...

    @overload
    def score(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[TextOptions]
    ) -> Stream[Likelihood]: ...

    @overload
    def score(
        self, texts: Texts, *, stream: No = ..., on_error: Return, **o: Unpack[TextOptions]
    ) -> Results[Likelihood | InputError]: ...

    @overload
    def score(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[TextOptions]
    ) -> Stream[Likelihood | InputError]: ...

    def score(
        self,
        texts: Texts,
        *,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """Log-likelihood and perplexity of each text under a causal language model.

        The first token, which has nothing before it, is not scored; give a text that starts with
        the begin-of-text token, or a tokenizer that adds it, to score every token of one's own.
        """
        call = self._score_call(texts, truncate=truncate, on_error=on_error)
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _score_call(self, texts: Texts, *, truncate: bool, on_error: OnError) -> Call[Results[Any]]:
        """Model.score, ready to run."""
        task = LikelihoodTask(self._need_head(self.heads.lm, "language model"))
        reader = self._reader(truncate=truncate, on_error=on_error)
        return Call("score", texts, task, reader, self._list_sink)

    @overload
    def hidden_states(
        self, texts: Texts, *, stream: No = ..., on_error: Raise = ..., **o: Unpack[StatesOptions]
    ) -> Results[np.ndarray]: ...

    @overload
    def hidden_states(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[StatesOptions]
    ) -> Stream[np.ndarray]: ...

    @overload
    def hidden_states(
        self, texts: Texts, *, stream: No = ..., on_error: Return, **o: Unpack[StatesOptions]
    ) -> Results[np.ndarray | InputError]: ...

    @overload
    def hidden_states(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[StatesOptions]
    ) -> Stream[np.ndarray | InputError]: ...

    def hidden_states(
        self,
        texts: Texts,
        *,
        layers: Sequence[int] = (-1,),
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """f32 [len(layers), num_tokens, hidden_size] a text; layer 0 is the embeddings' output."""
        call = self._hidden_states_call(texts, layers=layers, truncate=truncate, on_error=on_error)
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _hidden_states_call(
        self, texts: Texts, *, layers: Sequence[int], truncate: bool, on_error: OnError
    ) -> Call[Results[Any]]:
        """Model.hidden_states, ready to run."""
        task = HiddenStatesTask(chosen_layers(layers, num_states=self.spec.num_layers + 1))
        reader = self._reader(truncate=truncate, on_error=on_error)
        return Call("hidden_states", texts, task, reader, self._list_sink)

    def similarity(self, a: Vectors | Packed, b: Vectors | Packed) -> torch.Tensor:
        """f32 [len(a), len(b)]: bytetx.similarity with the function that the checkpoint names.

        A checkpoint that names none: cosine; dot where it is a sparse encoder, and maxsim where it
        is a multi-vector model.
        """
        return similarity(a, b, function=self.similarity_function)

    @property
    def similarity_function(self) -> Similarity:
        """One of bytetx.tasks.search.SIMILARITIES, for bytetx.similarity and semantic_search."""
        sentence = self.checkpoint.sentence
        if sentence.multi_vector is not None:
            return "meanmaxsim" if sentence.multi_vector.mean else "maxsim"
        if sentence.similarity is not None:
            return sentence.similarity
        return "dot" if sentence.is_sparse else "cosine"

    def info(self) -> dict[str, Any]:
        """What was loaded: family, sizes, dtype, device, heads, limits, tensors left unused."""
        limits = {"max_tokens": self.max_tokens, "token_budget": self.token_budget}
        return checkpoint_info(self.checkpoint, **limits)
