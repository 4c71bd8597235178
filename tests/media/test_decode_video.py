"""Files of videos become the pairs of frames that their rules choose; others are refused."""

import base64
import io
import sys

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL")

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ValidationError
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.decode_video import MAX_FRAME_PIXELS
from jaxllm.media.frames import Room
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Area, UndecodableError
from jaxllm.media.videos import read_video
from jaxllm.media_config import MediaConfig
from tests.media.models import OPTIONS, encoded, make_qwen3, picture
from tests.media.test_frames import IN_POSITIONS, IN_WORDS

SPEC = ImageSpec(
    patch_size=4, merge=2, resizing=Area(min_pixels=256, max_pixels=4096), resample=3,
    scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), image_token="[IMG]", image_token_id=3,
    has_grid_positions=True, max_images=4, video=IN_POSITIONS,
)  # fmt: skip
ROOM = Room(1000, 1000)
KINDS = {
    "mp4": ("mp4", "mpeg4"), "h264": ("mp4", "libx264"), "webm": ("webm", "libvpx-vp9"),
    "matroska": ("matroska", "ffv1"), "avi": ("avi", "mpeg4"),
}  # fmt: skip


def video_file(kind="mp4", number=20, height=32, width=48, fps=10, turned=0, title=None):
    """A file of grey frames, the first of 0 and each next one lighter by 10, with a bright corner
    above on the left."""
    av = pytest.importorskip("av")
    container, codec = KINDS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if title is not None:
            output.metadata["title"] = title
        if turned:
            stream.set_display_rotation(turned)
        for index in range(number):
            pixels = np.full((height, width, 3), 10 * index % 200, np.uint8)
            pixels[: height // 2, : width // 2] += 50
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def process():
    process = DecodeProcess(SPEC)
    yield process
    process.close()


def light_of(clip):
    """Of each frame the mean of its last patch, below on the right, where it is plain."""
    patches = [np.frombuffer(pair, np.uint8).reshape(-1, 3, 2, 16) for pair in clip.pairs]
    return [float(pair[-1, :, frame].mean()) for pair in patches for frame in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_frames_are_decoded(kind, process):
    clip = process.video(video_file(kind), ROOM)
    assert (clip.rows, clip.columns) == (8, 12)
    # 2 of 10 frames a second.
    assert light_of(clip) == pytest.approx([0, 50, 100, 150], abs=6)
    assert clip.times.seconds == pytest.approx([0.25, 1.25]) and clip.times.interval == 1.0


def test_a_single_frame_is_doubled(process):
    clip = process.video(video_file(number=1), ROOM)
    assert light_of(clip) == pytest.approx([0, 0], abs=6)


@pytest.mark.parametrize(("turned", "corner"), [(90, "below"), (-90, "right"), (180, "across")])
def test_videos_are_turned_as_their_file_says(process, turned, corner):
    """Against the clock: what is above on the left goes below on the left."""
    clip = process.video(video_file(turned=turned, number=2), ROOM)
    assert (clip.rows, clip.columns) == ((8, 12) if turned == 180 else (12, 8))
    patches = np.frombuffer(clip.pairs[0], np.uint8).reshape(-1, 3, 2, 16)[:, 0, 0].mean(axis=1)
    above, below = patches[0], patches[-1]
    of_corner = {"below": (0, 0), "right": (0, 0), "across": (0, 50)}[corner]
    assert (above, below) == pytest.approx(of_corner, abs=6)
    # The other two corners: the tokens of a row lie one behind the other.
    right, left = patches[clip.columns * 2 - 1], patches[-clip.columns * 2]
    expected = {"below": (0, 50), "right": (50, 0), "across": (0, 0)}[corner]
    assert (right, left) == pytest.approx(expected, abs=6)


HOSTILE = {
    "cut off": (lambda: video_file("h264")[:-200], "damaged"),
    "cut off behind its head": (lambda: video_file("avi")[:6200], "damaged"),
    "cut off inside its head": (lambda: video_file()[:-300], "damaged"),
    "its head alone": (lambda: video_file()[:40], "damaged"),
    "an image": (lambda: encoded(picture(8, 8)), "not a video file"),
    "a playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "not a video file"),
    "a list of files": (lambda: b"ffconcat version 1.0\nfile /etc/hostname\n", "not a video file"),
    "nothing": (lambda: b"", "not a video file"),
    "noise": (lambda: b"\x00\x00\x00\x1cftyp" + bytes(range(256)) * 40, "damaged"),
    "large frames": (lambda: video_file("mp4", 1, 4096, 4112), f"at most {MAX_FRAME_PIXELS}"),
    "long edges": (lambda: video_file("matroska", 2, 2, 404), "more than 200 times"),
    "many tokens": (
        lambda: video_file("mp4", 24, 64, 64, fps=2),
        "for fewer than 700 \\(max_model_len=1000",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_is_lost(name, process):
    make, reason = HOSTILE[name]
    good = video_file()
    with pytest.raises(UndecodableError, match=reason):
        process.video(make(), Room(700, 1000))
    assert len(process.video(good, ROOM).pairs) == 2


def test_a_file_of_too_many_frames_is_refused(process, monkeypatch):
    from jaxllm.media import decode_video

    monkeypatch.setattr(decode_video, "MAX_FRAMES_OF_FILE", 8)
    for kind in ("mp4", "webm"):  # which says its number, and which does not
        with pytest.raises(UndecodableError, match="from 1 to 8 are allowed"):
            decode_video.decode_video(video_file(kind, 9), SPEC, ROOM)


def test_no_other_file_is_opened(tmp_path, monkeypatch):
    """Were a playlist taken for a video."""
    from jaxllm.media import decode_video

    (tmp_path / "a.mp4").write_bytes(video_file())
    lines = ("#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", tmp_path / "a.mp4")
    data = "\n".join(map(str, [*lines, "#EXT-X-ENDLIST", ""])).encode()
    monkeypatch.setattr(decode_video, "_kind", lambda data: "hls")
    with pytest.raises(UndecodableError, match="names other files"):
        decode_video.decode_video(data, SPEC, ROOM)


def test_an_answer_without_memory_is_an_error(monkeypatch):
    from jaxllm.media import decode_process

    encode = msgspec.msgpack.encode

    def fails(answer):
        if answer.error is None:
            raise MemoryError
        return encode(answer)

    monkeypatch.setattr(decode_process.msgspec.msgpack, "encode", fails)
    work = decode_process.Work("image", [encoded(picture(8, 8))])
    answer = msgspec.msgpack.decode(decode_process._answer(work, SPEC), type=decode_process.Answer)
    assert answer.error and "too much memory" in answer.error


def test_what_takes_too_long_is_killed():
    data = video_file("h264", 400, 64, 64)
    process = DecodeProcess(SPEC, timeout_s=1e-4)
    try:
        with pytest.raises(UndecodableError, match="takes too long"):
            process.video(data, Room(100_000, 100_000))
    finally:
        process.close()


def test_without_pyav_files_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    process = DecodeProcess(SPEC)
    with pytest.raises(ValidationError, match=r"pip install 'jaxllm\[video\]'"):
        process.video(b"", ROOM)
    process.close()


def test_frames_in_files_are_decoded_as_images(process):
    times = IN_WORDS.times_of(3, 2.0, [0, 1, 2])
    files = [encoded(np.full((24, 16, 3), 40 * index, np.uint8)) for index in range(3)]
    clip = process.frames(files, times, ROOM)
    assert light_of(clip) == [0, 40, 80, 80] and clip.times == times
    with pytest.raises(UndecodableError, match="not an image file"):
        process.frames([*files, b"text"], times, ROOM)
    with pytest.raises(UndecodableError, match="several sizes"):
        process.frames([*files, encoded(picture(24, 24))], times, ROOM)


def test_prompts_and_chats_have_files(tmp_path):
    """A request names them as it names images."""
    data = video_file()
    (tmp_path / "a.mp4").write_bytes(data)
    path = make_qwen3(tmp_path / "model")
    llm = LLM(path, **OPTIONS, allowed_local_media_path=str(tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=3)
    try:
        urls = [
            f"data:video/mp4;base64,{base64.b64encode(data).decode()}",
            f"file://{tmp_path}/a.mp4",
        ]
        parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
        chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
                 for part in parts]  # fmt: skip
        (first, second) = llm.chat(chats, params, use_tqdm=False)
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        text = {"prompt": first.prompt, "multi_modal_data": {"video": str(tmp_path / "a.mp4")}}
        (third,) = llm.generate(text, params, use_tqdm=False)
        assert third.prompt_token_ids == first.prompt_token_ids
        assert third.outputs[0].token_ids == first.outputs[0].token_ids
        words = llm.get_tokenizer().decode(third.prompt_token_ids)
        assert "<0.3 seconds>" in words and "<1.6 seconds>" in words  # of frames 0, 6, 13 and 19
    finally:
        llm.shutdown()


def test_a_spec_travels_to_the_process():
    for spec in (SPEC, msgspec.structs.replace(SPEC, video=IN_WORDS)):
        assert msgspec.json.decode(msgspec.json.encode(spec), type=ImageSpec) == spec


def test_frames_that_a_cut_has_hidden_are_not_seen(process):
    """A cut that encodes nothing anew begins at an earlier frame, and hides what is before it."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(io.BytesIO(video_file("h264"))) as given, av.open(file, "w", format="mp4") as cut:
        stream = given.streams.video[0]
        its = cut.add_stream_from_template(stream)
        for packet in given.demux(stream):
            if packet.dts is not None:
                moved = 5 * packet.duration  # the first ones are before the beginning
                packet.pts, packet.dts, packet.stream = packet.pts - moved, packet.dts - moved, its
                cut.mux(packet)
    with av.open(io.BytesIO(file.getvalue())) as found:
        assert found.streams.video[0].frames == 20
        assert len(list(found.decode(video=0))) < 20, "nothing is hidden"
    clip = process.video(file.getvalue(), ROOM)
    assert len(clip.pairs) == 2 and light_of(clip)[0] > 30


def test_a_title_in_another_encoding_does_no_harm(process):
    title = "caf\xe9".encode()
    data = video_file("avi", title="caf\xe9")
    assert title in data
    clip = process.video(data.replace(title, b"caf\xe9\x20"), ROOM)
    assert len(clip.pairs) == 2


def test_a_path_that_is_too_long_is_no_directory(process):
    with pytest.raises(ValidationError, match="no such file"):
        read_video("video", "a" * 5000, SPEC, process, MediaConfig(), ROOM)
