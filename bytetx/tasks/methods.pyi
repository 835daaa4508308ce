"""Written by tests/method_stubs.py from the declared tasks; not edited by hand."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from numpy import ndarray
from numpy.typing import ArrayLike

from bytetx.errors import InputError
from bytetx.generate.outputs import RequestOutput
from bytetx.requests.prompts import ChatPrompt
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.embed_all import AllEmbeddings
from bytetx.tasks.generation_stream import AsyncGeneration
from bytetx.tasks.results import (
    Answer,
    Embeddings,
    Entity,
    ExtractedSpan,
    Extraction,
    Fill,
    Generation,
    Hit,
    Label,
    Likelihood,
    Results,
    Stream,
)
from bytetx.tasks.vectors import SparseEmbeddings, SparseVector, TokenEmbeddings

class ModelTasks:
    @overload
    def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Answer]]: ...
    @overload
    def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Answer] | InputError]: ...
    @overload
    def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Answer]]: ...
    @overload
    def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Answer] | InputError]: ...
    @overload
    def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Label]]: ...
    @overload
    def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Label] | InputError]: ...
    @overload
    def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Label]]: ...
    @overload
    def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Label] | InputError]: ...
    @overload
    def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[dict[str, dict[str, Any]]]: ...
    @overload
    def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[dict[str, dict[str, Any]] | InputError]: ...
    @overload
    def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[dict[str, dict[str, Any]]]: ...
    @overload
    def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[dict[str, dict[str, Any]] | InputError]: ...
    @overload
    def embed(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Embeddings: ...
    @overload
    def embed(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray]: ...
    @overload
    def embed(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray | InputError]: ...
    def embed_all(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        show_progress: bool = False,
    ) -> AllEmbeddings: ...
    def embed_chunks(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        stride: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        show_progress: bool = False,
    ) -> TokenEmbeddings: ...
    def embed_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        *,
        dimensions: int | None = None,
        pooling: str | Sequence[str] = "mean",
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        show_progress: bool = False,
    ) -> TokenEmbeddings: ...
    @overload
    def embed_sparse(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> SparseEmbeddings: ...
    @overload
    def embed_sparse(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[SparseVector]: ...
    @overload
    def embed_sparse(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[SparseVector | InputError]: ...
    @overload
    def embed_tokens(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> TokenEmbeddings: ...
    @overload
    def embed_tokens(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray]: ...
    @overload
    def embed_tokens(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray | InputError]: ...
    @overload
    def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[ExtractedSpan]]: ...
    @overload
    def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[ExtractedSpan] | InputError]: ...
    @overload
    def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[ExtractedSpan]]: ...
    @overload
    def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[ExtractedSpan] | InputError]: ...
    @overload
    def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Fill]]: ...
    @overload
    def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Fill] | InputError]: ...
    @overload
    def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Fill]]: ...
    @overload
    def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Fill] | InputError]: ...
    @overload
    def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Extraction]: ...
    @overload
    def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Extraction | InputError]: ...
    @overload
    def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Extraction]: ...
    @overload
    def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Extraction | InputError]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Generation]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Generation | InputError]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Generation]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Generation | InputError]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        stream: Literal["pieces"],
        show_progress: bool = False,
    ) -> Stream[RequestOutput]: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[ndarray]: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[ndarray | InputError]: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray]: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[ndarray | InputError]: ...
    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        listwise: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        show_progress: bool = False,
    ) -> Results[Hit]: ...
    @overload
    def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Likelihood]: ...
    @overload
    def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[Likelihood | InputError]: ...
    @overload
    def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Likelihood]: ...
    @overload
    def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[Likelihood | InputError]: ...
    @overload
    def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Entity]]: ...
    @overload
    def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[False] = ...,
        show_progress: bool = False,
    ) -> Results[list[Entity] | InputError]: ...
    @overload
    def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Entity]]: ...
    @overload
    def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        stream: Literal[True],
        show_progress: bool = False,
    ) -> Stream[list[Entity] | InputError]: ...

class AsyncModelTasks:
    @overload
    async def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Answer]]: ...
    @overload
    async def answer(
        self,
        texts: Iterable[tuple[str, str]],
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Answer] | InputError]: ...
    @overload
    async def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Label]]: ...
    @overload
    async def classify(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        top_k: int | None = None,
        raw_scores: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Label] | InputError]: ...
    @overload
    async def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[dict[str, dict[str, Any]]]: ...
    @overload
    async def decide(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        order: Literal["given", "average"] = "given",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[dict[str, dict[str, Any]] | InputError]: ...
    async def embed(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Embeddings: ...
    async def embed_all(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AllEmbeddings: ...
    async def embed_chunks(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        stride: int = 0,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings: ...
    async def embed_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        *,
        dimensions: int | None = None,
        pooling: str | Sequence[str] = "mean",
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings: ...
    async def embed_sparse(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> SparseEmbeddings: ...
    async def embed_tokens(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] = "float32",
        ranges: ArrayLike | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings: ...
    @overload
    async def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[ExtractedSpan]]: ...
    @overload
    async def extract(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | Mapping[str, str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
        relations: Sequence[str] = (),
        relation_threshold: float | None = None,
        adjacency_threshold: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[ExtractedSpan] | InputError]: ...
    @overload
    async def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Fill]]: ...
    @overload
    async def fill_mask(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Fill] | InputError]: ...
    @overload
    async def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Extraction]: ...
    @overload
    async def fill_schema(
        self,
        texts: Iterable[str],
        schema: Mapping[str, Any],
        *,
        threshold: float = 0.5,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Extraction | InputError]: ...
    def generate(
        self,
        prompt: str | Sequence[int] | ndarray | Sequence[Mapping[str, Any]] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGeneration: ...
    @overload
    async def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[ndarray]: ...
    @overload
    async def hidden_states(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        task: str | Sequence[str | None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        layers: Sequence[int] = (-1,),
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[ndarray | InputError]: ...
    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        listwise: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise", "return"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Hit]: ...
    @overload
    async def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Likelihood]: ...
    @overload
    async def score(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Likelihood | InputError]: ...
    @overload
    async def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["raise"] = ...,
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Entity]]: ...
    @overload
    async def tag(
        self,
        texts: Iterable[str | tuple[str, str] | Sequence[int] | ndarray],
        *,
        overflow: Literal["error", "truncate", "chunk"] | None = None,
        stride: int = 0,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        decoding: str = "auto",
        adapter: str | Sequence[str | None] | None = None,
        on_error: Literal["return"],
        truncate: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[list[Entity] | InputError]: ...

def attach(spec: Any) -> None: ...
