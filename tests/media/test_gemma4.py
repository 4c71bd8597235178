"""Prompts with images for Gemma 4, whose images keep their ratio. In large models the tokens of an
image see each other, in the layers with a window."""

import json
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.errors import ValidationError
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from tests.media.answers import (
    PARAMS,
    answers,
    assert_as_logits,
    assert_equal,
    before_marks,
    each_alone,
    taken,
)
from tests.media.models import OPTIONS, make_gemma4, picture

SOFT, MARK = 3, "<|image|>"
STEPS = OPTIONS | {"max_num_batched_tokens": 80}  # one image of 70 tokens, and no more
# None of an image that sees itself is longer than the longest that the processor makes.
PICTURES = [picture(64, 64), picture(3, 2, 1), picture(15, 120, 2), picture(200, 30, 3)]
# Decoders as small and large models have them, but for their sizes.
SMALL = {"use_bidirectional_attention": None}
LARGE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}


def prompt(*images, text=f"Look: {MARK} What is it?") -> Any:
    if len(images) > 1:
        text = f"One {MARK} and\n" * len(images) + " what else?"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [prompt(PICTURES[0]), prompt(PICTURES[1]), prompt(PICTURES[2], PICTURES[3])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_gemma4(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(model, **STEPS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    return each_alone(llm, PROMPTS)


def check_against_transformers(model, llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    oracle = AutoModelForImageTextToText.from_pretrained(
        model, dtype="float32", attn_implementation="eager"
    ).eval()
    fields = read_json(model / "preprocessor_config.json")
    processor = Gemma4ImageProcessorPil(
        **{name: fields[name] for name in fields if not name.endswith(("_type", "_class"))}
    )
    outputs = llm.generate(PROMPTS, PARAMS.clone(prompt_logprobs=0), use_tqdm=False)
    for one, output in zip(PROMPTS, outputs, strict=True):
        images = [Image.fromarray(image) for image in one["multi_modal_data"]["image"]]
        made = processor(images, return_tensors="pt")
        tokens = before_marks(output, {SOFT})
        assert tokens
        ids = torch.tensor([output.prompt_token_ids + tokens])
        with torch.no_grad():
            logits = oracle(
                ids,
                pixel_values=made["pixel_values"],
                image_position_ids=made["image_position_ids"],
                mm_token_type_ids=(ids == SOFT).long(),
            ).logits[0]
        assert_as_logits(output, tokens, logits, bound=2e-4)


@pytest.mark.oracle
def test_answers_are_those_of_transformers(model, llm):
    check_against_transformers(model, llm)


@pytest.mark.oracle
@pytest.mark.sweep
@pytest.mark.parametrize("fields", [SMALL, LARGE])
def test_other_sizes_are_as_in_transformers(tmp_path, fields):
    model = make_gemma4(tmp_path, **fields)
    llm = LLM(model, **STEPS)
    check_against_transformers(model, llm)
    llm.shutdown()


def test_in_a_crowd_and_cached_is_as_alone(llm, alone):
    """The cached prefix ends inside an image."""
    text = {"prompt": "A prompt of text alone, between those with images."}
    assert llm.reset_prefix_cache()
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])
    (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
    ids, cached = output.prompt_token_ids, output.num_cached_tokens
    assert cached > 64 and SOFT == ids[cached - 1] == ids[cached]
    assert_equal(taken([output]), alone[2:])


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_steps_of_other_sizes_answer_the_same(model, alone, backend):
    llm = LLM(model, **STEPS | {"max_num_batched_tokens": 160, "attention_backend": backend})
    assert_equal(answers(llm, PROMPTS), alone)
    llm.shutdown()


@pytest.mark.sweep
def test_windows_that_hold_all_are_still_those_in_which_images_see_themselves(model, tmp_path):
    """With a window as long as the longest sequence, the layers still differ from those without."""
    long = make_gemma4(tmp_path, sliding_window=256)
    llm = LLM(long, **STEPS)
    check_against_transformers(long, llm)
    llm.shutdown()


def test_a_mark_in_a_text_becomes_what_the_processor_writes(llm):
    (output,) = llm.generate([prompt(PICTURES[0])], PARAMS, use_tqdm=False)
    written = f"Look: <|image>{MARK * 64}<image|> What is it?"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(written)


def test_every_field_of_the_class_is_known(model):
    """And those of releases, whose rotation has an older name."""
    from transformers import CONFIG_MAPPING

    config = read_json(model / "config.json")
    written = CONFIG_MAPPING["gemma4"](**json.loads(json.dumps(config))).to_dict()
    written["architectures"] = config["architectures"]
    written["vision_config"] |= {
        "default_output_length": 70,
        "global_head_dim": 16,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    }
    seeing, blind = (read_architecture(written, sees_images=its) for its in (True, False))
    assert seeing.tower == read_architecture(config, sees_images=True).tower
    assert blind.tower is None


def test_ids_of_a_chat_get_what_its_text_gets(llm):
    text = f"Look: {MARK} What?"
    ids = llm.get_tokenizer().encode(text)
    given = prompt(PICTURES[0], text=text) | {"prompt_token_ids": ids}
    (output,) = llm.generate([given], PARAMS, use_tqdm=False)
    written = text.replace(MARK, f"<|image>{MARK * 64}<image|>")
    assert output.prompt_token_ids == llm.get_tokenizer().encode(written)


def test_images_are_refused_as_soon_as_a_prompt_has_no_room_for_them(llm):
    """A few bytes of a file become a whole image."""
    pictures = [picture(4, 3)] * 64
    with pytest.raises(ValidationError, match=r"the first 5 of them have \d+ tokens.*=256"):
        llm.generate([prompt(*pictures, text=MARK * 64)], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_batched_tokens": 73}, "max_num_batched_tokens.*at least 74"),
        ({"mm_processor_kwargs": {"max_soft_tokens": 71}}, "max_soft_tokens=71.*70, 140"),
        ({"mm_processor_kwargs": {"max_soft_tokens": 140}}, "at least 144"),
    ],
)
def test_refusals_name_the_option(model, options, says):
    with pytest.raises(ValidationError, match=says):
        LLM(model, **STEPS | options)
