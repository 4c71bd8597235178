"""Facts about platforms that a plan or an implementation chooses by.

A platform is what `jax.Device.platform` says: "cpu", "gpu" or "tpu".
"""

# Tokens per KV block where nobody asks for a number. On a CPU the XLA attention backend takes one
# block per iteration: in processor time of a decode (benchmarks/attention_xla.py, two cores),
# blocks of 16 cost 1.7 to 1.9 times those of 64, and blocks of 32 cost 1.0 to 1.2 times; smaller
# blocks are shared more often between prompts.
DEFAULT_BLOCK_SIZES = {"cpu": 32, "gpu": 32, "tpu": 64}

# Rows that a matrix product needs before it leaves a slow path. XLA:CPU multiplies one row of
# 16-bit weights ten times slower than two.
MIN_DOT_ROWS = {"cpu": 2, "gpu": 1, "tpu": 1}
