"""The OpenAI protocol: bodies of requests to prompts and parameters, outputs to bodies of answers.

Knows of no transport: a batch file and an HTTP server speak it alike.
"""
