"""Framing: what is encoded decodes to itself byte by byte, and no bytes at all raise anything but
WireError.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.kv_transfer import wire

EPOCHS = st.binary(min_size=16, max_size=16)
REASONS = st.none() | st.text(max_size=100)
MESSAGES = {
    (wire.encode_hello, wire.decode_hello): st.builds(
        wire.KvHello, st.text(max_size=60), st.sampled_from([(), ("nixl",), ("nixl", "ucx")])
    ),
    (wire.encode_reply, wire.decode_reply): st.builds(wire.Reply, REASONS)
    | st.builds(wire.Reply, st.none(), st.sampled_from(["nixl", "ucx"])),
    (wire.encode_attach, wire.decode_request): st.builds(
        wire.Attach, EPOCHS, st.binary(max_size=200)
    ),
    (wire.encode_attached, wire.decode_attached): st.builds(wire.Attached, st.binary(max_size=200))
    | st.builds(wire.Attached, st.just(b""), st.text(max_size=100)),
    (wire.encode_probe, wire.decode_request): st.builds(
        wire.CarrierProbe,
        st.integers(0, 2**64 - 1),
        st.binary(min_size=wire.PROBE_BYTES, max_size=wire.PROBE_BYTES),
    ),
    (wire.encode_header, wire.decode_request): st.builds(
        wire.Header,
        EPOCHS,
        st.tuples(st.integers(0, 99), st.integers(100, wire.MAX_HEADS)).map(
            lambda ends: range(*ends)
        ),
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=wire.MAX_FRAME_BLOCKS).map(tuple),
        st.integers(1, wire.MAX_PAYLOAD_BYTES),
        st.none() | st.integers(0, 2**64 - 1),
    ),
    (wire.encode_ack, wire.decode_ack): st.builds(wire.Ack, EPOCHS, REASONS),
}
CODECS_AND_MESSAGES = st.sampled_from(list(MESSAGES)).flatmap(
    lambda codec: st.tuples(st.just(codec), MESSAGES[codec])
)
INLINE = bytes(9)
HEADS = b"\x00\x00\x00\x01"
DECODERS = [decode for _, decode in MESSAGES]


@given(CODECS_AND_MESSAGES, st.binary(min_size=1, max_size=20))
def test_message_read_by_what_is_missing_is_itself_and_takes_no_byte_more(
    codec_and_message, following
):
    (encode, decode), message = codec_and_message
    stream = encode(message) + following
    data = b""
    while isinstance(result := decode(data), int):
        assert result > 0
        data = stream[: len(data) + result]
    assert result == message
    assert data == encode(message)


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_decode_of_any_bytes_raises_nothing_but_wire_error(decode, data):
    try:
        missing = decode(data)
    except wire.WireError:
        return
    assert not isinstance(missing, int) or 0 < missing <= wire.MAX_BLOB_BYTES


@given(CODECS_AND_MESSAGES, st.integers(0, 10**6), st.integers(1, 255))
def test_decode_of_one_damaged_byte_raises_nothing_but_wire_error(
    codec_and_message, position, flip
):
    (encode, decode), message = codec_and_message
    data = bytearray(encode(message))
    data[position % len(data)] ^= flip
    try:
        result = decode(bytes(data))
    except wire.WireError:
        return
    assert result != message


@pytest.mark.parametrize(
    ("decode", "data", "reason"),
    [
        (wire.decode_hello, b"GET / HTTP/1.1\r\n\r\n", "not a KV port"),
        (wire.decode_hello, b"PDCKV\r\n\x00\x00\x09\x00\x01", "version 9 is not 3"),
        (
            wire.decode_hello,
            b"PDCKV\r\n\x00\x00\x03\xff\xff\x00\x00",
            "engine_id bytes: 65535 is over the limit of 256",
        ),
        (wire.decode_reply, b"PDCKV\r\n\x00\x00\x03\x00\xff\xff", "reason bytes"),
        (wire.decode_reply, b"PDCKV\r\n\x00\x00\x03\x07\x00\x00", "unknown status 7"),
        (wire.decode_request, bytes(45), "not a frame header"),
        (
            wire.decode_request,
            b"KVFR" + bytes(16) + HEADS + bytes(8) + b"\x00\x00\x00\x01" + INLINE,
            "no blocks",
        ),
        (
            wire.decode_request,
            b"KVFR" + bytes(16) + HEADS + bytes(7) + b"\x01" + b"\xff" * 4 + INLINE,
            "blocks of a frame: 4294967295 is over",
        ),
        (
            wire.decode_request,
            b"KVFR" + bytes(16) + HEADS + b"\xff" * 8 + b"\x00\x00\x00\x01" + INLINE,
            "payload bytes of a frame: .* is over",
        ),
        (
            wire.decode_request,
            b"KVFR" + bytes(16) + b"\x00\x02\x00\x02" + b"\x00\x00\x00\x01" * 3 + INLINE,
            "no heads: 2 to 2",
        ),
        (
            wire.decode_request,
            b"KVFR" + bytes(16) + HEADS + b"\x00\x00\x00\x01" * 3 + b"\x00" + b"\x01" * 8,
            "unknown place",
        ),
        (
            wire.decode_request,
            b"KVAT" + bytes(16) + b"\xff" * 4,
            "bytes of a carrier: 4294967295 is over",
        ),
        (wire.decode_attached, bytes(9), "not an answer to attach"),
        (wire.decode_ack, bytes(23), "not an acknowledgement"),
    ],
)
def test_decode_names_what_is_wrong_before_asking_for_more(decode, data, reason):
    with pytest.raises(wire.WireError, match=reason):
        decode(data)


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (wire.encode_hello, wire.KvHello("e" * 257)),
        (wire.encode_attach, wire.Attach(bytes(16), bytes(wire.MAX_BLOB_BYTES + 1))),
        (wire.encode_probe, wire.CarrierProbe(0, b"short")),
        (wire.encode_header, wire.Header(bytes(17), range(1), (1,), 1)),
        (wire.encode_header, wire.Header(bytes(16), range(1), (1,) * 257, 1)),
        (wire.encode_header, wire.Header(bytes(16), range(1), (), 0)),
        (wire.encode_header, wire.Header(bytes(16), range(1), (1,), wire.MAX_PAYLOAD_BYTES + 1)),
        (wire.encode_header, wire.Header(bytes(16), range(2, 2), (1,), 1)),
        (wire.encode_header, wire.Header(bytes(16), range(wire.MAX_HEADS + 1), (1,), 1)),
        (wire.encode_ack, wire.Ack(bytes(17))),
    ],
)
def test_encode_refuses_what_the_peer_would_refuse(encode, message):
    with pytest.raises(wire.WireError):
        encode(message)


def test_encode_cuts_a_long_refusal():
    assert wire.decode_ack(wire.encode_ack(wire.Ack(bytes(16), "r" * 5000))) == wire.Ack(
        bytes(16), "r" * wire.MAX_REASON_BYTES
    )
