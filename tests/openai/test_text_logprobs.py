"""Logprobs of a response are those of its text's tokens, where a parser takes the answer apart."""

import json
import random

import msgspec
import pytest

from jaxllm import SamplingParams
from jaxllm.config import ModelConfig
from jaxllm.frontend.tokenizer import load_tokenizer
from jaxllm.openai.responses.endpoint import responses_endpoint
from jaxllm.openai.responses.stream import ResponseStream, answer_response
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.parsers.answer_format import AnswerFormat

TOOLS = [{"type": "function", "name": name} for name in ("look", "go")]
ASK = {
    "model": "tiny",
    "input": "Hello",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é four"}}\n</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": 4}<|tool_call_end|><|tool_calls_section_end|>'
)
# Names of parsers, and answers, in which what is shown as text stands in «».
ANSWERS = [
    ("qwen3", "hermes", "<think>It is four. think</think>\n\n«four. think»"),
    ("qwen3", "hermes", f"<think>four</think>\n\n«It is <four>, é😀é.»{CALL}"),
    ("qwen3", "hermes", "<think>four</think>«think: <four <<<tool»"),
    ("qwen3", None, "<think>four</think>\n\n«< four>»"),
    ("qwen3", "hermes", f"«four\n»{CALL}«\nfour, and <b>four</b>»{CALL}"),
    (None, "hermes", f"{CALL}«four»"),
    ("deepseek_r1", None, "four</thi four</think>«four</think»"),
    ("deepseek_r1", "llama3_json", 'four</think>{"name": "go", "parameters": {"four": 4}}'),
    ("qwen3", "kimi_k2", f"<think>four</think>«four four »{KIMI}"),
    ("openai_gptoss", "openai",
     "<|channel|>analysis<|message|>four<|end|><|start|>assistant<|channel|>final<|message|>"
     "«four final»<|return|>"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig(model="m", tokenizer="bundled"), "elsewhere")


def parts(written):
    """An answer and, for each of its bytes, the number of the text that it is in, or None."""
    text, places, number, inside = "", [], -1, False
    for letter in written:
        if letter in "«»":
            inside, number = letter == "«", number + (letter == "«")
        else:
            text += letter
            places += [number if inside else None] * len(letter.encode())
    return text, places


def tokens_of(tokenizer, text, draw):
    """Ids of the text, cut at random places before it is tokenized."""
    cuts = sorted(draw.sample(range(len(text) + 1), min(draw.randrange(30), len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [id for one in pieces for id in tokenizer.encode(one, add_special_tokens=False)]


def outputs_of(tokenizer, ids, draw):
    """Deltas as the engine has them, of one or several tokens."""
    stream = tokenizer.detokenizer.stream(prompt_token_ids=[5])
    ids, found = [*ids, tokenizer.eos_token_id], []
    while ids:
        some, ids = ids[: (size := draw.choice((1, 1, 2, 7)))], ids[size:]
        text = stream.append(some[:-1] if not ids else some)
        logprobs = [{id: Logprob(-float(id), 1)} for id in some]
        found.append(CompletionOutput(0, text, some, logprobs=logprobs))
    found[-1].finish_reason = "stop"
    return [RequestOutput("1", "?", [5], None, [one], not ids) for one in found]


def plain(value):
    return json.loads(msgspec.json.encode(value))


@pytest.mark.parametrize(("reasoning", "tools", "written"), ANSWERS)
def test_the_tokens_of_the_text_and_no_others(tokenizer, reasoning, tools, written):
    draw = random.Random(written)
    served = ServedModel(
        names=("tiny",), tokenizer=tokenizer, default_params=SamplingParams(), fingerprint="fp",
        max_model_len=1000, answer_format=AnswerFormat.of(reasoning, tools),
    )  # fmt: skip
    text, places = parts(written)
    for _ in range(25):
        ids = tokens_of(tokenizer, text, draw)
        expected, end = [], 0
        for token in ids:
            start, end = end, end + len(tokenizer.detokenizer.token_bytes(token))
            if (its := {one for one in places[start:end] if one is not None}) != set():
                expected.append((max(its), -float(token)))
        body = ASK | {"stream": True, "tools": TOOLS if tools else None}
        request = responses_endpoint(None).request.read(body, live=True)
        stream = ResponseStream(request, "id", 1, served)
        deltas = outputs_of(tokenizer, ids, draw)
        events = [plain(event) for one in deltas for event in stream.take(0, one)]
        found, messages = [], []
        for event in events:
            if event["type"] == "response.output_text.done":
                found += [(len(messages), one["logprob"]) for one in event["logprobs"]]
                messages.append(event["logprobs"])
                sent = [one for one in events if one.get("item_id") == event["item_id"]]
                sent = [one for one in sent if one["type"] == "response.output_text.delta"]
                assert [one for its in sent for one in its["logprobs"]] == event["logprobs"]
        assert found == expected
        whole = deltas[0].outputs[0]
        for one in deltas[1:]:
            whole.extend(one.outputs[0])
        response = plain(answer_response(request, "id", 1, [deltas[0]], served))
        items = [item["content"][0] for item in response["output"] if item["type"] == "message"]
        assert [item["logprobs"] for item in items] == messages
