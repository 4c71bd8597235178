"""Training of small models: text to a checkpoint that this engine, and others, can serve.

The model that is trained is the very class that is served. Only its attention is another one, over
whole rows instead of a paged cache.

    corpus.py       files to text: what is read, what is held out
    tokenizer.py    a byte-level BPE tokenizer of one's own
    chat_examples.py  conversations made of the functions of Python sources
    tokens.py       text to arrays of token ids, and batches of them by step
    bigrams.py      first embeddings, from counts
    forward.py      logits of whole rows, by the served model
    objective.py    the loss, of text alone or with a teacher
    schedule.py     how much of a run is done, and the learning rate there
    trainer.py      the loop
    run_state.py    what a run keeps on disk, and goes on from
    export.py       weights as a checkpoint in Hugging Face's form
"""
