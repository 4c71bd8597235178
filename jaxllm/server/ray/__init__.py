"""A fleet of engines behind one server, as an application of Ray Serve.

`serve run jaxllm.server.ray:app model=...` starts it, a config file of Serve's names
`jaxllm.server.ray:app`, and in Python `serve.run(build(model=...))` does. Nothing here imports Ray
before that.
"""

from jaxllm.server.ray.application import app, build

__all__ = ["app", "build"]
