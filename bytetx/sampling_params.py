"""SamplingParams: how a request's tokens are chosen, and when it ends."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from bytetx.errors import InputError, shown

# Takes the token ids so far (prompt and output) and the row's f32 logits [vocab_size], returns
# logits of that shape.
LogitsProcessor = Callable[[Sequence[int], Any], Any]

MAX_LOGPROBS = 1024
MAX_N = 16384  # vLLM's VLLM_MAX_N_SEQUENCES
# Logits are float32: beyond these a number is 0 or infinite there.
_FLOAT32_TINY, _FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
_NO_SEED = _NO_TOP_K = -1  # as vLLM's clients write "none"


class _Unset:
    """Marks a library default, which gives way to a checkpoint's; dataclasses.replace keeps it."""


class _UnsetInt(int, _Unset):
    pass


class _UnsetFloat(float, _Unset):
    pass


class _UnsetTuple(tuple[str, ...], _Unset):
    pass


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of the parameters that a request leaves unset; None is the library's own.

    max_length, min_length: tokens of prompt and answer together, where the numbers of new tokens
    are not given.  suppressed_tokens: never chosen, whatever a request sets.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] | None = None
    suppressed_tokens: tuple[int, ...] = ()

    def given(self) -> dict[str, Any]:
        """The values that differ from the library's, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}


_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_MAX_CHARACTERS = 1 << 20  # that a grammar may have


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that an answer must have, by vLLM's names; exactly one of the first five.

    json: a JSON schema, as a mapping or as its text.  regex: what the whole answer matches, in the
    syntax of Rust's regex crate, without look-around.  choice: the possible answers.
    grammar: a context-free grammar in Lark (of llguidance) or in GBNF (of llama.cpp).
    json_object: True is any JSON object.
    whitespace_pattern: a regex of the space between the tokens of JSON; None is at most 20
    characters, so that a model cannot write space for ever.  disable_any_whitespace: there is none.
    begin: rules, as llguidance's Lark writes them, with `begin` among them: what an answer has
    before it, such as a model's reasoning; None: nothing.

    Raises InputError, which names the field; whether a grammar can be read shows when it is used.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    begin: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(
                f"structured_outputs must have exactly one of {', '.join(_FORMS)}, got "
                f"{', '.join(given) or 'none'}"
            )
        _flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        kind, value = given[0], getattr(self, given[0])
        if kind == "choice":
            fits = isinstance(value, list | tuple) and value and all(map(_is_text, value))
            wanted = "a list of texts, none of them empty"
        elif kind == "json":
            fits, wanted = isinstance(value, str | Mapping | bool), "a JSON schema"
        elif kind == "json_object":
            fits, wanted = value is True, "True or False"
        else:
            fits, wanted = _is_text(value), "a text that is not empty"
        if not fits:
            raise InputError(f"structured_outputs.{kind} must be {wanted}, got {shown(value)}")
        for name in ("whitespace_pattern", "begin"):
            text = getattr(self, name)
            if text is not None and not _is_text(text):
                raise InputError(
                    f"structured_outputs.{name} must be a text that is not empty, got {shown(text)}"
                )
        length = len(self.source[1])
        if length > _MAX_CHARACTERS:
            raise InputError(
                f"structured_outputs.{kind} has {length:,} characters, at most "
                f"{_MAX_CHARACTERS:,} are taken"
            )

    @property
    def source(self) -> tuple[str, str]:
        """(kind, text) of the grammar: json, regex, choice or grammar; json and choice as JSON."""
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "grammar", self.grammar
        kind = "json" if self.choice is None else "choice"
        value: object = self.json if self.choice is None else list(self.choice)
        if self.json_object:
            value = {"type": "object"}
        if isinstance(value, str):
            return kind, value
        try:
            return kind, json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"structured_outputs.{kind} is no JSON: {error}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a text ends; checked once, when it is made.

    max_tokens, min_tokens, temperature, top_k, top_p, min_p, repetition_penalty and stop are the
    checkpoint's own where they are not set (or None, but for max_tokens): what its
    generation_config.json says, else the defaults here.

    Order and ranges are those of vLLM 0.33 (its default, model runner V2). A row's logits go
    through these steps, each of which sees what the ones before it left:

    1. logit_bias is added; before min_tokens, tokens that would end the answer get -inf.
    2. repetition_penalty, frequency_penalty, presence_penalty.
    3. logits_processors, in their order; then structured_outputs forbids what does not fit it.
    4. temperature 0 takes the most likely token; any other one divides the logits.
    5. min_p, top_k, then top_p, whose share is of the probability that the first two keep.

    transformers applies steps 1 to 4 in the same order (logit_bias is its sequence_bias), and then
    top_k, top_p, min_p: where top_p and min_p are given both, it keeps other tokens.

    n: 1 ... 16384, answers to each prompt; 1 where temperature is 0.
    max_tokens: at least 1, the most tokens of an answer, fewer where the model's positions or the
    cache end before; None sets no other limit.
    min_tokens: 0 ... max_tokens; in these first tokens, nothing that ends an answer is chosen or
    looked for, and no end-of-text token is chosen even with ignore_eos.
    temperature: 0 ... 2, taken as it is (vLLM raises what is above 0 and below 0.01 to 0.01).
    top_k: keeps the k most likely tokens; 0 and -1 keep all.  top_p: above 0, at most 1; keeps the
    most likely tokens that together have this probability.  min_p: 0 ... 1; keeps tokens with at
    least this share of the most likely one's probability.  All tokens of a tie at a limit are kept.
    repetition_penalty: above 0; divides positive and multiplies other logits of tokens that are in
    the prompt or the answer.  presence_penalty: -2 ... 2; is subtracted from logits of tokens in
    the answer.  frequency_penalty: -2 ... 2; the same, times the count of the token in it.
    logit_bias: token id -> what is added to its logit, a finite number or -inf, which forbids it.
    seed: -2**63 ... 2**64 - 1; the same seed gives the same answer, whatever runs beside it. None
    and -1 draw a seed.
    stop: strings that end an answer, none of them empty; they are looked for in the text with its
    special tokens and without them.
    stop_token_ids: tokens that do, as the checkpoint's end-of-text tokens do unless ignore_eos.
    include_stop_str_in_output: the text ends with the stop string, or with the stop token's text;
    else with what stands before it.
    skip_special_tokens: leaves special tokens out of the text.
    logprobs: 0 ... 1024; so many most likely tokens are reported with each chosen one, by the
    model's own logits, before step 1; None reports nothing, 0 the chosen ones alone.
    prompt_logprobs: the same of the prompt.
    logits_processors: functions (token_ids, logits) -> logits.
    structured_outputs: the form of the answer, or a mapping with the fields of one.
    An end-of-text token is chosen where the form is complete and never before; with min_tokens or
    ignore_eos only where nothing else is left, and it ends the answer even then.

    Raises InputError, which names the parameter, its range and the value.
    """

    n: int = 1
    max_tokens: int | None = _UnsetInt(256)
    min_tokens: int = _UnsetInt(0)
    temperature: float = _UnsetFloat(1.0)
    top_k: int = _UnsetInt(0)
    top_p: float = _UnsetFloat(1.0)
    min_p: float = _UnsetFloat(0.0)
    repetition_penalty: float = _UnsetFloat(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = _UnsetTuple()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            is_default = value is _DEFAULTS[name]  # most are, and a server makes many of these
            if value is None and name in _UNSET:
                self._set(name, _DEFAULTS[name])
            elif not (is_default or (value is None and name in _MAY_BE_NONE)):
                check(name, value)
        self._check_together()
        if not isinstance(self.stop, _Unset):
            self._set(
                "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            )
        self._set("stop_token_ids", tuple(int(token) for token in self.stop_token_ids or ()))
        self._set("logits_processors", tuple(self.logits_processors or ()))
        if isinstance(self.structured_outputs, Mapping):
            self._set("structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        if self.top_k == _NO_TOP_K:
            self._set("top_k", 0)
        if self.seed == _NO_SEED:
            self._set("seed", None)
        if self.logit_bias is not None:
            self._set("logit_bias", {int(t): float(b) for t, b in self.logit_bias.items()})

    def resolved(self, defaults: SamplingDefaults, *, num_prompt_tokens: int) -> "SamplingParams":
        """With the checkpoint's defaults for what is not set.

        num_prompt_tokens: for defaults of prompt and answer together.
        Raises InputError where a default does not go with a parameter that is set.
        """
        unset = {name for name in (*_UNSET, "max_tokens") if self._is_unset(name)}
        found = {name: getattr(defaults, name) for name in unset}
        most, least = defaults.max_tokens, defaults.min_tokens
        if most is None and defaults.max_length is not None:
            most = max(1, defaults.max_length - num_prompt_tokens)
        if "max_tokens" in found:
            found["max_tokens"] = most
        if defaults.min_length is not None:
            least = max(least or 0, defaults.min_length - num_prompt_tokens)
        if "min_tokens" in found and least is not None:
            # A request need not know the checkpoint's least to ask for fewer at most.
            limit = found.get("max_tokens") or self.max_tokens
            found["min_tokens"] = least if limit is None else min(least, limit)
        if defaults.suppressed_tokens:
            forbidden = dict.fromkeys(defaults.suppressed_tokens, -math.inf)
            found["logit_bias"] = {**(self.logit_bias or {}), **forbidden}
        found = {name: value for name, value in found.items() if value is not None}
        if not found:
            return self
        params = copy(self)
        for name, value in found.items():
            params._set(name, value)
        params._check_together()
        return params

    def _is_unset(self, name: str) -> bool:
        return isinstance(getattr(self, name), _Unset)

    def _check_together(self) -> None:
        """Raises InputError for parameters that exclude each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens must be at most max_tokens ({shown(self.max_tokens)}), got "
                f"{shown(self.min_tokens)}"
            )
        if self.is_greedy and self.n > 1:
            raise InputError(
                f"n must be 1 where temperature is 0, for all answers are equal: {self.n}"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on the tokens before it."""
        counted = self.presence_penalty or self.frequency_penalty
        return bool(counted) or self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InputError where a token id is none of the model's."""
        for name, tokens in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"{name} must name tokens below vocab_size ({vocab_size}), got "
                        f"{shown(token)}"
                    )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_Check = Callable[[str, Any], None]


def _integer(low: int, high: int | None = None) -> _Check:
    bounds = f"at least {low}" if high is None else f"{low} ... {high}"

    def check(name: str, value: Any) -> None:
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value > high):
            raise InputError(f"{name} must be an integer, {bounds}, got {shown(value)}")

    return check


def _top_k(name: str, value: Any) -> None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < _NO_TOP_K:
        raise InputError(
            f"{name} must be an integer, at least 1, or 0 or -1, which keep all, got {shown(value)}"
        )


def _number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> _Check:
    """above: whether low itself is out."""
    wanted = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    if high == math.inf:
        wanted = "a finite number" if low == -math.inf else f"a finite number above {low:g}"

    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        fits = is_number and math.isfinite(value) and low <= value <= high
        if not fits or (above and value == low):
            raise InputError(f"{name} must be {wanted}, got {shown(value)}")

    return check


def _stop(name: str, value: Any) -> None:
    strings = [value] if isinstance(value, str) else value
    is_list = isinstance(strings, Sequence) and all(isinstance(s, str) for s in strings)
    if not is_list or "" in strings:
        raise InputError(
            f"{name} must be a string or strings, none of them empty, got {shown(value)}"
        )


def _token_ids(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(f"{name} must be a list of token ids, got {shown(value)}")
    for token in value:
        _integer(0)(name, token)


def _repetition_penalty(name: str, value: object) -> None:
    _number(0, above=True)(name, value)
    _number(_FLOAT32_TINY, _FLOAT32_MAX)(name, value)


def _logit_bias(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must map token ids to numbers, got {shown(value)}")
    for token, bias in value.items():
        _integer(0)(f"{name}'s token", token)
        if bias != -math.inf:  # which forbids a token
            where = f"{name}[{shown(token)}]"
            _number()(where, bias)
            _number(-_FLOAT32_MAX, _FLOAT32_MAX)(where, bias)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {shown(value)}")


def _structured_outputs(name: str, value: object) -> None:
    known = {field.name for field in fields(StructuredOutputsParams)}
    if isinstance(value, Mapping):
        unknown = next((key for key in value if key not in known), None)
        if unknown is not None:
            raise InputError(
                f"{name} must have the fields {', '.join(sorted(known))}, got {shown(unknown)}"
            )
    elif not isinstance(value, StructuredOutputsParams):
        raise InputError(f"{name} must be StructuredOutputsParams, got {shown(value)}")


def _callables(name: str, value: object) -> None:
    if not isinstance(value, Sequence) or not all(map(callable, value)):
        raise InputError(f"{name} must be a list of functions, got {shown(value)}")


# None means that they are not set.
_UNSET = {"min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop"}
_MAY_BE_NONE = {
    "max_tokens",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "logprobs",
    "prompt_logprobs",
    "logits_processors",
    "structured_outputs",
}
_CHECKS: dict[str, _Check] = {
    "n": _integer(1, MAX_N),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "temperature": _number(0, 2),
    "top_k": _top_k,
    "top_p": _number(0, 1, above=True),
    "min_p": _number(0, 1),
    "repetition_penalty": _repetition_penalty,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _logit_bias,
    "seed": _integer(_MIN_SEED, _MAX_SEED),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "logits_processors": _callables,
    "structured_outputs": _structured_outputs,
}
assert _CHECKS.keys() == {field.name for field in fields(SamplingParams)}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
