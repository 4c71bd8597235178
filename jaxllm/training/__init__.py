"""Training of small models: makes a checkpoint from text that this engine, and others, can serve.

The trained model has the same class as the served one. Only its attention differs: it runs on whole
rows instead of a paged cache.

    corpus.py       reads files as text, and holds some of them out
    tokenizer.py    trains a byte-level BPE tokenizer
    chat_examples.py  makes conversations of the functions of Python sources
    tokens.py       stores text as arrays of token ids, and makes the batch of each step
    bigrams.py      fits the first embeddings to counts of bigrams
    forward.py      computes logits of whole rows with the served model
    adapter.py      an adapter of a model, in place of a whole one
    objective.py    the loss, on text alone or with a teacher
    schedule.py     the progress of a run, and its learning rate
    trainer.py      the loop
    run_state.py    checkpoints and the log of a run
    export.py       writes the weights as a checkpoint in Hugging Face's form
"""
