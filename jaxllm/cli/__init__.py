"""The `jaxllm` command. Each subcommand is one module, imported only when it is used."""
