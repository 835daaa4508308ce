"""Model: a checkpoint with its tokenizer, weights and runner, and a method for each task."""

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bytetx.arguments import (
    check_iterable,
    check_kv_cache_dtype,
    check_not_negative,
    check_token_budget,
)
from bytetx.checkpoint.answer_format import AnswerFormat
from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.generation_config import check_switch
from bytetx.encode.engine import EncodeEngine
from bytetx.encode.model_runner import Runner
from bytetx.errors import InputError, OptionError
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.load import load_ranks
from bytetx.info import checkpoint_info, checkpoint_line
from bytetx.nn.adapters import Adapters
from bytetx.nn.coded_cache import with_cache_dtype
from bytetx.nn.loading import LoadedCheckpoint, load_generation
from bytetx.nn.token_budget import default_token_budget
from bytetx.parallel.grid import Grid
from bytetx.runtime.device_memory import default_prefix_cache_bytes
from bytetx.runtime.forking import computing
from bytetx.tasks.adapted import adapted_call, task_call
from bytetx.tasks.catalog import ModelTasks
from bytetx.tasks.context import TaskContext
from bytetx.tasks.run import run_encode
from bytetx.tasks.task import PromptOptions, TaskOptions, TaskSpec

if TYPE_CHECKING:
    from bytetx.executor.torchrun import TorchrunLeader
    from bytetx.generate.build import GenerationSizes
    from bytetx.generate.engine import GenerationEngine
    from bytetx.requests.prompts import Prompt
    from bytetx.tasks.generate import ModelEngines
    from bytetx.tasks.search import Packed, Similarity, Vectors

logger = logging.getLogger("bytetx")


def load(
    path_or_id: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tp: "int | TorchrunLeader" = 1,
    grid: str | Grid | None = None,
    token_budget: int | None = None,
    prefix_cache_bytes: int | None = None,
    cuda_graphs: bool = True,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    generation_config: str | Path = "auto",
    families: str | Path | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
    revision: str | None = None,
    local_files_only: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
    reads_weights: bool = True,
    outline: "Model | None" = None,
) -> "Model":
    """Loads a Hugging Face checkpoint, with the head and the tokenizer that it has.

    path_or_id: the folder that save_pretrained wrote, or a hub id (revision and local_files_only
    as the hub knows them); a LoRA adapter is merged into its base model.
    adapters: LoRA adapters beside the model, which calls and texts choose by name (add_adapter).
    device: "auto" is CUDA where there is one.  dtype: float32, bfloat16 or float16 (fp32, bf16,
    fp16); "auto" is float32 on a CPU, on CUDA the checkpoint's half type or else float16, and codes
    of a causal checkpoint of 4 or 8 bits stay so; "fastest" is bfloat16 on a CPU that multiplies it
    faster, elsewhere as "auto"; fp8: GEMMs multiply E4M3 rows, on Hopper GPUs; int8, int4: weights
    stay 8 or 4 bits in memory, on GPUs from Ampere on and on CPUs, which round rows to 8 bits
    (docs/quantization.md).
    tp: processes that share the layers, each on a GPU of its own (on "cpu", all on the CPU); the
    others are started here, hold their share alone and end with the Model or its close().
    grid: processes in data x z x y x x, as "data2.z2": data takes some texts of each batch, z as
    well and holds a part of each layer's weights, which are gathered a layer ahead; y is tp; x
    divides hidden features. "auto" is the one that bytetx.plan finds fastest for all GPUs;
    docs/distributed.md says when to use which.
    token_budget: tokens of one forward pass, which bound its memory; None is a good default.
    prefix_cache_bytes: of what a causal model computed of prefixes that texts of several steps have
    in common; 0 keeps none, None is 1 GiB on a GPU and 256 MiB on a CPU, at most 5 % of its memory.
    cuda_graphs: replay repeated steps as CUDA graphs where the GPU's kernels allow it; same bits.
    batch_invariant: a text's results have the same bits whatever else is in its batch, found
    prefixes and pieces of prompts included: on CPUs in float32, bfloat16, int8 and int4, on Hopper
    GPUs in half types, which become slower; docs/batch_invariance.md.
    kv_cache_dtype: of the keys and values that generation keeps: "auto" is the model's dtype; "fp8"
    is E4M3 with a scale for each token and head, half of bf16's memory (docs/quantization.md).
    generation_config: where generation starts for the parameters that a request leaves unset:
    "auto" is the checkpoint's generation_config.json; "vllm" takes its end-of-text tokens alone, as
    vLLM's option of that name does; "none" does not read it; else the path of such a file.
    families: a folder of TOML files as models/ has them (docs/models.md): families of checkpoints
    that are added, and used in place of bytetx's own of the same model_type.
    group_timeout: with tp, seconds after which a process that is stopped ends the group with a
    GroupError; one that runs, but makes no progress, has ten times as long. math.inf: no limit.
    reads_weights: False checks the configuration, the tokenizer and the headers of the files, which
    takes milliseconds and hardly any memory: `info()` and the tokenizer of that Model are of use,
    and its tasks raise an OptionError.
    outline: a Model of the same checkpoint; its tokenizer is used again in place of reading it.
    Raises CheckpointError where the checkpoint cannot be run, InputError for a wrong option.
    """
    switch = check_switch(generation_config)
    check_kv_cache_dtype(kv_cache_dtype)
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
            outline=None if outline is None else outline.checkpoint,
            reads_weights=reads_weights,
        )
    try:
        checkpoint = load_generation(checkpoint, switch=switch)
    except BaseException:
        checkpoint.executor.close()
        raise
    model = Model(
        checkpoint,
        token_budget=token_budget,
        prefix_cache_bytes=prefix_cache_bytes,
        cuda_graphs=cuda_graphs,
    )
    try:
        model._set_kv_cache_dtype(kv_cache_dtype)
        for name, path in (adapters or {}).items():
            model.add_adapter(name, path)
    except BaseException:
        model.close()
        raise
    return model


class Model(ModelTasks):
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
        prefix_cache_bytes: int | None = None,
        cuda_graphs: bool = True,
    ):
        if token_budget is None:
            token_budget = default_token_budget(checkpoint.spec, checkpoint.device)
        self.checkpoint = checkpoint
        self.token_budget, self.cuda_graphs = check_token_budget(token_budget), cuda_graphs
        if prefix_cache_bytes is None:
            prefix_cache_bytes = default_prefix_cache_bytes(checkpoint.device)
        check_not_negative("prefix_cache_bytes", prefix_cache_bytes)
        # The limit is that of all routes together. Keys of one adapter are not those of another.
        prefix_cache_bytes //= 1 + len(checkpoint.routes)
        self.spec, self.transformer = checkpoint.spec, checkpoint.transformer
        self.tokenizer, self.heads = checkpoint.tokenizer, checkpoint.heads
        self.context = TaskContext(checkpoint)
        self._is_closed = False
        self._is_outline = checkpoint.transformer.embeddings.word.is_meta
        with computing(checkpoint.device):
            self.loras = Adapters(checkpoint)
        self._routes = {
            name: Model(
                replace(route, router=checkpoint.router),
                token_budget=token_budget,
                prefix_cache_bytes=prefix_cache_bytes,
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
            prefix_cache_bytes=prefix_cache_bytes,
        )
        self.encoder = EncodeEngine(self._runner, token_budget=self.token_budget)

    def _set_kv_cache_dtype(self, kv_cache_dtype: str) -> None:
        """As of load, for engines that are made from now on; OptionError where it is refused."""
        self.checkpoint = with_cache_dtype(self.checkpoint, kv_cache_dtype)

    def close(self) -> None:
        """Ends the workers of a model loaded with tp; the model cannot be used after that."""
        self._is_closed = True
        if "engines" in self.__dict__:
            self.engines.idle.clear()  # their graphs hold collectives of the group
        self.checkpoint.executor.close()

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter beside the model: `adapter=name` of a call, or of a text, runs it.

        name: 1 to 128 letters, digits, '.', '_' and '-'.  path: the folder that peft's
        save_pretrained wrote, or a hub id.  It may change linear layers of attention and dense
        feed-forward layers, by any rank, and heads (modules_to_save). Texts of different adapters,
        and of none, run in one step. Requests may run meanwhile.
        Raises OptionError for a name that is taken, or a model that takes none (tp, a Router,
        batch_invariant, fp8); CheckpointError for an adapter that does not fit the model or changes
        more than that.
        """
        with computing(self.checkpoint.device):
            self.loras.add(name, path)

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter. Requests that run with it end; its memory is free after the last one.

        Raises OptionError for an unknown name.
        """
        self.loras.remove(name)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of the adapters that are loaded, by name."""
        return self.loras.folders

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
            dtype=checkpoint.dtype_option,
            token_budget=self.token_budget,
            prefix_cache_bytes=self.prefix_cache_bytes,
            cuda_graphs=self.cuda_graphs,
            batch_invariant=checkpoint.batch_invariant,
            kv_cache_dtype=checkpoint.kv_cache_dtype,
            generation_config=checkpoint.generation.switch,
            families=checkpoint.families,
            adapters=self.adapters,
        )
        return again, ()

    def _cutting_left(self) -> "Model":
        """The same model for texts and pairs that lose their beginning where they are truncated."""
        view = object.__new__(type(self))  # copy() would load it again, as pickle does
        view.__dict__.update(self.__dict__, engines=self.engines)
        view.context = self.context.cutting_left()
        view._routes = {name: route._cutting_left() for name, route in self._routes.items()}
        return view

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of prefixes that are kept at most, those of all routes together; 0 keeps none."""
        cache = self._runner.prefix_cache
        own = 0 if cache is None else cache.max_bytes
        return own + sum(route.prefix_cache_bytes for route in self._routes.values())

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included."""
        return self.spec.max_positions if self.tokenizer is None else self.tokenizer.max_tokens

    def _run_task(self, spec: TaskSpec, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        show_progress = given.pop("show_progress", False)
        stream = spec.item is not None and given.pop("stream", False)
        if self._is_outline:
            raise _no_weights()
        model, call = self._call(spec, *spec.bind(inputs, given))
        return spec.run(call, model, stream=stream, show_progress=show_progress)

    def _call(
        self, spec: TaskSpec, inputs: Sequence[Any], options: TaskOptions
    ) -> tuple["Model", Any]:
        """A call of a task, ready to run, and the model that runs it: that of its route, if any.

        Raises OptionError for a task without a route.
        """
        router, model = self.checkpoint.router, self
        if router is not None and self._routes and isinstance(options, PromptOptions):
            model = self._routes[router.resolve(options.task)]
        if options.adapter is not None and spec.run is run_encode:
            return model, adapted_call(spec, model.context, model.loras, inputs, options)
        call = spec.start(model.context, *inputs, options)
        if self.checkpoint.tasks is not None and isinstance(options, PromptOptions):
            call = task_call(call, model.loras, options)
        return model, call

    @cached_property
    def engines(self) -> "ModelEngines":
        """The model's generation engines; what they need is imported when it first generates."""
        from bytetx.tasks.generate import ModelEngines

        if self._is_outline:
            raise _no_weights()
        return ModelEngines(
            self.checkpoint, token_budget=self.token_budget, cuda_graphs=self.cuda_graphs
        )

    @property
    def answer_format(self) -> AnswerFormat:
        """How answers to chats hold reasoning and calls of tools; it may be set to another one.

        Found by the chat template: `model.answer_format.parse(text)` takes an answer apart, and
        `tool_grammar(tools)` is the form of answers that call tools.
        """
        return self.context.answer_format

    @answer_format.setter
    def answer_format(self, answer_format: AnswerFormat) -> None:
        self.context.answer_format = answer_format

    def engine(
        self,
        *,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        seed: int | None = None,
    ) -> "GenerationEngine":
        """A new engine with add_request, abort and step; AsyncEngine(engine) is for servers.

        kv_cache_tokens, max_num_seqs, num_speculative_tokens: as of `generate`.
        seed: of the generator of seeds, for requests without a seed.
        """
        sizes = self.generation_sizes(
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )
        return self.engines.build(sizes, seed=seed)

    def generation_sizes(
        self,
        *,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
    ) -> "GenerationSizes":
        """The sizes of an engine with these options, in sequences, tokens and bytes."""
        from bytetx.tasks.generate import GenerateOptions

        return self.engines.sizes(
            GenerateOptions(
                kv_cache_tokens=kv_cache_tokens,
                max_num_seqs=max_num_seqs,
                num_speculative_tokens=num_speculative_tokens,
            )
        )

    def encode_prompts(
        self, prompts: "Iterable[Prompt]", *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[list[int]]:
        """Prompts as the token ids that `engine` takes; raises the first bad one's InputError.

        chat_template_kwargs: as of `generate`.
        """
        from bytetx.tasks.generate import ChatOptions, prompt_reader

        options = ChatOptions(chat_template_kwargs=chat_template_kwargs)
        encoded, reader = [], prompt_reader(self.checkpoint, options)
        for token_ids in reader.read(list(check_iterable("prompts", prompts))):
            if isinstance(token_ids, InputError):
                raise copy(token_ids)  # this frame holds the other
            encoded.append(token_ids)
        return encoded

    def similarity(self, a: "Vectors | Packed", b: "Vectors | Packed") -> torch.Tensor:
        """f32 [len(a), len(b)]: bytetx.similarity with the function that the checkpoint names.

        A checkpoint that names none: cosine; dot where it is a sparse encoder, and maxsim where it
        is a multi-vector model.
        """
        from bytetx.tasks.search import similarity

        return similarity(a, b, function=self.similarity_function)

    @property
    def similarity_function(self) -> "Similarity":
        """One of bytetx.tasks.search.SIMILARITIES, for bytetx.similarity and semantic_search."""
        sentence = self.checkpoint.sentence
        if sentence.multi_vector is not None:
            return "meanmaxsim" if sentence.multi_vector.mean else "maxsim"
        if sentence.similarity is not None:
            return sentence.similarity
        return "dot" if sentence.is_sparse else "cosine"

    def info(self) -> dict[str, Any]:
        """The checkpoint's family, sizes, dtype, device, heads, limits and unused tensors."""
        limits = {"max_tokens": self.max_tokens, "token_budget": self.token_budget}
        limits["prefix_cache_bytes"] = self.prefix_cache_bytes
        return checkpoint_info(self.checkpoint, **limits)


def _no_weights() -> OptionError:
    return OptionError(
        "this model has no weights, for it was loaded with reads_weights=False; load it with them"
    )
