"""`kv-router doctor`: listens to given engines as the router would, and says what is wrong and which flag mends it.

`examine` starts the router's own fleet (nothing is proxied) and, beside it, a `wiretap` on every event port that takes
any topic; with `--probe`, `probe` sends small prompts. `judge` turns what was seen into findings: pure.
"""
