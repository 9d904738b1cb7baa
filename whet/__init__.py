"""whet: language models learn to reason, for fewer tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "train"]

if TYPE_CHECKING:
    from whet.api import train


def __getattr__(name: str) -> Any:
    """`whet.train` without paying for its imports when only `whet.types` is wanted."""
    if name == "train":
        from whet.api import train

        return train
    raise AttributeError(f"module 'whet' has no attribute {name!r}")
