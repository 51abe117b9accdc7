"""Measures cuda_ext against other implementations: `python -m benchmarks --help`.

A part imports only from parts below it in this table:

  gpu_check       checks and measures everything on a machine with a GPU: `python -m benchmarks.gpu_check`
  model           the paper model, which predicts kernel times on GPUs: `python -m benchmarks model`
  suites          the cases to measure (bench_*.py), the timing, and the processes that do it
  presentation    tables, plots, the HTML page, the README's section, and the comparison of two runs
  comparison.py   tables of ours, the fastest opponent and the paper model's prediction
  results.py      what a measurement is, and its file format
  environment.py  device, clocks and versions
"""
