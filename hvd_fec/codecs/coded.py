"""FEC's coded form: the values of its planes near their entropy.

Which elements are kept, and which of these have a code above 1, above 2 and so on, are nested
subsets. Each is written as the gaps between its members in Golomb-Rice code (Rice and Plaunt 1971),
with the parameter that Kiely (2004, "Selecting the Golomb parameter in Rice coding") gives for the
subset's density. Signs are raw bits.
"""

from functools import partial
from typing import List, Sequence, Tuple

import numpy as np

from hvd_fec import threads, wire
from hvd_fec.codecs.arrays import ranges
from hvd_fec.codecs.kernels import active as kernels
from hvd_fec.wire import PayloadError

CHUNK = kernels.CODED
"""Elements of one independently coded chunk."""

_FAULTS = {
    1: "a stream that ends too early",
    2: "a position outside of what it is among",
    3: "a count larger than what it is among",
    4: "bits after its last value",
}


def pack(
    cuts: Sequence[Tuple[int, int]],
    codes: Sequence[np.ndarray],
    signs: Sequence[np.ndarray],
    tables: Sequence[np.ndarray],
    kept: Sequence[int],
) -> List[np.ndarray]:
    """The code section of a payload, in parts (uint8), from the planes of ranges of elements.

    Args:
        cuts: begin and end of each range; all but the last end at a multiple of ``CHUNK``.
        codes, signs, tables, kept: of each range, as the kernel ``fec_encode`` wrote them.
    """
    table = np.empty(2 * -(-cuts[-1][1] // CHUNK), "<u4")

    def encode(cut, codes, signs, planes, kept):
        a, b = cut
        out = np.empty(kernels.coded_room(b - a, kept), np.uint8)
        chunks = table[2 * (a // CHUNK) : 2 * -(-b // CHUNK)]
        return out[: kernels.coded_pack(codes, signs, planes, b - a, kept, out, chunks)]

    parts = zip(cuts, codes, signs, tables, kept)
    streams = threads.run([partial(encode, *part) for part in parts])
    return [table.view(np.uint8), *streams]


class Streams:
    """The coded streams of a payload, proven sound and unpacked.

    Args:
        header: of the payload.
        section: its code section, uint8.

    Raises:
        PayloadError: it is not what :func:`pack` writes for such a header.
    """

    def __init__(self, header: wire.Header, section: np.ndarray):
        n = header.count
        n_chunks = -(-n // CHUNK)
        if 8 * n_chunks > section.size or header.sections[1]:
            raise PayloadError(
                f"coded payload of {n} elements needs a chunk table of {8 * n_chunks} bytes and no "
                f"sign section, its sections have {section.size} and {header.sections[1]}"
            )
        table = section[: 8 * n_chunks].copy().view("<u4")
        data = section[8 * n_chunks :]
        lengths, kept = table[0::2].astype(np.int64), table[1::2].astype(np.int64)
        if lengths.sum() != data.size or kept.sum() != header.kept:
            raise PayloadError(
                f"chunk table adds up to {lengths.sum()} bytes and {kept.sum()} kept values, the "
                f"payload has {data.size} and {header.kept}"
            )
        sizes = np.minimum(n - np.arange(n_chunks) * CHUNK, CHUNK)
        # Each kept value has a sign bit. So the list below is in proportion to the payload.
        for fault in np.flatnonzero((kept > sizes) | (kept > 8 * lengths))[:1]:
            raise PayloadError(
                f"chunk {fault} of {n_chunks} claims {kept[fault]} kept values in "
                f"{lengths[fault]} bytes for {sizes[fault]} elements"
            )
        entries = np.empty(header.kept, np.uint32)
        self.parts: List[Tuple[int, int, np.ndarray, np.ndarray]] = []
        calls = []
        for a, b in ranges(n, CHUNK):
            chunks = slice(a // CHUNK, -(-b // CHUNK))
            part = table[2 * chunks.start : 2 * chunks.stop]
            length, count = lengths[chunks].sum(), kept[chunks].sum()
            self.parts.append((a, b, entries[:count], part))
            calls.append(partial(kernels.coded_unpack, data[:length], part, b - a, entries[:count]))
            data, entries = data[length:], entries[count:]
        for (a, *_), (status, chunk) in zip(self.parts, threads.run(calls)):
            if status:
                raise PayloadError(
                    f"chunk {a // CHUNK + chunk} of {n_chunks} has {_FAULTS[status]}"
                )

    def add_to(self, out: np.ndarray, lowest: float, scale: float) -> None:
        """Add ``scale`` times the values into ``out``, float32 of shape (count,).

        ``lowest`` is the smallest kept magnitude."""
        threads.run(
            [
                partial(kernels.coded_add, entries, table, lowest, scale, out[a:b])
                for a, b, entries, table in self.parts
            ]
        )
