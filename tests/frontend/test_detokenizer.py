import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KINDS = ["byte_level", "byte_fallback", "metaspace", "wordpiece", "python_bytes"]
# Byte fallback is compared on runs that are valid or invalid as a whole; see the module.
EXACT_KINDS = [kind for kind in KINDS if kind != "byte_fallback"]
INVALID = "\N{REPLACEMENT CHARACTER}"

each_kind = pytest.mark.parametrize("kind", KINDS)
fixed_fixtures = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def decode(tokenizer, token_ids, skip_special_tokens):
    return tokenizer.hf.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def split(data, token_ids):
    """Cut the ids into parts, some of them empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=40)))
    return [token_ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]


def assert_same_but_for_withheld(text, whole):
    assert whole.startswith(text)
    withheld = whole[len(text) :]
    assert withheld == INVALID * len(withheld)
    assert len(withheld) <= 3


@pytest.mark.parametrize("kind", EXACT_KINDS)
@fixed_fixtures
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_add_up_to_the_whole_text(kind, data, skip, request):
    tokenizer = request.getfixturevalue(kind)
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer.hf) - 1), max_size=60))

    stream = tokenizer.detokenizer.stream(skip_special_tokens=skip)
    text = "".join(stream.append(part) for part in split(data, token_ids))

    assert_same_but_for_withheld(text, decode(tokenizer, token_ids, skip))


@fixed_fixtures
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_byte_fallback_add_up_to_the_whole_text(data, skip, byte_fallback):
    def of_bytes(data):
        return [3 + byte for byte in data]

    piece = st.one_of(st.integers(0, 2), st.integers(259, len(byte_fallback.hf) - 1))
    parts = st.one_of(
        st.lists(piece, max_size=3),
        st.text(max_size=3).map(lambda text: of_bytes(text.encode())),
        st.tuples(piece, st.sampled_from([b"\xff", b"\x80\x80", b"\xe4\xbd", b"\xf0\x9f"]), piece)
        .map(lambda part: [part[0], *of_bytes(part[1]), part[2]])
        .filter(lambda part: part[0] > 2 and part[-1] > 2),
    )
    token_ids = sum(data.draw(st.lists(parts, max_size=12)), [])

    stream = byte_fallback.detokenizer.stream(skip_special_tokens=skip)
    text = "".join(stream.append(part) for part in split(data, token_ids))

    assert_same_but_for_withheld(text, decode(byte_fallback, token_ids, skip))


@each_kind
@fixed_fixtures
@given(prompt=st.text("helo sw", min_size=1), answer=st.text("helo sw你", min_size=1))
def test_answer_continues_the_text_of_its_prompt(kind, prompt, answer, request):
    tokenizer = request.getfixturevalue(kind)
    prompt_ids = tokenizer.hf(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer.hf(answer, add_special_tokens=False)["input_ids"]

    text = tokenizer.detokenizer.stream(prompt_token_ids=prompt_ids).append(answer_ids)

    assert decode(tokenizer, prompt_ids, True) + text == decode(
        tokenizer, [*prompt_ids, *answer_ids], True
    )


def test_first_token_of_all_loses_the_space_that_a_later_one_keeps(byte_fallback):
    hello = byte_fallback.hf.convert_tokens_to_ids("▁hello")
    bos = byte_fallback.hf.bos_token_id
    stream = byte_fallback.detokenizer.stream
    assert stream(prompt_token_ids=[bos]).append([hello]) == "hello"
    assert stream(prompt_token_ids=[bos, hello]).append([hello]) == " hello"


def test_unfinished_character_is_withheld_until_it_is_whole(byte_level):
    ids = [byte_level.hf.convert_tokens_to_ids(char) for char in "ðŁĺĥ"]  # 😃, byte by byte
    stream = byte_level.detokenizer.stream()
    assert [stream.append([token]) for token in ids] == ["", "", "", "😃"]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_character_that_the_prompt_left_unfinished_is_finished(byte_level, num_bytes):
    ids = [byte_level.hf.convert_tokens_to_ids(char) for char in "ðŁĺĥ"]
    stream = byte_level.detokenizer.stream(prompt_token_ids=ids[:num_bytes])
    assert stream.append(ids[num_bytes:]) == "😃"


@pytest.mark.parametrize("kind", ["byte_level", "python_bytes"])
def test_invalid_byte_is_shown_once_other_text_follows(kind, request):
    tokenizer = request.getfixturevalue(kind)
    first, *_, letter = tokenizer.hf.encode("你a", add_special_tokens=False)
    if kind == "byte_level":
        first = tokenizer.hf.convert_tokens_to_ids("ä")  # the byte 0xE4
    stream = tokenizer.detokenizer.stream()
    assert [stream.append([first]), stream.append([letter])] == ["", INVALID + "a"]


def test_byte_fallback_keeps_characters_that_were_shown_before_an_invalid_byte(byte_fallback):
    ids = [3 + byte for byte in "你".encode() + b"\xff\xe4"]
    stream = byte_fallback.detokenizer.stream()
    shown = "".join(stream.append([token]) for token in ids)
    assert shown + stream.append([byte_fallback.hf.convert_tokens_to_ids("h")]) == (
        "你" + INVALID + INVALID + "h"
    )


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "python_bytes"])
def test_endless_continuation_bytes_come_out_as_they_go_in(kind, request):
    tokenizer = request.getfixturevalue(kind)
    name = {"byte_level": "¡", "byte_fallback": "<0xA1>", "python_bytes": "b161"}[kind]
    token = tokenizer.hf.convert_tokens_to_ids(name)
    stream = tokenizer.detokenizer.stream()
    shown = 0
    for count in range(1, 500):
        shown += len(stream.append([token]))
        assert shown >= count - 3


def test_window_of_a_slow_tokenizer_is_bounded(python_bytes):
    python_bytes.hf.longest_decode = 0
    stream = python_bytes.detokenizer.stream()
    for token in [0xA1] * 300 + list("你好 hello".encode() * 30):
        stream.append([token])
    assert python_bytes.hf.longest_decode < 32


def test_ids_that_the_tokenizer_lacks_have_no_text(byte_level, metaspace, python_bytes):
    for tokenizer in (byte_level, metaspace, python_bytes):
        assert tokenizer.detokenizer.stream().append([100_000]) == ""
        assert tokenizer.detokenizer.token_text(100_000) == ""


def test_spaces_between_special_tokens_can_be_left_out(wordpiece):
    ids = [3, 1, 2, 2, 3]
    texts = []
    for spaces in (True, False):
        stream = wordpiece.detokenizer.stream(
            skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        texts.append("".join(stream.append([token]) for token in ids))
    assert texts == ["he [SEP] [MASK] [MASK] he", "he [SEP][MASK][MASK] he"]


def test_token_text_shows_space_and_special_tokens(byte_fallback):
    ids = byte_fallback.hf.convert_tokens_to_ids(["▁hello", "</s>", "<0x41>", "<0xE4>"])
    texts = [byte_fallback.detokenizer.token_text(token) for token in ids]
    assert texts == [" hello", "</s>", "A", INVALID]


class Piece(bytes):
    def __radd__(self, all_so_far):
        raise AssertionError("all so far is copied for each token of a long text")


def test_long_text_takes_time_in_proportion_to_its_length(byte_level, monkeypatch):
    token = byte_level.hf.convert_tokens_to_ids(" ö<x> ")
    known = byte_level.detokenizer._bytes
    monkeypatch.setitem(known, token, Piece(known[token]))
    assert byte_level.decode([token] * 400) == " ö<x> " * 400
