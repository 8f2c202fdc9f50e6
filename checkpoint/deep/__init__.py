"""The opt-in deep check: block scales in full, sampled weight bytes.

What each test can and cannot know, and its measured rates: ``docs/deep-check.md``.
"""

from .check import deep_check

__all__ = ["deep_check"]
