"""What adapters add to a weight's products on the CPU: the two narrow products, of the rows that take them.

A weight has some adapters beside it; which row takes how much of which is read from a table, or each row takes all of the one
that there is. Rows behind each other that take the same adapter share its weights; it costs nothing where nobody takes it. A
row's bits depend on what it takes alone.

A down is kept as [ranks / 16, K / e, 16, e]. An up is kept for each 64 outputs as [ranks / e, 64, e], of the ranks alone that
reach them: of an adapter's for q, k and v each has its own. `sides` is [num_sides, 6] int64: where an adapter's down and up lie,
its rank, a multiple of 16, its first column between the products, its column in the table, and where its spans lie: [N / 64, 3]
int64, of each 64 outputs where their part of up begins, in steps of 32 bits along ranks, the first of these, and how many.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_matmul import ROWS_PER_TASK, put_row
from nanovllm_cli.kernels.cpu_numbers import dot64, floats_at, keep, load, paged16, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import MAX_ROWS, TILE_COLUMNS, WIDENED_STEPS, typed_pointer
from nanovllm_cli.kernels.simd_ir import LANES

SIDE_FIELDS = 6
DOWN, UP, RANK, FIRST, MODULE, SPANS = range(SIDE_FIELDS)
PLACE, BEGIN, STEPS = range(3)
STEP = 4 * LANES
ONE_PAGE = 62
"""Steps of a page, by a power of two: a down lies in one."""


@inner
def _run_of(scales, module, row, end):
    """The first rows from `row` on that take of a module, before `end`: where they begin, and how many there are, MAX_ROWS at
    most. scales [rows, modules]; without modules all do."""
    if scales.shape[1] == 0:
        return row, min(MAX_ROWS, end - row)
    while row < end and scales[row, module] == np.float32(0.0):
        row += 1
    stop = row
    while stop < min(end, row + MAX_ROWS) and scales[stop, module] != np.float32(0.0):
        stop += 1
    return row, stop - row


@kernel()
def down(arguments, thread, team):
    """between [num_rows, width] of x's type: of each row x_stride bytes apart and each side that it takes, x times down, times
    what it takes. What nobody takes is left as it was. groups: most of a side, of 16 ranks; steps of 32 bits along x."""
    tag, x, num_rows, x_stride, steps, sides, num_sides, groups, scales, num_modules, between, width = fields(arguments)
    table = carray(typed_pointer(sides, np.int64(0)), (num_sides, SIDE_FIELDS))
    taken = floats_at(scales, (num_rows, num_modules))
    target = carray(typed_pointer(between, tag), (num_rows, width))
    num_chunks = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    memory = scratch(4 * MAX_ROWS * LANES)
    sums_at = memory.ctypes.data
    sums = floats_at(sums_at, (MAX_ROWS, LANES))
    for task in share(num_sides * groups * num_chunks, thread, team):
        side, group, chunk = task // (groups * num_chunks), task // num_chunks % groups, task % num_chunks
        if group * LANES >= table[side, RANK]:
            continue
        page, first = sides + 8 * (side * SIDE_FIELDS + DOWN), table[side, FIRST] + group * LANES
        row, end = chunk * ROWS_PER_TASK, min(num_rows, (chunk + 1) * ROWS_PER_TASK)
        while row < end:
            row, rows = _run_of(taken, table[side, MODULE], row, end)
            if rows == 0:
                break
            sums[:] = np.float32(0.0)
            for step in range(0, steps, WIDENED_STEPS):
                begin, some = (group * steps + step) * STEP, min(WIDENED_STEPS, steps - step)
                paged16(tag, rows, x + row * x_stride + 4 * step, x_stride, page, ONE_PAGE, begin, STEP, some, sums_at, STEP)
            for r in range(rows):
                factor = taken[row + r, table[side, MODULE]] if num_modules != 0 else np.float32(1.0)
                line = target[row + r, first : first + LANES]
                for c in range(LANES):
                    store(line, c, sums[r, c] * factor)
            row += rows
    keep(memory)


@kernel()
def up(arguments, thread, team):
    """y [num_rows, n] += of each side that a row takes, up times between: one chain of fp32 sums, rounded once. Rows that take
    nothing are left as they are. columns: of a task, a multiple of 64."""
    tag, out_tag, sides, num_sides, scales, num_modules, between, width, y, num_rows, n, columns = fields(arguments)
    table = carray(typed_pointer(sides, np.int64(0)), (num_sides, SIDE_FIELDS))
    taken = floats_at(scales, (num_rows, num_modules))
    target = carray(typed_pointer(y, out_tag), (num_rows, n))
    size = carray(typed_pointer(between, tag), (1,)).itemsize
    num_blocks = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_chunks, num_parts = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK, (n + columns - 1) // columns
    tile = 4 * MAX_ROWS * TILE_COLUMNS
    memory = scratch(tile + 8 * MAX_ROWS * (1 + 3 * num_sides))
    sums_at = memory.ctypes.data
    sums = floats_at(sums_at, (MAX_ROWS, TILE_COLUMNS))
    changes = carray(typed_pointer(sums_at + tile, np.int64(0)), (MAX_ROWS,))
    runs = carray(typed_pointer(sums_at + tile + 8 * MAX_ROWS, np.int64(0)), (MAX_ROWS * num_sides, 3))
    for task in share(num_chunks * num_parts, thread, team):
        chunk, part = task // num_parts, task % num_parts
        first, last = part * columns // TILE_COLUMNS, min(num_blocks, (part + 1) * columns // TILE_COLUMNS)
        for start in range(chunk * ROWS_PER_TASK, min(num_rows, (chunk + 1) * ROWS_PER_TASK), MAX_ROWS):
            many = min(MAX_ROWS, num_rows - start)
            num_runs = _find_runs(table, taken, start, many, runs, changes)
            for block in range(first, last if num_runs != 0 else first):
                column = block * TILE_COLUMNS
                for r in range(many):
                    if changes[r] != 0:
                        _take_row(target[start + r], column, sums[r])
                for run in range(num_runs):
                    side, row, rows = runs[run, 0], runs[run, 1], runs[run, 2]
                    spans = carray(typed_pointer(table[side, SPANS], np.int64(0)), (num_blocks, 3))
                    if spans[block, STEPS] == 0:
                        continue
                    w, steps = table[side, UP] + spans[block, PLACE] * 256, spans[block, STEPS]
                    at = between + ((start + row) * width + table[side, FIRST]) * size + spans[block, BEGIN] * 4
                    dot64(tag, rows, at, width * size, w, w + 64, w + 128, w + 192, 256, steps, sums_at + row * 256, 256, 1)
                for r in range(many):
                    if changes[r] != 0:
                        put_row(sums[r], target[start + r], column, target[start + r], False)
    keep(memory)


@inner
def _find_runs(table, taken, start, many, runs, changes):
    """Of some rows behind `start`: (side, first row, how many) of each run, and which rows take any. Returns how many runs."""
    count = 0
    changes[:] = 0
    for side in range(table.shape[0]):
        row = start
        while row < start + many:
            row, rows = _run_of(taken, table[side, MODULE], row, start + many)
            if rows != 0:
                runs[count, 0], runs[count, 1], runs[count, 2] = side, row - start, rows
                changes[row - start : row - start + rows] = 1
                count += 1
            row += max(1, rows)
    return count


@inner
def _take_row(line, first, sums):
    """A row's numbers from column `first` on, as many as there are of a tile's."""
    source = line[first : min(line.size, first + TILE_COLUMNS)]
    for c in range(source.size):
        sums[c] = load(source, c)
