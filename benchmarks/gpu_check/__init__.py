"""The check of a machine with a GPU; docs/gpu-check.md explains it."""
