import numpy as np

from jaxllm.executor.wire import (
    Arrived,
    Execute,
    Figures,
    FilesChanged,
    Move,
    Sample,
    StepDone,
    decode_from_leader,
    decode_to_leader,
    encode,
)
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.schedule import (
    Admission,
    BlockMoves,
    DraftedResult,
    LateMasks,
    LogprobArrays,
    Schedule,
    StepResult,
)


def assert_same(one, other):
    """Equal, with arrays of the same type and shape."""
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, tuple):
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, mine in one.items():
            assert_same(mine, other[key])
    else:
        assert one == other


def test_a_schedule_travels_whole():
    rows = np.arange(3, dtype=np.int32)
    admission = Admission(
        slot=2,
        sampling_params=SamplingParams(top_k=4, logit_bias={3: 1.5}, extra_args={"a": [1, "b"]}),
        seed=2**64 - 1,
        stop_token_ids=[1],
        bad_word_ids=[[1, 2]],
        prompt_token_ids=[1, 2],
        output_token_ids=[],
    )
    schedule = Schedule(
        step=7,
        num_decodes=2,
        slots=rows,
        num_tokens=rows[::-1],  # not as it lies in memory
        context_lens=rows,
        starts=rows,
        samples=rows > 1,
        token_ids=np.array([-1], np.int32),
        block_updates=np.zeros((0, 4), np.int32),
        num_drafts=rows[::-1],
        admissions=[admission],
        wants_logprobs=True,
        slices={"grammar": {"masks": np.ones((2, 3), np.int32), "count": np.array(2, np.int32)}},
        needs_mixed=True,
        late_rows=np.array([1], np.int32),
    )
    message = decode_from_leader(encode(Execute(3, schedule)))
    assert isinstance(message, Execute) and message.replica == 3
    for name in Schedule.__slots__:
        assert_same(getattr(schedule, name), getattr(message.schedule, name))


def test_masks_travel_whole():
    bits = np.array([[-1, 7], [0, -(2**31)]], np.int32)
    masks = LateMasks(bits, np.array([[5], [-1]], np.int32), bits[:1])
    message = decode_from_leader(encode(Sample(2, masks)))
    assert isinstance(message, Sample) and message.replica == 2
    assert_same(masks, message.masks)


def test_a_result_travels_whole():
    logprobs = LogprobArrays(
        np.ones((2, 3), np.int32),
        np.full((2, 3), -0.5, np.float32),
        np.ones(2, np.int32),
        np.full(2, 1.5, np.float32),
    )
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    slices = {"pooling": {"sums": np.full((2, 4), 0.5, np.float32)}}
    one = np.arange(2, dtype=np.int32)
    drafted = DraftedResult(one, one[::-1], np.ones((2, 4), np.int32), logprobs)
    result = StepResult(one, logprobs, logits, slices, drafted)
    message = decode_to_leader(encode(StepDone(1, result, Figures(num_token_rows=5))))
    assert isinstance(message, StepDone) and message.figures == Figures(num_token_rows=5)
    assert_same(result, message.result)


def test_moves_and_what_becomes_of_them_travel_whole():
    stores = np.array([[0, 4, 1], [1, 2, 0]], np.int32)
    moves = BlockMoves(
        number=3,
        stores=stores,
        contents=[b"\0one", b"two"],
        loads=stores[:0],
        reads=[(0, 2, b"three")],
    )
    message = decode_from_leader(encode(Move(2, moves)))
    assert isinstance(message, Move) and message.replica == 2
    for name in BlockMoves.__slots__:
        assert_same(getattr(moves, name), getattr(message.moves, name))
    for report in (
        Arrived(rank=1, replica=2, number=3, failed=[(1, b"two"), (0, b"\0one")]),
        FilesChanged(rank=1, replica=2, gained=[(0, b"two")], lost=[(1, b"\0one")]),
    ):
        assert decode_to_leader(encode(report)) == report
