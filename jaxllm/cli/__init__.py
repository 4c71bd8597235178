"""The `jaxllm` command. Each subcommand is a module that is imported only when it runs."""
