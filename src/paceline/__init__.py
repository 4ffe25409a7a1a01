"""Paceline: an inference engine for Qwen3-family language models."""

__version__ = "0.1.0"
