"""generation_config.json: a checkpoint's end-of-text tokens and its defaults of SamplingParams."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytetx.checkpoint.side_files import (
    FLAG,
    TEXT,
    TOKEN_IDS,
    Field,
    check_fields,
    either,
    integer,
    list_of,
    read_json,
)
from bytetx.errors import OptionError, shown
from bytetx.sampling_params import SamplingDefaults

logger = logging.getLogger("bytetx")

FILE_NAME = "generation_config.json"
_SWITCHES = ("auto", "vllm", "none")
# Logits are float32, and so is what they are divided and multiplied by.
_LEAST, _MOST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of generation that a checkpoint gives.

    eos_token_ids: tokens that end a text; none is beyond the vocabulary.
    source: the file that `sampling` comes from.  switch: the option of bytetx.load.
    """

    sampling: SamplingDefaults = SamplingDefaults()
    eos_token_ids: tuple[int, ...] = ()
    source: str = ""
    switch: str = "auto"

    def __str__(self) -> str:
        given = self.sampling.given()
        if not given:
            why = "" if self.switch == "auto" else f" (generation_config={self.switch!r})"
            return f"generation starts from bytetx's own defaults{why}"
        values = ", ".join(f"{name} {_short(value)}" for name, value in given.items())
        return (
            f"generation starts from {self.source}: {values}; a request's own values win, and "
            "generation_config='vllm' leaves the file's out"
        )


def check_switch(switch: object) -> str:
    """The option as a str. Raises OptionError where it names neither a choice nor a file."""
    if isinstance(switch, str) and switch in _SWITCHES:
        return switch
    if isinstance(switch, str | Path) and _file_of(switch).is_file():
        return str(switch)
    raise OptionError(
        f"generation_config must be auto, vllm, none, or a path to a {FILE_NAME} or to its folder, "
        f"got {shown(switch)}"
    )


def read_generation_config(
    folder: Path,
    config: Mapping[str, Any],
    *,
    switch: str,
    vocab_size: int,
    tokenizer_eos: int | None,
    has_tokenizer: bool,
) -> GenerationDefaults:
    """The defaults of the checkpoint in a folder, as transformers' generate and vLLM read them.

    config: of config.json, whose keys count where there is no generation_config.json.
    switch: auto; vllm takes the end-of-text tokens alone from the file, none nothing; else the path
    of another file or of its folder.  tokenizer_eos: the tokenizer's end-of-text token.
    Warns once of keys that change transformers' results and are not supported.
    Raises CheckpointError where a value is not what its key takes.
    """
    path = folder / FILE_NAME if switch in _SWITCHES else _file_of(switch)
    is_read = switch != "none" and path.is_file()
    content: Mapping[str, Any] = read_json(path) if is_read else _without_old_defaults(config)
    source = FILE_NAME if is_read else "config.json"
    where = path if is_read else "config.json"
    check_fields(where, content, {"eos_token_id": TOKEN_IDS})
    ends = _ids(
        content["eos_token_id"] if "eos_token_id" in content else config.get("eos_token_id")
    )
    if tokenizer_eos is not None:
        ends.append(tokenizer_eos)
    eos_token_ids = tuple(dict.fromkeys(token for token in ends if 0 <= token < vocab_size))
    if switch in ("vllm", "none"):
        return GenerationDefaults(SamplingDefaults(), eos_token_ids, source, switch)
    check_fields(where, content, _FIELDS)
    _warn_of_unsupported(where, content, has_tokenizer=has_tokenizer)
    sampling = _sampling(content, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
    return GenerationDefaults(sampling, eos_token_ids, source, switch)


def _without_old_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json without what old transformers wrote into every one: its own defaults, with which
    a text would end after 20 tokens."""
    return {
        key: value
        for key, value in config.items()
        if key not in _OLD_DEFAULTS or value != _OLD_DEFAULTS[key]
    }


def _file_of(path: str | Path) -> Path:
    found = Path(path).expanduser()
    return found / FILE_NAME if found.is_dir() else found


def _sampling(
    content: Mapping[str, Any], *, vocab_size: int, has_tokenizer: bool
) -> SamplingDefaults:
    temperature, top_k = content.get("temperature"), content.get("top_k")
    if content.get("do_sample") is False:  # and only where the file says so: vLLM samples
        temperature = 0.0
    banned = [
        *(content.get("suppress_tokens") or ()),
        *(words[0] for words in content.get("bad_words_ids") or () if len(words) == 1),
    ]
    stop = content.get("stop_strings") if has_tokenizer else None
    return SamplingDefaults(
        temperature=None if temperature is None else float(temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=_float(content, "top_p"),
        min_p=_float(content, "min_p"),
        repetition_penalty=_float(content, "repetition_penalty"),
        max_tokens=content.get("max_new_tokens"),
        min_tokens=content.get("min_new_tokens"),
        max_length=content.get("max_length"),
        min_length=content.get("min_length"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop) if stop else None,
        suppressed_tokens=tuple(dict.fromkeys(t for t in banned if 0 <= t < vocab_size)),
    )


def _float(content: Mapping[str, Any], key: str) -> float | None:
    value = content.get(key)
    return None if value is None else float(value)


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _warn_of_unsupported(
    where: Path | str, content: Mapping[str, Any], *, has_tokenizer: bool
) -> None:
    names = [
        key
        for key, is_off in _UNSUPPORTED.items()
        if content.get(key) is not None and not is_off(content[key])
    ]
    if content.get("stop_strings") and not has_tokenizer:
        names.append("stop_strings")
    if names:
        logger.warning(
            "%s: bytetx generates without %s, with which transformers' generate gives other "
            "tokens; generation_config='vllm' leaves all of the file's defaults out",
            where,
            ", ".join(names),
        )


def _number(low: float, high: float, needs: str) -> Field:
    """True and false are none."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high  # NaN fails, too

    return Field(needs, accepts)


_TEXTS = list_of(Field("text", lambda v: TEXT.accepts(v) and bool(v)))
_TOKEN_LIST = list_of(integer(-1))
_FIELDS = {
    "do_sample": FLAG,
    "temperature": _number(0, _MOST, "a finite number from 0"),
    "top_k": integer(-1),
    "top_p": _number(_LEAST, 1, "a number above 0, at most 1"),
    "min_p": _number(0, 1, "a number from 0 to 1"),
    "repetition_penalty": _number(_LEAST, _MOST, "a finite number above 0"),
    "max_new_tokens": integer(1),
    "min_new_tokens": integer(0),
    "max_length": integer(1),
    "min_length": integer(0),
    "stop_strings": either(Field("text", lambda v: TEXT.accepts(v) and bool(v)), _TEXTS),
    "suppress_tokens": _TOKEN_LIST,
    "bad_words_ids": list_of(
        Field("a list of token ids", lambda v: bool(v) and _TOKEN_LIST.accepts(v))
    ),
}


_OLD_DEFAULTS = {"do_sample": False, "max_length": 20, "top_k": 50}


def _is(*values: object) -> Callable[[Any], bool]:
    """Whether a value is one of these, which change nothing."""
    return lambda value: any(value == off for off in values)


# Keys of transformers 5.24 that change which tokens are generated, and the values with which they
# do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "bad_words_ids": lambda words: all(len(word) == 1 for word in words),
    "begin_suppress_tokens": _is([]),
    "constraints": _is([]),
    "diversity_penalty": _is(0),
    "dola_layers": _is([]),
    "encoder_no_repeat_ngram_size": _is(0),
    "encoder_repetition_penalty": _is(1),
    "epsilon_cutoff": _is(0),
    "eta_cutoff": _is(0),
    "exponential_decay_length_penalty": _is(),
    "force_words_ids": _is([]),
    "forced_bos_token_id": _is(),
    "forced_eos_token_id": _is([]),
    "guidance_scale": _is(1),
    "max_time": _is(math.inf),
    "no_repeat_ngram_size": _is(0),
    "num_beam_groups": _is(1),
    "num_beams": _is(1),
    "num_return_sequences": _is(1),
    "penalty_alpha": _is(0),
    "sequence_bias": _is({}, []),
    "token_healing": _is(False),
    "top_h": _is(),
    "typical_p": _is(1),
    "watermarking_config": _is({}),
}


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
