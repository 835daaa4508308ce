"""Hugging Face models that keep their class and API while their forward runs on packed tokens."""

from bytetx.hf.notice import FallbackWarning
from bytetx.hf.wrapper import unwrap, wrap

__all__ = ["FallbackWarning", "unwrap", "wrap"]
