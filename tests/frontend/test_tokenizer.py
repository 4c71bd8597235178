import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from jaxllm import bundled
from jaxllm.config import ModelConfig
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.frontend import tokenizer
from jaxllm.frontend.tokenizer import LONG_TEXT, load_tokenizer, render_chat
from jaxllm.testing import make_tiny_checkpoint

HELLO = [{"role": "user", "content": "hello"}]


def test_a_short_text_does_not_wait_for_a_long_one(byte_level, monkeypatch):
    text = "hello world " * (LONG_TEXT // 8)
    expected = byte_level.hf(text, verbose=False)["input_ids"]
    begun, go_on = threading.Event(), threading.Event()
    encode = tokenizer._encode

    def slow(hf, text, add_special_tokens):
        if len(text) > LONG_TEXT:
            begun.set()
            assert go_on.wait(60)
        return encode(hf, text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", slow)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(byte_level.encode, text)
        assert begun.wait(60)
        try:
            assert pool.submit(byte_level.encode, "hello").result(60) == expected[:1]
        finally:
            go_on.set()
        assert long.result(60) == expected


def test_saved_tokenizer_is_loaded_from_its_directory(byte_level, tmp_path):
    byte_level.hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(model="m", tokenizer=str(tmp_path)), "elsewhere")
    assert loaded.encode("hello world") == byte_level.encode("hello world")
    assert loaded.eos_token_id == byte_level.eos_token_id


def test_the_bundled_one_has_a_name():
    loaded = load_tokenizer(ModelConfig(model="m", tokenizer=bundled.MODEL), "elsewhere")
    assert loaded.decode(loaded.encode("def f(x):")) == "def f(x):"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gpt2", None])
@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None]
)
def test_the_class_is_that_of_auto_tokenizer(model_type, named, tmp_path):
    make_tiny_checkpoint(tmp_path)
    for name, field, value in (
        ("config.json", "model_type", model_type),
        ("tokenizer_config.json", "tokenizer_class", named),
    ):
        content = json.loads((tmp_path / name).read_text())
        content.pop(field, None)
        (tmp_path / name).write_text(json.dumps(content | ({field: value} if value else {})))
    loaded = load_tokenizer(ModelConfig(model="m"), str(tmp_path))
    wanted = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded.hf) is type(wanted)
    text = "  Hello, world:\n\tdef f(x): 你好</s>"
    assert loaded.encode(text) == wanted(text)["input_ids"]


@pytest.mark.parametrize("broken", ["empty directory", "damaged file"])
def test_missing_tokenizer_is_refused_with_a_remedy(broken, tmp_path):
    if broken == "damaged file":
        (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(JaxLLMError, match="skip_tokenizer_init=True"):
        load_tokenizer(ModelConfig(model="m"), str(tmp_path))


def test_code_of_a_model_is_not_run_unless_allowed(tmp_path):
    auto_map = {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"} | auto_map))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto_map))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValidationError, match="trust_remote_code=True"):
        load_tokenizer(ModelConfig(model="m"), str(tmp_path))


def test_decode_gives_text_back(byte_level):
    assert byte_level.decode(byte_level.encode("naïve 你好 😀")) == "naïve 你好 😀"


def test_decode_may_continue_a_prompt(byte_level, byte_fallback):
    smile = byte_level.encode("😀", add_special_tokens=False)
    assert len(smile) > 1
    assert byte_level.decode(smile[1:], prompt_token_ids=smile[:1]) == "😀"
    # At the head of a text its space would be stripped.
    hello = byte_fallback.encode("hello", add_special_tokens=False)
    assert byte_fallback.decode(hello, prompt_token_ids=hello) == " hello"


def test_chat_template_is_rendered_with_one_bos(byte_level):
    prompt = render_chat(byte_level, HELLO)
    assert prompt["prompt"] == "<s>[user]hello</s>[assistant]"
    bos = byte_level.hf.bos_token_id
    assert prompt["prompt_token_ids"].count(bos) == 1
    assert byte_level.decode(prompt["prompt_token_ids"]) == "[user]hello[assistant]"


def test_final_message_can_be_continued(byte_level):
    messages = [*HELLO, {"role": "assistant", "content": "hello y"}]
    prompt = render_chat(
        byte_level, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt["prompt"].endswith("[assistant]hello y")


def test_a_template_of_the_caller_sees_tools_and_his_own_variables(byte_level):
    prompt = render_chat(
        byte_level,
        HELLO,
        chat_template="{{ tools[0].name }} {{ mood }}",
        tools=[{"name": "clock"}],
        chat_template_kwargs={"mood": "calm"},
    )
    assert prompt["prompt"] == "clock calm"


def test_text_parts_and_tool_calls_reach_the_template_in_plain_form(byte_level):
    template = "{% for m in messages %}{{ m.content }}"
    template += "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
    template += "{% endfor %}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 7}'}}],
        },
    ]
    assert render_chat(byte_level, messages, chat_template=template)["prompt"] == "a\nb7"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x": 7}'


def test_no_content_is_empty_text_for_the_template(byte_level):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": ""}}]
    messages = [
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": "a", "tool_calls": None},
    ]
    assert render_chat(byte_level, messages, chat_template=template)["prompt"] == "[][][a]"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "give at least one"),
        (["hello"], {}, "'role'"),
        ([{"role": "user", "content": [{"type": "audio_url"}]}], {}, "type 'text'"),
        (HELLO, {"chat_template": "{% if %}"}, "chat template"),
        (HELLO, {"chat_template": "{{ raise_exception('no') }}"}, "no"),
        (HELLO, {"continue_final_message": True}, "add_generation_prompt=False"),
        (HELLO, {"chat_template": "{{ 1 / 0 }}"}, "chat template refuses.*division by zero"),
        (HELLO, {"chat_template": 5}, "chat_template=5"),
        (HELLO, {"chat_template_kwargs": 5}, "chat_template_kwargs=5"),
        (HELLO, {"tools": "clock"}, "tools='clock'"),
        (5, {}, "messages=5"),
        ({"role": "user", "content": "hello"}, {}, "messages=.*list of messages"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\].content=5: it must be text"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "text=None: it must be a string"),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            {},
            "it must be a string",
        ),
        ([{"role": "user", "content": "a\ud800"}], {}, "surrogate"),
        ([{"role": "assistant", "tool_calls": 5}], {}, "tool_calls=.: it must be a list"),
        ([{"role": "assistant", "tool_calls": 0}], {}, "tool_calls=.: it must be a list"),
        (
            [{"role": "a", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}],
            {},
            "arguments=.*: not JSON",
        ),
        ([{"role": "assistant", "tool_calls": [5]}], {}, "tool call must be a dict"),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}], {}, "and so its 'function'"),
    ],
)
def test_bad_conversations_are_refused(messages, options, message, byte_level):
    with pytest.raises(ValidationError, match=message):
        render_chat(byte_level, messages, **options)


def test_chat_without_a_template_is_refused_with_a_remedy(byte_fallback):
    with pytest.raises(ValidationError, match="chat_template="):
        render_chat(byte_fallback, HELLO)
