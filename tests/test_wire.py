"""The payload header, and the frames that carry payloads."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_fec import PayloadError, wire
from hvd_fec.codecs import FecCodec

X = np.where(np.arange(3000) % 50 == 0, np.arange(3000) - 1501, 0).astype(np.float32)
PAYLOAD = FecCodec(0).encode(X)
DECODED = FecCodec(0).decode(PAYLOAD)


def as_list(arrays):
    return [bytes(array) for array in arrays]


# ---- the header ---------------------------------------------------------------------------------


def test_payload_error_is_a_value_error():
    assert issubclass(PayloadError, ValueError)


def test_header_bytes():
    header = wire.Header(1, 3, 1, -2, 2**40, 2**33, (2**34, 5, 2**35))
    assert header.nbytes == 56 + 2**34 + 5 + 2**35
    payload = np.full(60, 7, np.uint8)
    header.write(payload)
    assert payload.tobytes().hex() == (
        "48464543 01 01 03 01 feff 000000000000 0000000000010000 0000000002000000"
        "0000000004000000 0500000000000000 0000000008000000 07070707"
    ).replace(" ", "")


def test_header_is_read_as_written():
    header = wire.read_header(PAYLOAD)
    sections = len(PAYLOAD) - 56 - header.sections[1], header.sections[1], 0
    assert header == wire.Header(1, 3, 0, 0, 3000, 60, sections)
    assert header.nbytes == PAYLOAD.size
    longer = np.append(PAYLOAD, np.uint8(1))  # more may follow
    assert wire.read_header(longer) == header


def with_field(offset, form, value):
    payload = bytearray(PAYLOAD)
    struct.pack_into("<" + form, payload, offset, value)
    return bytes(payload)


N, KEPT, (CODES, SIGNS, _) = wire.read_header(PAYLOAD)[4:7]
DAMAGED = {
    "magic": (0, "4s", b"HFEX", r"b'HFEX', not b'HFEC'"),
    "version": (4, "B", 2, "version 2, .* version 1: install the same"),
    "codec": (5, "B", 9, "codec 9, FEC is 1"),
    "dtype 0": (6, "B", 0, r"dtype code 0, known are \[1, 2, 3, 4\]"),
    "dtype 5": (6, "B", 5, r"dtype code 5, known are \[1, 2, 3, 4\]"),
    "flag without a plane": (7, "B", 1, "flags 1 and a non-finite plane of 0 bytes"),
    "unknown flag": (7, "B", 2, "flags 2 and"),
    "unknown form": (10, "B", 2, "form 2, known are 0 to 1"),
    "threshold below": (8, "h", -127, "threshold -127, outside -126..113"),
    "threshold above": (8, "h", 114, "threshold 114, outside -126..113"),
    "reserved": (11, "B", 3, "byte 11 is reserved and 3, not zero"),
    "mantissa": (12, "I", 2**23, "mantissa 8388608, more than 23 bits"),
    "more than there is": (16, "Q", KEPT - 1, f"claims {KEPT} kept values of {KEPT - 1}"),
    "fewer elements": (16, "Q", N // 2, "chunk 0 of 1 has a code stream that runs past its plane"),
    "more chunks": (16, "Q", 2**20, f"needs a chunk table of 128 bytes, .* has {CODES}"),
    "more in the table": (16, "Q", 2 * 32768, r"chunk table adds up to \d+ \+ \d+ bytes, .* have"),
    "fewer kept": (24, "Q", KEPT - 1, f"claims {KEPT - 1} kept values and holds {KEPT}"),
    "more kept": (24, "Q", KEPT + 1, f"claims {KEPT + 1} kept values and holds {KEPT}"),
    "shorter codes": (32, "Q", CODES - 1, f"payload of {PAYLOAD.size - 1} bytes, followed by 1"),
    "longer codes": (32, "Q", CODES + 1, f"claims {PAYLOAD.size + 1} bytes, {PAYLOAD.size} are"),
    "shorter signs": (40, "Q", SIGNS - 1, f"payload of {PAYLOAD.size - 1} bytes, followed by 1"),
    "longer signs": (40, "Q", SIGNS + 1, f"claims {PAYLOAD.size + 1} bytes, {PAYLOAD.size} are"),
    "non-finite plane": (48, "Q", 2, f"claims {PAYLOAD.size + 2} bytes, {PAYLOAD.size} are there"),
    "code stream": (56, "H", 3, "chunk table adds up to 3 "),
    "sign stream": (58, "H", 65535, r"chunk table adds up to \d+ \+ 65535 bytes"),
}


@pytest.mark.parametrize("offset, form, value, message", DAMAGED.values(), ids=DAMAGED)
def test_damaged_header(offset, form, value, message):
    payload = with_field(offset, form, value)
    with pytest.raises(PayloadError, match=message):
        FecCodec().decode(payload)
    out = np.full(N, np.nan, np.float32)
    with pytest.raises(PayloadError, match=message):
        FecCodec().decode_add(payload, out)
    assert np.isnan(out).all()


def test_sections_must_match_the_table():
    """Lengths that add up to the payload's, but split it elsewhere."""
    payload = bytearray(PAYLOAD)
    struct.pack_into("<2Q", payload, 32, CODES - 1, SIGNS + 1)
    with pytest.raises(
        PayloadError, match=rf"adds up to {CODES - 4} \+ {SIGNS} bytes, the sections have"
    ):
        FecCodec().decode(payload)


def chunk(n, codes, signs, kept=None, nonfinite=""):
    """A payload of one chunk, given as hex."""
    codes, signs, nonfinite = (bytes.fromhex(part) for part in (codes, signs, nonfinite))
    sections = 4 + len(codes), len(signs), len(nonfinite)
    payload = bytearray(56)
    header = wire.Header(1, 3, bool(nonfinite), 0, n, n if kept is None else kept, sections)
    header.write(np.frombuffer(payload, np.uint8))
    return bytes(payload) + struct.pack("<2H", len(codes), len(signs)) + codes + signs + nonfinite


MALFORMED = {
    "codes too long": (chunk(4, "000000", ""), "a code stream longer than its plane"),
    "codes overrun": (chunk(20, "0a01", ""), "a code stream that runs past its plane"),
    "codes overrun by 255s": (chunk(20, "ffff0001", ""), "a code stream that runs past its plane"),
    "codes end in r": (chunk(20, "0101 05", ""), "a code stream with a zero literal or a run"),
    "codes end in 255": (chunk(20, "0101 ff", ""), "a code stream with a zero literal or a run"),
    "zero literal": (
        chunk(20, "0100", ""),
        "a code stream with a zero literal or a run at its end",
    ),
    "code of no element": (chunk(3, "1110", "", 3), "a code for an element that does not exist"),
    "the same in a run": (chunk(19, "0910", ""), "a code for an element that does not exist"),
    "signs too long": (chunk(2, "11", "0000"), "a sign stream longer than its plane"),
    "signs without codes": (chunk(2, "", "01"), "a sign stream longer than its plane"),
    "signs overrun": (chunk(48, "11" * 24, "0601"), "a sign stream that runs past its plane"),
    "signs end in r": (
        chunk(48, "11" * 24, "010102"),
        "a sign stream with a zero literal or a run",
    ),
    "signs end in 255": (chunk(48, "11" * 24, "ff"), "a sign stream with a zero literal or a run"),
    "zero sign literal": (chunk(48, "11" * 24, "0100"), "a sign stream with a zero literal or"),
    "sign of no value": (chunk(2, "01", "02", 1), "a sign for a value that was not kept"),
    "the same in a stream": (
        chunk(20, "11" * 10, "0210", 20),
        "a sign for a value that was not kept",
    ),
    "non-finite too long": (
        chunk(8, "", "", 0, "0101"),
        "non-finite plane is longer than 8 elements",
    ),
    "non-finite longer by zeros": (
        chunk(8, "", "", 0, "0100"),
        "non-finite plane is longer than 8 elements",
    ),
    "non-finite element": (chunk(7, "", "", 0, "80"), "non-finite plane is longer than 7 elements"),
    "non-finite literal": (
        chunk(24, "", "", 0, "0100"),
        "non-finite plane of 2 bytes is malformed",
    ),
    "non-finite overrun": (
        chunk(24, "", "", 0, "0301"),
        "non-finite plane of 2 bytes is malformed",
    ),
    "non-finite end": (chunk(24, "", "", 0, "ff"), "non-finite plane of 1 bytes is malformed"),
    "kept": (chunk(20, "0111", "", 3), "claims 3 kept values and holds 2"),
    "nothing to hold": (
        wire.HEADER.pack(b"HFEC", 1, 1, 3, 0, 0, 0, 0, 0, 0, 1, 0, 0) + b"0",
        "adds up to",
    ),
    "table of two": (
        wire.HEADER.pack(b"HFEC", 1, 1, 3, 0, 0, 0, 0, 40000, 0, 9, 0, 0)
        + bytes([1, 0, 0, 0]) * 2
        + b"\1",
        r"adds up to 2 \+ 0 bytes, the sections have 1 \+ 0",
    ),
}


@pytest.mark.parametrize("payload, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed_streams(payload, message):
    with pytest.raises(PayloadError, match=message):
        FecCodec().decode(payload)
    count = wire.read_header(np.frombuffer(payload, np.uint8)).count
    out = np.full(count, np.nan, np.float32)
    with pytest.raises(PayloadError, match=message):
        FecCodec().decode_add(payload, out)
    assert np.isnan(out).all()


def test_the_helper_makes_sound_payloads():
    """So that what the table above is refused for is what it says."""
    expected = np.zeros(20, np.float32)
    expected[[2, 3, 19]] = np.float32(4 / 3) * np.float32([1, -2, 4])
    payload = chunk(20, "0121 0730", "02", 3)
    np.testing.assert_array_equal(FecCodec().decode(payload), expected)
    expected[0] = np.nan
    np.testing.assert_array_equal(
        FecCodec().decode(chunk(20, "0121 0730", "02", 3, "0001")), expected
    )


def test_the_fault_names_its_chunk():
    payload = FecCodec(0).encode(np.ones(3 * 32768 - 1, np.float32))
    payload[56 + 4 * 3 + 2 * 16384 + 16383] |= 0xF0  # the nibble that the last chunk lacks
    with pytest.raises(PayloadError, match="chunk 2 of 3 has a code for an element that does not"):
        FecCodec().decode(payload)


# ---- lengths ------------------------------------------------------------------------------------


def test_truncated_anywhere():
    for n in range(PAYLOAD.size):
        with pytest.raises(PayloadError, match=rf"\b{n}\b"):
            FecCodec().decode(PAYLOAD[:n])


@pytest.mark.parametrize("extra", [1, 55, 56, 1000])
def test_trailing_bytes(extra):
    longer = np.append(PAYLOAD, np.zeros(extra, np.uint8))
    with pytest.raises(PayloadError, match=f"payload of {PAYLOAD.size} bytes, followed by {extra}"):
        FecCodec().decode(longer)


@given(st.lists(st.integers(0, 60), max_size=6))
@settings(deadline=None)
def test_concatenated_payloads_split_again(sizes):
    payloads = [FecCodec(-3).encode(np.arange(n, dtype=np.float32)) for n in sizes]
    joined = b"".join(as_list(payloads))
    assert as_list(wire.split(joined)) == as_list(payloads)


def test_split_gives_views():
    data = np.concatenate([PAYLOAD, PAYLOAD])
    for part in wire.split(data):
        assert np.shares_memory(part, data)


@pytest.mark.parametrize("cut", [1, 55, 56, 57, PAYLOAD.size - 1])
def test_split_of_cut_payloads(cut):
    parts = wire.split(np.concatenate([PAYLOAD, PAYLOAD[:cut]]))
    assert bytes(next(parts)) == bytes(PAYLOAD)
    with pytest.raises(PayloadError, match=rf"\b{cut}\b"):
        next(parts)


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, np.array], ids=str)
def test_input_types(convert):
    assert as_list(wire.split(convert(PAYLOAD))) == [bytes(PAYLOAD)]
    (frame,) = wire.split_frames(convert(wire.pack_frame(1, [PAYLOAD])))
    assert as_list(frame.payloads) == [bytes(PAYLOAD)]
    strided = np.repeat(PAYLOAD, 2)[::2]
    assert as_list(wire.split(strided)) == [bytes(PAYLOAD)]


@pytest.mark.parametrize("offset", range(8))
def test_unaligned_and_read_only_input(offset):
    data = bytes(offset) + bytes(PAYLOAD)  # bytes cannot be written to
    view = memoryview(data)[offset:]
    np.testing.assert_array_equal(FecCodec().decode(view), DECODED)
    frame = np.frombuffer(bytes(offset) + bytes(wire.pack_frame(0, [PAYLOAD])), np.uint8)[offset:]
    assert not frame.flags.writeable
    np.testing.assert_array_equal(
        FecCodec().decode(wire.split_frames(frame)[0].payloads[0]), DECODED
    )


@pytest.mark.parametrize("data", ["text", None, 3, [1, 2], np.zeros(9, np.int8), np.zeros(9, bool)])
def test_input_that_is_no_bytes(data):
    for read in (lambda x: list(wire.split(x))), wire.split_frames, FecCodec().decode:
        with pytest.raises(TypeError):
            read(data)


def test_nothing_is_no_payload():
    assert list(wire.split(b"")) == wire.split_frames(b"") == []
    with pytest.raises(PayloadError, match="payload of 0 bytes is shorter than its 56 byte header"):
        FecCodec().decode(b"")


# ---- frames -------------------------------------------------------------------------------------

FRAME = wire.pack_frame(1, [PAYLOAD, PAYLOAD])
EMPTY = FecCodec(0).encode(np.zeros(0, np.float32))


def test_frame_bytes():
    used = 28 + 56
    assert wire.pack_frame(1, [EMPTY]).tobytes().hex() == (
        "48464558 01 00 01 00 01000000 5400000000000000 8000000000000000".replace(" ", "")
        + EMPTY.tobytes().hex()
        + "00" * (128 - used)
    )
    assert wire.pack_frame(0, []).tobytes().hex() == (
        "48464558 01 00 00 00 00000000 1c00000000000000 4000000000000000" + "00" * 36
    ).replace(" ", "")
    assert wire.pack_error("no é").tobytes().hex() == (
        "48464558 01 01 00 00 00000000 2100000000000000 4000000000000000 6e6f20c3a9" + "00" * 31
    ).replace(" ", "")


def test_frame_sizes():
    """Never smaller, rarely changing, and at most a sixteenth of padding from 1 KiB on."""
    sizes = [wire.frame_size(used) for used in range(28, 70_000)]
    assert sizes == sorted(sizes)
    for used, size in enumerate(sizes, 28):
        assert used <= size <= max(used + 63, used * 17 / 16)
        assert size % 64 == 0 and wire.frame_size(size) == size
    assert len(set(sizes[1024 - 28 :])) < 16 * 7
    assert wire.frame_size(2**40 + 1) == 2**40 + 2**36


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 300), max_size=4)), max_size=4)
)
@settings(deadline=None)
def test_frames_split_again(ranks):
    ranks = [
        (probe, [FecCodec(-9).encode(np.arange(n, dtype=np.float32)) for n in sizes])
        for probe, sizes in ranks
    ]
    frames = [wire.pack_frame(probe, payloads) for probe, payloads in ranks]
    for frame in frames:
        assert frame.dtype == np.uint8 and frame.size == wire.frame_size(frame.size)
    back = wire.split_frames(b"".join(as_list(frames)))
    assert [(frame.probe, as_list(frame.payloads)) for frame in back] == [
        (probe, as_list(payloads)) for probe, payloads in ranks
    ]


def test_padding_is_not_looked_at():
    noisy = FRAME.copy()
    used = 28 + 2 * PAYLOAD.size
    assert noisy.size > used
    noisy[used:] = 255
    (frame,) = wire.split_frames(noisy)
    assert as_list(frame.payloads) == [bytes(PAYLOAD)] * 2


@pytest.mark.parametrize("message", ["boom", "", "größer als 1 GiB", "x" * 5000])
def test_error_frames(message):
    frames = [wire.pack_frame(1, [PAYLOAD]), wire.pack_error(message)]
    with pytest.raises(RuntimeError) as error:
        wire.split_frames(np.concatenate(frames))
    assert str(error.value) == f"rank 1: {message}"


def test_error_that_is_not_utf8():
    frame = wire.pack_error("boom")
    frame[28] = 0xFF
    with pytest.raises(RuntimeError, match="rank 0: \N{REPLACEMENT CHARACTER}oom"):
        wire.split_frames(frame)


USED = 28 + 2 * PAYLOAD.size
BAD_FRAMES = {
    "magic": (0, "4s", b"HFEC", r"rank 1 sent a frame b'HFEC' of version 1 and kind 0"),
    "version": (4, "B", 7, "rank 1 sent a frame b'HFEX' of version 7 and kind 0"),
    "kind": (5, "B", 2, "rank 1 sent a frame b'HFEX' of version 1 and kind 2"),
    "fewer payloads": (8, "I", 1, "rank 1 sent 2 payloads in a frame of 1"),
    "more payloads": (8, "I", 3, "rank 1 sent 2 payloads in a frame of 3"),
    "nothing used": (12, "Q", 27, f"rank 1 sent a frame of {FRAME.size} bytes with 27 in use"),
    "header only": (12, "Q", 28, "rank 1 sent 0 payloads in a frame of 2"),
    "one byte less used": (
        12,
        "Q",
        USED - 1,
        f"claims {PAYLOAD.size} bytes, {PAYLOAD.size - 1} are",
    ),
    "one byte more used": (12, "Q", USED + 1, "payload of 1 bytes is shorter than its 56"),
    "used above total": (
        12,
        "Q",
        FRAME.size + 1,
        f"{FRAME.size} bytes with {FRAME.size + 1} in use",
    ),
    "huge used": (12, "Q", 2**63, f"with {2**63} in use"),
    "total below used": (20, "Q", USED - 1, f"frame of {USED - 1} bytes with {USED} in use"),
    "total too large": (
        20,
        "Q",
        FRAME.size + 1,
        f"{FRAME.size + 1} bytes .*, {FRAME.size} bytes are",
    ),
    "huge total": (20, "Q", 2**64 - 1, f"frame of {2**64 - 1} bytes"),
    "no total": (20, "Q", 0, "frame of 0 bytes"),
    "payload": (28, "4s", b"none", "starts with b'none', not b'HFEC'"),
}


@pytest.mark.parametrize("offset, form, value, message", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_damaged_frames(offset, form, value, message):
    data = bytearray(bytes(FRAME) * 2)
    struct.pack_into("<" + form, data, FRAME.size + offset, value)
    with pytest.raises(PayloadError, match=message):
        wire.split_frames(data)


def test_truncated_frames():
    data = bytes(FRAME) * 2
    assert len(wire.split_frames(data)) == 2
    for n in range(FRAME.size + 1, len(data)):
        with pytest.raises(PayloadError, match=rf"\b{n - FRAME.size}\b"):
            wire.split_frames(data[:n])


def test_bytes_behind_the_frames():
    with pytest.raises(PayloadError, match="5 bytes left after frame 2, too few for one"):
        wire.split_frames(bytes(FRAME) * 2 + b"extra")
