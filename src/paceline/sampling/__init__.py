"""Sampling parameters, logits processing, the position-keyed sampler and logprobs."""
