"""Trains a small GPT-2 on the text that ships with Python, then lets it write, and compares the speed of writing. All
ways to write sample with the same seed, so they should write the same.

    python examples/generate_gpt2.py
"""

from __future__ import annotations

import copy
import time

import torch
from common import Runs, arguments, print_table, text_batches
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import cuda_ext
import cuda_ext.integrations.transformers


def main() -> dict[str, Tensor]:
    options = arguments(__doc__, steps=120, batch=8, context=256, tokens=100, width=256, layers=4)
    config = GPT2Config(
        vocab_size=256,
        n_positions=2 * options.context,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    cuda_ext.integrations.transformers.enable()
    model = GPT2LMHeadModel._from_config(config, attn_implementation="cuda_ext").to(options.device)
    print(cuda_ext.patch(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(inputs: Tensor, _: Tensor) -> float:
        optimizer.zero_grad()
        inputs = inputs.to(options.device)
        loss = model(inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    runs = Runs()
    runs.train(
        "cuda_ext", text_batches(options.steps, options.batch, options.context, options.seed), options.steps, step
    )
    runs.report(options.out / "generate_gpt2.png")

    model.eval()
    prompts = torch.tensor([list(b"The value of the expression "), list(b"If the class defines method ")])
    written, rows = {}, []
    for name in ("eager", "sdpa", "cuda_ext"):
        writer = copy.deepcopy(model)
        if name != "cuda_ext":
            cuda_ext.unpatch(writer)
            writer.set_attn_implementation(name)
        settings = {
            "max_new_tokens": options.tokens,
            "min_new_tokens": options.tokens,
            "do_sample": True,
            "temperature": 0.7,
            "pad_token_id": 0,
        }
        writer.generate(prompts.to(writer.device), **settings)
        torch.manual_seed(options.seed)
        begin = time.perf_counter()
        written[name] = writer.generate(prompts.to(writer.device), **settings)
        speed = prompts.shape[0] * options.tokens / (time.perf_counter() - begin)
        rows.append((name, f"{speed:.0f}", "yes" if torch.equal(written[name], written["eager"]) else "no"))
    print_table(("attention", "tokens/s", "same text as eager"), rows)
    for text in written["cuda_ext"].tolist():
        print(repr(bytes(text).decode(errors="replace")))
    return written


if __name__ == "__main__":
    main()
