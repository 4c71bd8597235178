"""A dataset over engines in actors of a real, local Ray cluster."""

import pytest

from jaxllm import LLM, SamplingParams, ValidationError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
NUM_ROWS = 30


@pytest.fixture(scope="module")
def ray():
    """The module, which takes seconds to import."""
    pytest.importorskip("ray.data")
    import ray

    return ray


@pytest.fixture(scope="module")
def generate(ray):
    from jaxllm.batch.ray import generate

    return generate


@pytest.fixture(scope="module")
def cluster(ray):
    # Of its own: without an address it would join any other that runs on this machine.
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_rows_are_answered_by_several_engines(cluster, ray, generate, engine_options):
    prompts = [f"Number {i}" for i in range(NUM_ROWS)]
    rows = [{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)]
    rows[9]["prompt"] = "too long " * 100
    dataset = ray.data.from_items(rows, override_num_blocks=6)
    answers = generate(dataset, engine_options, GREEDY, num_engines=2, batch_size=4)
    by_id = {row["id"]: row for row in answers.take_all()}
    assert sorted(by_id) == list(range(NUM_ROWS))
    assert "it may have at most 127" in by_id.pop(9)["error"]
    llm = LLM(**engine_options)
    expected = llm.generate([prompts[i] for i in by_id], GREEDY, use_tqdm=False)
    for row, output in zip(by_id.values(), expected, strict=True):
        (answer,) = output.outputs
        assert row["prompt"] == output.prompt
        assert row["generated_text"] == answer.text
        assert list(row["generated_token_ids"]) == answer.token_ids
        assert (row["finish_reason"], row["error"]) == ("length", None)


def test_conversations_and_token_ids_are_prompts_too(cluster, ray, generate, engine_options):
    llm = LLM(**engine_options)
    messages = [{"role": "user", "content": "Hi"}]
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (ids,) = llm.generate([[70, 71]], GREEDY, use_tqdm=False)
    rows = [{"messages": messages, "prompt_token_ids": None},
            {"messages": None, "prompt_token_ids": [70, 71]}]  # fmt: skip
    dataset = ray.data.from_items(rows, override_num_blocks=1)
    answers = generate(dataset, engine_options, GREEDY).take_all()
    texts = {row["generated_text"] for row in answers}
    assert texts == {chat.outputs[0].text, ids.outputs[0].text}


def test_what_is_wrong_for_all_rows_is_said_at_once(generate, engine_options):
    # Nothing is asked of the dataset before.
    with pytest.raises(ValidationError, match="n=2: a row has one answer"):
        generate(None, engine_options, SamplingParams(n=2))
    with pytest.raises(ValidationError, match="unknown engine argument 'modell'"):
        generate(None, {"model": "m", "modell": 1})
