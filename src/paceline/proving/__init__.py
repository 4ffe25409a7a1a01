"""Losslessness gates, and the proof that a drafter changes no output of a model."""
