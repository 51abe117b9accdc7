"""The names under which data parallel training reports to its user."""

NAME = "cuda_ext.distributed.BucketedDataParallel"  # in errors
