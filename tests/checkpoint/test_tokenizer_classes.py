"""Ids of every class of tokenizers that a checkpoint may name, against transformers' AutoTokenizer.

Each case is a vocabulary as a slow tokenizer has it, with options; then the same as tokenizer.json,
whose options were changed afterwards.  Ids are AutoTokenizer's, or the class is refused by name.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from vocabulary_files import byte_pairs, pieces, texts, word_pieces

from bytetx.checkpoint.tokenizer import load_tokenizer
from bytetx.errors import CheckpointError

TEXTS = texts(200)
PAIRS = list(zip(TEXTS[:40], TEXTS[40:80], strict=True))
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
RAW = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
BYTES = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 600, **RAW}
NEW = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False, "special": True}


def roberta(folder: Path) -> None:
    byte_pairs(folder, ROBERTA)


def gpt2(folder: Path) -> None:
    byte_pairs(folder, ("<|endoftext|>",))


def mpnet(folder: Path) -> None:
    names = {"[PAD]": "<pad>", "[CLS]": "<s>", "[SEP]": "</s>", "[MASK]": "<mask>"}
    word_pieces(folder, special=names)


def albert(folder: Path) -> None:
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    pieces(folder, "spiece.model", control_symbols="[CLS],[SEP],[MASK]", **ids)


def t5(folder: Path) -> None:
    pieces(folder, "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def xlm_roberta(folder: Path) -> None:
    pieces(folder, "sentencepiece.bpe.model")


def deberta_v2(folder: Path) -> None:
    """spm.model alone, as DeBERTa v2 and v3 are published."""
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    pieces(folder, "spm.model", user_defined_symbols="[MASK]", **ids, **names)


def llama(folder: Path) -> None:
    pieces(folder, "tokenizer.model", **BYTES)


def gemma(folder: Path) -> None:
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    names = {"eos_piece": "<eos>", "bos_piece": "<bos>", "user_defined_symbols": "<mask>,<2mass>"}
    pieces(folder, "tokenizer.model", add_dummy_prefix=False, **BYTES, **ids, **names)


@dataclass(frozen=True)
class Case:
    """model_type: of config.json.  name: the class.  options: of tokenizer_config.json.
    in_config: the class is named in config.json.  files: JSON files beside."""

    make: Callable[[Path], None]
    model_type: str
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    in_config: bool = False
    files: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, *, with_options: bool = True) -> Path:
        folder.mkdir(exist_ok=True)
        self.make(folder)
        named = {} if self.name is None else {"tokenizer_class": self.name}
        model = {"model_type": self.model_type} | (named if self.in_config else {})
        (folder / "config.json").write_text(json.dumps(model))
        settings = {} if self.in_config else dict(named)
        if with_options:
            settings |= self.options
            for name, content in self.files.items():
                (folder / name).write_text(json.dumps(content))
        if settings:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    def __str__(self) -> str:
        stated = {**self.options, **self.files}
        where = " in config.json" if self.in_config else ""
        return f"{self.model_type} {self.name}{where} {stated or ''}".strip()[:90]


BERT_OPTIONS: list[dict[str, Any]] = [
    {"do_lower_case": False},
    {"strip_accents": False},
    {"strip_accents": True, "do_lower_case": False},
    {"tokenize_chinese_chars": False},
    {"do_basic_tokenize": False},
    {"never_split": ["fox"]},
    {"split_special_tokens": True},
    {"additional_special_tokens": ["[NEW]"]},
    {"extra_special_tokens": {"own_token": "[NEW]"}},
    {"own_token": "[NEW]"},
    {"added_tokens_decoder": {"420": NEW}},
    {"unk_token": "[MASK]"},
    {"cls_token": "[NEW]"},
]
BERT_LIKE = ["BertTokenizerFast", "DistilBertTokenizer", "ElectraTokenizer", "SqueezeBertTokenizer"]
BYTE_LEVEL_OPTIONS: list[dict[str, Any]] = [
    {"add_prefix_space": True},
    {"trim_offsets": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"split_special_tokens": True},
]
CASES = [
    Case(word_pieces, "bert"),
    *(Case(word_pieces, "bert", "BertTokenizer", options) for options in BERT_OPTIONS),
    *(Case(word_pieces, "bert", name) for name in BERT_LIKE),
    *(
        Case(word_pieces, model_type, "BertTokenizer", in_config=True)
        for model_type in ("roberta", "gpt2", "llama", "deberta-v2", "xlm-roberta", "nomic_bert")
    ),
    Case(word_pieces, "bert", "BertTokenizer", files={"added_tokens.json": {"<new>": 420}}),
    Case(
        word_pieces,
        "bert",
        "BertTokenizer",
        files={"special_tokens_map.json": {"additional_special_tokens": ["<new>"]}},
    ),
    Case(mpnet, "mpnet"),
    Case(mpnet, "mpnet", "MPNetTokenizer", {"do_lower_case": False}),
    Case(roberta, "roberta"),
    Case(roberta, "bert", "RobertaTokenizer", in_config=True),
    *(Case(roberta, "roberta", "RobertaTokenizer", options) for options in BYTE_LEVEL_OPTIONS),
    Case(roberta, "roberta", "RobertaTokenizer", {"cls_token": "<unk>"}),
    Case(roberta, "roberta", "BartTokenizer"),
    Case(roberta, "deberta"),
    *(Case(gpt2, "gpt2", "GPT2Tokenizer", options) for options in BYTE_LEVEL_OPTIONS),
    Case(gpt2, "gpt_neox"),
    *(Case(gpt2, "qwen2", "Qwen2Tokenizer", options) for options in BYTE_LEVEL_OPTIONS[:3]),
    Case(gpt2, "qwen3"),
    Case(albert, "albert"),
    Case(albert, "albert", "AlbertTokenizer", {"keep_accents": True}),
    Case(albert, "albert", "AlbertTokenizer", {"do_lower_case": False}),
    Case(albert, "albert", "AlbertTokenizer", {"remove_space": False}),
    Case(albert, "albert", "AlbertTokenizer", {"add_prefix_space": False}),
    Case(t5, "t5"),
    Case(t5, "mt5", "T5Tokenizer", {"extra_ids": 0}),
    Case(t5, "t5", "T5Tokenizer", {"extra_ids": 10}),
    Case(t5, "t5", "T5Tokenizer", {"legacy": False}),
    Case(xlm_roberta, "xlm-roberta"),
    Case(xlm_roberta, "camembert", "CamembertTokenizer", in_config=True),
    Case(xlm_roberta, "bert", "XLMRobertaTokenizer"),
    Case(xlm_roberta, "xlm-roberta", "XLMRobertaTokenizer", {"add_prefix_space": False}),
    Case(deberta_v2, "deberta-v2"),
    *(
        Case(deberta_v2, "deberta-v2", "DebertaV2Tokenizer", {option: value})
        for option, value in (
            ("do_lower_case", True),
            ("split_by_punct", True),
            ("add_prefix_space", False),
        )
    ),
    Case(llama, "mistral"),
    *(
        Case(llama, "llama", "LlamaTokenizer", options)
        for options in (
            {},
            {"legacy": True},
            {"legacy": False, "add_prefix_space": False},
            {"add_bos_token": True, "add_eos_token": True},
            {"use_default_system_prompt": True},
        )
    ),
    Case(gemma, "gemma2", "GemmaTokenizer"),
    Case(gemma, "gemma3_text", "GemmaTokenizer", {"add_bos_token": True}),
]


@pytest.mark.feature("Checkpoints", "tokenizers from bare vocabularies")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ids_of_a_vocabulary(case: Case, tmp_path: Path) -> None:
    check_ids(case.save(tmp_path))


CHANGED = [case for case in CASES if case.options or case.files]


@pytest.mark.parametrize("case", CHANGED, ids=str)
def test_options_beside_a_tokenizer_json_that_has_others(case: Case, tmp_path: Path) -> None:
    """Only tokenizer.json was read, whatever tokenizer_config.json said."""
    plain = case.save(tmp_path / "plain", with_options=False)
    folder = tmp_path / "saved"
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    shutil.copy(plain / "config.json", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | case.options))
    for name, content in case.files.items():
        (folder / name).write_text(json.dumps(content))
    check_ids(folder)


def check_ids(folder: Path) -> None:
    """Ids of texts and pairs are AutoTokenizer's, by the library and the native core."""
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder, max_positions=1 << 20)
    assert tokenizer is not None
    wanted = reference(TEXTS)["input_ids"]
    assert sum(map(len, wanted)) > 1000  # a vocabulary was read
    for text, ids, encoding in zip(TEXTS, wanted, tokenizer.encode(TEXTS), strict=True):
        assert encoding.ids == ids, repr(text)
    tokens = tokenizer.encode_ids(TEXTS)
    assert tokens.token_ids.tolist() == sum(wanted, [])
    pairs = [encoding.ids for encoding in tokenizer.encode(PAIRS)]
    assert pairs == [reference(*pair)["input_ids"] for pair in PAIRS]
    assert tokenizer.has_token_types == ("token_type_ids" in reference.model_input_names)


PYTHON_CLASSES = [
    *("BertweetTokenizer", "BertGenerationTokenizer"),
    *("CpmTokenizer", "EsmTokenizer", "ByT5Tokenizer", "CanineTokenizer", "XLMTokenizer"),
    *("FlaubertTokenizer", "TapasTokenizer", "RoCBertTokenizer", "BertTokenizerLegacy"),
]


@pytest.mark.parametrize("name", PYTHON_CLASSES)
@pytest.mark.parametrize("in_config", [False, True])
def test_classes_that_are_python_code_are_refused_by_name(
    name: str, in_config: bool, tmp_path: Path
) -> None:
    """MeCab, BPE of words and the like: ids of another class would be wrong."""
    folder = Case(word_pieces, "bert", name, in_config=in_config).save(tmp_path)
    (folder / "bpe.codes").write_text("a b 1\n")
    with pytest.raises(CheckpointError, match=rf"{name.removesuffix('Tokenizer')}.*Python code"):
        load_tokenizer(folder, max_positions=512)
    transformers.BertTokenizer.from_pretrained(folder).backend_tokenizer.save(
        str(folder / "tokenizer.json")
    )
    with pytest.raises(CheckpointError, match=rf"{name.removesuffix('Tokenizer')}.*Python code"):
        load_tokenizer(folder, max_positions=512)


@pytest.mark.parametrize(
    "case",
    [
        Case(xlm_roberta, "bert"),
        Case(xlm_roberta, "xlm-roberta", "BertTokenizer", in_config=True),
        Case(word_pieces, "roberta"),
        Case(word_pieces, "deberta-v2"),
        Case(word_pieces, "t5"),
        Case(roberta, "camembert"),
        Case(deberta_v2, "albert"),
    ],
    ids=str,
)
def test_a_vocabulary_of_another_class(case: Case, tmp_path: Path) -> None:
    """transformers makes a tokenizer of five special tokens: every text was [CLS] and [SEP]."""
    with pytest.raises(CheckpointError, match=r"reads .*, which is not there"):
        load_tokenizer(case.save(tmp_path), max_positions=512)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("version", ["v1", "v3"])
def test_mistrals_name_of_a_sentencepiece_model(
    model_type: str, version: str, tmp_path: Path
) -> None:
    """tokenizer.model.v3 alone; transformers makes an empty tokenizer of it, or fails."""
    folder = Case(llama, model_type, "LlamaTokenizer").save(tmp_path / "versioned")
    bare = Case(llama, model_type, "LlamaTokenizer").save(tmp_path / "bare")
    (folder / "tokenizer.model").rename(folder / f"tokenizer.model.{version}")
    wanted = transformers.AutoTokenizer.from_pretrained(bare)(TEXTS)["input_ids"]
    tokenizer = load_tokenizer(folder, max_positions=1 << 20)
    assert tokenizer is not None
    assert [encoding.ids for encoding in tokenizer.encode(TEXTS)] == wanted


def test_an_option_that_is_not_read_is_named(tmp_path: Path) -> None:
    options = {"max_entity_length": 3}
    folder = Case(roberta, "roberta", "LukeTokenizer", options).save(tmp_path)
    (folder / "entity_vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LukeTokenizer"):
        load_tokenizer(folder, max_positions=512)


def test_tokenizer_json_that_agrees_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the files contradict each other does transformers decide; without it they are
    refused, with the option's name."""
    plain = Case(word_pieces, "bert", "BertTokenizer").save(tmp_path / "plain")
    folder = tmp_path / "saved"
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    shutil.copy(plain / "config.json", folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_tokenizer(folder, max_positions=512) is not None
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": False}))
    with pytest.raises(CheckpointError, match="do_lower_case False.*pip install transformers"):
        load_tokenizer(folder, max_positions=512)


@pytest.mark.parametrize(
    "make, model_type", [(gpt2, "gpt2"), (roberta, "roberta"), (llama, "llama")]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
def test_dropout_of_a_bpe_is_off(
    make: Callable[[Path], None],
    model_type: str,
    dropout: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It makes ids random, which is for training; classes that build their model leave it out."""
    plain = Case(make, model_type).save(tmp_path / "plain")
    folder = tmp_path / "saved"
    reference = transformers.AutoTokenizer.from_pretrained(plain)
    reference.save_pretrained(folder)
    shutil.copy(plain / "config.json", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["dropout"] = dropout
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder, max_positions=1 << 20)
    assert tokenizer is not None
    assert ("dropout" in caplog.text) == (dropout > 0)
    wanted = reference(TEXTS)["input_ids"]
    for same in (tokenizer, tokenizer.untruncated(), tokenizer.limited(1 << 19)):
        assert [encoding.ids for encoding in same.encode(TEXTS)] == wanted
        assert same.encode_ids(TEXTS).token_ids.tolist() == sum(wanted, [])


SAMPLING = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}


@pytest.mark.parametrize(
    "make, model_type",
    [(t5, "t5"), (albert, "albert"), (xlm_roberta, "xlm-roberta"), (deberta_v2, "deberta-v2")],
)
def test_sampling_of_a_unigram_model_is_off(
    make: Callable[[Path], None], model_type: str, tmp_path: Path
) -> None:
    """Options of sentencepiece's own processor, which transformers does not run either."""
    case = Case(make, model_type, options={"sp_model_kwargs": SAMPLING, **SAMPLING})
    check_ids(case.save(tmp_path / "vocabulary"))
    folder = tmp_path / "saved"
    transformers.AutoTokenizer.from_pretrained(tmp_path / "vocabulary").save_pretrained(folder)
    shutil.copy(tmp_path / "vocabulary" / "config.json", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"alpha": 0.1, "nbest_size": -1}
    path.write_text(json.dumps(content))
    check_ids(folder)


@pytest.mark.parametrize("legacy", [None, False, True])
@pytest.mark.parametrize("adds", [None, False, True])
def test_llama_2s_tokenizer_json_needs_no_transformers(
    legacy: bool | None, adds: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its normalizer puts "▁" before every part; the class does as legacy and add_prefix_space
    say."""
    plain = Case(llama, "llama", "LlamaTokenizer").save(tmp_path / "plain")
    folder = tmp_path / "saved"
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    shutil.copy(plain / "config.json", folder)
    settings = folder / "tokenizer_config.json"
    stated = {"legacy": legacy, "add_prefix_space": adds}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | stated))
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = None
    backend.save(str(path))
    check_ids(folder)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ids = reference(TEXTS)["input_ids"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = load_tokenizer(folder, max_positions=1 << 20)
    assert tokenizer is not None
    assert [encoding.ids for encoding in tokenizer.encode(TEXTS)] == ids
    for one in ids[:60]:
        text = tokenizer.decode(one, skip_special_tokens=True)
        assert text == reference.decode(one, skip_special_tokens=True)
