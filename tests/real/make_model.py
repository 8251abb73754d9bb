"""Run by an engine's environment: a tiny random Llama for the tokenizer in FOLDER, written beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

folder = Path(sys.argv[1])
vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
ids = [*vocabulary["model"]["vocab"].values(), *(token["id"] for token in vocabulary["added_tokens"])]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=(max(ids) + 64) // 64 * 64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=65_536,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=True,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
