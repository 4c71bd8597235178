"""The layers that models are made of: plain flax modules and functions, traced by the runner.

Axis letters, used in every shape comment of the device side:

    T tokens of a step      R rows (requests of a step)   P blocks per row     S slots
    N query heads           K kv heads                    H head size
    D model (hidden) size   F ffn (intermediate) size     V vocabulary         E experts

Weights are stored [out, in], as in checkpoints. Activations have the model's dtype; norms, rotary
embeddings, matmul accumulators and logits are computed in float32.
"""
