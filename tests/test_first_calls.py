"""The first op of a thread, which has no CUDA context until a call of the runtime makes one current: PyTorch's backward
runs in such a thread. The same without a GPU: tests/ptx/test_runtime.py, with tensor maps alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOT = Path(__file__).resolve().parent.parent

START = """
import threading
import torch
import cuda_ext

def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()

def close(out, exact):
    error = (out.float() - exact).norm() / exact.norm()
    assert error < 0.02, f"relative error {error}"

def in_a_thread(function):
    errors = []
    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
"""

# The inputs are made by the main thread, so allocations in the other one may be served from PyTorch's cache.
CASES = {
    "backward of a product": """
class Square(torch.autograd.Function):  # whose forward runs nothing of ours
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.new_zeros(())
    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return cuda_ext.gemm(b, a), None

a, b = normal(256, 256).requires_grad_(), normal(256, 256)
torch.empty(1 << 22, device="cuda")  # to the cache
Square.apply(a, b).backward()
close(a.grad, b.float() @ a.detach().float())
""",
    "a product in a thread": """
a, b = normal(256, 256), normal(256, 256)
torch.empty(1 << 22, device="cuda")
in_a_thread(lambda: close(cuda_ext.gemm(a, b), a.float() @ b.float()))
""",
    "attention in a thread": """
q, k, v = (normal(1, 256, 4, 64) for _ in range(3))
torch.empty(1 << 22, device="cuda")
def attend():
    out = cuda_ext.flash_attention(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v)))
    close(out, exact.transpose(1, 2))
in_a_thread(attend)
""",
    "a captured product in a thread": """
a, b = normal(256, 256), normal(256, 256)
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ext.gemm(a, b)
    a.mul_(2)
    graph.replay()
    close(out, a.float() @ b.float())
cuda_ext.gemm(a, b)  # the kernel's shared memory must be requested before a capture
in_a_thread(capture)
""",
}


@pytest.mark.parametrize("name", CASES)
def test_first_call(name: str) -> None:
    command = [sys.executable, "-c", START + CASES[name] + "\ntorch.cuda.synchronize()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
