"""`jaxllm bench <what>`, a module for each; `jaxllm.bench` does the work."""
