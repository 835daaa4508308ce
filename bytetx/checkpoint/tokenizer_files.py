"""Names of the files of a checkpoint's tokenizer."""

# Each says that a checkpoint has a tokenizer, though not in the form that is read without help.
VOCABULARIES = (
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
# What belongs to a vocabulary.
VOCABULARY_PARTS = ("merges.txt", "added_tokens.json", "special_tokens_map.json")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    *VOCABULARIES,
    *VOCABULARY_PARTS,
)
