"""The form of answers over HTTP: OpenAI's client, and vLLM's fields, against a server process."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from checkpoints import edit_json, save_causal
from pydantic import BaseModel, Field
from serving import start_server

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
MESSAGES: Any = [{"role": "user", "content": "a fox"}]


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_causal(tmp_path_factory.mktemp("writer"), "gpt2", kind="bytes", n_positions=800)
    edit_json(folder / "tokenizer_config.json", model_max_length=800)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "front-ends"])
def client(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    options = ["--model", f"writer={folder}", "--frontends", str(request.param)]
    with start_server(options, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.feature("Server", "structured outputs by OpenAI's and vLLM's fields")
def test_openai_parses_what_a_random_model_writes(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="writer", messages=MESSAGES, response_format=Person, seed=seed, max_tokens=400
        )
        assert answer.choices[0].finish_reason == "stop"
        person = answer.choices[0].message.parsed
        assert person is not None and 0 <= person.age <= 150


def test_streams_and_json_objects_have_their_form(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    stream = client.chat.completions.create(
        model="writer", messages=MESSAGES, response_format=schema, stream=True, max_tokens=400
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in chunks)
    assert chunks[-1].finish_reason == "stop" and Person.model_validate_json(text)
    answer = client.chat.completions.create(
        model="writer",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=40,
        logprobs=True,
    )
    assert (answer.choices[0].message.content or "").startswith("{")


PERSON = Person.model_json_schema() | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]"}, lambda text: re.fullmatch("[a-c]{3}-[0-9]", text)),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_grammar": 'root ::= "a" root "b" | "c"'}, lambda text: "c" in text),
        ({"guided_json": PERSON, "guided_whitespace_pattern": " "}, Person.model_validate_json),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, Person.model_validate_json),
    ],
    ids=["regex", "choice", "grammar", "json", "structured choice", "structured json"],
)
def test_fields_of_vllm(client: openai.OpenAI, fields: dict[str, Any], fits: Any) -> None:
    answer = client.completions.create(
        model="writer", prompt=["a fox", "the dog"], max_tokens=400, n=2, extra_body=fields
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert fits(choice.text) or choice.finish_reason == "length", choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    for schema, words in (
        ({"type": "strin"}, "strin"),
        ({"not": {}}, "Unimplemented keys"),
        ({"$ref": "#/$defs/nothing"}, "nothing"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(
                model="writer",
                messages=MESSAGES,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": schema},
                },
                stream=stream,
            )
