"""What the sides of a case are: baselines, which ours is compared with, and references, which only show the scale."""

from __future__ import annotations

# Names in the results that need an explanation.
MEANINGS = {
    "unfused": "the same in separate PyTorch ops",
    "SDPA": "`scaled_dot_product_attention`",
    "SDPA, each": "one SDPA call per sequence of a packed batch",
    "linear_cross_entropy": "`torch.nn.functional.linear_cross_entropy` in chunks",
    "linear_cross_entropy, 128 rows": "the same in chunks of 128 rows",
    "F.grouped_mm": "`torch.nn.functional.grouped_mm`",
    "a loop": "a product after the other",
    "transformers, grouped_mm": 'the experts of transformers\' Mixtral, `experts_implementation="grouped_mm"`',
    "transformers, eager": "the same with a loop over experts",
    "F.linear, bfloat16": "the layer in bfloat16",
    "passes": "PyTorch calls with the same result: copy, then scale and overflow check, then norm",
    "foreach": "`torch._foreach_copy_` only: no scale, check or norm",
    "copy_": "one `copy_` of as many bytes: no scale, check or norm",
    "DDP": "`DistributedDataParallel`",
    "DDP, bucket views": "DDP with `gradient_as_bucket_view=True`",
    "DDP, bf16 hook": "DDP with `bf16_compress_hook`",
    "PyTorch": "the equivalent PyTorch modules or calls",
}
# Not alternatives to ours: lower bounds, and other options of ours.
REFERENCES = {
    "no communication": "the same step without exchanging gradients",
    "cuda_ext, forward": "ours with gradients formed in forward",
    "cuda_ext, recompute": "ours with logits formed again in backward",
    "cuda_ext, bf16 wire": "ours with bfloat16 transfers",
    "cuda_ext, over sockets": "ours over sockets instead of shared memory",
    "cuda_ext, float32 over sockets": "ours over sockets, summed in float32",
    "cuda_ext, all_reduce": "ours with NCCL's all-reduce of the transferred dtype",
    "cuda_ext, float32 sums": "ours, summed in float32",
    "torch.mul": "`torch.mul` on the same tensors: what any PyTorch call costs",
    "torch alone": "`import torch` without `import cuda_ext`",
    "again, nothing changed": "the build, repeated with nothing changed",
    "an empty extension": "the build of an extension with one empty function",
}
