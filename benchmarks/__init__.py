"""Measures cuda_ext beside everything it competes with: `python -m benchmarks --help`."""
