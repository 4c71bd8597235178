"""Models in GGUF files: metadata, tokenizer, tensors in blocks ([page](README.md))."""
