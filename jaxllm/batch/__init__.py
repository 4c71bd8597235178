"""Batch inference: a file of requests in, a file of answers out, and a run can resume after a kill.

    storage ─► input ─► lines ─► run ─► journal ─► delivery
                               LLMEngine

`journal` is the durable record of finished items. `run` feeds an engine with a bounded number of
requests. `delivery` sorts the results if requested, and `storage` writes them to their destination.
`job` connects all of it; a server has its own, `jaxllm.server.batch_job`. `process` makes requests
of lines for both. `ray` is another way, for a dataset and many engines.
"""
