"""Requests of completions and chats, with the form that an answer is held to."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bytetx.serve.schemas import ANY_VALUE, ListOf, Messages, OpenRequest, OrNull, Texts
from bytetx.serve.schemas_tools import ToolChoice, Tools

# Fields of OpenAI's API, vLLM, SGLang and llama.cpp that completions and chats have in common.
_GENERATION = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "early_stopping": (False,),
    "enable_thinking": (),
    "ebnf": (),
    "ec_transfer_params": (),
    "grammar": (),
    "guided_decoding_backend": ANY_VALUE,
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_path": (),
    "num_beams": (1,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "safety_identifier": ANY_VALUE,
    "service_tier": ANY_VALUE,
    "session_id": ANY_VALUE,
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ANY_VALUE,
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
_CHATS = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "metadata": ANY_VALUE,
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": ANY_VALUE,  # it makes an answer faster, not another one
    "prompt_cache_key": ANY_VALUE,
    "prompt_cache_options": ANY_VALUE,
    "prompt_cache_retention": ANY_VALUE,
    "separate_reasoning": (True,),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(OpenRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "continuous_usage_stats": (False,),
        "include_obfuscation": ANY_VALUE,
    }
    include_usage: OrNull[bool] = False


class JsonSchemaFormat(OpenRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"strict": ANY_VALUE}
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(OpenRequest):
    """OpenAI's; an answer keeps to a schema whether it is strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(OpenRequest):
    """vLLM's: the fields of StructuredOutputsParams."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_additional_properties": (False,),
        "disable_fallback": ANY_VALUE,
        "structural_tag": (),
    }
    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: OrNull[bool] = False

    def given(self) -> dict[str, Any]:
        """The fields of StructuredOutputsParams that are set."""
        names = ("json_object", "regex", "choice", "grammar", "whitespace_pattern")
        form = {"json": self.json_} | {name: getattr(self, name) for name in names}
        form = {name: value for name, value in form.items() if value is not None}
        return form | ({"disable_any_whitespace": True} if self.disable_any_whitespace else {})


class GenerationRequest(OpenRequest):
    """Fields that completions and chats share; top_k to stop_token_ids are vLLM's names."""

    model: str | None = None
    n: OrNull[Annotated[int, Field(ge=1, le=128)]] = 1
    temperature: float | None = Field(None, description="The checkpoint's, else 1.")
    top_p: float | None = Field(None, description="The checkpoint's, else 1.")
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stream: OrNull[bool] = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _GENERATION | {
        "add_special_tokens": (True,),
        "echo": (False,),
        "suffix": ("",),
    }
    prompt: Texts
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The checkpoint's, else 16."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = Field(None, description="n, or left out.")


class ChatRequest(GenerationRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _GENERATION | _CHATS
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: OrNull[bool] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools = Field(None, description="Functions, for the chat template and the answer.")
    tool_choice: ToolChoice | None = Field(None, description="auto where there are tools.")
    parallel_tool_calls: OrNull[bool] = True
    documents: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    reasoning_effort: str | None = Field(None, description="For the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Begin an answer; true.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the checkpoint's chat template."
    )
