"""Trains a small Llama of the transformers library with its Trainer, first as it is, then on cuda_ext.

    python examples/finetune_transformers.py

The model's code is not changed: `enable()` adds the attention implementation "cuda_ext" to transformers, and `patch`
replaces the feed-forward blocks. Both runs start from the same weights and see the same batches.
"""

from __future__ import annotations

import copy

import torch
from common import arguments, plot, print_table
from text import read_text, split_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cuda_ext
import cuda_ext.integrations.transformers


class Windows(Dataset[dict[str, Tensor]]):
    """The training text in windows of `context` bytes."""

    def __init__(self, context: int) -> None:
        text, _ = split_text(read_text(None), context)
        self.rows = text[: len(text) // context * context].long().view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(model: LlamaForCausalLM, options: object) -> tuple[list[float], float]:
    """The loss of every step, and seconds per step."""
    settings = TrainingArguments(
        output_dir=str(options.out / "finetune"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        logging_steps=max(options.steps // 10, 1),
        save_strategy="no",
        report_to=[],
        use_cpu=options.device == "cpu",
        seed=options.seed,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Windows(options.context))
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [float(loss) for loss in losses], result.metrics["train_runtime"] / options.steps


def main() -> dict[str, list[float]]:
    options = arguments(__doc__, steps=80, batch=8, context=256, hidden=256, layers=4)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 128, 1),
        max_position_embeddings=options.context,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    ours = copy.deepcopy(model)

    cuda_ext.integrations.transformers.enable()
    ours.set_attn_implementation("cuda_ext")
    print(cuda_ext.patch(ours))

    runs = {"sdpa": train(model, options), "cuda_ext": train(ours, options)}
    rows = [
        (name, f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{1e3 * time:.0f} ms") for name, (losses, time) in runs.items()
    ]
    print_table(("", "first loss", "last loss", "per step"), rows)
    plot(options.out / "finetune_transformers.png", {name: losses for name, (losses, _) in runs.items()})
    with torch.no_grad():
        start = torch.tensor([list(b"The ")], device=ours.device)
        written = ours.generate(start, max_new_tokens=60, do_sample=True, temperature=0.7, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return {name: losses for name, (losses, _) in runs.items()}


if __name__ == "__main__":
    main()
