"""The best any router could do: one cache with no bounds that every request goes to. Pure."""

from __future__ import annotations

from router.hashing import Namespace, Scheme, TokenIds, creditable_blocks, prompt_keys, token_count


class UnboundedCache:
    """Counts the prompt tokens a single endless cache would have served, request by request in order of sending."""

    def __init__(self, page_tokens: int) -> None:
        self._scheme = Scheme("sglang-sha256", page_tokens, False)
        self._blocks: set[int] = set()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def request(self, ids: TokenIds, continued_tokens: int = 0) -> None:
        """A prompt: counts what is there already, then holds all of it.

        `continued_tokens` are the previous turn's prompt and answer, which this prompt extends: counted as held whether
        or not the answer's text encodes to the very ids that were sampled. That makes this an upper bound.
        """
        tokens = token_count(ids)
        keys = prompt_keys(self._scheme, ids, Namespace()) or []
        creditable = creditable_blocks(self._scheme, tokens)
        hit = 0
        for key in keys[:creditable]:
            if key not in self._blocks:
                break
            hit += 1
        hit = max(hit, min(creditable, continued_tokens // self._scheme.width))
        self.prompt_tokens += tokens
        self.cached_tokens += hit * self._scheme.width
        self._blocks.update(keys)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
