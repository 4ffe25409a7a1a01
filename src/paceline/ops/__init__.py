"""Every kernel: a torch reference and a Triton version behind one function."""
