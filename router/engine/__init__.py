"""The simulated engine: a paged radix cache, a scheduler in modelled time, real ZMQ publishers and real HTTP.

A prompt walks through the modules in this order: `app` (routes) → `body` (what was asked) → `text` (token ids) →
`rank` (one data-parallel rank on the event loop) → `scheduler` (batches, modelled time) → `radix` (pages, eviction)
→ `wire` (event bytes) → `publisher` (sockets). `radix`, `scheduler`, `timing` and `wire` do no I/O. A prefill or decode
engine (`--role`) goes through `split` first: its prompt's KV is handed over in `rooms` by `handover`.
"""
