"""Errors that a user can meet; each says what was given, what is needed and what to do."""


class BytetxError(ValueError):
    """Base of every error that is the caller's or the checkpoint's to fix."""


class CheckpointError(BytetxError):
    """A checkpoint that cannot be loaded: files, config or tensors are not as they should be."""


class InputError(BytetxError):
    """An input that cannot be run: text, token ids, lengths or options."""


class TooLongError(InputError):
    """A text with more tokens than the model has positions, where truncation was not asked for."""
