"""Chat templates that do what those of families do, against transformers' own rendering.

They refuse roles, fold messages into others, take documents and tools, and come in several files.
"""

import json
from datetime import datetime

import pytest

from jaxllm.config import ModelConfig
from jaxllm.errors import ValidationError
from jaxllm.frontend.template_process import TemplateProcess
from jaxllm.frontend.tokenizer import load_tokenizer, render_chat
from jaxllm.testing import make_tiny_checkpoint

ALTERNATES = """
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user') }}
{%- endif %}
{%- endfor %}
"""
TEMPLATES = {
    # Gemma 1 and 2 have no system role.
    "gemma2": """
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{%- set turns = messages %}"""
    + ALTERNATES
    + """
{%- for m in messages %}
{{- '<turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim }}
{{- '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    # Gemma 3 writes it before the first user's message, and sees parts where there are some.
    "gemma3": """
{%- set first = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if first else messages %}"""
    + ALTERNATES
    + """
{%- for m in turns %}
{{- '<turn>' ~ m.role ~ '\n' ~ (first if loop.first else '') }}
{%- if m.content is string %}{{ m.content | trim }}
{%- elif m.content is iterable %}
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part.text | trim }}
{%- endfor %}
{%- endif %}
{{- '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    # Mistral: the system message and the tools stand before the last user's message.
    "mistral": """
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set rest = messages[1:] if system is not none else messages %}
{%- set turns = rest | selectattr('role', 'in', ['user', 'assistant'])
    | rejectattr('tool_calls', 'defined') | list %}"""
    + ALTERNATES
    + """
{%- set last = namespace(user=-1) %}
{%- for m in rest %}
{%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if loop.index0 == last.user and tools %}
{{- '[TOOLS]' ~ tools | tojson ~ '[/TOOLS]' }}
{%- endif %}
{{- '[INST]' ~ (system ~ '\n\n' if system and loop.index0 == last.user else '') ~ m.content }}
{{- '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[CALLS]' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('ids of tool calls must have nine characters') }}
{%- endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ call.id }}
{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'tool' %}{{ '[RESULT]' ~ m.content | string ~ '[/RESULT]' }}
{%- else %}{{ m.content ~ eos_token }}
{%- endif %}
{%- endfor %}""",
    # Thinking that a request switches off, and that earlier turns lose.
    "qwen3": """
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if m.reasoning_content is defined and loop.last %}
{{- '<think>' ~ m.reasoning_content }}
{%- endif %}
{{- '<|' ~ m.role ~ '|>' ~ content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}""",
    # Granite: the date, tools and documents in blocks of their own, and loops that end early.
    "granite": """
{%- if messages[0].role != 'system' %}{{ '<system>' ~ strftime_now('%B %d, %Y') }}{% endif %}
{%- if tools %}{{ '<tools>' ~ tools | tojson(indent=4) }}{% endif %}
{%- if documents %}{{ '<documents>' }}
{%- for d in documents %}{{ loop.index ~ d.title | default('', true) ~ d.text }}{% endfor %}
{%- endif %}
{%- for m in messages %}
{%- if loop.index > 8 %}{% break %}{% endif %}
{%- for key, value in m.items() | sort %}
{%- if value is not string %}{{ key ~ '=' ~ value | tojson }}{% endif %}
{%- endfor %}
{{- '<' ~ m.role ~ '>' ~ m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' ~ (controls or {}) | tojson }}{% endif %}""",
}
SYSTEM = {"role": "system", "content": "Be brief.  "}
HELLO = {"role": "user", "content": " hello, <b>you</b> & naïve 你好"}
ANSWER = {"role": "assistant", "content": "<think>well</think>\n\nhi"}
AGAIN = {"role": "user", "content": "again"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "clock", "arguments": '{"zone": "Zürich", "n": [1, 2.5, null]}'},
        }
    ],
}
RESULT = {"role": "tool", "content": "12:00", "tool_call_id": "abcdefghi", "name": "clock"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time < now >.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    }
]
DOCUMENTS = [{"title": "T", "text": "words"}, {"text": "more"}]
CONVERSATIONS = {
    "one": [HELLO],
    "system": [SYSTEM, HELLO],
    "turns": [HELLO, ANSWER, AGAIN],
    "system-turns": [SYSTEM, HELLO, ANSWER, AGAIN],
    "tools": [SYSTEM, HELLO, CALL, RESULT, {"role": "assistant", "content": "noon"}, AGAIN],
    "two-users": [HELLO, AGAIN],
    "prefill": [HELLO, ANSWER | {"reasoning_content": "hm"}],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return load_tokenizer(ModelConfig(model="m"), str(path))


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(30)
    yield process
    process.close()


def as_transformers_wants(messages):
    """With the arguments of calls as objects, and empty text where there is none."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if message["content"] is None:
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def rendered(function, *arguments, **options):
    """The text, or the template's own words of refusal."""
    try:
        result = function(*arguments, **options)
    except ValidationError as error:
        assert error.parameter == "messages"
        return str(error)
    except Exception as error:
        return f"the chat template refuses these messages: {error}"
    return result if isinstance(result, str) else result["prompt"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_are_those_of_transformers(tokenizer, process, family, conversation):
    messages = CONVERSATIONS[conversation]
    continues = messages[-1]["role"] == "assistant"
    refusals = 0
    for tools, variables in (
        (None, {}),
        (TOOLS, {}),
        (None, {"documents": DOCUMENTS}),
        (TOOLS, {"documents": DOCUMENTS, "enable_thinking": False, "controls": {"length": "long"}}),
    ):
        options = {
            "tools": tools,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        expected = rendered(
            tokenizer.hf.apply_chat_template,
            as_transformers_wants(messages),
            chat_template=TEMPLATES[family],
            tokenize=False,
            **options,
            **variables,
        )
        refusals += expected.startswith("the chat template refuses")
        options |= {"chat_template": TEMPLATES[family], "chat_template_kwargs": variables}
        for how in ({}, {"render": process.render}):
            assert rendered(render_chat, tokenizer, messages, **options, **how) == expected
    alternates = family in ("gemma2", "gemma3", "mistral")
    refuses = alternates and conversation == "two-users"
    refuses |= family == "gemma2" and "system" in conversation
    refuses |= family in ("gemma2", "gemma3") and conversation == "tools"
    assert bool(refusals) == refuses


def test_the_date_is_that_of_today(tokenizer):
    template = "{{ strftime_now('%d %b %Y') }}"
    days = {datetime.now().strftime("%d %b %Y")}
    prompt = render_chat(tokenizer, [HELLO], chat_template=template)["prompt"]
    assert prompt in days | {datetime.now().strftime("%d %b %Y")}


NAMED = {
    "default": "plain {{ messages[0].content }}",
    "tool_use": "tools {{ tools | length }}",
    "rag": "rag {{ documents | length }}{{ tools | length if tools else '' }}",
}


def in_config(path):
    """As Cohere's older releases have them."""
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": k, "template": v} for k, v in NAMED.items()]
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def in_files(path):
    """As transformers saves them now; what tokenizer_config.json has does not count then."""
    (path / "chat_template.jinja").write_text(NAMED["default"])
    (path / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (path / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])


@pytest.mark.parametrize("place", [in_config, in_files])
def test_templates_have_names(place, tmp_path):
    place(make_tiny_checkpoint(tmp_path))
    tokenizer = load_tokenizer(ModelConfig(model="m"), str(tmp_path))

    def prompt(**options):
        return render_chat(tokenizer, [AGAIN], **options)["prompt"]

    assert prompt() == "plain again"
    assert prompt(tools=TOOLS) == "tools 1"
    documents = {"chat_template_kwargs": {"documents": DOCUMENTS}}
    assert prompt(chat_template="rag", **documents) == "rag 2"
    assert prompt(chat_template="rag", tools=TOOLS, **documents) == "rag 21"
    assert prompt(chat_template="default", tools=TOOLS) == "plain again"


def test_without_a_default_one_of_the_names_is_asked_for(tmp_path):
    make_tiny_checkpoint(tmp_path)
    in_config(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"].pop(0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelConfig(model="m"), str(tmp_path))
    with pytest.raises(ValidationError, match=r"chat_template: .*\['rag', 'tool_use'\]"):
        render_chat(tokenizer, [AGAIN])


def test_one_file_counts_before_the_config(tmp_path):
    make_tiny_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("of the file")
    tokenizer = load_tokenizer(ModelConfig(model="m"), str(tmp_path))
    assert render_chat(tokenizer, [AGAIN])["prompt"] == "of the file"


def test_the_template_of_a_processor_counts_if_there_is_no_other(tmp_path):
    make_tiny_checkpoint(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    tokenizer = load_tokenizer(ModelConfig(model="m"), str(tmp_path))
    assert render_chat(tokenizer, [AGAIN])["prompt"] != "of the processor"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelConfig(model="m"), str(tmp_path))
    assert render_chat(tokenizer, [AGAIN])["prompt"] == "of the processor"
