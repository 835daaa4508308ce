"""Decision heads in files beside a trunk: decision_config.json with readout.safetensors, and
judge_config.json with head.safetensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    save_codes,
    save_decider,
    save_judge,
    stock,
    stock_pipeline,
)
from safetensors.torch import load_file, save_file
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError

Save = Callable[..., Path]
BOTH = pytest.mark.parametrize("save", [save_codes, save_judge])
PARTS = [{"type": "text", "text": "a fox"}, {"type": "text", "text": " <s> runs"}]
# Those whose state JEV's prompt takes.
STATED: list[Any] = [
    *(one for one in REQUESTS if isinstance(one["state"], str | dict | list)),
    {"state": PARTS, "questions": {"a": SPAM, "b": URGENCY}},
    {"state": ["a ", {"b": [1]}, 2, PARTS[0]], "questions": {"a": TONE}},
    {"state": "", "questions": {"a": SPAM}},
]


def assert_same(folder: Path, requests: list[Any]) -> bytetx.Model:
    """The answers of transformers; those of each request alone have the same bits."""
    model = bytetx.load(folder, device="cpu")
    got = list(model.decide(requests))
    assert_same_answers(got, stock(folder, requests))
    assert [model.decide([one])[0] for one in requests] == got
    return model


@pytest.mark.feature("Tasks", "decision heads beside a trunk")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("is_trunk", [False, True])
def test_answers_are_those_of_transformers(name: str, is_trunk: bool, tmp_path: Path) -> None:
    """Beside a causal model, which still scores texts, and beside one without its own head."""
    prompt = {"prompt": "d3"} if is_trunk else {}
    codes = save_codes(tmp_path / "codes", name, is_trunk=is_trunk, **prompt)
    judge = save_judge(tmp_path / "judge", name, is_trunk=is_trunk, softcap=3.0)
    for folder, requests in ((codes, [*STATED, *REQUESTS]), (judge, STATED)):
        model = assert_same(folder, requests)
        heads = ["decision"] if is_trunk else ["language model", "decision"]
        assert model.info()["heads"] == heads
        if is_trunk:
            with pytest.raises(InputError, match="no language model head"):
                model.score(["a fox"])
        else:
            assert len(model.score(["a fox"])) == 1


@BOTH
def test_answers_are_those_of_a_plain_forward_and_the_head(save: Save, tmp_path: Path) -> None:
    folder = save(tmp_path)
    pipe = stock_pipeline(folder)  # for its prompts alone
    trunk = transformers.AutoModel.from_pretrained(folder)
    (file,) = (path for path in folder.glob("*.safetensors") if path.name != "model.safetensors")
    head = {key.removeprefix("proj."): value for key, value in load_file(file).items()}
    got = bytetx.load(folder, device="cpu").decide(STATED)
    temperatures = {"noul": 1.5, "choice": 0.75, "score": 1.0}
    for request, answers in zip(STATED, got, strict=True):
        for inputs, (question,) in pipe.preprocess(request)["prompts"]:
            assert inputs["marks"].tolist() == [inputs["input_ids"].shape[1]]
            with torch.inference_mode():
                last = trunk(inputs["input_ids"]).last_hidden_state[0, -1]
            scores, first = last @ head["weight"].T, 0
            divisor = 1.25
            if save is save_judge:
                scores = 30 * torch.tanh((scores + head["bias"]) / 30)
                first = {"noul": 0, "score": 2, "choice": 8}[question.type]
                divisor = temperatures[question.type]
            own = scores[first : first + len(question.options)]
            chances = (own / divisor).softmax(-1).tolist()
            answer = answers[question.name]
            if question.type == "noul":  # false comes first
                assert answer["noul"] == pytest.approx(chances[1], abs=1e-5)
            else:
                assert list(answer["probabilities"].values()) == pytest.approx(chances, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_trunk_whose_tokens_see_the_whole_prompt(name: str, tmp_path: Path) -> None:
    causal = bytetx.load(save_codes(tmp_path / "one", name), device="cpu").decide(REQUESTS)
    folder = save_codes(tmp_path / "other", name, attention_mode="noncausal_full_attention")
    model = assert_same(folder, REQUESTS)
    spam = [found[0]["spam"]["noul"] for found in (causal, model.decide(REQUESTS))]
    assert abs(spam[0] - spam[1]) > 1e-3
    with pytest.raises(InputError, match="predicts no next token"):
        model.score(["a fox"])


def test_an_attention_mode_that_a_family_has_not(tmp_path: Path) -> None:
    folder = save_codes(tmp_path, "olmo2", attention_mode="noncausal_full_attention")
    with pytest.raises(CheckpointError, match="attention_mode is noncausal_full_attention, which"):
        bytetx.load(folder, device="cpu")


def test_a_judge_with_an_adapter(tmp_path: Path) -> None:
    folder = save_judge(tmp_path)
    plain = bytetx.load(folder, device="cpu").decide(STATED[:1])
    edit_json(folder / "judge_config.json", adapter_subfolder="lora")
    with pytest.raises(CheckpointError, match="LoRA is in the subfolder 'lora', which has no adap"):
        bytetx.load(folder, device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    path = folder / "judge_config.json"
    content = json.loads(path.read_text())
    del content["adapter_subfolder"]  # which is then the folder `adapter`
    path.write_text(json.dumps(content))
    found = assert_same(folder, STATED).decide(STATED[:1])
    assert abs(found[0]["spam"]["noul"] - plain[0]["spam"]["noul"]) > 1e-3


@BOTH
def test_the_decision_files_count_before_those_of_the_head(save: Save, tmp_path: Path) -> None:
    """As calibration writes them: each type of question on its own."""
    folder = save(tmp_path)
    plain = bytetx.load(folder, device="cpu").checkpoint.decisions
    (folder / "decision.json").write_text(json.dumps({"temperature": {"noul": 4.0}}))
    (folder / "decision_template.jinja").write_text("{{ state | tojson }}: {{ question.options }}")
    changed = bytetx.load(folder, device="cpu").checkpoint.decisions
    assert dict(changed.temperature) == {**plain.temperature, "noul": 4.0}
    assert changed.labels == plain.labels and changed.noul_options == ["false", "true"]
    assert changed.chat_template != plain.chat_template
    assert bytetx.load(folder, device="cpu").decide(REQUESTS)[4]["a"]["type"] == "score"


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_answers_have_the_same_bits(save: Save, dtype: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    model = bytetx.load(folder, device="cpu", dtype=dtype, batch_invariant=True, token_budget=700)
    alone = [model.decide([one])[0] for one in STATED]
    assert list(model.decide([*STATED[::-1], *STATED])) == alone[::-1] + alone


def test_a_state_is_computed_once_and_the_bits_are_those_without(tmp_path: Path) -> None:
    """The codes' prompt has the state before the question."""
    folder = save_codes(tmp_path)
    questions = {f"q{n}": {"type": "noul", "instructions": f"{n} foxes?"} for n in range(8)}
    request = {"state": "the quick brown fox " * 20, "questions": questions}
    model = bytetx.load(folder, device="cpu")
    apart = [
        model.decide([{**request, "questions": {name: one}}])[0][name]
        for name, one in questions.items()
    ]
    assert list(model.decide([request])[0].values()) == apart
    assert_same_answers(model.decide([request])[0], stock(folder, [request])[0])


@BOTH
def test_reranking(save: Save, tmp_path: Path) -> None:
    """The score is the probability that the document answers the query."""
    model = bytetx.load(save(tmp_path), device="cpu")
    hits = {hit.index: hit.score for hit in model.rerank("a fox", ["a dog", "the fox"])}
    assert hits.keys() == {0, 1} and all(0 < score < 1 for score in hits.values())
    assert hits[0] != hits[1]


@BOTH
def test_a_wrapped_pipeline(save: Save, tmp_path: Path) -> None:
    folder = save(tmp_path)
    plain = stock_pipeline(folder)
    wanted = plain(STATED)
    pipe = transformers.pipeline(
        "decision", model=bytetx.wrap(plain.model), tokenizer=plain.tokenizer, device="cpu"
    )
    assert_same_answers(pipe(STATED), wanted)


@pytest.mark.parametrize(
    ("save", "state", "message"),
    [
        (save_codes, [{"type": "image", "image": "x"}], r"requests\[0\] .*has an image in its sta"),
        (save_judge, [{"image": "x"}], r"requests\[0\] .*has an image in its state"),
        (save_judge, ["a", {"type": "image_url"}], r"requests\[0\] .*has an image in its state"),
        (save_judge, 7, r"requests\[0\] .*state that must be text, a table or a list"),
        (save_judge, None, r"requests\[0\] .*state that must be text, a table or a list"),
    ],
)
def test_states_that_a_prompt_does_not_take(
    save: Save, state: Any, message: str, tmp_path: Path
) -> None:
    model = bytetx.load(save(tmp_path), device="cpu")
    with pytest.raises(InputError, match=message):
        model.decide([{"state": state, "questions": {"a": SPAM}}])


def test_more_options_than_the_head_has(tmp_path: Path) -> None:
    model = bytetx.load(save_codes(tmp_path / "codes", num_codes=25), device="cpu")
    with pytest.raises(InputError, match="'many' has 26 options, and this model reads at most 25"):
        model.decide(REQUESTS[1:2])
    judge = bytetx.load(save_judge(tmp_path / "judge"), device="cpu")
    seven = {"type": "score", "criteria": ["x"] * 7}
    with pytest.raises(InputError, match="'a' has 7 options, and this model reads at most 6"):
        judge.decide([{"state": "x", "questions": {"a": seven}}])


def test_files_of_something_else_change_nothing(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    wanted = list(bytetx.load(folder, device="cpu").decide(REQUESTS))
    (folder / "decision_config.json").write_text('{"mode": "fast"}')
    (folder / "calibration.json").write_text("[]")
    save_file({"x": torch.ones(1)}, folder / "head.safetensors")
    assert list(bytetx.load(folder, device="cpu").decide(REQUESTS)) == wanted


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, **keys: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **keys)


def hold(name: str, tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / name)


def slots(**keys: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "judge_config.json"
        content = json.loads(path.read_text())
        content["slots"] |= keys
        path.write_text(json.dumps(content))

    return change


RANGES = {"noul": [0, 2], "score": [2, 8], "choice": [8, 34]}
CODES, JUDGE = "decision_config.json", "judge_config.json"
DAMAGES: list[tuple[Save, Callable[[Path], None], str]] = [
    (save_codes, remove("readout.safetensors"), "readout.safetensors cannot be read"),
    (save_codes, remove(CODES), "readout.safetensors is a decision head, and decision_config.json"),
    (
        save_codes,
        write(CODES, codes=None),
        "decision_config.json beside it does not name its codes",
    ),
    (save_codes, write(CODES, codes=[]), "codes must be a list of 1 to 65536 texts, got"),
    (save_codes, write(CODES, codes=[{"code": "A"}]), "codes must be a list of 1 to 65536 texts"),
    (save_codes, write(CODES, codes=["A"]), r"weight has shape \(26, 48\), .* imply \(1, 48\)"),
    (save_codes, write(CODES, temperature=0), "temperature must be a number above 0, got 0"),
    (save_codes, write(CODES, temperature={"noul": 1}), "temperature must be a number above 0"),
    (save_codes, write(CODES, prompt="d25"), "the prompt d25 is not known, only pplx, d3; write"),
    (save_codes, write(CODES, prompt_layout="state-first"), "of prompt_layout state-first is not"),
    (
        save_codes,
        write(CODES, attention_mode="local"),
        "attention_mode must be one of causal, nonc",
    ),
    (save_codes, write(CODES, pooling="mean"), "pooling must be one of last, got 'mean'"),
    (
        save_codes,
        hold("readout.safetensors", {"weight": torch.ones(26, 40)}),
        r"readout.safetensors: weight has shape \(26, 40\), .* imply \(26, 48\); it is the head",
    ),
    (
        save_codes,
        hold("readout.safetensors", {"matrix": torch.ones(26, 48)}),
        "readout.safetensors holds no weight or proj.weight",
    ),
    (
        save_codes,
        hold("readout.safetensors", {"weight": torch.full((26, 48), torch.nan)}),
        "values that are not finite",
    ),
    (save_judge, remove("head.safetensors"), "head.safetensors cannot be read"),
    (save_judge, remove("calibration.json"), "calibration.json cannot be read: there is no such"),
    (save_judge, write("calibration.json", per_kind=None), "per_kind must be a table of temperat"),
    (
        save_judge,
        write("calibration.json", per_kind={"noul": -1}),
        "per_kind must be a table, each",
    ),
    (save_judge, write(JUDGE, slots=None), "slots.ranges must name slots below num_slots"),
    (save_judge, write(JUDGE, softcap="x"), "softcap must be a number from 0"),
    (save_judge, write(JUDGE, adapter_subfolder="../a"), "adapter_subfolder must be a path inside"),
    (save_judge, slots(num_slots=33), r"slots.ranges must name slots below num_slots \(33\)"),
    (save_judge, slots(num_slots=0), "num_slots must be an integer from 1"),
    (save_judge, slots(verbalizers=["A"]), "each with one of the 1 verbalizers"),
    (save_judge, slots(ranges={"noul": [0, 2]}), "for each of noul, choice, score"),
    (
        save_judge,
        slots(ranges=RANGES | {"noul": [2, 2]}),
        r"ranges must be a table, each value \[f",
    ),
    (save_judge, slots(template_version="chat-v1"), "template_version must be one of bare-v1"),
    (
        save_judge,
        hold("head.safetensors", {"proj.weight": torch.ones(24, 48), "proj.bias": torch.ones(24)}),
        r"head.safetensors: proj.weight has shape \(24, 48\), .* imply \(34, 48\)",
    ),
]


@pytest.mark.parametrize(("save", "damage", "message"), DAMAGES)
def test_damaged_files(
    save: Save, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = save(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        bytetx.load(folder, device="cpu")
    assert "\n" not in str(raised.value)
