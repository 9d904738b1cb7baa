"""whet: language models learn to reason, for fewer tokens."""

__version__ = "0.1.0"
