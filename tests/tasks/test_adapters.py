"""LoRA adapters per text and per prompt, against the models that peft merges."""

import asyncio
import contextlib
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, save_asymmetric, save_causal, save_checkpoint
from lora_adapters import save_adapter
from safetensors.torch import load_file, save_file
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint.task_adapters import TaskAdapters
from bytetx.errors import CheckpointError, OptionError
from bytetx.model import Model
from bytetx.nn.adapters import Adapters

SEQLENS = [1, 7, 30, 3, 12]
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXTS = [text for text in SENTENCES if text]


def load(folder: Path, **options: object) -> Model:
    return bytetx.load(folder, device="cpu", dtype="float32", local_files_only=True, **options)


def close(a: object, b: object) -> bool:
    return np.allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4)


def base_of(name: str, folder: Path) -> Path:
    if name in ("bert", "roberta", "distilbert", "mpnet", "electra", "modernbert", "albert"):
        return save(tiny_model(name), folder)
    return save(tiny_decoder(name, "Model"), folder)


@pytest.mark.feature("Checkpoints", "Adapters per request")
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "distilbert", "mpnet", "electra", "modernbert", "albert"),
        *("llama", "gpt2", "gpt_neox", "phi3", "falcon", "gemma3", "qwen3_moe"),
        *("qwen3_5", "qwen3_next"),
    ],
)
def test_each_text_has_its_adapters_hidden_states(name: str, tmp_path: Path) -> None:
    """Ranks differ; layouts of tensors that a weight stacks, separates or shares."""
    base = base_of(name, tmp_path / "base")
    ids = random_ids(SEQLENS)
    targets: object = "all-linear"
    if name == "qwen3_moe":
        targets = ["q_proj", "v_proj", "o_proj"]
    elif name == "qwen3_next":
        targets = ["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]
    right: dict[str | None, list[torch.Tensor]] = {}
    configs = {"a": {"r": 3, "lora_alpha": 9}, "b": {"r": 16, "use_rslora": True}}
    models = {None: transformers.AutoModel.from_pretrained(base).eval()}
    for seed, (adapter, config) in enumerate(configs.items()):
        models[adapter] = save_adapter(
            base, tmp_path / adapter, seed=seed, target_modules=targets, **config
        )
    for adapter, model in models.items():
        with torch.no_grad():
            right[adapter] = [model(torch.tensor([row])).last_hidden_state[0] for row in ids]
    model = load(base, adapters={adapter: tmp_path / adapter for adapter in configs})
    mixed = ["a", None, "b", "a", "b"]
    for adapters in ("a", "b", None, mixed):
        each = adapters if isinstance(adapters, list) else [adapters] * len(ids)
        found = model.hidden_states(ids, adapter=adapters)
        for index, own in enumerate(each):
            assert close(found[index], right[own][index]), (adapters, index)
    assert not close(right["a"][2], right[None][2])


@pytest.mark.feature("Checkpoints", "Adapters per request with biases")
@pytest.mark.parametrize(
    ("name", "configs"),
    [
        ("bert", ({"bias": "lora_only"}, {"lora_bias": True, "bias": "lora_only"})),
        ("distilbert", ({"bias": "lora_only"}, {})),
        ("albert", ({"bias": "lora_only", "lora_bias": True}, {})),
        ("gpt2", ({"bias": "lora_only"}, {"lora_bias": True})),
        ("gpt_neox", ({"bias": "lora_only"}, {"lora_bias": True})),
        # Without biases of their own; peft cannot merge these.
        ("llama", ({"lora_bias": True, "lora_alpha": 12}, {"bias": "all"})),
        ("phi3", ({"lora_bias": True}, {})),
        ("gemma3", ({"lora_bias": True}, {"bias": "all"})),
        ("lfm2", ({"lora_bias": True}, {})),
        ("qwen3_5", ({"lora_bias": True}, {})),
    ],
)
def test_each_text_has_its_adapters_biases(
    name: str, configs: tuple[dict[str, object], ...], tmp_path: Path
) -> None:
    base = base_of(name, tmp_path / "base")
    ids, each = random_ids(SEQLENS), ["a", None, "b", "a", "b"]
    models = {None: transformers.AutoModel.from_pretrained(base).eval()}
    for seed, (adapter, config) in enumerate(zip("ab", configs, strict=True)):
        models[adapter] = save_adapter(
            base, tmp_path / adapter, seed=seed, target_modules="all-linear", **config
        )
    model = load(base, adapters={adapter: tmp_path / adapter for adapter in "ab"})
    for adapters in (each, ["a"] * len(ids)):
        found = model.hidden_states(ids, adapter=adapters)
        for row, adapter, states in zip(ids, adapters, found, strict=True):
            with torch.no_grad():
                right = models[adapter](torch.tensor([row])).last_hidden_state[0]
            assert close(states, right), adapter


@pytest.mark.parametrize("name", ["gte", "jina_embeddings_v3"])
def test_biases_of_layers_that_the_files_stack(name: str, tmp_path: Path) -> None:
    """Also those of layers without factors."""
    base = save(tiny_model(name), tmp_path / "base")
    right = save_adapter(
        base, tmp_path / "a", target_modules=["q_proj", "o_proj"], bias="lora_only", lora_bias=True
    )
    model = load(base, adapters={"a": tmp_path / "a"})
    ids = random_ids(SEQLENS)
    for row, states in zip(ids, model.hidden_states(ids, adapter="a"), strict=True):
        with torch.no_grad():
            assert close(states, right(torch.tensor([row])).last_hidden_state[0])


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "base", head="ForSequenceClassification")


def test_heads_of_their_own(classifier: Path, tmp_path: Path) -> None:
    """modules_to_save: a step has texts of three heads, and each text gets its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    kind = transformers.AutoModelForSequenceClassification
    models = {None: kind.from_pretrained(classifier).eval()}
    for seed, name in enumerate("ab"):
        models[name] = save_adapter(
            classifier,
            tmp_path / name,
            kind,
            seed,
            task_type="SEQ_CLS",
            target_modules=["query", "key", "pooler.dense"],
        )
    models["c"] = save_adapter(classifier, tmp_path / "c", kind, 5, target_modules=["value"])
    model = load(classifier, adapters={name: tmp_path / name for name in "abc"})
    each = [[None, "a", "b", "c"][i % 4] for i in range(len(TEXTS))]
    with torch.no_grad():
        right = [
            models[name](**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
            for name, text in zip(each, TEXTS, strict=True)
        ]

    def scores(found: object) -> list[list[float]]:
        return [
            [score for _, score in sorted((one.label, one.score) for one in labels)]
            for labels in found
        ]

    assert close(scores(model.classify(TEXTS, adapter=each)), torch.stack(right))
    streamed = list(model.classify(iter(TEXTS), adapter=each, stream=True))
    assert close(scores(streamed), torch.stack(right))
    chunked = model.classify(TEXTS, adapter=each, overflow="chunk")
    assert close(scores(chunked), torch.stack(right))
    for name in (None, "a", "c"):
        own = [i for i, other in enumerate(each) if other == name]
        found = scores(model.classify([TEXTS[i] for i in own], adapter=name))
        assert close(found, torch.stack([right[i] for i in own]))

    async def together() -> list[object]:
        async with bytetx.AsyncModel(model) as shared:
            calls = [
                shared.classify([text], adapter=name)
                for name, text in zip(each, TEXTS, strict=True)
            ]
            return await asyncio.gather(*calls, shared.classify(TEXTS, adapter=each))

    *single, whole = asyncio.run(together())
    assert close(scores(one[0] for one in single), torch.stack(right))
    assert close(scores(whole), torch.stack(right))


def test_tags_and_scores_of_pairs(tmp_path: Path) -> None:
    tagger = save_checkpoint(tmp_path / "tagger", head="ForTokenClassification")
    ranker = save_checkpoint(tmp_path / "ranker", head="ForSequenceClassification", num_labels=1)
    cases: list[tuple[Path, str, type, Callable[[Model, object], object]]] = [
        (
            tagger,
            "TOKEN_CLS",
            transformers.AutoModelForTokenClassification,
            lambda model, adapter: [
                [entity.score for entity in entities]
                for entities in model.tag(TEXTS[:4], adapter=adapter, aggregation="none")
            ],
        ),
        (
            ranker,
            "SEQ_CLS",
            transformers.AutoModelForSequenceClassification,
            lambda model, adapter: [
                hit.score
                for hit in sorted(
                    model.rerank("a fox", TEXTS[:4], adapter=adapter), key=lambda hit: hit.index
                )
            ],
        ),
    ]
    for base, task_type, kind, run in cases:
        folders = {name: tmp_path / f"{task_type}-{name}" for name in "ab"}
        for seed, folder in enumerate(folders.values()):
            save_adapter(
                base, folder, kind, seed, task_type=task_type, target_modules=["query", "dense"]
            )
        model = load(base, adapters=folders)
        right = {name: run(load(folder), None) for name, folder in folders.items()}
        right[None] = run(load(base), None)
        for name in (None, "a", "b"):
            assert all(map(close, run(model, name), right[name]))
        each = ["a", None, "b", "a"]
        mixed = run(model, each)
        assert all(close(mixed[i], right[name][i]) for i, name in enumerate(each))


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """A causal model, and its adapters `a` and `b` in folders beside it."""
    base = save_causal(tmp_path / "causal")
    for seed, name in enumerate("ab"):
        save_adapter(
            base,
            tmp_path / name,
            transformers.AutoModelForCausalLM,
            seed,
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
            r=4 + 3 * seed,
        )
    return base


def folders(causal: Path) -> dict[str, Path]:
    return {name: causal.parent / name for name in "ab"}


def merged(causal: Path) -> dict[str | None, Model]:
    return {None: load(causal), **{name: load(path) for name, path in folders(causal).items()}}


def common_prompts(num_prompts: int = 6) -> list[list[int]]:
    """Prompts that begin with the same 40 tokens."""
    generator = np.random.default_rng(0)
    prefix = generator.integers(5, 90, 40).tolist()
    return [[*prefix, *generator.integers(5, 90, 2 + i).tolist()] for i in range(num_prompts)]


def token_ids(found: object) -> list[tuple[int, ...]]:
    return [tuple(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_prompts_of_different_adapters_generate_together(
    num_speculative_tokens: int, causal: Path
) -> None:
    """Their prompts begin alike: no page of one adapter serves another, in any order."""
    prompts = common_prompts()
    right = {name: token_ids(own.generate(prompts, GREEDY)) for name, own in merged(causal).items()}
    assert len({right[name][0] for name in right}) == 3
    each = ["a", None, "b", "b", None, "a"]
    options = {"num_speculative_tokens": num_speculative_tokens}
    model = load(causal, adapters=folders(causal))
    for _ in range(2):  # the second time prefixes are in the cache
        found = token_ids(model.generate(prompts, GREEDY, adapter=each, **options))
        assert found == [right[name][i] for i, name in enumerate(each)]
        for name, own in right.items():
            assert token_ids(model.generate(prompts, GREEDY, adapter=name, **options)) == own


def test_prompts_of_an_async_model(causal: Path) -> None:
    prompts = common_prompts()
    right = {name: token_ids(own.generate(prompts, GREEDY)) for name, own in merged(causal).items()}
    each = ["a", None, "b", "b", None, "a"]

    async def one(model: bytetx.AsyncModel, prompt: list[int], name: str | None) -> list[int]:
        pieces = [piece async for piece in model.generate(prompt, GREEDY, adapter=name)]
        return [token for piece in pieces for token in piece.token_ids]

    async def run() -> list[list[int]]:
        async with bytetx.AsyncModel(load(causal, adapters=folders(causal))) as model:
            with pytest.raises(OptionError, match="adapter must be the name of a loaded one"):
                model.generate(prompts[0], GREEDY, adapter="c")
            with pytest.raises(OptionError, match="one name for one prompt"):
                model.generate(prompts[0], GREEDY, adapter=["a"])
            calls = map(one, [model] * len(each), prompts, each)
            return await asyncio.gather(*calls)

    found = asyncio.run(run())
    assert [tuple(one) for one in found] == [right[name][i] for i, name in enumerate(each)]


def test_a_prefix_of_one_adapter_never_serves_another(causal: Path) -> None:
    """In a step, and from the cache of earlier steps."""
    texts = common_prompts(8)
    right = {name: own.embed(texts) for name, own in merged(causal).items()}
    each = ["a", None, "b", "a", "b", None, "a", "b"]
    model = load(causal, adapters=folders(causal))
    for _ in range(3):
        found = model.embed(texts, adapter=each)
        assert close(found, np.stack([right[name][i] for i, name in enumerate(each)]))
        for name, own in right.items():
            assert close(model.embed(texts, adapter=name), own)
    cache = model._runner.prefix_cache
    assert cache is not None and cache.saved_tokens > 0  # adapters share prefixes with themselves

    async def together() -> list[object]:
        async with bytetx.AsyncModel(model) as shared:
            calls = [
                shared.embed([text], adapter=name) for text, name in zip(texts, each, strict=True)
            ]
            return await asyncio.gather(*calls)

    rows = [one[0] for one in asyncio.run(together())]
    assert close(rows, np.stack([right[name][i] for i, name in enumerate(each)]))


def test_an_adapter_added_again_is_another_one(causal: Path) -> None:
    """Content of the first one of a name is not the second one's."""
    prompts, paths = common_prompts(), folders(causal)
    right = {name: token_ids(own.generate(prompts, GREEDY)) for name, own in merged(causal).items()}
    vectors = {name: own.embed(prompts) for name, own in merged(causal).items()}
    model = load(causal)
    for name in ("a", "b", "a"):
        model.add_adapter("x", paths[name])
        for _ in range(2):
            assert token_ids(model.generate(prompts, GREEDY, adapter="x")) == right[name]
            assert close(model.embed(prompts, adapter="x"), vectors[name])
        model.remove_adapter("x")


@pytest.fixture
def bert(tmp_path: Path) -> Iterator[Model]:
    """A model with the adapters `a` and `b`."""
    base = save_checkpoint(tmp_path / "base")
    for seed, name in enumerate("ab"):
        save_adapter(base, tmp_path / name, seed=seed, target_modules=["query", "dense"])
    yield load(base, adapters={name: tmp_path / name for name in "ab"})


class Unsized:
    """Texts that can be read again, and whose number nobody knows."""

    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS[:2])


def test_an_unknown_adapter_is_an_error(bert: Model) -> None:
    for wrong in ("c", "", "A", 3, b"a", ["a", "c"], ["a", 3]):
        with pytest.raises(OptionError, match=r"name of a loaded one \('a', 'b'\)"):
            bert.embed(TEXTS[:2], adapter=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one for each of 2 inputs, got 1"):
        bert.embed(TEXTS[:2], adapter=["a"])
    with pytest.raises(OptionError, match="one for each of 2 inputs, got 1"):
        bert.embed(itertools.repeat("a fox"), adapter=["a"])
    with pytest.raises(OptionError, match="adapter has 1 entries, and there are more texts"):
        bert.embed(Unsized(), adapter=["a"])
    bert.remove_adapter("a")
    with pytest.raises(OptionError, match=r"loaded one \('b'\)"):
        bert.embed(TEXTS[:2], adapter="a")
    bert.remove_adapter("b")
    with pytest.raises(OptionError, match="none is loaded"):
        bert.embed(TEXTS[:2], adapter="b")
    assert bert.adapters == {}
    assert bert.embed([], adapter=[]).shape[0] == 0


def test_names(bert: Model) -> None:
    folder = bert.adapters["a"]
    for wrong in ("", "a:b", "a/b", ".a", "a b", "\u00e4", "a" * 129, None, 3, "a\n"):
        with pytest.raises(OptionError, match="name of an adapter must be 1 to 128"):
            bert.add_adapter(wrong, folder)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="an adapter 'a' is there already; remove it first"):
        bert.add_adapter("a", bert.adapters["b"])
    with pytest.raises(OptionError, match="name of a loaded one"):
        bert.remove_adapter("c")
    bert.add_adapter("a.B-c_9", folder)
    assert close(bert.embed(TEXTS, adapter="a.B-c_9"), bert.embed(TEXTS, adapter="a"))


def test_a_pickled_model_has_its_adapters(bert: Model) -> None:
    again = pickle.loads(pickle.dumps(bert))
    assert again.adapters == bert.adapters
    assert close(again.embed(TEXTS, adapter="b"), bert.embed(TEXTS, adapter="b"))


def test_an_adapter_is_freed_with_its_last_request(bert: Model) -> None:
    """A removed one serves the stream that has begun, and nothing holds it afterwards."""
    right = bert.embed(TEXTS, adapter="a")
    stream = bert.embed(TEXTS * 40, adapter="a", stream=True)
    first = next(iter(stream))
    adapter, weight = bert.loras.get("a").adapter, bert.transformer.layers.weights[0].qkv
    held = weakref.ref(adapter.changes.of_weight[id(weight)].by_owner[adapter.slot].a)
    del adapter
    bert.remove_adapter("a")
    assert close([first, *stream][: len(TEXTS)], right)
    del stream, first
    gc.collect()
    assert held() is None


def test_adapters_come_and_go_while_requests_run(bert: Model) -> None:
    folder, texts = bert.adapters["a"], TEXTS * 3
    right = {name: np.asarray(bert.embed(texts, adapter=name)) for name in (None, "a", "b")}
    ends, errors, done = threading.Event(), [], []

    def change() -> None:
        while not ends.is_set():
            bert.add_adapter("x", folder)
            bert.remove_adapter("x")

    def run() -> None:
        try:
            for _ in range(20):
                for name in (None, "a", "b"):
                    assert close(bert.embed(texts, adapter=name), right[name])
                with contextlib.suppress(OptionError):
                    done.append(close(bert.embed(texts, adapter="x"), right["a"]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    changer = threading.Thread(target=change)
    for thread in (*threads, changer):
        thread.start()
    for thread in threads:
        thread.join()
    ends.set()
    changer.join()
    assert not errors and all(done)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            {"target_modules": ["query"], "use_dora": True},
            {},
            "scales the base model's 'encoder.layer.0.*DoRA.*merge_and_unload.*or load the adapter",
        ),
        (
            {"target_modules": ["query"], "bias": "all"},
            {},
            "changes 'embeddings.LayerNorm.bias' and 4 more tensors",
        ),
        ({"target_modules": ["word_embeddings", "query"]}, {}, "changes 'embeddings.word_emb"),
        (
            {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]},
            {},
            "changes 'embeddings.word_embeddings.weight', and an adapter of single requests",
        ),
        (
            {"target_modules": ["query"], "modules_to_save": ["LayerNorm"]},
            {},
            "changes 'embeddings.LayerNorm.bias' and 9 more tensors",
        ),
        ({"target_modules": ["query"]}, {"r": 0}, "r must be an integer from 1"),
        ({"target_modules": ["query"]}, {"r": 5}, "says rank 5"),
        ({"target_modules": ["query"]}, {"target_modules": ["key"]}, "not in target_modules"),
        ({"target_modules": ["query"]}, {"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
)
def test_what_rows_cannot_have_is_refused(
    config: dict[str, object], change: dict[str, object], message: str, bert: Model, tmp_path: Path
) -> None:
    save_adapter(bert.checkpoint.folder, tmp_path / "x", **config)
    edit_json(tmp_path / "x" / "adapter_config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        bert.add_adapter("x", tmp_path / "x")
    assert list(bert.adapters) == ["a", "b"]


@pytest.mark.parametrize("ending", ["lora_A.weight", "lora_B.weight", "lora_B.bias"])
def test_values_that_are_not_finite_are_refused(ending: str, bert: Model, tmp_path: Path) -> None:
    """At once, as of an adapter that is merged, and not in each request."""
    save_adapter(bert.checkpoint.folder, tmp_path / "x", target_modules=["value"], lora_bias=True)
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(ending))
    for value in (torch.nan, torch.inf):
        tensors[name].view(-1)[3] = value
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=r"holds values that are not finite in .*float32"):
            bert.add_adapter("x", tmp_path / "x")


def test_adapters_of_other_models_are_refused(bert: Model, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensors that the base model lacks"):
        bert.add_adapter("x", folder_of_llama(tmp_path))
    wide = save(tiny_model("bert", hidden_size=96), tmp_path / "wide")
    save_adapter(wide, tmp_path / "x", target_modules=["query"])
    with pytest.raises(CheckpointError, match="the adapter is of another model"):
        bert.add_adapter("x", tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        bert.add_adapter("x", wide)
    with pytest.raises(CheckpointError, match="there is no folder"):
        bert.add_adapter("x", tmp_path / "nothing")
    factors = load_file(bert.adapters["a"] / "adapter_model.safetensors")
    factors.pop(next(name for name in factors if "lora_B" in name))
    save_file(factors, bert.adapters["a"] / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lacks lora_B"):
        bert.add_adapter("x", bert.adapters["a"])


def folder_of_llama(tmp_path: Path) -> Path:
    base = save(tiny_decoder("llama", "Model"), tmp_path / "llama")
    save_adapter(base, tmp_path / "of_llama", target_modules=["q_proj"])
    return tmp_path / "of_llama"


def test_language_model_heads_and_relative_positions_are_refused(tmp_path: Path) -> None:
    base = save(tiny_decoder("llama"), tmp_path / "base")
    kind = transformers.AutoModelForCausalLM
    for key in ("target_modules", "modules_to_save"):
        config = {"target_modules": ["q_proj"]} | {key: ["q_proj", "lm_head"][key[0] == "m" :]}
        save_adapter(base, tmp_path / key, kind, task_type="CAUSAL_LM", **config)
        with pytest.raises(CheckpointError, match="changes 'lm_head.weight'.*language model head"):
            load(base, adapters={"x": tmp_path / key})
    deberta = save(tiny_model("deberta-v2"), tmp_path / "deberta")
    save_adapter(deberta, tmp_path / "q", target_modules=["query_proj", "value_proj"])
    with pytest.raises(CheckpointError, match="query_proj', with which deberta_v2 projects"):
        load(deberta, adapters={"x": tmp_path / "q"})
    model = save_adapter(deberta, tmp_path / "v", target_modules=["value_proj", "dense"])
    ids = random_ids([5])
    with torch.no_grad():
        right = model(torch.tensor(ids)).last_hidden_state[0]
    found = load(deberta, adapters={"x": tmp_path / "v"}).hidden_states(ids, adapter="x")
    assert close(found[0], right)


def test_models_that_take_no_adapters(bert: Model, tmp_path: Path) -> None:
    folder = bert.adapters["a"]
    invariant = load(bert.checkpoint.folder, batch_invariant=True)
    with pytest.raises(OptionError, match="not for a batch-invariant model"):
        invariant.add_adapter("x", folder)
    router = load(save_asymmetric(tmp_path / "router"))
    with pytest.raises(OptionError, match="not for a checkpoint with a Router"):
        router.add_adapter("x", folder)
    shared = replace(bert.checkpoint, executor=SimpleNamespace(has_workers=True))
    with pytest.raises(OptionError, match="not for a model that several processes share"):
        Adapters(shared).add("x", folder)
    shared = replace(shared, tasks=TaskAdapters({"x": {}}, {"x": "x"}))
    with pytest.raises(OptionError, match="not for a model that several processes share"):
        Adapters(shared).of_tasks("x")
    assert Adapters(shared).of_tasks(None) is None
    with pytest.raises(OptionError, match="not for a model in fp8"):
        Adapters(replace(bert.checkpoint, quantization="fp8")).add("x", folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_half_and_8_bit_models(dtype: str, bert: Model) -> None:
    """As near to f32 as the model without an adapter is."""
    if dtype == "int8":
        from bytetx.ops.int8_linear import why_no_int8_linear

        if reason := why_no_int8_linear():
            pytest.skip(reason)
    narrow = bytetx.load(bert.checkpoint.folder, device="cpu", dtype=dtype, adapters=bert.adapters)

    def error(adapter: str | None) -> float:
        found, right = narrow.embed(TEXTS, adapter=adapter), bert.embed(TEXTS, adapter=adapter)
        return float(np.abs(np.asarray(found) - np.asarray(right)).mean())

    assert error("a") <= 2 * error(None) + 1e-3
