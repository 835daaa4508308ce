"""Fields that a request leaves out are the checkpoint's; ends of texts as a request asks."""

from pathlib import Path

import pytest
from checkpoints import edit_json, save_causal
from serving import InProcess

from bytetx.sampling_params import SamplingParams
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources

CHAT = {"messages": [{"role": "user", "content": "a quick fox"}]}
FREE = {"prompt": "a quick fox", "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_causal(tmp_path_factory.mktemp("defaults"), "gpt2")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    keys = {"do_sample": False, "max_new_tokens": 21, "repetition_penalty": 1.5}
    edit_json(folder / "generation_config.json", **keys)
    return folder


def serve(folder: Path, **options: str) -> InProcess:
    settings = ServeSettings(model_sources([f"writer={folder}"]), device="cpu", **options)
    return InProcess(settings, load_models(settings))


@pytest.fixture(scope="module")
def server(folder: Path) -> InProcess:
    return serve(folder)


def test_a_request_starts_from_the_checkpoint(server: InProcess) -> None:
    model = server.model("writer")
    params = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=21, ignore_eos=True)
    wanted = model.generate([FREE["prompt"]], params)[0].text
    empty = dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "max_tokens", "stop"])
    for body in (FREE, FREE | empty):
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["completion_tokens"] == 21
    chat = server.post("/v1/chat/completions", CHAT | {"ignore_eos": True}).json()
    assert chat["usage"]["completion_tokens"] == 21
    logged = server.post("/v1/completions", FREE | {"logprobs": 1}).json()
    assert logged["usage"]["completion_tokens"] == 21
    own = FREE | {"max_tokens": 9, "repetition_penalty": 1.0}
    plain = model.generate(
        [FREE["prompt"]],
        SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=9, ignore_eos=True),
    )[0].text
    assert server.post("/v1/completions", own).json()["choices"][0]["text"] == plain
    refused = server.post("/v1/completions", FREE | {"n": 2})
    assert refused.status_code == 400 and "temperature is 0" in refused.json()["error"]["message"]
    assert server.get("/info").status_code == 200


def test_the_switch_of_the_server(folder: Path) -> None:
    for switch in ("vllm", "none"):
        server = serve(folder, generation_config=switch)
        answer = server.post("/v1/completions", FREE | {"n": 2, "seed": 1}).json()
        assert answer["usage"]["completion_tokens"] == 2 * 16
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[0] != texts[1]


def test_special_tokens_in_stop_strings(server: InProcess) -> None:
    """Logits that are biased so far that </s> follows anything."""
    end = server.model("writer").tokenizer.backend.token_to_id("</s>")
    body = FREE | {"max_tokens": 4, "logit_bias": {str(end): 1000}, "repetition_penalty": 1}
    free = server.post("/v1/completions", body).json()["choices"][0]
    assert free["finish_reason"] == "length" and free["text"] == ""
    shown = server.post("/v1/completions", body | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "</s>" * 4
    for stop, count, kept in (("</s>", 1, "</s>"), ("s></s", 2, "s></s"), ("</s></s>", 2, None)):
        given = body | {"stop": [stop]}
        answer = server.post("/v1/completions", given).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == count
        answer = server.post("/v1/completions", given | {"include_stop_str_in_output": True}).json()
        assert answer["choices"][0]["text"] == (kept or stop)
