"""Which schedule a product runs with: what decides the bits of a result, and what does not.

Every result is the float32 sum of `parts` partial sums, added in ascending order; a partial sum is one
accumulator that walks its stretch of K in steps of 16. The number of parts depends on the weight's shape alone.
All else here (rows of a tile, pipeline depth, how many blocks share one sum) changes the time only.
"""

from __future__ import annotations

import dataclasses
import functools

PROCESSORS = 132
"""Streaming multiprocessors of H100 and H200 (SXM); schedules are chosen for them and right on any number."""

BLOCK = 64
"""Weight rows of one warpgroup."""

PART_STEP = 128
"""A part of K is a multiple of this."""

ENOUGH_BLOCKS = 120
"""Blocks that read weights fast enough: below, K is cut into parts so that more processors take part."""

MOST_PARTS = 8
"""Blocks of a cluster, at most."""

CLUSTER_GROUPS, CLUSTER_PLACES = 8, 28
"""Groups of processors, and blocks that the smallest of them holds two to a processor: a cluster stays in one group.
40 clusters of 6 took turns, 40 of 5 did not (H200)."""

SPLIT_ROWS = 64
"""Largest row count at which the parts of one sum run on different processors."""

QUANTIZED_TOKENS = 32
"""Rows that every block may as well quantise for itself: cheaper than a kernel before this one."""

RESIDENT = 2 * PROCESSORS
"""Small blocks that run at once: two share a processor. More than these take turns."""

SHORT_STEPS, SHORT_STAGES, MOST_STAGES = 16, 3, 8
"""Steps of a block that make a short walk, and stages of its pipeline (FP8 weights) and of others, at most."""

TOKEN_TILES = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one product is cut up.

    parts: of K. tokens: rows of x in a tile. warpgroups: one, two or four, each with 64 weight rows of the tile.
    step: columns of a pipeline stage. stages: of the pipeline. clustered: the parts run on different processors
    of one cluster; otherwise one after the other. quantizing: the kernel quantises the rows that it reads.
    """

    parts: int
    tokens: int
    warpgroups: int
    step: int
    stages: int
    clustered: bool
    quantizing: bool = False

    @property
    def weight_rows(self) -> int:
        """Weight rows of a tile."""
        return BLOCK * self.warpgroups

    @property
    def chunk(self) -> int:
        """Rows of x that leave for memory together."""
        return min(self.tokens, 64)


def parts_of(outputs: int, inputs: int) -> int:
    """Number of partial sums, up to 8, of a weight [outputs, inputs]: with few rows the fastest by a small model.

    It decides bits. It must be the same for all shards of a weight that is split along its outputs: see
    `column_tile` in `mosaic_gpu.py`. Parts are whole units of `PART_STEP` columns; the first ones may have one more.

    The model (H200), of blocks of one or two warpgroups: a step of `PART_STEP` columns takes a block 0.42 microseconds
    and 0.18 more for every warpgroup that multiplies on its processor; adding parts takes 1.5, and 0.1 for each of
    them. With blocks of four warpgroups its choices are still the fastest that were tried.
    """
    units = inputs // PART_STEP
    blocks = -(-outputs // BLOCK)
    if blocks >= ENOUGH_BLOCKS or inputs % PART_STEP:
        return 1
    costs = {}
    for parts in range(1, min(MOST_PARTS, units) + 1):
        single = blocks * parts <= RESIDENT
        clusters = blocks if single else -(-blocks // 2)
        if parts > 1 and clusters > CLUSTER_GROUPS * (CLUSTER_PLACES // parts):
            continue
        running = clusters * parts
        multiplying = -(-running // PROCESSORS) * (1 if single else 2)
        costs[parts] = -(-units // parts) * (42 + 18 * multiplying) + (150 + 10 * parts if parts > 1 else 0)
    return min(costs, key=lambda parts: costs[parts])


def _waves(rows: int, outputs: int, tokens: int, warpgroups: int) -> int:
    tiles = -(-rows // tokens) * -(-outputs // (BLOCK * warpgroups))
    return -(-tiles // PROCESSORS)


@functools.lru_cache(maxsize=4096)
def schedule(
    rows: int,
    outputs: int,
    inputs: int,
    *,
    packed: bool,
    parts: int,
    group_outputs: int,
    quantize: bool = False,
) -> Schedule:
    """Schedule of `rows` rows with a weight [outputs, inputs].

    packed: the weight is FP8, otherwise bfloat16. group_outputs: a tile must not leave its group of outputs.
    quantize: the rows are to be quantised; by the kernel if the schedule says so, otherwise before.
    """
    two = group_outputs % (2 * BLOCK) == 0
    tiles = -(-rows // SPLIT_ROWS) * -(-outputs // (2 * BLOCK))
    if rows <= SPLIT_ROWS or (parts > 1 and two and tiles <= PROCESSORS // 4):
        return _few_rows(rows, outputs, inputs, packed, parts, group_outputs, quantize)
    # A warpgroup keeps one accumulator, and with parts their sum too: 256 registers a thread are all there are.
    largest = 256 if parts == 1 else 192
    warpgroups = 2 if two else 1
    choices = [size for size in TOKEN_TILES if 64 <= size <= largest]
    # Time of a tile: its products, but at least that of decoding its weights, and a share for its start and end.
    tokens = min(choices, key=lambda size: _waves(rows, outputs, size, warpgroups) * (max(size, 112) + 24))
    step = 64
    stage = BLOCK * warpgroups * step * (1 if packed else 2) + 2 * step * tokens
    stages = max(2, min(6, (200 * 1024 - 16384 * warpgroups) // stage))
    return Schedule(parts, tokens, warpgroups, step, stages, False)


def _few_rows(
    rows: int, outputs: int, inputs: int, packed: bool, parts: int, group_outputs: int, quantize: bool
) -> Schedule:
    """Schedule of products whose time is that of reading the weight."""
    tokens = next((size for size in TOKEN_TILES if size >= rows), SPLIT_ROWS)
    tokens = min(tokens, SPLIT_ROWS)
    two = group_outputs % (2 * BLOCK) == 0
    step = PART_STEP if inputs % PART_STEP == 0 else 64
    # With few rows the weight is all that is read, and many small blocks read it best. With more, every block
    # reads all of x too: larger blocks halve that. Blocks of 64 weight rows that would take turns run all at once in
    # fours, with one warpgroup that fetches and one that quantises for four that multiply.
    wide = two and tokens >= 32 and outputs * parts // (2 * BLOCK) >= PROCESSORS // 2
    four = packed and rows <= SPLIT_ROWS and group_outputs % (4 * BLOCK) == 0
    if four and RESIDENT < outputs * parts // BLOCK <= 2 * RESIDENT:
        warpgroups = 4
    else:
        warpgroups = 2 if wide or rows > SPLIT_ROWS else 1
    stage = BLOCK * warpgroups * step * (1 if packed else 2) + 2 * step * tokens
    # In a short walk deep pipelines only delay the first stage: all stages of all blocks are asked for at once.
    most = SHORT_STAGES if packed and inputs // step <= SHORT_STEPS * parts else MOST_STAGES
    stages = max(2, min(most, (192 if wide or warpgroups == 4 else 96) * 1024 // stage))
    fused = quantize and tokens <= QUANTIZED_TOKENS and step == PART_STEP
    return Schedule(parts, tokens, warpgroups, step, stages, parts > 1, fused)
