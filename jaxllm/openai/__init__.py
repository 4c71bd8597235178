"""The OpenAI protocol: reads request bodies as prompts and parameters, writes outputs as bodies.

It does not depend on a transport: batch files and the HTTP server both use it.
"""
