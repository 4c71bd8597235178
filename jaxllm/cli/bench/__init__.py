"""`jaxllm bench <what>`: one module per benchmark. `jaxllm.bench` does the work."""
