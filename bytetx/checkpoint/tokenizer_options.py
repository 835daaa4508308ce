"""Whether tokenizer.json does what the tokenizer's class in transformers makes of its options.

Most classes build their normalizer, their words and the tokens around a text from
tokenizer_config.json, and take no more than the vocabulary from tokenizer.json.  Saved together,
the two files say the same; where they do not, a reader of tokenizer.json alone gives other ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, pre_tokenizers

from bytetx.checkpoint.text_prefix import members, state_of
from bytetx.checkpoint.tokenizer_config import special_token

_Frame = tuple[str, ...]  # tokens around texts that are empty, by their keys in the config


@dataclass(frozen=True, slots=True)
class _Class:
    """Parts that a class builds.

    options: with their defaults.  tokens: defaults of those around a text, by key.
    single, pair: the keys of the tokens around one text and two.
    """

    model: Literal["WordPiece", "BPE", "Unigram"]
    options: Mapping[str, bool | None]
    tokens: Mapping[str, str]
    single: _Frame = ()
    pair: _Frame = ()


_CLS, _SEP = "cls_token", "sep_token"
_BRACKETS = {_CLS: "[CLS]", _SEP: "[SEP]"}
_ANGLES = {_CLS: "<s>", _SEP: "</s>"}
_TWO, _THREE, _FOUR = (_CLS, _SEP), (_CLS, _SEP, _SEP), (_CLS, _SEP, _SEP, _SEP)
_BERT_OPTIONS: Mapping[str, bool | None] = {
    "do_lower_case": True,
    "strip_accents": None,
    "tokenize_chinese_chars": True,
}
_SPACE, _NO_SPACE = {"add_prefix_space": True}, {"add_prefix_space": False}
_BERT = _Class("WordPiece", _BERT_OPTIONS, _BRACKETS, _TWO, _THREE)
_ROBERTA = _Class("BPE", _NO_SPACE, _ANGLES, _TWO, _FOUR)
_GPT2 = _Class("BPE", _NO_SPACE, {})
_XLM_ROBERTA = _Class("Unigram", _SPACE, _ANGLES, _TWO, _FOUR)
_CLASSES = {
    **dict.fromkeys(("Bert", "DistilBert", "Electra", "ConvBert", "SqueezeBert"), _BERT),
    **dict.fromkeys(("MobileBert", "Lxmert", "LayoutLM", "DPRContextEncoder"), _BERT),
    **dict.fromkeys(("DPRQuestionEncoder", "DPRReader"), _BERT),
    "MPNet": _Class("WordPiece", _BERT_OPTIONS, _ANGLES, _TWO, _FOUR),
    **dict.fromkeys(("Roberta", "Bart", "LED", "Longformer"), _ROBERTA),
    "Deberta": _Class("BPE", _NO_SPACE, _BRACKETS, _TWO, _THREE),
    **dict.fromkeys(("GPT2", "GPTNeoX", "Qwen2"), _GPT2),
    "Albert": _Class(
        "Unigram",
        {"do_lower_case": True, "keep_accents": False, "add_prefix_space": True},
        _BRACKETS,
        _TWO,
        _THREE,
    ),
    **dict.fromkeys(("XLMRoberta", "Camembert"), _XLM_ROBERTA),
    "DebertaV2": _Class(
        "Unigram",
        {"do_lower_case": False, "split_by_punct": False, "add_prefix_space": True},
        _BRACKETS,
        _TWO,
        _THREE,
    ),
    "T5": _Class("Unigram", {}, {"eos_token": "</s>"}, ("eos_token",), ("eos_token",) * 2),
    # Its tokens around a text are those of tokenizer.json.
    "Llama": _Class("BPE", {"legacy": False, "add_prefix_space": True}, {}),
}
# Of the families' model types, those whose class does not depend on the files.
_FIXED = {"modernbert": "TokenizersBackend", "phi3": "TokenizersBackend", "qwen2": "Qwen2"}
# Those for which transformers takes tokenizer.json as it is, whatever class is named.
_BACKEND_TYPES = (
    *("gpt_bigcode", "granite", "mistral", "mixtral", "olmo2", "stablelm", "xlm-roberta-xl"),
)
_DEFAULTS = {
    **dict.fromkeys(("bert", "distilbert", "electra", "nomic_bert"), "Bert"),
    **dict.fromkeys(("roberta", "roberta-prelayernorm"), "Roberta"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "starcoder2"), "GPT2"),
    **dict.fromkeys(("gte", "jina_embeddings_v3", "xlm-roberta"), "XLMRoberta"),
    **dict.fromkeys(("qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("t5", "mt5"), "T5"),
    "albert": "Albert",
    "camembert": "Camembert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "gpt_neox": "GPTNeoX",
    "mpnet": "MPNet",
}
# Classes of transformers that are Python code, which tokenizer.json says nothing about.
_PYTHON = frozenset(
    (
        *("Bartpho", "BertGeneration", "Bertweet", "BioGpt", "BlenderbotSmall"),
        *("ByT5", "CTRL", "Canine", "Cpm", "CpmAnt", "Esm", "FSMT", "Flaubert", "GPTSw3"),
        *("GPTNeoXJapanese", "M2M100", "Marian", "MyT5", "Perceiver", "ProphetNet"),
        *("RoCBert", "Siglip", "Speech2Text", "SpeechT5", "Tapas", "XLM", "BertTokenizerLegacy"),
    )
)
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrained")
OPTIONS = (
    *("add_prefix_space", "do_lower_case", "keep_accents", "legacy", "split_by_punct"),
    *("strip_accents", "tokenize_chinese_chars", "remove_space"),
)
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def class_name(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The class that transformers takes, without Tokenizer and Fast behind its name.

    config: tokenizer_config.json.  model: config.json.
    """
    model_type = str(model.get("model_type"))
    given = config.get("tokenizer_class") or model.get("tokenizer_class")
    if model_type in _FIXED:
        return _FIXED[model_type]
    if model_type in _BACKEND_TYPES:
        return "TokenizersBackend"
    if given is None:
        return _DEFAULTS.get(model_type, "TokenizersBackend")
    if given in _PLAIN:
        return str(given)
    return str(given).removesuffix("Fast").removesuffix("Tokenizer")


def is_python_class(name: str) -> bool:
    """Whether a class, by class_name, is Python code with no equal in the library tokenizers."""
    return name in _PYTHON


def has_token_types(name: str) -> bool:
    """Whether a class gives the second text of a pair token type 1, unless its config says so."""
    return name not in _CLASSES or name in _TYPED


# Of _CLASSES; of other classes nothing is known here.
_TYPED = (
    *("Bert", "ConvBert", "Deberta", "DebertaV2", "DPRContextEncoder", "DPRQuestionEncoder"),
    *("DPRReader", "Electra", "LayoutLM", "Lxmert", "MobileBert", "SqueezeBert"),
)


def contradiction(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str, added: Mapping[str, Any]
) -> str | None:
    """Return an option of tokenizer_config.json that tokenizer.json contradicts; None for none.

    backend: of tokenizer.json.  config: of read_tokenizer_config.  name: of class_name.
    added: added_tokens.json.
    """
    if (token := _other_token(backend, config, added)) is not None:
        return f"the added token {token!r:.120}"
    if name in _PLAIN or (name == "Llama" and _is_byte_level(backend)):
        return None
    if name not in _CLASSES:
        given = [key for key in OPTIONS if config.get(key) is not None]
        return given[0] if given else None
    kind = _CLASSES[name]
    if (model := _model_kind(backend)) != kind.model:
        return f"tokenizer_class {name}Tokenizer, which has a {kind.model} model and no {model}"
    for option, default in kind.options.items():
        wanted = config.get(option)
        wanted = default if wanted is None else wanted
        if not _does(backend, kind, option, wanted, config):
            return f"{option} {wanted}"
    if kind is _BERT or name == "MPNet":
        unk = special_token(config, "unk_token") or "[UNK]"
        if backend.model.unk_token != unk:
            return f"unk_token {unk!r:.120}"
    return _other_frame(backend, kind, config)


def as_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer with the parts that the class Llama builds: pieces of sentencepiece with "▁"
    before the text, where tokenizer.json puts it before every part between special tokens.

    What does not follow from its options stays: vocabulary, added tokens, tokens around a text.
    """
    made = tokenizers.Tokenizer.from_str(backend.to_str())
    model, adds = made.model, config.get("add_prefix_space") is not False
    model.fuse_unk, model.byte_fallback, model.unk_token = True, True, None
    model.continuing_subword_prefix = model.end_of_word_suffix = None
    prefixed: Literal["always", "first"] = "always" if config.get("legacy") else "first"
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=prefixed if adds else "never", split=False
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds:
        parts.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(parts)
    return made


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """As of Llama 3, which transformers takes as it is, though the class's name is Llama 2's."""
    splitters = members(state_of(backend.pre_tokenizer), "pretokenizers")
    return any(part["type"] == "ByteLevel" for part in splitters)


def _model_kind(backend: tokenizers.Tokenizer) -> str:
    return type(backend.model).__name__


def _does(
    backend: tokenizers.Tokenizer,
    kind: _Class,
    option: str,
    wanted: bool | None,
    config: Mapping[str, Any],
) -> bool:
    """Whether the parts of a tokenizer are those that an option with this value makes."""
    normalizers = members(state_of(backend.normalizer), "normalizers")
    splitters = members(state_of(backend.pre_tokenizer), "pretokenizers")
    kinds = [part["type"] for part in (*normalizers, *splitters)]
    if kind.model == "WordPiece":
        names = {
            "do_lower_case": "lowercase",
            "strip_accents": "strip_accents",
            "tokenize_chinese_chars": "handle_chinese_chars",
        }
        is_bert = kinds == ["BertNormalizer", "BertPreTokenizer"]
        return is_bert and normalizers[0][names[option]] == wanted
    if option == "do_lower_case":
        return ("Lowercase" in kinds) == wanted
    if option == "keep_accents":
        return ("StripAccents" in kinds) != wanted
    if option == "split_by_punct":
        return ("Punctuation" in kinds) == wanted
    if option == "legacy":
        return True  # it says how add_prefix_space is done
    if kind.model == "BPE" and "legacy" not in kind.options:
        byte_levels = [part for part in splitters if part["type"] == "ByteLevel"]
        return [part["add_prefix_space"] for part in byte_levels] == [wanted]
    schemes = [part["prepend_scheme"] for part in splitters if part["type"] == "Metaspace"]
    if "Prepend" in kinds:  # also before a space, which no class does
        return False
    if "legacy" not in kind.options:
        unprefixed = "first" if "split_by_punct" in kind.options else "never"
        return schemes == ["always" if wanted else unprefixed]
    if not wanted:
        return not schemes or schemes == ["never"]
    return schemes == ["always" if config.get("legacy") else "first"]


def _other_frame(
    backend: tokenizers.Tokenizer, kind: _Class, config: Mapping[str, Any]
) -> str | None:
    """The tokens around a text, where tokenizer.json has others."""
    for keys, texts in ((kind.single, ("",)), (kind.pair, ("", ""))):
        if not keys:
            continue
        tokens = [special_token(config, key) or kind.tokens[key] for key in keys]
        encoding = backend.encode(*texts)
        # An empty text may have a token for its space.
        found = [
            token
            for token, mask in zip(encoding.tokens, encoding.special_tokens_mask, strict=True)
            if mask
        ]
        if found != tokens:
            return f"{' '.join(tokens)} around {'a text' if len(texts) == 1 else 'a pair'}"
    return None


def _other_token(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any]
) -> str | None:
    """The first token of tokenizer_config.json or added_tokens.json that is no added token of the
    tokenizer, or one of another kind."""
    own = {str(token.content): token for token in backend.get_added_tokens_decoder().values()}
    names = [special_token(config, key) for key in config if key.endswith("_token")]
    names += [*_extra_tokens(config), *added]
    for name in names:
        if name is not None and name not in own:
            return name
    for entry in (config.get("added_tokens_decoder") or {}).values():
        token = own.get(entry["content"])
        if token is None:
            return str(entry["content"])
        # transformers' own defaults, where a key is left out
        defaults = {"normalized": not entry.get("special", False)}
        if any(getattr(token, f) != entry.get(f, defaults.get(f, False)) for f in _FLAGS):
            return str(entry["content"])
    return None


def _extra_tokens(config: Mapping[str, Any]) -> Sequence[str]:
    given = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = given.values() if isinstance(given, Mapping) else given
    return [entry["content"] if isinstance(entry, Mapping) else entry for entry in values]
