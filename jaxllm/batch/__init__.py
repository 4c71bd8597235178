"""Batch inference: a file of requests in, a file of answers out, whatever kills it in between.

    storage ─► input ─► requests ─► run ─► journal ─► delivery
                          (LLMEngine)

`journal` is the one durable truth about what is finished. `run` feeds an engine with a bounded
number of requests; `delivery` brings the answers to where they were wanted, in order if asked.
"""
