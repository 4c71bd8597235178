"""Prompts of embeddings over HTTP, asked for by OpenAI's own client."""

import openai
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.prompt_embeds.models import OPTIONS, in_base64, numpy_file, safetensors_file, table

pytestmark = pytest.mark.slow  # it starts an engine

IDS = [[5, 6, 7, 8] * 10, [9, 10, 11]]


@pytest.fixture(scope="module")
def both(tmp_path_factory, new_host):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    host = new_host({"model": str(path), **OPTIONS})
    try:
        with host.serve() as http:
            base = f"http://127.0.0.1:{http.port}/v1"
            with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
                yield http, client, table(path)
    finally:
        host.close()


def test_answers_are_those_to_the_tokens(both):
    _, client, embeddings = both
    ask = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    expected = client.completions.create(**ask, prompt=IDS, logprobs=2)
    files = [
        in_base64(numpy_file(embeddings[IDS[0]])),
        in_base64(safetensors_file(embeddings[IDS[1]])),
    ]
    # Embeddings come first, and an empty prompt beside them is none.
    for prompt, given in (("", files), (IDS[1], files[0]), (IDS[1:], files[0])):
        found = client.completions.create(
            **ask, prompt=prompt, logprobs=2, extra_body={"prompt_embeds": given}
        )
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
        for one, its in zip(found.choices, expected.choices, strict=True):
            assert one.logprobs.tokens == its.logprobs.tokens
            assert one.logprobs.token_logprobs == pytest.approx(its.logprobs.token_logprobs, 1e-4)
    chunks = client.completions.create(
        **ask, prompt="", stream=True, extra_body={"prompt_embeds": files[0]}
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == found.choices[0].text


def test_what_is_wrong_is_named(both):
    http, _, embeddings = both
    good = in_base64(numpy_file(embeddings[:4]))
    wide = in_base64(numpy_file(embeddings[:4, :9]))
    cases = [
        ({"prompt_embeds": wide}, "prompt_embeds", "must be [tokens, 64]"),
        ({"prompt_embeds": [good, wide]}, "prompt_embeds[1]", "must be [tokens, 64]"),
        ({"prompt_embeds": [good], "prompt": ["a", [1, 999]]}, "prompt[1]", "no such token"),
        ({"prompt_embeds": "UEsDBA=="}, "prompt_embeds", "torch.save"),
        ({"prompt_embeds": 3}, "prompt_embeds", "3"),
        ({"prompt_embeds": []}, "prompt_embeds", "one file at least"),
        ({"prompt_embeds": good, "prompt": {}}, "prompt", "must be a string"),
        ({"prompt_embeds": good, "echo": True}, "echo", "no text"),
        ({"prompt_embeds": good, "suffix": "x"}, "suffix", "no text"),
        ({"prompt_embeds": good, "prompt_logprobs": 1}, "prompt_logprobs", "no logprobs"),
        ({"prompt_embeds": good, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "not cut"),
        ({"prompt_embeds": good, "use_beam_search": True}, "prompt_embeds", "beam search"),
        ({"prompt": {"prompt_embeds": good}}, "prompt", "must be a string"),
    ]
    for fields, name, reason in cases:
        answer = http.post("/v1/completions", json={"model": "tiny", **fields})
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert error["param"] == name and reason in error["message"], (fields, error)
    answer = http.post("/v1/completions", json={"prompt_embeds": good, "max_tokens": 1})
    assert answer.status_code == 200
