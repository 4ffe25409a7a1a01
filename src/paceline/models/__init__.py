"""Qwen3, checkpoint loading and the attention contexts a model runs in."""
