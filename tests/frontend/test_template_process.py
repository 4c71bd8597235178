"""Templates in a process of their own: the same prompts, and an end to those that have none."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxllm import ValidationError
from jaxllm.errors import JaxLLMError
from jaxllm.frontend.chat_template import render
from jaxllm.frontend.template_process import TemplateProcess
from jaxllm.frontend.tokenizer import render_chat

HELLO = [{"role": "user", "content": "hello 你 \U0001f600"}]
FOR_EVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",  # no byte code between which anything could look at a clock
)


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(timeout_s=60.0)
    process.start()
    yield process
    process.close()


def ask(process, tokenizer, template=None, **options):
    return render_chat(tokenizer, HELLO, chat_template=template, render=process.render, **options)[
        "prompt"
    ]


def test_prompts_are_the_same(process, byte_level):
    for template, options in (
        (None, {}),
        (None, {"tools": [{"name": "clock"}]}),
        ("{{ messages }} {{ tools | tojson }} {{ x }}", {"chat_template_kwargs": {"x": [1, 2.5]}}),
        ("{{ bos_token }}{{ y is defined }}{{ eos_token }}", {}),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", {}),
    ):
        expected = render_chat(byte_level, HELLO, chat_template=template, render=render, **options)
        assert ask(process, byte_level, template, **options) == expected["prompt"]
    long = [{"role": "user", "content": "a\n" * 100_000}]
    assert render_chat(byte_level, long, render=process.render)["prompt"].count("a\n") == 100_000


def test_a_template_without_end_is_ended_and_the_next_is_rendered(byte_level):
    process = TemplateProcess(timeout_s=2.0)
    for template in FOR_EVER:
        with pytest.raises(ValidationError, match=r"chat_template_timeout=2\.0: .*takes longer"):
            ask(process, byte_level, template)
        assert ask(process, byte_level).startswith("<s>[user]hello")
    process.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('x' * 100000) }}", "refuses these messages: xxx"),
        ("{{ 'a' * 70000000 }}", "the prompt is longer than"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{% if %}", "the chat template"),
        ("{{ cycler.__init__.__globals__.os.system('exit') }}", "the chat template"),
    ],
)
def test_what_a_template_does_wrong_is_told(process, byte_level, template, message):
    with pytest.raises(ValidationError, match=message) as told:
        ask(process, byte_level, template)
    assert len(str(told.value)) < 2100
    assert ask(process, byte_level).startswith("<s>[user]hello")


def test_variables_may_not_take_the_place_of_what_is_there(byte_level):
    for name in ("messages", "tokenize", "conversations", "range", "chat_template"):
        with pytest.raises(ValidationError, match=f"chat_template_kwargs=.*{name}"):
            render_chat(byte_level, HELLO, chat_template_kwargs={name: True})


def test_a_process_that_was_killed_is_replaced(process, byte_level):
    ask(process, byte_level)
    process._process.kill()
    process._process.wait()
    assert ask(process, byte_level).startswith("<s>[user]hello")


def resident_bytes(process):
    pages = Path(f"/proc/{process._process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_what_a_template_needed_is_given_back(process, byte_level):
    ask(process, byte_level)
    before, pid = resident_bytes(process), process._process.pid
    doubling = "{% set ns.x = ns.x ~ ns.x %}" * 40
    with pytest.raises(ValidationError, match="MemoryError"):
        ask(process, byte_level, "{% set ns = namespace(x='12345678') %}" + doubling)
    assert process._process.pid == pid
    assert resident_bytes(process) < before + (160 << 20)


def test_a_process_that_keeps_what_it_needed_is_replaced(byte_level):
    process = TemplateProcess(timeout_s=60.0, max_growth_bytes=-(1 << 40))
    pids = []
    for _ in range(2):
        assert ask(process, byte_level).startswith("<s>[user]hello")
        pids.append(process._process.pid)
    assert pids[0] != pids[1]
    process.close()


def test_closing_ends_what_is_being_rendered(byte_level):
    process = TemplateProcess(timeout_s=600.0)
    ask(process, byte_level)
    threading.Timer(0.5, process.close).start()
    with pytest.raises(JaxLLMError):
        ask(process, byte_level, FOR_EVER[0])
    assert process._process.poll() is not None
    with pytest.raises(JaxLLMError, match="stopping"):
        ask(process, byte_level)


def test_it_ends_with_its_parent():
    code = (
        "import os; from jaxllm.frontend.template_process import TemplateProcess; "
        "process = TemplateProcess(5.0); process.start(); "
        "print(process._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
