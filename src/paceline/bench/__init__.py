"""Benchmarks behind ``paceline bench``. Every result names the machine, the versions and the command."""
