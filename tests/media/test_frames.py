"""Which frames of a video are seen, how large and when: as transformers' processors have it. What
is written here was computed by them, with torchvision."""

import json

import msgspec
import numpy as np
import pytest

from jaxllm.errors import UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.media.frames import Times, VideoSpec, read_metadata
from jaxllm.media.preprocessor import read_image_spec
from jaxllm.media.processors.files import VideoWanted, Wanted
from jaxllm.media.resizing import Area, TotalArea, UndecodableError
from tests.media.models import make_qwen3

# Of Qwen3-VL, whose frames have their times in words, and of Qwen2.5-VL, in positions.
IN_WORDS = VideoSpec(
    resizing=TotalArea(1024, 8192), token="<|video_pad|>", token_id=6, start_id=4, end_id=5,
    positions_per_second=None, fps=2.0, num_frames=None, min_frames=4, max_frames=768, max_videos=8,
)  # fmt: skip
IN_POSITIONS = msgspec.structs.replace(
    IN_WORDS, resizing=Area(min_pixels=256, max_pixels=4096), positions_per_second=2
)


@pytest.mark.parametrize(
    ("total", "fps", "in_words", "in_positions"),
    [
        (9, 3.0, [0, 2, 3, 5, 6, 8], [0, 1, 3, 4, 6, 7]),
        (7, 24.0, [0, 2, 4, 6], [0, 1, 3, 5]),
        (2, 10.0, [0, 1], [0, 1]),
        (5, 1.0, [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        (
            300, 30.0,
            [0, 16, 31, 47, 63, 79, 94, 110, 126, 142, 157, 173, 189, 205, 220, 236, 252, 268, 283,
             299],
            list(range(0, 300, 15)),
        ),
    ],
)  # fmt: skip
def test_sampled_frames_are_those_of_transformers(total, fps, in_words, in_positions):
    assert IN_WORDS.sampled(total, fps) == in_words
    assert IN_POSITIONS.sampled(total, fps) == in_positions


@pytest.mark.parametrize(
    ("total", "fps", "numbers", "ends"),
    [
        (1000, 23.976, (83, 82), ([0, 12, 24, 999], [0, 12, 24, 987])),
        (90_000, 25.0, (768, 768), ([0, 117, 235, 89_999], [0, 117, 234, 89_882])),
    ],
)
def test_long_videos_are_sampled_up_to_a_number(total, fps, numbers, ends):
    for spec, number, its in zip((IN_WORDS, IN_POSITIONS), numbers, ends, strict=True):
        found = spec.sampled(total, fps)
        assert len(found) == number and [*found[:3], found[-1]] == its


def test_sampled_frames_are_in_the_video():
    """transformers' arithmetic goes beyond the end of some, as of 75 frames at 10 a second."""
    for spec in (IN_WORDS, IN_POSITIONS):
        for total in range(1, 200):
            for fps in (0.5, 1.0, 10.0, 29.97):
                found = spec.sampled(total, fps)
                assert found == sorted(found) and found[0] == 0 and found[-1] < total
    assert IN_POSITIONS.sampled(75, 10.0) == [
        0, 5, 10, 16, 21, 26, 32, 37, 42, 48, 53, 58, 64, 69
    ]  # fmt: skip


def test_a_number_of_frames_may_be_asked_for():
    for spec, expected in (
        (IN_WORDS, [0, 25, 50, 74, 99]), (IN_POSITIONS, [0, 25, 50, 75]),
    ):  # fmt: skip
        assert msgspec.structs.replace(spec, num_frames=5).sampled(100, 25.0) == expected
        assert msgspec.structs.replace(spec, num_frames=8).sampled(3, 25.0)[-1] < 3


@pytest.mark.parametrize(
    ("sizes", "area", "side"),
    [
        (
            {(2, 1080, 1920): (1088, 1920), (20, 1080, 1920): (832, 1472), (5, 24, 16): (64, 32),
             (7, 64, 48): (64, 64), (3, 10, 2000): (32, 6400), (2, 8, 8): (64, 64)},
            TotalArea(4096, 25_165_824), 32,
        ),
        (
            {(2, 1080, 1920): (448, 832), (20, 1080, 1920): (128, 256), (5, 24, 16): (224, 160),
             (7, 64, 48): (160, 128), (3, 10, 2000): (32, 7232), (2, 8, 8): (256, 256)},
            TotalArea(131_072, 786_432), 32,
        ),
        (
            {(2, 1080, 1920): (48, 80), (20, 1080, 1920): (8, 24), (5, 24, 16): (24, 16),
             (7, 64, 48): (32, 24), (3, 10, 2000): (8, 736), (2, 8, 8): (24, 24)},
            TotalArea(1024, 8192), 8,
        ),
    ],
)  # fmt: skip
def test_sizes_of_frames_are_those_of_transformers(sizes, area, side):
    for (number, height, width), expected in sizes.items():
        found = area.frame_size(number, height, width, side)
        assert found == expected
        assert found[0] * found[1] <= area.max_tokens(side) * side**2
    with pytest.raises(UndecodableError, match="200 times"):
        area.frame_size(2, side, 201 * side, side)


def test_the_largest_frame_is_no_larger():
    rng = np.random.default_rng(0)
    for area in (TotalArea(1024, 8192), TotalArea(131_072, 786_432)):
        sizes = np.exp(rng.uniform(0, 9, (2000, 2))).astype(int).tolist()
        for (height, width), number in zip(sizes, rng.integers(2, 769, 2000), strict=True):
            try:
                found = area.frame_size(int(number), height, width, 8)
            except UndecodableError:
                continue
            assert found[0] * found[1] <= area.max_tokens(8) * 64


@pytest.mark.parametrize(
    ("indices", "fps", "expected"),
    [
        ([0, 2, 3, 5, 6, 8], 3.0, [1 / 3, 4 / 3, 7 / 3]),
        ([0, 1, 2], 24.0, [0.5 / 24, 2 / 24]),
        ([0, 15, 30, 45, 60], 29.97, [0.2502502502502503, 1.2512512512512513, 2.002002002002002]),
    ],
)
def test_the_time_of_a_pair_is_in_its_middle(indices, fps, expected):
    assert IN_WORDS.times_of(100, fps, indices).seconds == pytest.approx(expected, abs=1e-12)


def test_positions_tell_the_time():
    times = IN_POSITIONS.times_of(300, 30.0, list(range(0, 300, 15)))
    assert times.interval == 1.0
    assert IN_POSITIONS.positions(times) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    # Pairs that follow each other fast may have one position.
    assert IN_POSITIONS.positions(Times([0.0] * 4, 0.3)) == [0, 0, 1, 1]


def test_frames_say_what_they_are():
    known = read_metadata("video", {}, 3, IN_WORDS)
    assert known == (3, 2.0, [0, 1, 2], False)
    given = {"fps": 30, "frames_indices": np.array([0, 30, 60]), "total_num_frames": 90}
    assert read_metadata("video", given, 3, IN_WORDS) == (90, 30.0, [0, 30, 60], False)
    given = given | {"total_num_frames": np.int64(90), "fps": np.float32(30)}
    assert read_metadata("video", given, 3, IN_WORDS) == (90, 30.0, [0, 30, 60], False)
    del given["total_num_frames"]
    assert read_metadata("video", given, 3, IN_WORDS).total == 61


@pytest.mark.parametrize(
    "given",
    [
        {"fps": 0}, {"fps": "2"}, {"fps": True}, {"frames_indices": [0, 1]},
        {"frames_indices": [2, 1, 0]}, {"frames_indices": [0, 1, -1]}, {"do_sample_frames": 1.5},
        {"total_num_frames": 2}, {"speed": 2}, [2.0], {"do_sample_frames": 1},
        {"do_sample_frames": np.array([1, 0])}, {"do_sample_frames": True, "total_num_frames": 3},
        {"do_sample_frames": True, "frames_indices": [0, 1, 2]},
        {"duration": "2"}, {"width": 2.5}, {"height": [24]}, {"video_backend": 1},
    ],
)  # fmt: skip
def test_malformed_words_of_frames_are_refused(given):
    with pytest.raises(ValidationError, match="video"):
        read_metadata("video", given, 3, IN_WORDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen"))


def read(*args, **kwargs):
    return read_spec(*args, **kwargs).video


def read_spec(model, path, *, kwargs=(), file=None, max_videos=8, wants=True):
    """How videos are made, with such a file of their processor."""
    tokens = VideoWanted(6, 4, 5, None)
    wanted = Wanted("Qwen2VLImageProcessor", 4, 2, 3, video=tokens)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (path / name).write_bytes((model / name).read_bytes())
    if file is not None:
        its = read_json(model / "preprocessor_config.json") | file
        (path / "video_preprocessor_config.json").write_text(json.dumps(its))
    changes = dict(kwargs)
    spec = read_image_spec(
        path, wanted, changes=changes, max_images=1, max_videos=max_videos, wants_videos=wants
    )
    assert spec is not None
    return spec


def test_files_say_how_videos_are_made(model, tmp_path):
    size = {"shortest_edge": 1024, "longest_edge": 8192}
    file = {"size": size, "video_processor_type": "Qwen3VLVideoProcessor", "fps": 1}
    found = read(model, tmp_path, file=file)
    assert found == msgspec.structs.replace(IN_WORDS, fps=1.0)
    changes = {"num_frames": 6, "videos_kwargs": {"max_pixels": 2048}}
    found = read(model, tmp_path, file=file, kwargs=changes)
    assert (found.num_frames, found.resizing) == (6, TotalArea(1024, 2048))
    assert read(model, tmp_path, max_videos=0) is None
    # As transformers writes what it does not use.
    nulls = dict.fromkeys(("fps", "num_frames", "min_frames", "max_frames", "cap_pixels_per_frame"))
    assert read(model, tmp_path, file={"size": size} | nulls) == IN_WORDS
    nested = {"video_processor": {"size": size, "fps": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read(model, tmp_path, file=file).fps == 3.0, "transformers takes this one, too"
    (tmp_path / "processor_config.json").unlink()
    # As does what is nested of images, and where nothing else is said of videos, their own file.
    fields = read_json(model / "preprocessor_config.json")
    nested = {"image_processor": fields | {"size": {"shortest_edge": 256, "longest_edge": 1024}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_spec(model, tmp_path).resizing == Area(min_pixels=256, max_pixels=1024)
    (tmp_path / "processor_config.json").unlink()
    of_file = read(model, tmp_path, file=file | {"fps": None, "num_frames": 9})
    assert of_file == msgspec.structs.replace(IN_WORDS, num_frames=9)
    assert read(model, tmp_path, file=file | {"num_frames": 9}, kwargs={"fps": 3}).fps == 3.0


@pytest.mark.parametrize(
    ("kwargs", "file", "reason"),
    [
        ({"fps": 0}, {}, "from 0.001"),
        ({"fps": 1, "num_frames": 4}, {}, "num_frames says otherwise"),
        ({"num_frames": 769}, {}, "from 1 to 768"),
        ({"max_frames": 0}, {}, "from 1 to 768"),
        ({"num_frames": 9, "max_frames": 8}, {}, "max_frames is 8"),
        ({"min_frames": 9}, {"max_frames": 8}, "max_frames is 8"),
        ({}, {"max_frames": 769}, 'max_frames=769 .*"video": 0'),
        ({"videos_kwargs": {"crop": 1}}, {}, "it may have"),
        ({"videos_kwargs": {"max_pixels": 10_000}}, {}, "at most 4096"),
        ({"fps": 1, "crop": 1}, {}, "may be changed"),
        ({}, {"cap_pixels_per_frame": True}, "not supported"),
        ({}, {"video_processor_type": "Qwen2VLVideoProcessor"}, "not supported"),
        ({}, {"image_mean": [0.5, 0.5, 0.5]}, '"video": 0'),
        ({}, {"size": {"shortest_edge": 0}}, "areas of videos"),
    ],
)
def test_what_videos_cannot_have_is_refused(model, tmp_path, kwargs, file, reason):
    with pytest.raises((ValidationError, UnsupportedModelError), match=reason):
        read(model, tmp_path, kwargs=kwargs, file=file)


def test_without_videos_that_are_supported_images_are(model, tmp_path, caplog):
    assert read(model, tmp_path, file={"cap_pixels_per_frame": True}, wants=False) is None
    assert "there are no videos in prompts" in caplog.text
    with pytest.raises(ValidationError, match="from 0.001"):
        read(model, tmp_path, kwargs={"fps": "x"}, max_videos=0)
