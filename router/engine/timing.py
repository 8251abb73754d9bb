"""How long one scheduler step takes. Seconds and tokens; the model of the policy study, every constant a field."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """One rank's speed. At a context of `attention_context_tokens` a prompt token takes twice as long."""

    prefill_tokens_per_s: float = 20_000.0
    attention_context_tokens: float = 100_000.0
    step_overhead_s: float = 0.003
    decode_step_s: float = 0.009
    per_sequence_s: float = 40e-6
    per_kv_token_s: float = 30e-9
    chunk_tokens: int = 8192
    max_running: int = 128
    cached_attention: float = 0.0
    """Share of the cached context's own attention that every prefill step computes again. GPU kernels: 0. SGLang's
    torch_native backend (CPU) pads the queries to the whole context and so pays 1: a cache saves it only the rest."""

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Computing `tokens` prompt tokens that end at position `context_tokens`: they attend to what is before them,
        cached tokens × new ones and half of the new ones' square, and the share above."""
        context = context_tokens - tokens / 2
        again = self.cached_attention * (context_tokens - tokens) ** 2 / 2
        return (tokens + (tokens * context + again) / self.attention_context_tokens) / self.prefill_tokens_per_s

    def step_s(self, prefill_s: float, decoding: int, kv_tokens: int) -> float:
        """One step: prefill and decodes share it, the longer of the two counts."""
        compute_s = max(prefill_s, self.decode_step_s if decoding else 0.0)
        return self.step_overhead_s + compute_s + decoding * self.per_sequence_s + kv_tokens * self.per_kv_token_s
