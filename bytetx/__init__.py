"""bytetx: transformer inference on packed tokens; no pad token is ever computed."""

__version__ = "0.1.0"
