"""LLM as its users see it: what goes in, what comes out, in which order."""

import functools
import itertools
import json
import math

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxllm import (
    LLM,
    AnswerFormat,
    BeamSearchParams,
    LogitsProcessor,
    RequestOutputKind,
    SamplingParams,
    ValidationError,
    register_scheduling_policy,
)
from jaxllm.metrics.reader import Counter, Gauge, Histogram
from jaxllm.scheduler import policy
from jaxllm.testing import VOCAB_SIZE, make_tiny_checkpoint

EOS = 0


class OnlyToken(LogitsProcessor):
    """Lets requests with extra_args={"only": id} sample nothing but that token."""

    num_params = 1

    def encode(self, params):
        only = (params.extra_args or {}).get("only")
        return None if only is None else [only]

    def apply(self, logits, params, output_index):
        ids = jnp.arange(logits.shape[1])
        return jnp.where(ids == params.astype(jnp.int32), logits, -jnp.inf)


class ShortestPromptFirst:
    def key(self, request):
        return (request.num_prompt_tokens,)


class NotComparable:
    def key(self, request):
        return (None,)


@pytest.fixture(scope="module", autouse=True)
def policies():
    """Policies from outside; other tests do not see them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_policies", dict(policy._policies))
        register_scheduling_policy("fewest_tokens", ShortestPromptFirst())
        register_scheduling_policy("not_comparable", NotComparable())
        yield


OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_gpu_blocks_override": 40,
    "max_logprobs": -1,
    "scheduling_policy": "priority",
    "logits_processors": (OnlyToken,),
    "check_invariants": True,
}


@pytest.fixture(scope="module")
def start():
    """Start an engine."""

    def start(model, **options):
        return LLM(str(model), **{**OPTIONS, **options})

    return start


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory, start):
    """Start an engine with the checkpoint that most tests here use."""
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    recommended = {"temperature": 0.5, "top_k": 20, "max_new_tokens": 7, "eos_token_id": EOS}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    return functools.partial(start, model)


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm()


@pytest.fixture(scope="module")
def tokenizer(llm):
    return llm.get_tokenizer()


def ids(index, length):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def generate(llm, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# ---- generate


def test_all_kinds_of_prompts_have_the_same_answer(llm, tokenizer):
    text = "Hello, how are you today?"
    token_ids = tokenizer(text)["input_ids"]
    prompts = [
        text,
        token_ids,
        {"prompt": text},
        {"prompt_token_ids": token_ids},
        {"prompt_token_ids": token_ids, "prompt": text},
    ]
    together = generate(llm, prompts, greedy())
    alone = [generate(llm, prompt, greedy())[0] for prompt in prompts]
    numpys = generate(llm, list(np.array(token_ids)), greedy())
    assert len({tuple(tokens) for tokens in tokens_of(together + alone + numpys)}) == 1
    assert [output.prompt for output in together] == [text, None, text, None, text]
    assert all(output.prompt_token_ids == token_ids for output in together)


def test_results_are_in_the_order_of_the_prompts_and_each_has_its_own_parameters(llm):
    prompts = [ids(i, n) for i, n in enumerate([30, 2, 17, 5])]
    lengths = [9, 1, 4, 6]
    outputs = generate(llm, prompts, [greedy(n) for n in lengths])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == lengths
    assert all(output.finished for output in outputs)
    same = generate(llm, prompts, greedy(9))
    for longest, tokens in zip(tokens_of(same), tokens_of(outputs), strict=True):
        assert longest[: len(tokens)] == tokens


def test_lists_of_a_wrong_length_are_refused(llm):
    with pytest.raises(ValidationError, match="sampling_params has 3 entries for 2 prompts"):
        llm.generate([ids(0, 3), ids(1, 3)], [greedy()] * 3)
    with pytest.raises(ValidationError, match="priority has 1 entries for 2 prompts"):
        llm.generate([ids(0, 3), ids(1, 3)], greedy(), priority=[1])


def test_users_parameters_are_left_as_they_were(llm):
    params = greedy(stop=["x"], logit_bias={5: 1.0})
    before = msgspec.msgpack.encode(params)
    generate(llm, [ids(0, 3), ids(1, 3)], params)
    assert msgspec.msgpack.encode(params) == before


def test_prompts_are_truncated_to_their_last_tokens(llm):
    prompt = ids(0, 50)
    [output] = generate(llm, prompt, greedy(), tokenization_kwargs={"truncate_prompt_tokens": 9})
    assert output.prompt_token_ids == prompt[-9:]
    assert tokens_of([output]) == tokens_of(generate(llm, prompt[-9:], greedy()))
    with pytest.raises(ValidationError, match="'max_length'.*truncate_prompt_tokens"):
        generate(llm, prompt, greedy(), tokenization_kwargs={"max_length": 9})


def test_cache_is_shared_by_requests_with_the_same_salt_only(llm):
    llm.reset_prefix_cache()

    def num_cached(**salt):
        [output] = generate(llm, {"prompt_token_ids": ids(0, 30), **salt}, greedy(1))
        return output.num_cached_tokens

    assert [num_cached(cache_salt="a"), num_cached(cache_salt="a")] == [0, 24]
    assert [num_cached(cache_salt="b"), num_cached()] == [0, 0]
    assert [num_cached(cache_salt="b"), num_cached()] == [24, 24]


def test_prefix_cache_is_reset_unless_in_use(llm):
    prompt = ids(1, 30)
    generate(llm, prompt, greedy(1))
    assert generate(llm, prompt, greedy(1))[0].num_cached_tokens == 24
    assert llm.reset_prefix_cache()
    assert generate(llm, prompt, greedy(1))[0].num_cached_tokens == 0

    llm.enqueue(prompt, greedy())
    llm.llm_engine.step()
    assert not llm.reset_prefix_cache()
    llm.wait_for_completion(use_tqdm=False)
    assert llm.reset_prefix_cache()


def served_order(outputs):
    """Indices of outputs in the order in which they were first scheduled."""
    return sorted(range(len(outputs)), key=lambda i: outputs[i].metrics.scheduled_ts)


def test_lower_priorities_are_served_first(llm):
    prompts = [ids(i, 5) for i in range(5)]
    outputs = generate(llm, prompts, greedy(), priority=[3, -1, 2, 0, 3])
    assert served_order(outputs) == [1, 3, 2, 0, 4]
    assert served_order(generate(llm, prompts, greedy())) == [0, 1, 2, 3, 4]


def test_policy_from_outside_decides_the_order(make_llm):
    llm = make_llm(scheduling_policy="fewest_tokens", enforce_eager=True)
    outputs = generate(llm, [ids(i, n) for i, n in enumerate([20, 9, 15, 2])], greedy(3))
    assert served_order(outputs) == [3, 1, 2, 0]


def test_requests_that_a_policy_cannot_order_are_refused_and_forgotten(make_llm):
    llm = make_llm(scheduling_policy="not_comparable", enforce_eager=True)
    with pytest.raises(ValidationError, match="tuple of numbers"):
        generate(llm, [ids(0, 3), ids(1, 3)], greedy())
    assert not llm.llm_engine.has_unfinished_requests()


def test_bar_that_cannot_be_made_leaves_nothing_behind(llm):
    def broken(**_):
        raise RuntimeError("no bar")

    with pytest.raises(RuntimeError, match="no bar"):
        llm.generate([ids(0, 3)], greedy(), use_tqdm=broken)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_shut_down_engine_says_so(make_llm):
    llm = make_llm(enforce_eager=True)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(ValidationError, match="shut down"):
        generate(llm, [ids(0, 3)], greedy())


def test_beam_search_keeps_to_its_salt(llm):
    prompt = ids(40, 24)
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    llm.beam_search([{"prompt_token_ids": prompt, "cache_salt": "mine"}], params)
    [unsalted] = generate(llm, [prompt], greedy())
    assert unsalted.num_cached_tokens == 0


def test_only_the_first_of_n_answers_computes_prompt_logprobs(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=1)
    before = llm.llm_engine.stats().num_prompt_tokens
    [output] = generate(llm, [ids(41, 24)], params)
    assert len(output.prompt_logprobs) == 24
    assert llm.llm_engine.stats().num_prompt_tokens - before < 48


def test_times_of_a_request_come_in_order(llm):
    outputs = generate(llm, [ids(i, 20) for i in range(3)], greedy(4))
    for output in outputs:
        times = output.metrics
        assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts
        assert times.first_token_ts < times.last_token_ts
        assert times.arrival_time > 0 and times.first_token_latency > 0
        assert (times.num_generation_tokens, times.num_preemptions) == (4, 0)


def test_enqueued_requests_are_waited_for_in_order(llm):
    prompts = [ids(i, 4) for i in range(4)]
    expected = tokens_of(generate(llm, prompts, greedy()))
    first = llm.enqueue(prompts[:1], greedy())
    second = llm.enqueue(prompts[1:3], greedy())
    # Others may be served meanwhile.
    assert tokens_of(generate(llm, prompts[3:], greedy())) == expected[3:]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert tokens_of(outputs) == expected[:3]
    assert llm.wait_for_completion(use_tqdm=False) == []


# ---- chat


CONVERSATION = [
    {"role": "system", "content": "Tell stories."},
    {"role": "user", "content": "Where is the old man?"},
]


def test_chat_is_generate_with_the_rendered_conversation(llm, tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    expected = generate(llm, text, greedy())
    one = llm.chat(CONVERSATION, greedy(), use_tqdm=False)
    assert one[0].prompt == text and text.endswith("<|im_start|>assistant\n")
    assert one[0].prompt_token_ids == expected[0].prompt_token_ids
    assert tokens_of(one) == tokens_of(expected)

    several = llm.chat([CONVERSATION, CONVERSATION[1:]], [greedy(), greedy(3)], use_tqdm=False)
    assert tokens_of(several[:1]) == tokens_of(expected)
    assert "Tell stories" not in several[1].prompt and len(tokens_of(several)[1]) == 3


def test_chat_continues_the_last_message(llm):
    begun = [*CONVERSATION, {"role": "assistant", "content": "In the house"}]
    [output] = llm.chat(
        begun,
        greedy(),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt.endswith("<|im_start|>assistant\nIn the house")
    with pytest.raises(ValidationError, match="exclude each other"):
        llm.chat(begun, greedy(), continue_final_message=True)


def test_the_template_sees_tools_and_an_output_can_be_taken_apart(llm):
    tools = [{"type": "function", "function": {"name": "look"}}]
    template = "{{ tools[0].function.name }} {{ messages[0].content }}<think>"
    [output] = llm.chat(CONVERSATION, greedy(), use_tqdm=False, tools=tools, chat_template=template)
    assert output.prompt.startswith("look ")
    answer_format = AnswerFormat.of("qwen3", "hermes")
    answer = answer_format.parser(output.prompt, tools).parse(output.outputs[0].text)
    # The prompt has begun the reasoning, and noise does not end it.
    assert answer.reasoning.strip() == output.outputs[0].text.strip() != ""
    assert (answer.content, answer.tool_calls) == ("", [])


@pytest.mark.parametrize(
    "messages", [[], [[]], [{"content": "x"}], ["hello"], 5, "hello", CONVERSATION[0]]
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(ValidationError, match="message"):
        llm.chat(messages, greedy())
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_error_says_which_of_several_prompts_it_is_about(llm):
    good, long = ids(0, 3), ids(0, 200)
    with pytest.raises(ValidationError, match=r"^prompts\[2\]: the prompt has 200") as caught:
        llm.generate([good, good, long], greedy())
    assert caught.value.prompt_index == 2 and caught.value.parameter == "prompt"
    assert "have it cut by truncate_prompt_tokens=-1" in str(caught.value)
    with pytest.raises(ValidationError, match=r"^prompts\[1\]: allowed_token_ids=400"):
        llm.generate([good, good], [greedy(), greedy(allowed_token_ids=[400])])
    # What all share, or the only one has, is not a matter of the place.
    with pytest.raises(ValidationError, match="^allowed_token_ids=400"):
        llm.generate([good, good], greedy(allowed_token_ids=[400]))
    with pytest.raises(ValidationError, match="^the prompt has 200"):
        llm.generate(long, greedy())
    with pytest.raises(ValidationError, match=r"^messages\[1\]: "):
        llm.chat([CONVERSATION, [5]], greedy())


@pytest.mark.parametrize("call", ["generate", "enqueue", "beam_search"])
def test_an_adapter_is_refused_and_its_absence_is_not(llm, call):
    params = BeamSearchParams(beam_width=1, max_tokens=1) if call == "beam_search" else greedy()
    assert getattr(llm, call)([ids(0, 3)], params, lora_request=None)
    llm.wait_for_completion(use_tqdm=False)
    with pytest.raises(ValidationError, match="lora_request='adapter': it must be a LoRARequest"):
        getattr(llm, call)([ids(0, 3)], params, lora_request="adapter")


def test_only_the_plain_way_to_reset_the_prefix_cache_is_accepted(llm):
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)
    for name in ("reset_running_requests", "reset_connector"):
        with pytest.raises(ValidationError, match=f"{name}=True"):
            llm.reset_prefix_cache(**{name: True})


def test_tokenization_kwargs_of_a_wrong_type_are_refused(llm):
    with pytest.raises(ValidationError, match="tokenization_kwargs=5"):
        llm.generate(ids(0, 3), greedy(), tokenization_kwargs=5)


def test_added_deltas_are_the_final_output(llm):
    engine, params = llm.llm_engine, greedy(8, logprobs=1)
    [final] = generate(llm, ids(0, 5), params)
    engine.add_request("r", ids(0, 5), params.clone(output_kind=RequestOutputKind.DELTA))
    total = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if total is None:
                total = output
            else:
                total.add(output, aggregate=True)
    assert total.finished and len(total.outputs) == 1
    assert total.outputs[0] == final.outputs[0]
    assert final.lora_request is None and final.outputs[0].lora_request is None


# ---- what is sampled


def test_all_logprobs_are_a_distribution(llm):
    [output] = generate(llm, ids(0, 5), greedy(3, logprobs=-1, prompt_logprobs=-1))
    assert output.prompt_logprobs[0] is None
    for position in output.prompt_logprobs[1:] + output.outputs[0].logprobs:
        assert position.keys() == set(range(VOCAB_SIZE))
        assert sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1)
        by_rank = sorted(position.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in by_rank] == list(range(1, VOCAB_SIZE + 1))
        assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(by_rank))
    for token, position in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
    ):
        assert position[token].rank == 1


def test_custom_logits_processor_changes_its_own_requests_only(llm):
    prompts = [ids(0, 5), ids(1, 5)]
    expected = tokens_of(generate(llm, prompts, greedy()))
    outputs = generate(llm, prompts, [greedy(extra_args={"only": 77}), greedy()])
    assert tokens_of(outputs) == [[77] * 6, expected[1]]
    for unfit in (print, "abc", float("nan"), 1e39):
        with pytest.raises(ValidationError, match="extra_args"):
            generate(llm, prompts[0], greedy(extra_args={"only": unfit}))


@pytest.fixture(scope="module")
def words(tokenizer):
    """Tokens that are text by themselves."""
    return sorted(set(tokenizer("the cat sat on a mat, one two three; where is it?")["input_ids"]))


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_token_borders(llm, tokenizer, words, include):
    free = greedy(12, allowed_token_ids=words)
    [whole] = generate(llm, ids(0, 5), free)
    tokens, text = whole.outputs[0].token_ids, whole.outputs[0].text
    pieces = [tokenizer.decode([token]) for token in tokens]
    assert "".join(pieces) == text
    # The end of a token, the next one, and the head of the one after that.
    stop = pieces[4][-1] + pieces[5] + pieces[6][0]
    end = text.index(stop) + len(stop)
    num_tokens = next(n for n in range(1, 13) if len("".join(pieces[:n])) >= end)
    assert 2 < num_tokens < 12

    params = free.clone(stop=["nowhere in it", stop], include_stop_str_in_output=include)
    [output] = generate(llm, ids(0, 5), params)
    [answer] = output.outputs
    assert answer.text == text[: end if include else end - len(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == tokens[:num_tokens]
    assert llm.llm_engine.stats().num_requests_running == 0


def test_min_tokens_puts_off_every_kind_of_end(llm):
    [free] = tokens_of(generate(llm, ids(0, 5), greedy(20)))
    stop = free[0]
    [output] = generate(llm, ids(0, 5), greedy(20, stop_token_ids=[stop]))
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([stop], stop)

    # The end is by far the likeliest token, as soon as it is allowed.
    params = greedy(20, stop_token_ids=[stop], min_tokens=5, logit_bias={stop: 100.0})
    [output] = generate(llm, ids(0, 5), params)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 6 and tokens[5] == stop and stop not in tokens[:5]

    params = greedy(20, ignore_eos=False, min_tokens=3, logit_bias={EOS: 100.0})
    [output] = generate(llm, ids(0, 5), params)
    [answer] = output.outputs
    assert answer.token_ids[3:] == [EOS] and EOS not in answer.token_ids[:3]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_bad_words_do_not_appear(llm, tokenizer, words):
    free = greedy(12, allowed_token_ids=words)
    [output] = generate(llm, ids(0, 5), free)
    used = dict.fromkeys(output.outputs[0].token_ids)
    word = next(
        text for text in map(lambda t: tokenizer.decode([t]).strip(), used) if text.isalpha()
    )
    [output] = generate(llm, ids(0, 5), free.clone(bad_words=[word]))
    banned = {tokenizer(text)["input_ids"][0] for text in (word, " " + word)}
    assert banned & used.keys()
    assert banned.isdisjoint(output.outputs[0].token_ids)


def test_default_parameters_are_those_of_the_model(llm, make_llm):
    defaults = llm.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.5, top_k=20, max_tokens=7)
    [output] = llm.generate(ids(0, 5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 7
    plain = make_llm(generation_config="vllm", enforce_eager=True)
    assert plain.get_default_sampling_params() == SamplingParams()


def test_beam_search_is_the_best_of_all_continuations(llm, tokenizer):
    beam_width, prompts = 3, [ids(0, 4), ids(1, 9)]
    outputs = llm.beam_search(
        prompts, BeamSearchParams(beam_width=beam_width, max_tokens=3, ignore_eos=True)
    )
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        beams = [(0.0, prompt)]
        for _ in range(3):
            nexts = generate(llm, [tokens for _, tokens in beams], greedy(1, logprobs=-1))
            continuations = [
                (total + entry.logprob, [*tokens, token])
                for (total, tokens), answer in zip(beams, nexts, strict=True)
                for token, entry in answer.outputs[0].logprobs[0].items()
            ]
            beams = sorted(continuations, reverse=True)[:beam_width]
        assert [s.tokens for s in output.sequences] == [tokens for _, tokens in beams]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx(
            [total for total, _ in beams], abs=1e-4
        )
        for sequence in output.sequences:
            # An unfinished character at the end is withheld.
            text = tokenizer.decode(sequence.tokens[len(prompt) :])
            assert sequence.text.rstrip("\ufffd") == text.rstrip("\ufffd")


def test_beam_search_ends_at_an_eos_that_only_the_tokenizer_knows(start, tmp_path):
    llm = start(make_tiny_checkpoint(tmp_path, eos_token_id=None), enforce_eager=True)
    assert llm.llm_engine.info.eos_token_ids == []
    # So strong a penalty that the shortest answer is the best one.
    params = BeamSearchParams(beam_width=192, max_tokens=2, length_penalty=-30.0)
    [output] = llm.beam_search([ids(0, 4)], params)
    assert (output.sequences[0].finish_reason, output.sequences[0].stop_reason) == ("stop", EOS)


def test_beam_search_moves_a_bar_and_shows_special_tokens_if_asked(llm):
    bars = []

    class Bar:
        def __init__(self, **_):
            bars.append(self)
            self.moves = []

        def update(self, count):
            self.moves.append(count)

        def close(self):
            self.moves.append("closed")

    params = BeamSearchParams(
        beam_width=192,
        max_tokens=1,
        length_penalty=-30.0,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    [output] = llm.beam_search([ids(0, 4)], params, use_tqdm=Bar)
    assert [bar.moves for bar in bars] == [[1, "closed"]]
    ended = next(s for s in output.sequences if s.finish_reason == "stop")
    assert ended.text == "<|endoftext|>"
    [output] = llm.beam_search(
        [ids(0, 4)], msgspec.structs.replace(params, skip_special_tokens=True)
    )
    assert next(s for s in output.sequences if s.finish_reason == "stop").text == ""


def test_beam_search_wants_its_own_parameters(llm):
    with pytest.raises(ValidationError, match="params=.*BeamSearchParams"):
        llm.beam_search([ids(0, 4)], greedy())


def test_only_ends_of_sequence_beside_the_first_are_a_reason_to_stop(start, tmp_path):
    model = make_tiny_checkpoint(tmp_path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 5]}))
    llm = start(model, enforce_eager=True)
    params = [greedy(ignore_eos=False, logit_bias={token: 1000.0}) for token in (EOS, 5)]
    answers = [out.outputs[0] for out in generate(llm, [ids(0, 4)] * 2, params)]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]
    assert [answer.stop_reason for answer in answers] == [None, 5]


# ---- the engine


LABELS = ("model_name", "engine")


def test_metrics_move(llm):
    def read():
        found = {}
        for metric in llm.get_metrics():
            assert metric.labels["model_name"] == llm.llm_engine.info.model
            assert metric.labels["engine"] == "0"
            others = [value for name, value in metric.labels.items() if name not in LABELS]
            key = " ".join([metric.name.removeprefix("jaxllm:"), *others])
            assert key not in found
            found[key] = metric
        return found

    before = read()
    llm.reset_prefix_cache()
    for _ in range(2):
        generate(llm, [ids(0, 20), ids(1, 3)], greedy(5))
    after = read()
    steps, steps_before = after.pop("iteration_tokens_total"), before["iteration_tokens_total"]
    moved = {name: after[name].value - before[name].value for name in after}
    assert moved["engine_answers_finished"] == 4
    assert moved["generation_tokens"] == 20
    assert moved["prefix_cache_hits"] == 16
    assert moved["prefix_cache_queries"] == moved["prompt_tokens"] == 46
    assert moved["prompt_tokens_by_source local_compute"] == 30
    assert moved["prompt_tokens_by_source local_cache_hit"] == moved["prompt_tokens_cached"] == 16
    assert moved["token_rows"] >= moved["scheduled_tokens"] >= 30 + 16
    assert moved["engine_steps"] >= 10
    for phase in ("schedule", "pack", "update"):
        assert moved[f"host_seconds {phase}"] > 0
    # Every step is in the histogram, by its size.
    assert type(steps) is Histogram
    assert steps.count - steps_before.count == moved["engine_steps"]
    assert steps.sum - steps_before.sum == moved["scheduled_tokens"]
    larger = steps.count - steps.buckets["1.0"]
    assert larger - (steps_before.count - steps_before.buckets["1.0"]) >= 2
    assert list(steps.buckets.values()) == sorted(steps.buckets.values())
    assert steps.buckets["+Inf"] == steps.count
    for name, metric in after.items():
        assert type(metric) in (Counter, Gauge)
        assert type(metric) is Gauge or moved[name] >= 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
        assert after[name].value == 0
    assert after["kv_blocks"].value == 40 and after["overlap"].value == 1


EVERY_PARAMETER = [
    greedy(5, structured_outputs={"regex": "[a-z]{4,9}"}),
    SamplingParams(n=3, temperature=0.9, seed=1, logprobs=2, max_tokens=9),
    SamplingParams(top_k=7, top_p=0.9, min_p=0.01, ignore_eos=True),
    greedy(5, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    greedy(5, stop=["the"], include_stop_str_in_output=True, spaces_between_special_tokens=False),
    SamplingParams(stop_token_ids=[9], min_tokens=2, skip_special_tokens=False, logprobs=-1),
    greedy(5, prompt_logprobs=1, logit_bias={4: 5.0}, bad_words=["the", "a b"]),
    greedy(5, allowed_token_ids=[3, 4, 5], detokenize=False, extra_args={"only": 5}),
]


def test_nothing_is_compiled_after_the_start_whatever_requests_ask_for(make_llm):
    used = {
        field
        for params in EVERY_PARAMETER
        for field in SamplingParams.__struct_fields__
        if getattr(params, field) != getattr(SamplingParams(), field)
    }
    # The last is refused.
    assert used == set(SamplingParams.__struct_fields__) - {"output_kind", "guided_decoding"}

    llm = make_llm()
    # One of which the prefix, when it is found again, has more blocks than travel with a step.
    prompts = [ids(i, n) for i, n in enumerate([8, 1, 2, 15, 16, 17, 33, 100])]
    for _ in range(2):
        outputs = generate(llm, prompts, EVERY_PARAMETER)
        assert all(output.finished for output in outputs)
    assert outputs[-1].num_cached_tokens == 96
    llm.chat(CONVERSATION, greedy(), use_tqdm=False)
    llm.beam_search(prompts[:2], BeamSearchParams(beam_width=2, max_tokens=2))
    assert llm.llm_engine.stats().num_compiles_after_warmup == 0
