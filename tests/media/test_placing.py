"""The tokens of videos in prompts."""

import msgspec
import pytest

from jaxllm.errors import ValidationError
from jaxllm.media.frames import Clip, Times
from jaxllm.media.placing import MAX_POSITIONS_IN_TIME, Media, place
from tests.media.test_decode import SPEC
from tests.media.test_frames import IN_POSITIONS

VIDEO = msgspec.structs.replace(SPEC, video=IN_POSITIONS, break_token_id=None, end_token_id=None)


def slow(interval):
    """Two pairs of frames so many seconds apart, of one token each."""
    return Clip(2, 2, [b"first", b"second"], Times([0.0, interval], interval))


def placed(*clips):
    return place([7, *[4, 6, 5] * len(clips), 8], Media(videos=clips), VIDEO, None)


def test_videos_take_no_more_positions_than_there_are():
    most = MAX_POSITIONS_IN_TIME / IN_POSITIONS.positions_per_second
    tokens, items = placed(slow(most / 4), slow(most / 2))
    assert tokens == [7, *[4, 6, 6, 5] * 2, 8]
    assert [item.time for item in items] == [0, 1 << 21, 0, 1 << 22]
    for clips in ([slow(2 * most)], [slow(most / 4)] * 5, [slow(1e15)]):
        with pytest.raises(ValidationError, match=f"more than {MAX_POSITIONS_IN_TIME} positions"):
            placed(*clips)
