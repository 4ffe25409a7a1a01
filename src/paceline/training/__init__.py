"""Training drafters: the target's own answers, anchored blocks, and what the engine will accept of them."""
