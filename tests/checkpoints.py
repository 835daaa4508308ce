"""Small random checkpoints with tokenizers, as transformers and sentence-transformers save them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tiny import FAMILIES, randomize, tiny_model
from tiny_decoders import tiny_decoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

MAX_POSITIONS = 40
_VOCABULARIES = Path(__file__).parent / "vocabularies"
ROUTER_PROMPTS = {"query": "query: ", "document": "passage: "}
HIDDEN_SIZE = 48

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "Angela Merkel met Zaphod in Berlin-Mitte on 3rd March 2024.",
    "Packed tokens never touch a pad token; unhappiness is unbelievable!",
    "Ünïcödé wörds, 日本語 and emoji 🙂 are ordinary input.",
    "New York is big. San Francisco isn't far from Oakland (California).",
    "antidisestablishmentarianism",
    "a",
    "",
]

# Family: kind of its tokenizer. Pad is token 1 in the families whose positions start after it.
TOKENIZERS = {
    "bert": "wordpiece",
    "roberta": "bpe",
    "xlm-roberta": "unigram",
    "camembert": "unigram",
    "distilbert": "wordpiece",
    "mpnet": "wordpiece",
    "electra": "wordpiece",
    "modernbert": "bpe",
    "eurobert": "bpe",
    "ultrabert": "bpe",
    "albert": "unigram",
    "xlm-roberta-xl": "unigram",
    "roberta-prelayernorm": "bpe",
    "nomic_bert": "wordpiece",
    "gte": "unigram",
    "jina_embeddings_v3": "unigram",
    "deberta": "bpe",
    "deberta-v2": "unigram",
}
TOKENIZERS = {family: kind for family, kind in TOKENIZERS.items() if family in FAMILIES}
_POSITION_OFFSETS = dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "roberta-prelayernorm"), 2
)
# cls, sep, pad, unk, mask
_BERT_TOKENS = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
_ROBERTA_TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "<mask>")


def make_tokenizer(
    kind: str, *, max_tokens: int = MAX_POSITIONS
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of a kind (wordpiece, bpe, unigram), trained on SENTENCES alone.

    Kind bytes is bpe with a token for each byte, as large vocabularies have them.

    The trainers of wordpiece and unigram give other vocabularies in every process, with texts of
    other lengths: what one of them gave once is kept in tests/vocabularies.
    """
    cls, sep, pad, unk, mask = names = _BERT_TOKENS if kind == "wordpiece" else _ROBERTA_TOKENS
    backend = _backend(kind, unk, special=[cls, pad, sep, unk, mask])
    backend.add_special_tokens(list(names))
    ids = {name: backend.token_to_id(name) for name in names}
    between = [sep] if kind == "wordpiece" else [sep, sep]
    second_type = ":1" if kind == "wordpiece" else ""
    backend.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", *between, f"$B{second_type}", f"{sep}{second_type}"],
        special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_tokens,
        cls_token=cls,
        sep_token=sep,
        pad_token=pad,
        unk_token=unk,
        mask_token=mask,
        model_input_names=["input_ids", "attention_mask"] + ["token_type_ids"] * bool(second_type),
    )


def make_gemma_tokenizer(
    *, adds_end: bool = False, max_tokens: int = MAX_POSITIONS
) -> transformers.GemmaTokenizer:
    """Gemma's own kind, trained on SENTENCES alone: spaces are tokens' marks, what is unknown falls
    back to bytes, texts begin by <bos>.

    adds_end: they also end by <eos>, as those of EmbeddingGemma.
    """
    turns = ["<start_of_turn>", "<end_of_turn>"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *turns]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # words, to train
    num_bytes = 256
    words = trainers.BpeTrainer(
        vocab_size=len(special) + num_bytes + 200,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(num_bytes))],
    )
    backend.train_from_iterator(SENTENCES[:3] * 3, words)
    model = json.loads(backend.to_str())["model"]
    return transformers.GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        additional_special_tokens=turns,
        add_bos_token=True,
        add_eos_token=adds_end,
        model_max_length=max_tokens,
    )


def _backend(kind: str, unk: str, *, special: Sequence[str]) -> tokenizers.Tokenizer:
    """special: the first tokens of a bpe vocabulary."""
    if kind == "wordpiece":
        pieces = (_VOCABULARIES / "wordpiece.txt").read_text(encoding="utf-8").split()
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unk))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    elif kind in ("bpe", "bytes"):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
        trainer = trainers.BpeTrainer(
            vocab_size=330 + len(alphabet),
            special_tokens=list(special),
            initial_alphabet=alphabet,
        )
        backend.train_from_iterator(SENTENCES[:5] * 3, trainer)
    else:
        rows = (_VOCABULARIES / "unigram.tsv").read_text(encoding="utf-8").splitlines()
        scores = [(piece, float(score)) for piece, score in (row.split("\t") for row in rows)]
        unk_id = [piece for piece, _ in scores].index(unk)
        backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id, byte_fallback=False))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    return backend


def save_checkpoint(
    folder: Path, family: str = "bert", *, head: str = "Model", **config: object
) -> Path:
    """A random model of a family with its tokenizer, saved as save_pretrained does.

    head: the class name without its stem (Model, ForMaskedLM, ...).  config: more of its config.
    """
    tokenizer = make_tokenizer(TOKENIZERS[family])
    settings = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_POSITIONS + _POSITION_OFFSETS.get(family, 0),
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = tiny_model(family, head, **(settings | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_sentence_model(
    folder: Path,
    modules: Sequence[nn.Module],
    *,
    family: str = "bert",
    max_seq_length: int | None = None,
    **options: object,
) -> Path:
    """A SentenceTransformer: a random transformer, then `modules`; options: prompts and such."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    base = save_checkpoint(folder / "base", family)
    transformer = Transformer(str(base), max_seq_length=max_seq_length)
    model = SentenceTransformer(modules=[transformer, *modules], device="cpu", **options)
    for module in modules:
        randomize(module)
    model.save(str(folder / "model"))
    return folder / "model"


def save_asymmetric(folder: Path, *, shared: bool = False, **options: object) -> Path:
    """Two dense encoders behind a Router, then a Normalize for both; tasks have ROUTER_PROMPTS."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    document = [Transformer(str(save_checkpoint(folder / "bert"))), Pooling(48, "mean")]
    first = document[0]
    if not shared:
        first = Transformer(str(save_checkpoint(folder / "mpnet", "mpnet")))
    query = [first, Pooling(48, "cls"), Dense(48, 48)]
    randomize(query[-1])
    router = Router.for_query_document(query, document, **options)
    model = SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts=ROUTER_PROMPTS)
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def texts(num_texts: int, *, max_words: int = 20, seed: int = 0) -> list[str]:
    """Random texts of 0 to max_words words of SENTENCES, of very different lengths."""
    words = " ".join(SENTENCES).split()
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    return [
        " ".join(words[draw(len(words))] for _ in range(draw(max_words + 1)))
        for _ in range(num_texts)
    ]


def cosine_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest of 1 - cos over the rows."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cos = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return float((1 - cos).max())


def edit_json(path: Path, **changes: object) -> None:
    """Changes keys of a JSON object in place."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_config(folder: Path, config: dict[str, object]) -> None:
    """Writes config.json in place of the one that is there, if any."""
    (folder / "config.json").write_text(json.dumps(config))


def save_gemma(
    folder: Path,
    name: str,
    head: str = "ForCausalLM",
    *,
    adds_end: bool = False,
    **config: object,
) -> Path:
    """A random Gemma with a tokenizer of its kind."""
    tokenizer = make_gemma_tokenizer(adds_end=adds_end, max_tokens=96)
    model = tiny_decoder(name, head, vocab_size=len(tokenizer), **config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_causal(
    folder: Path,
    name: str = "qwen3",
    head: str = "ForCausalLM",
    *,
    kind: str = "bpe",
    added_tokens: Sequence[transformers.AddedToken] = (),
    **config: object,
) -> Path:
    """A random causal model with a byte-level tokenizer that ends every text by its last token."""
    tokenizer = make_tokenizer(kind, max_tokens=96)
    tokenizer.add_tokens(list(added_tokens))
    end = tokenizer.eos_token or tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", end], special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))]
    )
    model = tiny_decoder(name, head, vocab_size=len(tokenizer), **config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_m3(folder: Path, *, suffix: str = ".pt", bias: bool = True) -> Path:
    """An XLM-RoBERTa with BGE-M3's layers beside it."""
    save_checkpoint(folder, "xlm-roberta")
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 20)):
        tensors = {"weight": torch.randn(rows, HIDDEN_SIZE)}
        if bias:
            tensors["bias"] = torch.randn(rows)
        if suffix == ".pt":
            torch.save(tensors, folder / f"{name}.pt")
        else:
            save_file(tensors, folder / f"{name}.safetensors")
    return folder
