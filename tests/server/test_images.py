"""Images over HTTP, asked for by OpenAI's own client: the answers of the same engine offline."""

import base64
import threading

import openai
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.media.decode_process import DecodeProcess
from tests.media.models import OPTIONS, encoded, make_model, picture

pytest.importorskip("PIL")
pytestmark = pytest.mark.slow  # it starts two engines

LARGE = picture(64, 64)


def url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def message(*images, text="What is it?"):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


@pytest.fixture(scope="module")
def both(tmp_path_factory, new_host):
    folder = tmp_path_factory.mktemp("files")
    (folder / "large.png").write_bytes(encoded(LARGE))
    path = make_model(tmp_path_factory.mktemp("vision"))
    llm = LLM(path, **OPTIONS)
    host = new_host({"model": str(path), "allowed_local_media_path": str(folder), **OPTIONS})
    try:
        with host.serve() as http:
            base = f"http://127.0.0.1:{http.port}/v1"
            with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
                yield llm, client, folder
    finally:
        host.close()


def test_answers_are_those_offline(both):
    llm, client, folder = both
    history = [
        message(url(encoded(LARGE))),
        {"role": "assistant", "content": "A picture."},
        message(f"file://{folder}/large.png", url(encoded(picture(9, 30), "JPEG"), "image/jpeg")),
    ]
    for messages in (history[:1], history):
        (expected,) = llm.chat(
            offline(messages, folder),
            SamplingParams(temperature=0.0, max_tokens=6),
            use_tqdm=False,
        )
        answer = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=6
        )
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=6, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == expected.outputs[0].text


def offline(messages, folder):
    """The same messages for an engine that may not read the folder."""
    from PIL import Image

    def part_of(part):
        given = part.get("image_url", {}).get("url", "")
        if not given.startswith("file:"):
            return part
        return {"type": "image_pil", "image_pil": Image.open(folder / "large.png")}

    return [
        one
        if isinstance(one["content"], str)
        else one | {"content": [part_of(part) for part in one["content"]]}
        for one in messages
    ]


def test_an_image_and_a_form_of_the_answer(both):
    _, client, _ = both
    answer = client.chat.completions.create(
        model="tiny",
        messages=[message(url(encoded(LARGE)))],
        max_tokens=6,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (url(b"no image"), "not an image file"),
        ("http://169.254.169.254/latest", "host is not allowed"),
        ("file:///etc/passwd", "not in the directory"),
        ("data:image/png,raw", "not of the form"),
        (3, "must be a URL"),
    ],
)
def test_a_refused_image_is_named(both, image, reason):
    _, client, _ = both
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(
            model="tiny", messages=[message(url(encoded(LARGE)), image)], max_tokens=1
        )
    assert caught.value.param == "messages[0].content[2].image_url.url"


def test_too_many_images_and_marks_are_refused(both):
    _, client, _ = both
    for messages, reason in (
        ([message(*["data:x"] * 65)], "may have 64"),
        ([message(url(encoded(LARGE)), text="[IMG]")], "once for each image"),
        ([{"role": "user", "content": [{"type": "image"}]}], "give the image"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


def test_other_protocols_show_the_same_image(both):
    llm, client, _ = both
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_pil", "image_pil": LARGE}]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (expected,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    given = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": url(encoded(LARGE)), "detail": "auto"},
    ]
    answer = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": given}],
        temperature=0,
        max_output_tokens=6,
        store=False,
    )
    assert answer.output_text == expected.outputs[0].text
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)

    anthropic = pytest.importorskip("anthropic")
    base = str(client.base_url).removesuffix("/").removesuffix("/v1")
    data = base64.b64encode(encoded(LARGE)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="tiny",
            max_tokens=6,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )
    assert message.content[0].text == expected.outputs[0].text
    usage = message.usage
    assert usage.cache_read_input_tokens > 64  # the image's, too
    num_tokens = usage.input_tokens + usage.cache_read_input_tokens
    assert num_tokens == len(expected.prompt_token_ids)


def test_a_tool_shows_an_image(both):
    """In each protocol, where the template of the chat puts it."""
    llm, client, _ = both
    function = {"name": "look", "arguments": "{}"}
    asks = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": function},
    ]}  # fmt: skip
    hello = {"role": "user", "content": "What is it?"}

    def shown(part):
        return {"role": "tool", "tool_call_id": "a", "content": [part]}

    params = SamplingParams(temperature=0.0, max_tokens=6)
    part = {"type": "image_pil", "image_pil": LARGE}
    (expected,) = llm.chat([hello, asks, shown(part)], params, use_tqdm=False)
    assert len(expected.prompt_token_ids) > 72
    text = expected.outputs[0].text

    part = {"type": "image_url", "image_url": {"url": url(encoded(LARGE))}}
    answer = client.chat.completions.create(
        model="tiny", messages=[hello, asks, shown(part)], temperature=0, max_tokens=6
    )
    assert answer.choices[0].message.content == text

    part = {"type": "input_image", "image_url": url(encoded(LARGE)), "detail": "auto"}
    items = [
        hello,
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": [part]},
    ]
    response = client.responses.create(
        model="tiny", input=items, temperature=0, max_output_tokens=6, store=False
    )
    assert response.output_text == text

    anthropic = pytest.importorskip("anthropic")
    base = str(client.base_url).removesuffix("/").removesuffix("/v1")
    data = base64.b64encode(encoded(LARGE)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "image", "source": source}
    messages = [
        hello,
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [image]},
        ]},
    ]  # fmt: skip
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="tiny", max_tokens=6, messages=messages, extra_body={"temperature": 0}
        )
    assert message.content[0].text == text


def test_a_rendered_image_is_decoded_where_it_delays_no_text(both, monkeypatch):
    _, client, _ = both
    decode, threads = DecodeProcess.patches, []

    def patches(self, data):
        threads.append(threading.current_thread().name)
        return decode(self, data)

    monkeypatch.setattr(DecodeProcess, "patches", patches)
    body = {"model": "tiny", "messages": [message(url(encoded(LARGE)))], "max_tokens": 1}
    rendered = client.post("/chat/completions/render", body=body, cast_to=object)
    answer = client.chat.completions.create(**body)
    assert len(rendered["token_ids"]) == answer.usage.prompt_tokens
    assert len(threads) == 2 and all(name.startswith("images") for name in threads)
