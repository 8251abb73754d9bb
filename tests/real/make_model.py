"""Run by an engine's environment: a tiny random Llama for the tokenizer in FOLDER, written beside it.

make_model.py FOLDER [HIDDEN MLP LAYERS [HEAD]]: wider ones are for tests that need prefill to take time. Attention
stays small: SGLang's CPU backend computes it anew for the cached context too, so only the rest is saved by a cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

folder = Path(sys.argv[1])
vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
ids = [*vocabulary["model"]["vocab"].values(), *(token["id"] for token in vocabulary["added_tokens"])]
hidden, mlp, layers = (int(size) for size in sys.argv[2:5]) if len(sys.argv) > 2 else (64, 128, 2)
head = int(sys.argv[5]) if len(sys.argv) > 5 else 16
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=(max(ids) + 64) // 64 * 64,
    hidden_size=hidden,
    intermediate_size=mlp,
    num_hidden_layers=layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=head,
    max_position_embeddings=65_536,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=True,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
