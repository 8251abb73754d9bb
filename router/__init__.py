"""kv-router: routes LLM requests to the engine whose KV cache already holds their prefix."""

__version__ = "0.1.0"
