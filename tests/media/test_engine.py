"""Prompts with images: the tokens are those of transformers, whatever else the engine does."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.files import read_json
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint
from tests.media.answers import (
    PARAMS,
    answers,
    assert_as_logits,
    assert_equal,
    before_marks,
    each_alone,
    taken,
)
from tests.media.models import OPTIONS, encoded, make_pixtral, picture

IMAGE_TOKEN = 3
# A picture that steps of 32 tokens cut, one of a single token, one that is made smaller.
LARGE, SMALL, LONG = picture(64, 64), picture(3, 2, 1), picture(30, 200, 2)


def prompt(*images, text="Look: [IMG] What is it?"):
    if len(images) > 1:
        text = "One [IMG] and" * len(images) + " what else?"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [
    prompt(LARGE), prompt(picture(9, 3)), prompt(LONG, LARGE), prompt(LARGE, text="[IMG]"),
    prompt(SMALL, SMALL, LONG),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(vision_model):
    llm = LLM(vision_model, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    return each_alone(llm, PROMPTS)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["mistral3", pytest.param("pixtral-12b", marks=pytest.mark.sweep)])
def test_answers_are_those_of_transformers(kind, vision_model, llm, tmp_path):
    path, engine, prompts, side = vision_model, llm, PROMPTS, 8
    if kind == "pixtral-12b":  # which has more tokens for an image
        path, side = make_pixtral(tmp_path), 4
        engine = LLM(path, **OPTIONS)
        prompts = [prompt(picture(9, 3)), prompt(picture(30, 40, 1)), prompt(LONG, SMALL)]
    try:
        compare(path, engine, prompts, side)
    finally:
        if engine is not llm:
            engine.shutdown()


def compare(path, engine, prompts, side):
    """Compare the likeliest tokens of each position. `side` are the pixels of a token's side."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    oracle = AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()
    fields = read_json(path / "preprocessor_config.json") | {"patch_size": side}
    processor = PixtralImageProcessorPil(**fields)
    for one in prompts:
        images = [Image.fromarray(image) for image in one["multi_modal_data"]["image"]]
        made = processor(images, return_tensors="np")
        params = PARAMS.clone(prompt_logprobs=0)
        (output,) = engine.generate(one, params, use_tqdm=False)
        tokens = before_marks(output, {IMAGE_TOKEN})
        ids = torch.tensor([output.prompt_token_ids + tokens])
        with torch.no_grad():
            logits = oracle(
                ids,
                pixel_values=torch.tensor(made["pixel_values"]),
                image_sizes=torch.tensor(made["image_sizes"]),
            ).logits[0]
        assert_as_logits(output, tokens, logits)


def test_alone_is_as_in_a_crowd(llm, alone):
    assert llm.reset_prefix_cache()
    text = {"prompt": "A prompt of text alone, between those with images."}
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])
    assert_equal(answers(llm, [text]), [crowd[len(PROMPTS)]])


def test_cached_is_as_cold_and_encodes_nothing(llm, alone):
    assert llm.reset_prefix_cache()
    answers(llm, [PROMPTS[0]])
    encoded_before = llm.llm_engine.stats().num_images_encoded
    (output,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert output.num_cached_tokens > 64
    assert_equal(taken([output]), alone[:1])
    assert llm.llm_engine.stats().num_images_encoded == encoded_before


def test_images_of_equal_sizes_are_told_apart(llm):
    """Their prompts have equal tokens."""
    other = picture(64, 64, seed=9)
    cold = []
    for image in (LARGE, other):
        assert llm.reset_prefix_cache()
        cold += answers(llm, [prompt(image)])
    assert cold[0][0] != cold[1][0]
    assert llm.reset_prefix_cache()
    for image, expected in ((LARGE, cold[0]), (other, cold[1]), (LARGE, cold[0])):
        assert_equal(answers(llm, [prompt(image)]), [expected])
    swapped = [prompt(LARGE, other), prompt(other, LARGE)]
    first = answers(llm, swapped)
    assert first[0][0] != first[1][0]
    assert llm.reset_prefix_cache()
    assert_equal(answers(llm, [swapped[1]]), first[1:])


def test_equal_images_are_encoded_once(llm, alone):
    llm.reset_prefix_cache()
    image = picture(64, 56, seed=21)
    before = llm.llm_engine.stats()
    texts = [prompt(image, text=f"{number} [IMG]") for number in range(8)]
    answers(llm, texts)
    after = llm.llm_engine.stats()
    assert after.num_images_encoded == before.num_images_encoded + 1
    assert after.num_images >= before.num_images + 8


def test_several_answers_share_an_image(llm, alone):
    assert llm.reset_prefix_cache()
    params = PARAMS.clone(n=3, temperature=1.0, seed=7)
    found = answers(llm, [PROMPTS[2]], params)
    assert len({tuple(tokens) for tokens, _ in found}) == 3
    one_by_one = [PARAMS.clone(temperature=1.0, seed=7 + place) for place in range(3)]
    assert_equal(found, [answers(llm, [PROMPTS[2]], its)[0] for its in one_by_one])


def test_more_images_than_the_pool_holds(llm, alone):
    """The pool has rows for two of the largest: 20 of them take turns."""
    assert llm.reset_prefix_cache()
    many = [prompt(picture(64, 64, seed), text=f"{seed} [IMG]") for seed in range(40, 60)]
    crowd = answers(llm, many)
    assert llm.reset_prefix_cache()
    assert_equal(answers(llm, many[:3]), crowd[:3])


def test_preempted_requests_go_on(vision_model, llm):
    """There are blocks for one and a half of the requests that run."""
    params = PARAMS.clone(max_tokens=60, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    assert llm.reset_prefix_cache()
    before = llm.llm_engine.stats().num_preemptions
    expected = answers(llm, prompts, params)
    assert llm.llm_engine.stats().num_preemptions == before
    few = LLM(vision_model, **OPTIONS | {"num_gpu_blocks_override": 20})
    try:
        found = answers(few, prompts, params)
        assert few.llm_engine.stats().num_preemptions
        assert_equal(found, expected)
    finally:
        few.shutdown()


def test_what_is_on_the_device_may_be_lost(llm, alone):
    llm.sleep(level=1)
    llm.wake_up()
    assert_equal(answers(llm, PROMPTS), alone)


def test_images_may_be_given_in_several_ways(llm, alone, tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(encoded(LARGE))
    for given in (LARGE, Image.fromarray(LARGE), path, str(path)):
        assert_equal(answers(llm, [prompt(given)]), alone[:1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"multi_modal_data": {"image": [LARGE] * 65}}, "limit_mm_per_prompt"),
        ({"multi_modal_data": {"image": [LARGE, LARGE]}}, "once for each image"),
        ({"multi_modal_data": {"audio": LARGE}}, "only 'image' and 'video'"),
        ({"multi_modal_data": {"video": LARGE}}, "takes no videos"),
        ({"multi_modal_data": {"image": 3}}, "it must be an image"),
        ({"multi_modal_data": {"image": LARGE.astype(np.float32)}}, "must be uint8"),
        ({"multi_modal_data": {"image": "/nowhere.png"}}, "no such file"),
        ({"multi_modal_data": {"image": "http://example.com/x"}}, "host is not allowed"),
        ({"multi_modal_data": LARGE.tolist()}, "must be a dict"),
        ({"mm_processor_kwargs": {"size": 3}}, "give it to the engine"),
        ({"multi_modal_uuids": {"image": ["a", "b"]}}, "string or None for each"),
        ({"prompt": "[IMG] [IMG]"}, "once for each image"),
        ({"prompt": "No mark."}, "once for each image"),
        ({"prompt": "[IMG]" + " one two three" * 60}, "max_model_len"),
    ],
)
def test_what_cannot_be_read_is_refused(llm, alone, change, reason):
    with pytest.raises(ValidationError, match=reason):
        llm.generate(prompt(LARGE) | change, PARAMS, use_tqdm=False)
    assert_equal(answers(llm, PROMPTS[:1]), alone[:1])


def test_truncation_and_beams_are_refused(llm):
    from jaxllm import BeamSearchParams

    with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
        options = {"truncate_prompt_tokens": 8}
        llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, tokenization_kwargs=options)
    with pytest.raises(ValidationError, match="beam search"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_chat_has_images(llm, alone):
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "Look:"}, {"type": "image_pil", "image_pil": LARGE},
        ]},
    ]  # fmt: skip
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False)
    assert output.prompt.count("[IMG]") == 1
    assert len(output.prompt_token_ids) > 72
    parts = [{"type": "text", "text": "[IMG]"}, *messages[0]["content"]]
    marked = [{"role": "user", "content": parts}]
    with pytest.raises(ValidationError, match="once for each image"):
        llm.chat(marked, PARAMS, use_tqdm=False)


def test_the_command_line_shows_images(llm, tmp_path):
    import threading

    from jaxllm.cli.conversation import Conversation
    from jaxllm.cli.generate import with_media
    from jaxllm.cli.local_model import LocalModel

    path = tmp_path / "large.png"
    path.write_bytes(encoded(LARGE))
    found = answers(llm, [with_media("Look: [IMG] What is it?", [str(path)], [])])
    assert_equal(found, answers(llm, PROMPTS[:1]))
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS))
    with pytest.raises(ValidationError, match="no such file"):
        chat.show("/nowhere.png")
    chat.show(str(path))
    first = "".join(chat.reply("What is it?", threading.Event()))
    parts = [{"type": "image_pil", "image_pil": LARGE}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": parts}]
    assert llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text == first
    second = "".join(chat.reply("And?", threading.Event()))  # the image is still in its place
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    assert llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text == second


@pytest.mark.sweep
def test_codes_are_of_the_decoder_alone(vision_model, alone):
    coded = LLM(vision_model, **OPTIONS, quantization="int8")
    try:
        ((tokens, logprobs),) = answers(coded, PROMPTS[:1])
        (expected, of_expected) = alone[0]
        assert tokens[0] == expected[0]
        assert 0 < abs(logprobs[0][tokens[0]].logprob - of_expected[0][tokens[0]].logprob) < 0.3
    finally:
        coded.shutdown()


def test_without_its_tower_the_engine_is_one_of_text(vision_model, llm):
    plain = LLM(vision_model, **OPTIONS, language_model_only=True)
    try:
        assert plain.llm_engine.info.images is None
        text = {"prompt": "A prompt of text alone."}
        assert_equal(answers(plain, [text]), answers(llm, [text]))
        with pytest.raises(ValidationError, match="reads text alone"):
            answers(plain, [PROMPTS[0]])
    finally:
        plain.shutdown()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "devices|not supported with images"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "with images"),
        ({"spec_method": "draft_model", "spec_model": "/nowhere"}, "with images"),
        ({"limit_mm_per_prompt": {"video": 1}}, "no video"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "no audio"),
        ({"limit_mm_per_prompt": {"image": -1}}, "from 0 on"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 4096}}}, "at most 64"),
        ({"mm_processor_kwargs": {"crop": True}}, "only 'size'"),
        ({"allowed_local_media_path": "/nowhere"}, "not a directory"),
        ({"allowed_media_domains": ["http://x"]}, "names of hosts"),
    ],
)
def test_options_that_do_not_go_together_are_refused(vision_model, options, reason):
    with pytest.raises(ValidationError, match=reason):
        LLM(vision_model, **OPTIONS | options)


def test_a_token_that_the_model_lacks_is_refused_by_name(vision_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(vision_model, path)
    tokenizer = read_json(path / "tokenizer.json")
    (token,) = (one for one in tokenizer["added_tokens"] if one["content"] == "[IMG_BREAK]")
    token["id"] = 100_000
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="image_break_token is the token 100000, .*vocab_si"):
        make_plan(EngineConfig.create(path, **OPTIONS))


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": {"video": 2}}, {"limit_mm_per_prompt": {"image": 2, "video": 0}},
        {"mm_processor_kwargs": {"fps": 1}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "without its processor"])
def test_wishes_for_images_are_refused_where_there_are_none(
    vision_model, is_text, options, tmp_path
):
    path = tmp_path / "model"
    if is_text:
        make_tiny_checkpoint(path)
    else:
        shutil.copytree(vision_model, path, ignore=lambda *_: {"preprocessor_config.json"})
    with pytest.raises(ValidationError, match=f"{next(iter(options))}=.* text alone"):
        LLM(path, **OPTIONS | options)
    sees_no_more = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    make_plan(EngineConfig.create(path, **OPTIONS | sees_no_more))
