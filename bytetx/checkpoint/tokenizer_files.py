"""Names of the files of a checkpoint's tokenizer."""

# Each says that a checkpoint has a tokenizer, though not in the form that is read without help.
VOCABULARIES = (
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    # Mistral's versions of it: the form is the same.
    *(f"tokenizer.model.v{version}" for version in (1, 2, 3)),
    "tiktoken.model",
    "tekken.json",
)
# What belongs to a vocabulary.
VOCABULARY_PARTS = (
    "merges.txt",
    "bpe.codes",
    "added_tokens.json",
    "special_tokens_map.json",
)

NAMED_TEMPLATES = "additional_chat_templates"  # a folder of chat templates beside the default

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    *VOCABULARIES,
    *VOCABULARY_PARTS,
)
