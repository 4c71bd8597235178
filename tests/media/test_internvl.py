"""Prompts with images for InternVL, whose images are some tiles each."""

import json
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.errors import CheckpointError, JaxLLMError, UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.media.device import encoder_sizes
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Tiles
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
from tests.media.models import OPTIONS, make_internvl, picture

SOFT, OPENS, CLOSES = 3, 4, 5
MARK = "<IMG_CONTEXT>"
# A tile has 16 tokens, so steps of 32 tokens cut images.
STEPS = OPTIONS | {"max_num_batched_tokens": 32, "max_model_len": 512}
# Of one tile, of three and the whole, of six and the whole, of two and the whole.
PICTURES = [picture(3, 2, 1), picture(30, 100), picture(70, 48, 2), picture(64, 33, 3)]


def prompt(*images, text=f"Look: {MARK} What is it?") -> Any:
    if len(images) > 1:
        text = f"One {MARK} and\n" * len(images) + " what else?"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [
    prompt(PICTURES[1]), prompt(PICTURES[0], PICTURES[2]), prompt(PICTURES[3], text=MARK),
    prompt(PICTURES[3], PICTURES[0], PICTURES[1]),
]  # fmt: skip
# As InternViT 6B has it, behind the larger ones; and with the settings that no release has.
OF_6B = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}
OTHERS = {"use_mean_pooling": False, "image_size": 32, "patch_size": 8, "hidden_act": "relu"}
VARIANTS = {
    "qwen2": {"decoder": "qwen2", "tie_word_embeddings": False},
    "qwen3-moe-6b": {"decoder": "qwen3_moe", "vision": OF_6B},
    "others": {"vision": OTHERS, "downsample_ratio": 0.25},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(model, **STEPS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    return each_alone(llm, PROMPTS)


@pytest.mark.oracle
def test_answers_are_those_of_transformers(model, llm):
    """And what is put into the prompt."""
    compare(model, llm, of_tile=16)


@pytest.mark.sweep
@pytest.mark.oracle
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_of_variants_are_those_of_transformers(variant, tmp_path):
    """Also of the checkpoint as transformers writes it."""
    pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText

    path = make_internvl(tmp_path / "released", **VARIANTS[variant])
    of_tile = 1 if variant == "others" else 16
    llm = LLM(path, **STEPS)
    expected = answers(llm, PROMPTS)
    compare(path, llm, of_tile)
    llm.shutdown()
    AutoModelForImageTextToText.from_pretrained(path).save_pretrained(tmp_path / "written")
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "written" / name).write_bytes((path / name).read_bytes())
    llm = LLM(tmp_path / "written", **STEPS)
    assert_equal(answers(llm, PROMPTS), expected)
    llm.shutdown()


def compare(path, llm, of_tile):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    oracle, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype="float32", output_loading_info=True
    )
    assert not any(info.values()), info
    fields = read_json(path / "preprocessor_config.json")
    # As its processor does.
    processor = GotOcr2ImageProcessorPil(**fields | {"crop_to_patches": True})
    outputs = llm.generate(PROMPTS, PARAMS.clone(prompt_logprobs=0), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for one, output in zip(PROMPTS, outputs, strict=True):
        images = [Image.fromarray(image) for image in one["multi_modal_data"]["image"]]
        made = processor(images, return_tensors="pt")
        before, *rest = one["prompt"].split(MARK)
        wanted = tokenizer.encode(before)
        for tiles, text in zip(made["num_patches"].tolist(), rest, strict=True):
            wanted += [OPENS, *[SOFT] * of_tile * tiles, CLOSES, *tokenizer.encode(text)]
        assert output.prompt_token_ids == wanted
        tokens = before_marks(output, {SOFT})
        ids = torch.tensor([wanted + tokens])
        with torch.no_grad():
            logits = oracle(ids, pixel_values=made["pixel_values"]).logits[0]
        assert_as_logits(output, tokens, logits)


def test_crowds_caches_and_steps_change_nothing(llm, alone):
    assert llm.reset_prefix_cache()
    text = {"prompt": "A prompt of text alone, between those with images."}
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])
    # The cached prefix ends inside an image.
    assert llm.reset_prefix_cache()
    answers(llm, [PROMPTS[2]])
    encoded = llm.llm_engine.stats().num_images_encoded
    (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
    ids, cached = output.prompt_token_ids, output.num_cached_tokens
    assert cached > 32 and SOFT == ids[cached - 1] == ids[cached]
    assert_equal(taken([output]), alone[2:3])
    assert llm.llm_engine.stats().num_images_encoded == encoded


def test_chats_have_what_is_put_around_images(llm, alone):
    parts = [{"type": "image_pil", "image_pil": PICTURES[1]}, {"type": "text", "text": "What?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    image = [OPENS, *[SOFT] * 64, CLOSES]
    before, behind = map(llm.get_tokenizer().encode, ("<|im_start|>user\n", "What?<|im_end|>\n"))
    ids = output.prompt_token_ids
    assert ids[: len(before + image + behind)] == before + image + behind
    parts[1]["text"] = f"What is {MARK}?"
    with pytest.raises(ValidationError, match="2 times"):
        llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 256}, {"attention_backend": "reference"},
     {"num_gpu_blocks_override": 40}],
)  # fmt: skip
def test_steps_of_other_sizes_answer_the_same(model, alone, options):
    llm = LLM(model, **STEPS | options)
    assert_equal(answers(llm, PROMPTS * 2), alone * 2)
    llm.shutdown()


@pytest.mark.sweep
def test_text_needs_no_tower_and_fewer_tiles_are_fewer_tokens(model, llm, alone):
    text = [{"prompt": "A prompt of text alone."}]
    its = LLM(model, **STEPS | {"language_model_only": True})
    assert_equal(answers(its, text), answers(llm, text))
    with pytest.raises(ValidationError, match="reads text alone"):
        answers(its, PROMPTS[:1])
    its.shutdown()
    its = LLM(model, **STEPS | {"mm_processor_kwargs": {"max_patches": 1}})
    (output,) = its.generate(prompt(PICTURES[1]), PARAMS, use_tqdm=False)
    assert output.prompt_token_ids.count(SOFT) == 16
    assert_equal(answers(its, text), answers(llm, text))
    its.shutdown()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mm_processor_kwargs": {"max_patches": 7}}, "max_patches=7.*from 1 to 6"),
        ({"mm_processor_kwargs": {"min_patches": 2}}, "only 'max_patches' may be changed"),
        ({"hf_overrides": {"vision_config": {"use_mask_token": True}}}, "use_mask_token=True"),
        ({"hf_overrides": {"vision_config": {"norm_type": "group"}}}, "norm_type='group'"),
        ({"hf_overrides": {"vision_config": {"image_size": [32, 64]}}}, "image_size"),
        ({"hf_overrides": {"vision_config": {"image_size": 64}}}, "images of 64 x 64"),
        ({"hf_overrides": {"vision_feature_layer": -2}}, "vision_feature_layer=-2"),
        ({"hf_overrides": {"vision_feature_select_strategy": "full"}}, "select_strategy='full'"),
        ({"hf_overrides": {"downsample_ratio": 0.3}}, "downsample_ratio=0.3"),
        ({"hf_overrides": {"text_config": {"model_type": "gpt_oss"}}}, "model_type='gpt_oss'"),
    ],
)
def test_refusals_name_the_field(model, options, says):
    with pytest.raises(JaxLLMError, match=says) as caught:
        LLM(model, **STEPS | options)
    assert isinstance(caught.value, ValidationError | CheckpointError | UnsupportedModelError)


def test_programs_of_the_tower_have_whole_tiles():
    spec = ImageSpec(
        patch_size=14, merge=2, resizing=Tiles(pixels=336, min_tiles=1, max_tiles=12), resample=3,
        scale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3, image_token=MARK, image_token_id=SOFT,
        max_images=4,
    )  # fmt: skip
    sizes = encoder_sizes(spec, spec.max_patches)
    assert sizes[0] == 24**2 and not any(size % 24**2 for size in sizes)
    assert sizes[-2] < spec.max_patches == 13 * 24**2 <= sizes[-1]


def test_every_field_of_the_class_is_known(model):
    from transformers import CONFIG_MAPPING

    config = read_json(model / "config.json")
    for kind in ("qwen2", "qwen3", "qwen3_moe"):
        config["text_config"] |= {"model_type": kind}
        written = CONFIG_MAPPING["internvl"](**json.loads(json.dumps(config))).to_dict()
        written["architectures"] = config["architectures"]
        for sees_images in (True, False):
            read_architecture(written, sees_images=sees_images)
