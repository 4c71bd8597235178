"""Videos over HTTP, asked for by OpenAI's own client: the answers of the same engine offline."""

import base64

import openai
import pytest

pytest.importorskip("PIL")
pytest.importorskip("av")

from jaxllm import LLM, SamplingParams
from tests.media.models import OPTIONS, make_qwen3
from tests.media.test_decode_video import video_file

pytestmark = pytest.mark.slow  # it starts two engines


@pytest.fixture(scope="module")
def both(tmp_path_factory, new_host):
    path = make_qwen3(tmp_path_factory.mktemp("vision"))
    llm = LLM(path, **OPTIONS)
    host = new_host({"model": str(path), **OPTIONS})
    try:
        with host.serve() as http:
            base = f"http://127.0.0.1:{http.port}/v1"
            with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
                yield llm, client
    finally:
        host.close()


def message(url):
    part = {"type": "video_url", "video_url": {"url": url}}
    return {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}


def test_answers_are_those_offline(both):
    llm, client = both
    url = "data:video/mp4;base64," + base64.b64encode(video_file()).decode()
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (expected,) = llm.chat([message(url)], params, use_tqdm=False)
    answer = client.chat.completions.create(
        model="tiny", messages=[message(url)], temperature=0, max_tokens=6
    )
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/hostname", "--allowed-local-media-path"),
        ("http://example.com/a.mp4", "host is not allowed"),
        ("data:video/mp4;base64,AAAA", "not a video file"),
        ("/etc", "begin with http"),
    ],
)
def test_what_cannot_be_read_is_refused(both, url, reason):
    _, client = both
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(model="tiny", messages=[message(url)], max_tokens=3)
    assert "messages[0].content[0].video_url.url" in str(caught.value)
