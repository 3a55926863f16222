"""Speculative decoding for SGLang that switches itself off under load and back on after it."""

__version__ = "0.1.0"
