"""rerank of sentence-transformers' generative rerankers (LogitScore), against CrossEncoder."""

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, save_causal
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError

DOCUMENTS = [*SENTENCES, "fox " * 40]
QUERY = "who met Zaphod?"
# Templates of pairs, with a tail behind the document.
FLAT = (
    "{%- for message in messages %}<{{ message.role }}>: {{ message.content }}\n{% endfor -%}"
    "{{ tail }}{% if add_generation_prompt %}the answer: {% endif %}"
)
STRUCTURED = FLAT.replace("message.content", "message.content[0].text")


def save_reranker(
    folder: Path,
    template: str | None = None,
    *,
    name: str = "qwen3",
    ids: tuple[int, int | None] = (70, 80),
    max_seq_length: int | None = None,
    chat: dict[str, object] | None = None,
    **options: object,
) -> Path:
    """A random causal model with LogitScore. chat: variables of the template."""
    base = save_causal(folder / "base", name, max_position_embeddings=512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template, tokenizer.model_max_length = template, 400
    tokenizer.save_pretrained(base)
    processing = {} if chat is None else {"processing_kwargs": {"chat_template": chat}}
    transformer = Transformer(
        str(base), transformer_task="text-generation", max_seq_length=max_seq_length, **processing
    )
    model = CrossEncoder(modules=[transformer, LogitScore(*ids)], device="cpu", **options)
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def assert_same(folder: Path, prompt: str | None = None, *, truncate: bool = False) -> None:
    stock, model = CrossEncoder(str(folder), device="cpu"), bytetx.load(folder, device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    for raw, activation in ((False, None), (True, torch.nn.Identity())):
        wanted = stock.predict(pairs, prompt=prompt, activation_fn=activation)
        hits = model.rerank(QUERY, DOCUMENTS, instruction=prompt, raw_scores=raw, truncate=truncate)
        assert sorted(hit.index for hit in hits) == list(range(len(DOCUMENTS)))
        for hit in hits:
            assert hit.score == pytest.approx(float(wanted[hit.index]), abs=1e-4)
    assert wanted.max() - wanted.min() > 0.1


@pytest.mark.feature("Tasks", "reranking by the logits of answers")
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("no", [80, 0, None])
def test_pairs_of_the_tokenizer(name: str, no: int | None, tmp_path: Path) -> None:
    options = {"prompts": {"judge": "judge the dog: "}, "default_prompt_name": "judge"}
    folder = save_reranker(tmp_path, name=name, ids=(70, no), **options)
    assert_same(folder)
    assert_same(folder, "another fox: ")
    assert_same(folder, "")


@pytest.mark.parametrize("template", [FLAT, STRUCTURED], ids=["flat", "structured"])
@pytest.mark.parametrize("chat", [None, {"add_generation_prompt": True}, {"tail": "in Berlin"}])
def test_chats(template: str, chat: dict[str, object] | None, tmp_path: Path) -> None:
    folder = save_reranker(tmp_path, template, chat=chat)
    assert_same(folder)
    assert_same(folder, "Judge whether the dog jumps.")


@pytest.mark.parametrize("restores", [True, False])
def test_chats_that_are_cut_keep_the_end_of_the_template(restores: bool, tmp_path: Path) -> None:
    chat = {"tail": "the end", "restore_suffix": restores}
    folder = save_reranker(tmp_path, FLAT, chat=chat, max_seq_length=60)
    assert_same(folder, truncate=True)
    model = bytetx.load(folder, device="cpu")
    with pytest.raises(TooLongError, match=r"documents\[8\] makes a prompt of \d+ tokens, the mod"):
        model.rerank(QUERY, DOCUMENTS[6:7] * 8 + DOCUMENTS[-1:])
    cut = model.rerank(QUERY, [*DOCUMENTS[6:7], DOCUMENTS[-1]], truncate=True)
    assert cut.stats.num_truncated == 1
    kept = model.rerank(QUERY, [*DOCUMENTS[6:7], DOCUMENTS[-1]], on_error="return")
    assert list(kept.errors) == [1] and len(kept) == 1


def test_pairs_that_are_cut(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path, max_seq_length=30)
    assert_same(folder, truncate=True)
    got = bytetx.load(folder, device="cpu").rerank("q", ["a", DOCUMENTS[-1]], truncate=True)
    assert got.stats.num_truncated == 1


def test_an_activation_of_the_checkpoint(tmp_path: Path) -> None:
    assert_same(save_reranker(tmp_path, activation_fn=torch.nn.Tanh()))


def test_generate_keeps_the_prompt_of_an_answer(tmp_path: Path) -> None:
    """The template of pairs has no generation prompt, that of chats has one."""
    folder = save_reranker(tmp_path, FLAT)
    checkpoint = bytetx.load(folder, device="cpu").checkpoint
    chat = [{"role": "user", "content": "a"}]
    assert checkpoint.chat_template.render(chat) == "<user>: a\nthe answer: "
    assert checkpoint.pair_template.render(chat) == "<user>: a\n"


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path, "{{ messages[-1].content if messages[-1].role == 'user' }}")
    with pytest.raises(InputError, match="does not write messages of the roles query and document"):
        bytetx.load(folder, device="cpu").rerank(QUERY, DOCUMENTS)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template, and its sentence_bert_conf"):
        bytetx.load(folder, device="cpu")
    path = folder / "sentence_bert_config.json"
    edit_json(path, processing_kwargs={"chat_template": {"max_length": 9}})
    with pytest.raises(CheckpointError, match="sets max_length, .*; write max_seq_length"):
        bytetx.load(folder, device="cpu")
    config = folder / "1_LogitScore" / "config.json"
    entry = {"method": "forward", "method_output_name": "logits"}
    edit_json(path, processing_kwargs={}, modality_config={"text": entry})
    edit_json(config, true_token_id=5000)
    with pytest.raises(CheckpointError, match="reads the logits of tokens 5000, 80 of a causal"):
        bytetx.load(folder, device="cpu")
    edit_json(config, module_input_name="scores")
    with pytest.raises(CheckpointError, match="module_input_name 'scores' is not supported"):
        bytetx.load(folder, device="cpu")
    config.write_text("{}")
    with pytest.raises(CheckpointError, match="lacks true_token_id"):
        bytetx.load(folder, device="cpu")


def test_a_template_without_a_place_for_the_instruction(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages if m.role != 'system' %}<{{ m.role }}>: {{ m.content }}\n"
        "{% endfor -%}"
    )
    model = bytetx.load(save_reranker(tmp_path, template), device="cpu")
    assert len(model.rerank(QUERY, DOCUMENTS, truncate=True)) == len(DOCUMENTS)
    with pytest.raises(OptionError, match="does not write a system message"):
        model.rerank(QUERY, DOCUMENTS, instruction="judge", truncate=True)
