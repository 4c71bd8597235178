"""Prompts with images for Qwen's models, whose tokens have positions in rows and columns."""

import json
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.errors import UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.media.preprocessor import read_image_spec
from jaxllm.media.processors.files import Wanted
from jaxllm.media.resizing import Area
from tests.media.answers import (
    PARAMS,
    answers,
    assert_as_logits,
    assert_equal,
    before_marks,
    each_alone,
    taken,
)
from tests.media.models import (
    OPTIONS,
    make_qwen2_5,
    make_qwen3,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_moe,
    picture,
)

IMAGE_TOKEN = 3
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
# One of 64 tokens, which steps of 32 tokens cut; one of 4 tokens; one of 2 x 16, in which the text
# goes on far behind its tokens' number.
LARGE, SMALL, LONG = picture(64, 64), picture(3, 2, 1), picture(15, 120, 2)
KINDS = {"qwen2.5": make_qwen2_5, "qwen3": make_qwen3, "qwen3.5": make_qwen3_5}
IN_SWEEP = {"qwen3-moe": make_qwen3_moe, "qwen3.5-moe": make_qwen3_5_moe}


def prompt(*images, text=f"Look: {MARK} What is it?") -> Any:
    if len(images) > 1:
        text = f"One {MARK} and" * len(images) + " what else?"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [
    prompt(LARGE), prompt(picture(9, 31, 3)), prompt(LONG, LARGE), prompt(LONG, text=MARK),
    prompt(SMALL, picture(50, 20, 4), SMALL, LONG),
]  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.sweep) for kind in IN_SWEEP)],
)
def model(request, tmp_path_factory):
    return (KINDS | IN_SWEEP)[request.param](tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def options(model):
    """A model with states has snapshots of them inside images."""
    has_states = "linear_num_key_heads" in read_json(model / "config.json")["text_config"]
    snapshots = {"mamba_block_size": 32, "num_state_snapshots": 16}
    return OPTIONS | (snapshots if has_states else {})


@pytest.fixture(scope="module")
def llm(model, options):
    llm = LLM(model, **options)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    return each_alone(llm, PROMPTS)


@pytest.mark.oracle
def test_answers_are_those_of_transformers(model, llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    oracle = AutoModelForImageTextToText.from_pretrained(model, dtype="float32").eval()
    processor = Qwen2VLImageProcessorPil(**read_json(model / "preprocessor_config.json"))
    # All prompts are in one crowd, of which steps cut the images.
    outputs = llm.generate(PROMPTS, PARAMS.clone(prompt_logprobs=0), use_tqdm=False)
    for one, output in zip(PROMPTS, outputs, strict=True):
        images = [Image.fromarray(image) for image in one["multi_modal_data"]["image"]]
        made = processor(images, return_tensors="pt")
        tokens = before_marks(output, {IMAGE_TOKEN})
        ids = torch.tensor([output.prompt_token_ids + tokens])
        with torch.no_grad():
            is_image = (ids == IMAGE_TOKEN).long()
            logits = oracle(ids, **made, mm_token_type_ids=is_image).logits[0]
        assert_as_logits(output, tokens, logits)


def test_alone_is_as_in_a_crowd(llm, alone):
    assert llm.reset_prefix_cache()
    text = {"prompt": "A prompt of text alone, between those with images."}
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])
    assert_equal(answers(llm, [text]), [crowd[len(PROMPTS)]])


def test_cached_is_as_cold(llm, alone):
    assert llm.reset_prefix_cache()
    answers(llm, [PROMPTS[2]])
    (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
    assert output.num_cached_tokens > 64
    assert_equal(taken([output]), alone[2:3])


@pytest.mark.parametrize(
    ("place", "other"),
    [(3, prompt(LONG.swapaxes(0, 1), text=MARK)), (0, prompt(picture(64, 64, 9)))],
    ids=["2 x 16 and 16 x 2", "64 x 64"],
)
def test_images_of_equal_numbers_of_tokens_are_told_apart(place, other, llm, alone):
    assert llm.reset_prefix_cache()
    cold = answers(llm, [other])
    assert cold[0] != alone[place]
    assert llm.reset_prefix_cache()
    for _ in range(2):  # states are found from the second time on
        assert_equal(answers(llm, [PROMPTS[place]]), [alone[place]])
    assert_equal(answers(llm, [other]), cold)


@pytest.mark.sweep
def test_preempted_requests_go_on(model, llm, options):
    """Also behind their prompts, at the positions that they had."""
    params = PARAMS.clone(max_tokens=60, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[4]]
    assert llm.reset_prefix_cache()
    before = llm.llm_engine.stats().num_preemptions
    expected = answers(llm, prompts, params)
    assert llm.llm_engine.stats().num_preemptions == before
    few = LLM(model, **options | {"num_gpu_blocks_override": 20})
    try:
        found = answers(few, prompts, params)
        assert few.llm_engine.stats().num_preemptions
        assert_equal(found, expected)
    finally:
        few.shutdown()


@pytest.mark.sweep
def test_text_is_as_without_the_tower(model, llm):
    plain = LLM(model, **OPTIONS, language_model_only=True)
    try:
        text = {"prompt": "A prompt of text alone."}
        assert_equal(answers(plain, [text]), answers(llm, [text]))
    finally:
        plain.shutdown()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": "<|vision_start|><|image_pad|>"}, "ends with"),
        ({"multi_modal_data": {"image": picture(1, 201)}}, "more than 200 times"),
    ],
)
def test_what_cannot_be_read_is_refused(llm, change, reason):
    with pytest.raises(ValidationError, match=reason):
        answers(llm, [prompt(LARGE) | change])


@pytest.mark.parametrize(
    "kwargs",
    [{"max_pixels": 5000}, {"min_pixels": 4000, "max_pixels": 300}, {"size": {"longest_edge": 0}}],
)
def test_areas_that_the_model_does_not_know_are_refused(model, kwargs):
    with pytest.raises(ValidationError, match="at most 4096"):
        LLM(model, **OPTIONS, mm_processor_kwargs=kwargs)


def areas(path, model, **fields):
    """How images are resized if preprocessor_config.json has these fields."""
    wanted = Wanted("Qwen2VLImageProcessor", 4, 2, IMAGE_TOKEN)
    (path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    its = read_json(model / "preprocessor_config.json") | fields
    (path / "preprocessor_config.json").write_text(json.dumps(its))
    spec = read_image_spec(path, wanted, changes={}, max_images=1)
    assert spec is not None
    return spec.resizing


def test_areas_that_are_null_are_those_of_the_size(model, tmp_path):
    """As transformers writes them."""
    expected = Area(min_pixels=256, max_pixels=4096)
    assert areas(tmp_path, model, min_pixels=None, max_pixels=None) == expected
    assert areas(tmp_path, model, size=None, min_pixels=256, max_pixels=4096) == expected
    with pytest.raises(UnsupportedModelError, match="'max_pixels': 'many'.* not supported"):
        areas(tmp_path, model, max_pixels="many")


@pytest.mark.sweep
def test_images_may_be_made_smaller(model):
    small = LLM(model, **OPTIONS, mm_processor_kwargs={"max_pixels": 1024})
    try:
        (output,) = small.generate([prompt(LARGE)], PARAMS, use_tqdm=False)
        assert output.prompt_token_ids.count(IMAGE_TOKEN) == 16
    finally:
        small.shutdown()
