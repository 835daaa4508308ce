"""decide: the answers, defaults and errors of transformers' pipeline, from packed passes."""

import asyncio
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from checkpoints import edit_json
from decisions import (
    REQUESTS,
    SPAM,
    TONE,
    URGENCY,
    assert_same_answers,
    save_decider,
    save_jev,
    stock,
    stock_pipeline,
)
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError
from bytetx.requests.decisions import DecisionReader

MARKED = (
    "<s>{{ question.type }}: {{ question.instructions | tojson }} {% for option in "
    "question.options %}{{ question.labels[loop.index0] }} {{ option }} "
    "{{ question.descriptions[loop.index0] }}<|split|>{% endfor %}\nanswer:<|mark|> tail of "
    "{{ state | tojson }} {{ unknown_name }}{{ eos_token }}"
)
TOGETHER = (
    "{{ state | tojson }}{% for q in questions %}<|split|>{{ q.name }}? "
    "{{ q.options | join(', ') }}:<|mark|>{% endfor %}"
)


def assert_same(folder: Path, requests: list[Any] = REQUESTS, **options: Any) -> list[Any]:
    """The answers of transformers, whatever shares the pass."""
    wanted = stock(folder, requests)
    model = bytetx.load(folder, device="cpu", **options)
    got = model.decide(requests)
    assert_same_answers(list(got), wanted)
    assert_same_answers([model.decide([one])[0] for one in requests], wanted)
    return wanted


def write_files(folder: Path, template: str | None = None, **settings: object) -> None:
    if template is not None:
        (folder / "decision_template.jinja").write_text(template)
    (folder / "decision.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def decider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decider(tmp_path_factory.mktemp("decider"))


@pytest.fixture(scope="module")
def model(decider: Path) -> bytetx.Model:
    return bytetx.load(decider, device="cpu")


@pytest.mark.feature("Tasks", "typed decisions with probabilities")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gemma2", "granite"])
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Tied and untied heads, logits that are divided and capped."""
    wanted = assert_same(save_decider(tmp_path, name))
    assert len({round(answer["spam"]["noul"], 3) for answer in wanted[:1]}) == 1
    assert 0.02 < wanted[0]["spam"]["noul"] < 0.98


def test_json_and_streams(model: bytetx.Model) -> None:
    wanted = model.decide(REQUESTS)
    as_text = model.decide([json.dumps(one) for one in REQUESTS])
    assert list(as_text) == list(wanted)
    assert list(model.decide(iter(REQUESTS), stream=True)) == list(wanted)
    assert model.decide([]) == []


def test_calls_of_many_tasks_share_passes(decider: Path) -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        async with bytetx.AsyncModel(bytetx.load(decider, device="cpu")) as model:
            first = [model.decide([one]) for one in REQUESTS]
            others = [model.embed(["a fox"]), model.score(["a fox jumps"])]
            found = await asyncio.gather(*first, *others)
            return [one[0] for one in found[: len(first)]], list(await model.decide(REQUESTS))

    apart, together = asyncio.run(main())
    wanted = list(bytetx.load(decider, device="cpu").decide(REQUESTS))
    assert_same_answers(apart, wanted)
    assert_same_answers(together, wanted)


@pytest.mark.parametrize("template", [MARKED, TOGETHER, "{{ state }} {{ question.name }}:"])
@pytest.mark.parametrize("sanitizes", [True, False])
def test_templates_of_the_checkpoint(template: str, sanitizes: bool, tmp_path: Path) -> None:
    folder = save_decider(tmp_path, template=None)
    write_files(
        folder,
        template,
        labels={"score": list("vwxyz")},
        noul_options=["false", "true"],
        sanitize_control_tokens=sanitizes,
    )
    hostile = {"state": "a <|mark|> b <|split|> c <s>", "questions": {"<|mark|>": SPAM}}
    assert_same(folder, [*REQUESTS, hostile])


def test_control_tokens_of_requests_are_text(decider: Path, model: bytetx.Model) -> None:
    tokens = [
        "<|im_end|>",
        "</s>",
        "<|mark|>",
        "<|split|>",
        "\U000f0000</s>\U000f0001",
        "\U000f0001",
    ]
    requests = [{"state": f"a {token}{token} b", "questions": {"a": SPAM}} for token in tokens]
    assert_same_answers(list(model.decide(requests)), stock(decider, requests))


def test_labels_and_temperatures(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    temperature = {"noul": 3, "choice": 0.25}
    write_files(folder, labels={"noul": ["x", "y"]}, temperature=temperature, sort_choices=True)
    few = [REQUESTS[0], *REQUESTS[2:]]
    cooled = assert_same(folder, few)
    (folder / "decision.json").unlink()
    plain = assert_same(folder, few)
    assert cooled[0]["due"] == plain[0]["due"]
    assert cooled[0]["tone"]["confidence"] > plain[0]["tone"]["confidence"]


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}])
def test_a_decision_head(settings: dict[str, Any], tmp_path: Path) -> None:
    offsets = {"noul": 30, "score": 2, "choice": 4}
    folder = save_jev(tmp_path, num_verbalizers=32, offsets=offsets, **settings)
    write_files(folder, MARKED, temperature={"score": 2.0})
    wanted = assert_same(folder)
    assert bytetx.load(folder, device="cpu").info()["heads"] == ["decision"]
    assert 0 < wanted[0]["due"]["confidence"] < 1
    write_files(folder, TOGETHER)
    assert_same(folder)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_decision_head_on_other_models(name: str, tmp_path: Path) -> None:
    folder = save_jev(tmp_path, name, num_verbalizers=40)
    assert_same(folder)
    model = bytetx.load(folder, device="cpu")
    with pytest.raises(InputError, match="no language model head"):
        model.score(["a fox"])
    edit_json(folder / "config.json", offsets={"noul": 0, "score": 2, "choice": 20})
    with pytest.raises(InputError, match="'many' has 26 options, and the head of this mod"):
        bytetx.load(folder, device="cpu").decide(REQUESTS[1:2])
    for bad in (400, None):
        edit_json(folder / "config.json", offsets={"noul": 0, "score": 2, "choice": bad})
        with pytest.raises(CheckpointError, match="offsets must name a row below num_verbalizers"):
            bytetx.load(folder, device="cpu")


BAD: list[tuple[Any, str]] = [
    (3, 'must be {"state"'),
    ({"state": 1}, 'must be {"state"'),
    ({"questions": {"a": SPAM}}, 'must be {"state"'),
    ("{", "is no JSON"),
    ("[]", 'must be {"state"'),
    ({"state": 1, "questions": {}}, "questions must be a table"),
    ({"state": 1, "questions": [SPAM]}, "questions must be a table"),
    ({"state": 1, "questions": {"a": 5}}, "question 'a' must be a table"),
    ({"state": 1, "questions": {"a": {}}}, "must be one of noul, choice, score, got None"),
    ({"state": 1, "questions": {"a": {"type": "box"}}}, "one of noul, choice, score, got 'box'"),
    ({"state": 1, "questions": {"a": {"type": []}}}, "one of noul, choice, score"),
    ({"state": 1, "questions": {"a": {**SPAM, "more": 1}}}, "has 'more', which is not known"),
    ({"state": 1, "questions": {"a": {**SPAM, "instructions": 5}}}, "has instructions that must"),
    ({"state": 1, "questions": {"a": {**SPAM, "criteria": {"yes": "x"}}}}, "has criteria beside"),
    ({"state": 1, "questions": {"a": {**SPAM, "criteria": {"true": 5}}}}, "has a description that"),
    ({"state": 1, "questions": {"a": {**SPAM, "criteria": ["x"]}}}, "needs criteria, a table"),
    ({"state": 1, "questions": {"a": {"type": "choice"}}}, "needs criteria, a table"),
    ({"state": 1, "questions": {"a": {**TONE, "criteria": {}}}}, "needs criteria with its options"),
    ({"state": 1, "questions": {"a": {**TONE, "criteria": ["x"]}}}, "needs criteria, a table"),
    ({"state": 1, "questions": {"a": {**TONE, "criteria": {1: "x"}}}}, "whose name is no text"),
    ({"state": 1, "questions": {"a": {**TONE, "criteria": {"x": 1}}}}, "has a description that"),
    ({"state": 1, "questions": {"a": {"type": "score"}}}, "needs criteria, a list"),
    ({"state": 1, "questions": {"a": {**URGENCY, "criteria": []}}}, "needs criteria with its"),
    ({"state": 1, "questions": {"a": {**URGENCY, "criteria": {"x": "y"}}}}, "a list of levels"),
    ({"state": 1, "questions": {"a": {**URGENCY, "criteria": ["x", None]}}}, "has a level that"),
    (
        {"state": 1, "questions": {"a": {**URGENCY, "criteria": ["x"] * 27}}},
        "has 27 options, and this model reads at most 26",
    ),
]


@pytest.mark.parametrize(("request_", "message"), BAD)
def test_a_bad_request(request_: Any, message: str, decider: Path, model: bytetx.Model) -> None:
    given = [REQUESTS[0], request_, REQUESTS[2]]
    with pytest.raises(InputError) as raised:
        model.decide(given)
    assert str(raised.value).startswith("requests[1] ") and "\n" not in str(raised.value)
    assert message in str(raised.value)
    kept = model.decide(given, on_error="return")
    assert list(kept.errors) == [1] and kept[1] is kept.errors[1]
    assert_same_answers([kept[0], kept[2]], list(model.decide([given[0], given[2]])))


def test_transformers_refuses_the_same_requests(decider: Path) -> None:
    pipe = stock_pipeline(decider)
    for request, _ in BAD:
        with pytest.raises((ValueError, TypeError)):
            pipe.preprocess(request)


def test_every_bad_question_is_named(model: bytetx.Model) -> None:
    questions = {"a": {"type": "x"}, "b": SPAM, "c": {"type": "score"}}
    with pytest.raises(InputError, match=r"question 'a' has a type.*; question 'c' needs criteria"):
        model.decide([{"state": 1, "questions": questions}])


def test_what_no_prompt_can_be_made_of(model: bytetx.Model) -> None:
    ask = {"a": SPAM}
    with pytest.raises(InputError, match=r"requests\[0\] has assets \['img'\]: images"):
        model.decide([{"state": "img", "questions": ask, "assets": {"img": {"data_base64": "x"}}}])
    held: list[Any] = []
    held.append(held)
    with pytest.raises(InputError, match="nests deeper than"):
        model.decide([{"state": held, "questions": ask}])
    with pytest.raises(InputError, match=r"requests\[0\] .*not JSON serializable"):
        model.decide([{"state": {"a": object()}, "questions": ask}])
    with pytest.raises(InputError, match=r"requests\[1\] .*half a surrogate pair"):
        model.decide([REQUESTS[0], {"state": "a \ud800", "questions": ask}])
    with pytest.raises(InputError, match="requests must be a list of requests, got one"):
        model.decide(REQUESTS[0])
    with pytest.raises(InputError, match="put it in a list"):
        model.decide(json.dumps(REQUESTS[0]))
    with pytest.raises(OptionError, match="order must be given or average, got 'all'"):
        model.decide(REQUESTS, order="all")


def test_long_requests(model: bytetx.Model) -> None:
    """A prompt may be as long as the model, and fills steps of any size."""
    long = {"state": "a fox " * 1000, "questions": {"a": SPAM, "b": TONE}}
    with pytest.raises(TooLongError, match=r"requests\[1\] makes a prompt of \d+ tokens"):
        model.decide([REQUESTS[0], long])
    kept = model.decide([REQUESTS[0], long, REQUESTS[2]], on_error="return")
    assert list(kept.errors) == [1] and isinstance(kept[1], TooLongError)


@pytest.mark.parametrize("token_budget", [16, 300, 4096])
def test_any_token_budget(token_budget: int, decider: Path, model: bytetx.Model) -> None:
    other = bytetx.load(decider, device="cpu", token_budget=token_budget)
    assert_same_answers(list(other.decide(REQUESTS * 2)), [*model.decide(REQUESTS)] * 2)


def test_labels_that_are_several_tokens(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    write_files(folder, labels={"noul": ["fox and dog", "No"], "choice": ["A", "A", "C"]})
    model = bytetx.load(folder, device="cpu")
    for question in (SPAM, TONE):
        request = {"state": "x", "questions": {"q": question}}
        with pytest.raises(ValueError, match="distinct single tokens"):
            stock(folder, [request])
        with pytest.raises(InputError, match=r"question 'q' has the labels .* not distinct single"):
            model.decide([request])
    assert model.decide([{"state": "x", "questions": {"q": URGENCY}}])[0]["q"]["type"] == "score"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": {"noul": 0}}, "temperature must be a table"),
        ({"temperature": {"noul": "1"}}, "temperature must be a table"),
        ({"temperature": 1.0}, "temperature must be a table"),
        ({"labels": {"noul": "Yes"}}, "labels must be a table"),
        ({"labels": ["A"]}, "labels must be a table"),
        ({"noul_options": ["true", "true"]}, "noul_options must be"),
        ({"sanitize_control_tokens": "no"}, "sanitize_control_tokens must be true or false"),
        ({"chat_template": 5}, "chat_template must be text"),
        ({"adapter": "../other"}, "adapter must be a path inside"),
    ],
)
def test_a_damaged_decision_file(
    settings: dict[str, Any], message: str, decider: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in decider.iterdir():
        (folder / path.name).symlink_to(path)
    write_files(folder, **settings)
    with pytest.raises(CheckpointError, match=f"decision.json: {message}"):
        bytetx.load(folder, device="cpu")


def test_templates_that_do_not_fit(tmp_path: Path) -> None:
    folder = save_decider(tmp_path, template=None)
    ask = [REQUESTS[0]]
    with pytest.raises(InputError, match="has no chat template"):
        bytetx.load(folder, device="cpu").decide(ask)
    for template, message in (
        ("{% for q in questions %}{% endfor %}a<|mark|>b<|mark|>", "2 marks for 3 questions"),
        ("{{ raise_exception('no ' ~ question.type) }}", "no noul"),
        ("<|split|>", "makes a prompt of 0 tokens"),
    ):
        write_files(folder, template)
        with pytest.raises(InputError, match=message):
            bytetx.load(folder, device="cpu").decide(ask)
    write_files(folder, "{% if %}")
    with pytest.raises(CheckpointError, match="decision_template.jinja: the chat template is brok"):
        bytetx.load(folder, device="cpu").decide(ask)


def test_the_mean_over_orders(decider: Path, model: bytetx.Model) -> None:
    options = ["north", "east", "south"]
    orders = [options[n:] + options[:n] for n in range(3)]
    ask = [
        {"state": "fox", "questions": {"way": {"type": "choice", "criteria": dict.fromkeys(own)}}}
        for own in orders
    ]
    apart = [answers["way"]["probabilities"] for answers in model.decide(ask)]
    wanted = {name: float(np.mean([own[name] for own in apart])) for name in options}
    both = {"way": ask[0]["questions"]["way"], "due": URGENCY, "spam": SPAM}
    got = model.decide([{"state": "fox", "questions": both}], order="average")[0]
    assert list(got) == list(both) and list(got["way"]["probabilities"]) == options
    assert got["way"]["probabilities"] == pytest.approx(wanted, abs=1e-6)
    assert got["way"]["choice"] == max(wanted, key=lambda name: wanted[name])
    plain = model.decide([{"state": "fox", "questions": both}])[0]
    assert_same_answers([got["due"], got["spam"]], [plain["due"], plain["spam"]])


def test_the_mean_over_orders_where_prompts_ask_everything(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    write_files(folder, TOGETHER)
    model = bytetx.load(folder, device="cpu")
    got = model.decide(REQUESTS[:1], order="average")[0]
    turned = {**TONE, "criteria": {"mad": "loud", "calm": None}}
    questions = REQUESTS[0]["questions"] | {"tone": turned}
    both = model.decide([REQUESTS[0], {**REQUESTS[0], "questions": questions}])
    chances = [one["tone"]["probabilities"]["mad"] for one in both]
    assert got["tone"]["probabilities"]["mad"] == pytest.approx(np.mean(chances), abs=1e-6)
    assert_same_answers(got["spam"], both[0]["spam"])
    assert math.isclose(sum(got["tone"]["probabilities"].values()), 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_answers_have_the_same_bits(dtype: str, decider: Path) -> None:
    model = bytetx.load(decider, device="cpu", dtype=dtype, batch_invariant=True, token_budget=700)
    alone = [model.decide([one])[0] for one in REQUESTS]
    assert list(model.decide(REQUESTS)) == alone
    turned = [REQUESTS[3], *REQUESTS[::-1], *REQUESTS]
    assert list(model.decide(turned))[1:6] == alone[::-1]
    assert list(model.decide(iter(turned), stream=True))[6:] == alone
    assert model.info()["batch_invariant"] is True


def test_a_model_that_decides_nothing(tmp_path: Path) -> None:
    from checkpoints import save_checkpoint

    with pytest.raises(InputError, match="no language model head"):
        bytetx.load(save_checkpoint(tmp_path), device="cpu").decide(REQUESTS)


@pytest.mark.parametrize("save", [save_decider, partial(save_jev, num_verbalizers=40)])
def test_an_adapter_in_a_subfolder(save: Any, tmp_path: Path) -> None:
    folder = save(tmp_path)
    plain = bytetx.load(folder, device="cpu").decide(REQUESTS[:1])
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    write_files(folder, adapter="adapter")
    wanted = assert_same(folder)
    assert abs(wanted[0]["spam"]["noul"] - plain[0]["spam"]["noul"]) > 1e-3
    write_files(folder, adapter="elsewhere")
    with pytest.raises(CheckpointError, match="elsewhere"):
        bytetx.load(folder, device="cpu")


def test_the_guess_of_a_request_is_that_of_its_prompts(model: bytetx.Model) -> None:
    """Each question has the state; in a pass all of them have it once."""
    questions = {f"q{i}": {"type": "noul", "instructions": "y" * 40} for i in range(20)}
    request = {"state": "x" * 4000, "questions": questions}
    prompts = model.context.decision_prompts
    reader = DecisionReader(model.spec, model.tokenizer, maker=prompts)
    for given in (request, json.dumps(request)):
        assert 20 * 1000 < reader.estimate_tokens(given) < 30 * 1000
        assert 1000 < reader.estimate_work(given, given) < 2000
    assert reader.estimate_tokens({}) >= 1 and reader.estimate_tokens("") >= 1
