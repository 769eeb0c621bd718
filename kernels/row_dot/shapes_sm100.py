"""Which schedule a product runs with on SM100 (Blackwell): what decides the bits of a result, and what does not.

As on SM90 (`shapes.py`), every result is the float32 sum of `parts` partial sums, added in ascending order, and a
partial sum is one accumulator that walks its stretch of K in steps of 16. The number of parts is that of `parts_of`.
Nothing else here decides a bit.
"""

from __future__ import annotations

import dataclasses
import functools

from deepinfer_jax.kernels.row_dot.shapes import BLOCK, ENOUGH_BLOCKS, MOST_PARTS, PART_STEP, SPLIT_ROWS

PROCESSORS = 148
"""Streaming multiprocessors of B200; schedules are chosen for them and right on any number."""

LONG_PART = 2048
"""Columns that a part of a weight that is cut anyway may keep: a longer walk costs more than adding more parts."""

ROWS = 128
"""Weight rows of a tile: the lanes of tensor memory."""

RING = 2
"""Steps of decoded weights in shared memory: one is multiplied while the next one is written."""

CHUNK = 32
"""Most rows of x that leave for memory together, and most columns of tensor memory that are read at once."""

CLUSTER_CHUNK = 8
"""The same for blocks of a cluster, which read as many columns of every part at once: a block of four warpgroups that
shares its processor has 64 registers a thread, enough for up to four parts."""

QUANTIZED_TOKENS = 32
"""Rows that every block may as well quantise for itself: cheaper than a kernel before this one."""

TOKEN_TILES = (16, 32, 64, 128, 192, 256)
"""Instructions with 128 rows take columns in sixteens."""

_SHARED_BYTES = {1: 216 * 1024, 2: 108 * 1024}
_MOST_STAGES = 8


def parts_of(outputs: int, inputs: int) -> int:
    """Number of partial sums of a weight [outputs, inputs]: the power of two up to 8 that gives enough blocks.

    A weight that is cut is cut further while its parts are long and its blocks all run at once. See `shapes.parts_of`
    for what it decides.
    """
    parts = 1
    blocks = -(-outputs // BLOCK)
    while parts < MOST_PARTS and inputs % (2 * parts * PART_STEP) == 0:
        long = parts > 1 and inputs // parts > LONG_PART and blocks * parts <= 2 * PROCESSORS
        if blocks * parts >= ENOUGH_BLOCKS and not long:
            break
        parts *= 2
    return parts


def _chunk(tokens: int, clustered: bool) -> int:
    return min(tokens, CLUSTER_CHUNK if clustered else CHUNK)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one product is cut up.

    parts: of K. tokens: rows of x in a tile. step: columns of a pipeline stage. stages: of the pipeline. clustered:
    the parts run on different processors of one cluster; otherwise one after the other. quantizing: the kernel
    quantises the rows that it reads. resident: blocks that share a processor.
    """

    parts: int
    tokens: int
    step: int
    stages: int
    clustered: bool
    quantizing: bool = False
    resident: int = 1

    @property
    def chunk(self) -> int:
        """Rows of x that leave for memory together."""
        return _chunk(self.tokens, self.clustered)

    @property
    def local_parts(self) -> int:
        """Partial sums that one block makes, one after the other."""
        return 1 if self.clustered else self.parts

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory: two accumulators, and the sum of the parts where one block makes them all."""
        return self.tokens * (2 if self.local_parts == 1 else 3)


def _stages(tokens: int, step: int, packed: bool, out_size: int, resident: int, clustered: bool) -> int:
    """Pipeline stages that fit in shared memory beside decoded weights and results."""
    chunk = _chunk(tokens, clustered)
    left = _SHARED_BYTES[resident] - min(2, tokens // chunk) * chunk * ROWS * out_size
    if packed:
        left -= RING * ROWS * step * 2
    return min(_MOST_STAGES, left // (ROWS * step * (1 if packed else 2) + 2 * step * tokens))


@functools.lru_cache(maxsize=4096)
def schedule(
    rows: int, outputs: int, inputs: int, *, packed: bool, parts: int, out_size: int, quantize: bool = False
) -> Schedule:
    """Schedule of `rows` rows with a weight [outputs, inputs].

    packed: the weight is FP8, otherwise bfloat16. out_size: bytes of an element of the result. quantize: the rows
    are to be quantised; by the kernel if the schedule says so, otherwise before.
    """
    weight_tiles = -(-outputs // ROWS)
    if rows <= SPLIT_ROWS:
        tokens = next(size for size in TOKEN_TILES if size >= rows)
        fused = quantize and tokens <= QUANTIZED_TOKENS and inputs % (PART_STEP * parts) == 0
        # A block that quantises has steps of 128 columns, which fill the shared memory of a processor. Clusters
        # that do not run all at once would take turns: those share processors instead.
        if fused and (parts == 1 or weight_tiles * parts <= PROCESSORS):
            stages = _stages(tokens, PART_STEP, packed, out_size, 1, parts > 1)
            return Schedule(parts, tokens, PART_STEP, stages, parts > 1, True)
        stages = _stages(tokens, 64, packed, out_size, 2, parts > 1)
        return Schedule(parts, tokens, 64, stages, parts > 1, resident=2)
    # Two accumulators, and with parts their sum too: there are 512 columns of tensor memory.
    choices = [size for size in TOKEN_TILES if 64 <= size <= (256 if parts == 1 else 128)]

    def time(tokens: int) -> int:
        """Rounds of tiles times the time of one: its products, but at least that of decoding its weights."""
        rounds = -(-(-(-rows // tokens) * weight_tiles) // PROCESSORS)
        return rounds * (max(tokens, 160 if packed else 96) + 24)

    tokens = min(choices, key=time)
    return Schedule(parts, tokens, 64, _stages(tokens, 64, packed, out_size, 1, False), False)
