"""Prefill/decode disaggregation: one pool computes a prompt's KV, another decodes with it; the router makes the pair.

`pools` sorts workers by role and says which half is missing, `decode` chooses the second half of a pair once the policy
has chosen the first, `dialects` writes what SGLang and vLLM engines need to meet into both bodies. All of it is pure;
`router.proxy.pair` sends the two requests.
"""
