"""Prompts with videos for Qwen's models: pairs of frames are seen as images are."""

import base64
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.errors import ValidationError
from jaxllm.files import read_json
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
    encoded,
    make_qwen2_5,
    make_qwen3,
    make_qwen3_5,
    picture,
)

IMAGE, START, END, VIDEO = 3, 4, 5, 6
MARK = "<|vision_start|><|video_pad|><|vision_end|>"
IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
KINDS = {"qwen2.5": make_qwen2_5, "qwen3": make_qwen3, "qwen3.5": make_qwen3_5}


def film(number, height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, height, width, 3), np.uint8)


# Steps of 32 tokens cut the first one, also within a pair; the second has an odd number of frames.
LONG, ODD, OTHER = film(8, 32, 24), film(5, 24, 16, 1), film(2, 16, 40, 2)


def prompt(text, videos, images=()) -> Any:
    data = {"video": list(videos)} | ({"image": list(images)} if images else {})
    return {"prompt": text, "multi_modal_data": data}


# Frames taken ten times a second, of which a pair has less than a position, and once.
PROMPTS = [
    prompt(f"Look: {MARK} What is it?", [LONG]),
    prompt(f"{MARK}", [ODD]),
    prompt(f"A {MARK} and {MARK}.", [(ODD, {"fps": 10.0}), (OTHER, {"fps": 1})]),
    prompt(f"{IMAGE_MARK} is {MARK} or {IMAGE_MARK}", [OTHER], [picture(30, 20), picture(8, 60)]),
]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("video"))


@pytest.fixture(scope="module")
def options(model):
    """A model with states has snapshots of them inside videos."""
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


def is_in_positions(model):
    return read_json(model / "config.json")["model_type"] == "qwen2_5_vl"


def frames_of(video):
    return (video[0], float(video[1]["fps"])) if isinstance(video, tuple) else (video, 2.0)


def patches_of(processor, model, frames):
    """Patches of pairs of frames, as the image processor makes those of each frame, and the grid.
    The sizes are those for these videos by transformers' rule."""
    by_area = {(32, 24): (32, 24), (24, 16): (24, 16), (16, 40): (16, 40)}
    by_total = {(8, 32, 24): (24, 16), (5, 24, 16): (24, 16), (2, 16, 40): (16, 40)}
    shape = frames.shape[:3]
    size = by_area[shape[1:]] if is_in_positions(model) else by_total[shape]
    resized = [Image.fromarray(one).resize(size[::-1], Image.Resampling.BICUBIC) for one in frames]
    resized += resized[-1:] * (len(resized) % 2)
    made = [processor([one], do_resize=False, return_tensors="np") for one in resized]
    of_frames = [one["pixel_values"].reshape(-1, 3, 2, 16)[:, :, :1] for one in made]
    pairs = zip(of_frames[::2], of_frames[1::2], strict=True)
    patches = [np.concatenate(pair, axis=2).reshape(-1, 96) for pair in pairs]
    _, rows, columns = made[0]["image_grid_thw"][0].tolist()
    return np.concatenate(patches), [len(patches), rows, columns]


def positions_of(ids, grids, seconds):
    """Those of Qwen2.5-VL by the paper: the text behind a video goes on behind all its positions,
    which transformers forgets."""
    found, place, at = [], 0, 0
    grids, seconds = list(grids), list(seconds)
    while at < len(ids):
        if ids[at] not in (IMAGE, VIDEO):
            found.append([place] * 3)
            place, at = place + 1, at + 1
            continue
        is_video = ids[at] == VIDEO
        time, rows, columns = grids.pop(0)
        by = 2 * seconds.pop(0) if is_video else 1
        its = [
            [place + int(t * by), place + r, place + c]
            for t in range(time) for r in range(rows // 2) for c in range(columns // 2)
        ]  # fmt: skip
        found += its
        place, at = max(map(max, its)) + 1, at + len(its)
    return found


@pytest.mark.oracle
def test_answers_are_those_of_transformers(model, llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    oracle = AutoModelForImageTextToText.from_pretrained(model, dtype="float32").eval()
    processor = Qwen2VLImageProcessorPil(**read_json(model / "preprocessor_config.json"))
    # All prompts are in one crowd, of which steps cut the videos.
    outputs = llm.generate(PROMPTS, PARAMS.clone(prompt_logprobs=0), use_tqdm=False)
    for one, output in zip(PROMPTS, outputs, strict=True):
        data = one["multi_modal_data"]
        videos = [frames_of(video) for video in data["video"]]
        patches, grids = zip(*(patches_of(processor, model, its) for its, _ in videos), strict=True)
        its: dict[str, Any] = {
            "pixel_values_videos": torch.tensor(np.concatenate(patches)),
            "video_grid_thw": torch.tensor(grids),
        }
        images = [Image.fromarray(image) for image in data.get("image", ())]
        if images:
            its |= processor(images, return_tensors="pt")
        tokens = before_marks(output, {IMAGE, VIDEO})
        ids = output.prompt_token_ids + tokens
        in_order = list(grids)
        if is_in_positions(model):
            if images:
                first, second = its["image_grid_thw"].tolist()
                in_order = [first, *grids, second]
            positions = positions_of(ids, in_order, [2 / fps for _, fps in videos])
            its["position_ids"] = torch.tensor(positions).T[:, None]
        kinds = [1 if token == IMAGE else 2 * (token == VIDEO) for token in ids]
        with torch.no_grad():
            found = oracle(torch.tensor([ids]), **its, mm_token_type_ids=torch.tensor([kinds]))
        assert_as_logits(output, tokens, found.logits[0])


def test_tokens_are_placed_as_the_processor_does(model, llm):
    """Each pair behind its time and between marks of its own, or all of them between those of the
    text."""
    encode = llm.get_tokenizer().encode
    (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
    before, between, behind = (
        encode(text, add_special_tokens=False) for text in ("A ", " and ", ".")
    )
    if is_in_positions(model):
        of_odd, of_other = [[START, *[VIDEO] * number, END] for number in (18, 10)]
    else:
        of_odd, of_other = [
            [
                token
                for time in times
                for token in [*encode(f"<{time} seconds>", add_special_tokens=False), START,
                              *[VIDEO] * number, END]
            ]
            for times, number in ((("0.1", "0.2", "0.4"), 6), (("0.5",), 10))
        ]  # fmt: skip
    assert output.prompt_token_ids == [*before, *of_odd, *between, *of_other, *behind]


def test_alone_is_as_in_a_crowd(llm, alone):
    assert llm.reset_prefix_cache()
    text = {"prompt": "A prompt of text alone, between those with videos."}
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])


def test_cached_is_as_cold_and_encodes_nothing(llm, alone):
    assert llm.reset_prefix_cache()
    for one in (PROMPTS[0], PROMPTS[0]):  # states are found from the second time on
        answers(llm, [one])
    before = llm.llm_engine.stats()
    (output,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    after = llm.llm_engine.stats()
    assert output.num_cached_tokens >= 32
    assert_equal(taken([output]), alone[:1])
    assert after.num_images_encoded == before.num_images_encoded
    assert after.num_images == before.num_images + 4  # pairs


def test_a_faster_video_is_told_apart(model, llm):
    """Its tokens may be the same: positions differ, or the times in words."""
    asked = [prompt(f"Look: {MARK} What?", [(LONG, {"fps": fps})]) for fps in (2.0, 0.25)]
    cold = []
    for one in asked:
        assert llm.reset_prefix_cache()
        cold += answers(llm, [one])
    assert cold[0] != cold[1]
    assert llm.reset_prefix_cache()
    for one, expected in zip(asked * 2, cold * 2, strict=True):
        assert_equal(answers(llm, [one]), [expected])


def test_the_order_of_frames_matters(llm, alone):
    swapped = LONG.copy()
    swapped[[0, 1]] = LONG[[1, 0]]
    text = PROMPTS[0]["prompt"]
    assert answers(llm, [prompt(text, [swapped])]) != alone[:1]
    assert_equal(answers(llm, PROMPTS[:1]), alone[:1])


def test_videos_may_be_given_in_several_ways(llm, alone, tmp_path):
    for place, frame in enumerate(LONG):
        (tmp_path / f"{place:03}.png").write_bytes(encoded(frame))
    text = PROMPTS[0]["prompt"]
    images = [Image.fromarray(one) for one in LONG]
    slow = np.repeat(LONG, 2, axis=0)[:-1]  # of which every other frame is seen
    says = {"fps": 30.0, "frames_indices": list(range(0, 120, 15)), "total_num_frames": 120}
    for given in (LONG, images, list(LONG), tmp_path, str(tmp_path), (LONG, says), (LONG, None)):
        one = {"prompt": text, "multi_modal_data": {"video": given}}
        assert_equal(answers(llm, [one]), alone[:1])
    sampled = (slow, {"fps": 3.75, "do_sample_frames": True})
    (output,) = llm.generate(prompt(text, [sampled]), PARAMS, use_tqdm=False)
    (whole,) = llm.generate(prompt(text, [LONG]), PARAMS, use_tqdm=False)
    assert output.prompt_token_ids.count(VIDEO) == whole.prompt_token_ids.count(VIDEO)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"multi_modal_data": {"video": [ODD] * 9}}, "limit_mm_per_prompt"),
        ({"multi_modal_data": {"video": [ODD, ODD]}}, "once for each video"),
        ({"multi_modal_data": {"video": [ODD], "image": [picture(8, 8)]}}, "once for each image"),
        ({"multi_modal_data": {"video": ODD[0]}}, "array of frames"),
        ({"multi_modal_data": {"video": ODD[:0]}}, "no frames"),
        ({"multi_modal_data": {"video": ODD.astype(np.float32)}}, "must be uint8"),
        ({"multi_modal_data": {"video": film(2, 1, 201)}}, "200 times"),
        ({"multi_modal_data": {"video": film(769, 1, 1)}}, "may have 768"),
        ({"multi_modal_data": {"video": film(130, 30, 30)}}, "tokens"),
        ({"multi_modal_data": {"video": [picture(8, 8), picture(8, 9)]}}, "several sizes"),
        ({"multi_modal_data": {"video": "/nowhere.mp4"}}, "no such file|jaxllm.video"),
        ({"multi_modal_data": {"video": "/nowhere"}}, "no such file|jaxllm.video"),
        ({"multi_modal_data": {"video": "http://example.com/x"}}, "host is not allowed"),
        ({"multi_modal_data": {"video": (ODD, {"fps": -1})}}, "from 0.001"),
        ({"multi_modal_data": {"video": ("/nowhere.mp4", {"fps": 2})}}, "says itself"),
        ({"multi_modal_data": {"video": ("data:video/mp4;", {"fps": 2})}}, "says itself"),
        ({"multi_modal_data": {"video": 3}}, "it must be an array of frames"),
        ({"multi_modal_uuids": {"video": ["a", "b"]}}, "string or None for each"),
        ({"prompt": f"{MARK} {MARK}"}, "once for each video"),
        ({"prompt": "No mark."}, "once for each video"),
        ({"prompt": MARK + " one two three" * 80}, "max_model_len"),
    ],
)
def test_what_cannot_be_read_is_refused(llm, change, reason):
    with pytest.raises(ValidationError, match=reason):
        answers(llm, [prompt(MARK, [ODD]) | change])


@pytest.mark.sweep
def test_whole_is_as_cut_and_preempted_requests_go_on(model, llm, options):
    """Steps that hold whole prompts, and blocks for one and a half of the requests that run."""
    params = PARAMS.clone(max_tokens=60, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[0]]
    assert llm.reset_prefix_cache()
    expected = answers(llm, prompts, params)
    changes = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 20}
    few = LLM(model, **options | changes)
    try:
        found = answers(few, prompts, params)
        assert few.llm_engine.stats().num_preemptions
        assert_equal(found, expected)
    finally:
        few.shutdown()


def test_an_engine_without_videos_carries_one_frame_of_a_patch(model, llm, options):
    """Its images are as beside videos, and their bytes half as many."""
    still = LLM(model, **options, limit_mm_per_prompt={"video": 0})
    try:
        spec, of_both = still.llm_engine.info.images, llm.llm_engine.info.images
        assert spec.video is None and 2 * spec.patch_bytes == of_both.patch_bytes
        image = {"prompt": f"See {IMAGE_MARK}.", "multi_modal_data": {"image": picture(40, 24)}}
        assert_equal(answers(still, [image]), answers(llm, [image]))
        with pytest.raises(ValidationError, match="started without them"):
            answers(still, PROMPTS[:1])
    finally:
        still.shutdown()


def test_the_command_line_shows_videos(llm, alone, tmp_path):
    from jaxllm.cli.generate import with_media

    for place, frame in enumerate(LONG):
        (tmp_path / f"{place:03}.png").write_bytes(encoded(frame))
    shown = with_media(PROMPTS[0]["prompt"], [], [str(tmp_path)])
    assert_equal(answers(llm, [shown]), alone[:1])
    line: Any = {"prompt": "x", "multi_modal_data": {"video": "b"}}
    both = with_media(line, ["i"], ["a"])
    assert both == {"prompt": "x", "multi_modal_data": {"image": ["i"], "video": ["a", "b"]}}


def test_no_prompt_ends_with_a_frame(model, llm):
    """Unless the model puts a mark behind each pair."""
    bare = prompt("<|vision_start|><|video_pad|>", [ODD])
    if is_in_positions(model):
        with pytest.raises(ValidationError, match="ends with"):
            answers(llm, [bare])
    else:
        (output,) = llm.generate(bare, PARAMS, use_tqdm=False)
        assert output.prompt_token_ids[0] == START and output.prompt_token_ids[-1] == END


def test_a_chat_takes_urls_of_videos_alone(llm):
    """A body of JSON cannot name a directory, nor a file that is not allowed."""
    for url, reason in (
        ("file:///etc/hostname", "--allowed-local-media-path"),
        ("/etc", "begin with http"),
        (
            "data:video/mp4;base64," + base64.b64encode(b"nothing").decode(),
            "not a video file|jaxllm",
        ),
    ):
        part = {"type": "video_url", "video_url": {"url": url}}
        with pytest.raises(ValidationError, match=reason):
            llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)
