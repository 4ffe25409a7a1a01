"""A forward pass of a few rows as one persistent CUDA kernel: ``kernel.cu``, and the phase lists it runs."""
