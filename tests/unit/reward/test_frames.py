"""Messages between scorer and worker survive any cut of the stream, and nothing else passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.frames import MAX_ANSWER_BYTES, FrameBuffer, decode, encode

messages = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(sent=st.lists(messages, max_size=5), piece=st.integers(min_value=1, max_value=50))
def test_messages_come_out_whole_however_the_stream_is_cut(sent: list[object], piece: int) -> None:
    stream = b"".join(encode(message) for message in sent)
    frames = FrameBuffer()
    got = [m for at in range(0, len(stream), piece) for m in frames.feed(stream[at : at + piece])]
    assert got == sent


def test_a_lone_surrogate_from_a_broken_tokenizer_passes() -> None:
    assert decode(encode("\ud800 ok")[4:]) == "\ud800 ok"


def test_nan_is_no_message() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode([float("nan")])
    with pytest.raises(ValueError, match="NaN is no JSON"):
        decode(b"[NaN]")


def test_a_frame_of_absurd_length_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="frame of"):
        list(FrameBuffer().feed((MAX_ANSWER_BYTES + 1).to_bytes(4, "big")))
