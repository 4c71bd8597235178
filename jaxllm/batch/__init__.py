"""Batch inference: a file of requests in, a file of answers out, whatever kills it in between.

    storage ─► input ─► lines ─► run ─► journal ─► delivery
                               LLMEngine

`journal` is the one durable truth about what is finished. `run` feeds an engine with a bounded
number of requests; `delivery` sorts the results, if asked, for storage to put where they belong.
`job` holds it all together. `ray` is another way, for a dataset and many engines.
"""
