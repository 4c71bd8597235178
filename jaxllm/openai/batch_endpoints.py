"""The endpoints that lines of a batch may name, but for those that pool."""

from jaxllm.openai.endpoints import ENDPOINTS, Endpoint, find_in
from jaxllm.openai.responses.endpoint import responses_endpoint

BATCH_ENDPOINTS = {
    **ENDPOINTS,
    "/v1/responses": responses_endpoint(None, why="the responses of a batch are its lines"),
}


def find_batch_endpoint(path: str) -> Endpoint:
    """Return the endpoint of a path; raise NotFoundError."""
    return find_in(BATCH_ENDPOINTS, path)
