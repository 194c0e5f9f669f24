"""What a mixture of experts needs on the CPU beside matmuls: which experts a token takes, the sum of what they say, and how a
recorded step comes to run those that its token takes."""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import clear_team, fields, kernel, run_kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer

MOST_TOGETHER = 2
"""Parts a thread that all threads compute together, the last ones: else some have nothing to do until the others are done."""


ROOT_SOFTPLUS = 3
_LITTLE = np.float32(1e-20)
"""What is added to the sum of a token's scores, which may all be 0 then."""


@inner
def _score(logit, largest, total, by_sigmoid):
    """logit's sigmoid, or share of a softmax, or with a by_sigmoid of ROOT_SOFTPLUS the root of its softplus."""
    if by_sigmoid == 0:
        return exp_not_positive(logit - largest) / total
    if by_sigmoid == ROOT_SOFTPLUS:
        return np.sqrt(max(logit, np.float32(0.0)) + np.log1p(exp_not_positive(-abs(logit))))
    e = exp_not_positive(-abs(logit))
    return (np.float32(1.0) if logit >= 0 else e) / (np.float32(1.0) + e)


@inner
def _rank(row, bias, by_sigmoid, ranks):
    """ranks = scores of a row + bias, or with a by_sigmoid of 2 logits + bias; returns what `_score` needs besides."""
    largest, total = np.float32(-np.inf), np.float32(0.0)
    if by_sigmoid == 0:
        for e in range(len(row)):
            largest = max(largest, row[e])
        for e in range(len(row)):
            total += exp_not_positive(row[e] - largest)
    for e in range(len(row)):
        ranks[e] = (row[e] if by_sigmoid == 2 else _score(row[e], largest, total, by_sigmoid)) + bias[e]
    return largest, total


@inner
def _above(one, other):
    """A NaN is larger than any number."""
    return one > other or (np.isnan(one) and not np.isnan(other))


@inner
def _keep_groups(ranks, sums, taken, best):
    """ranks become minus infinity in all groups but those whose `best` (1 or 2) largest have the largest sums. sums: scratch, of
    each group."""
    size = len(ranks) // len(sums)
    for g in range(len(sums)):
        first = second = np.float32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            if _above(ranks[e], first):
                first, second = ranks[e], first
            elif _above(ranks[e], second):
                second = ranks[e]
        sums[g] = first + second if best == 2 else first
    for g in range(len(sums)):
        before = 0
        for other in range(len(sums)):
            before += _above(sums[other], sums[g]) or (other < g and not _above(sums[g], sums[other]))
        if before >= taken:
            for e in range(g * size, (g + 1) * size):
                ranks[e] = np.float32(-np.inf)


@inner
def _weigh(row, places, largest, total, by_sigmoid, norm_topk, scale, part):
    """part[c] = the score of places[c], with norm_topk over the sum of these, times scale."""
    whole = np.float32(0.0)
    for c in range(len(places)):
        part[c] = _score(row[places[c]], largest, total, by_sigmoid)
        whole += part[c]
    whole += _LITTLE if by_sigmoid == ROOT_SOFTPLUS else np.float32(0.0)
    for c in range(len(places)):
        part[c] = (part[c] / whole if norm_topk != 0 else part[c]) * scale


@inner
def _share_among_near(row, before, best, nearness):
    """See `mixture.shares_among_near`, of the expert `best`, which is taken behind those before."""
    most, total = row[best], np.float32(0.0)
    for e in range(len(row)):
        was_taken = False
        for i in range(len(before)):
            was_taken = was_taken or before[i] == e
        if not was_taken and not most - row[e] > nearness * max(abs(row[e]), most):
            total += exp_not_positive(row[e] - most)
    return np.float32(1.0) / total


@kernel()
def route(arguments, thread, team):
    """chosen, weights [num_rows, num_chosen]: of each row of logits [num_rows, num_experts] fp32 the places of the largest, the
    lower one first among equals, in ascending order, and exp(logit) over the sum of it: of all, or with norm_topk of the chosen.
    Where ranks is not 0, [num_rows, num_experts] fp32 for scratch: as mixture.Scoring has it, bias [num_experts] fp32 and,
    where it is not 0, expert_scale alike; num_groups 1 where there are none. nearness: below 0 for none; else ranks is 0.

    A NaN is larger than any number, so that it comes out in the weights. Sums go up in order: a row's bits are its own.
    """
    (
        logits, num_rows, num_experts, num_chosen, norm_topk, chosen, weights, ranks, bias, expert_scale, by_sigmoid,
        num_groups, groups_taken, group_best, scale, nearness,
    ) = fields(arguments)  # fmt: skip
    all_logits = carray(typed_pointer(logits, np.float32(0)), (num_rows, num_experts))
    rows = carray(typed_pointer(ranks if ranks != 0 else logits, np.float32(0)), (num_rows, num_experts))
    added = carray(typed_pointer(bias if ranks != 0 else logits, np.float32(0)), (num_experts,))
    own = carray(typed_pointer(expert_scale if expert_scale != 0 else logits, np.float32(0)), (num_experts,))
    places = carray(typed_pointer(chosen, np.int64(0)), (num_rows, num_chosen))
    shares = carray(typed_pointer(weights, np.float32(0)), (num_rows, num_chosen))
    memory = scratch(4 * num_groups)
    sums = floats_at(memory.ctypes.data, (num_groups,))
    for r in share(num_rows, thread, team):
        row, place, part = rows[r], places[r], shares[r]
        largest = total = np.float32(0.0)
        if ranks != 0:
            largest, total = _rank(all_logits[r], added, by_sigmoid, row)
            if num_groups > 1:
                _keep_groups(row, sums, groups_taken, group_best)
        for c in range(num_chosen):
            best = -1
            for e in range(num_experts):
                if best >= 0 and not _above(row[e], row[best]):
                    continue
                taken = False
                for i in range(c):
                    taken = taken or place[i] == e
                if not taken:
                    best = e
            own_share = _share_among_near(row, place[:c], best, np.float32(nearness)) if nearness >= 0 else np.float32(0.0)
            i = c
            while i > 0 and place[i - 1] > best:
                place[i], part[i] = place[i - 1], part[i - 1]
                i -= 1
            place[i], part[i] = best, own_share
            largest = row[best] if c == 0 and ranks == 0 else largest
        if nearness >= 0:
            continue
        if ranks != 0:
            _weigh(all_logits[r], place, largest, total, by_sigmoid, norm_topk, np.float32(scale), part)
            if expert_scale != 0:
                for c in range(num_chosen):
                    part[c] *= own[place[c]]
            continue
        total = np.float32(0.0)
        if norm_topk == 0:
            for e in range(num_experts):
                total += exp_not_positive(row[e] - largest)
        for c in range(num_chosen):
            part[c] = exp_not_positive(row[place[c]] - largest)
            if norm_topk != 0:
                total += part[c]
        for c in range(num_chosen):
            part[c] /= total
    keep(memory)


@kernel()
def route_by_table(arguments, thread, team):
    """chosen, weights [num_rows, num_chosen]: of each row the experts that table […, num_chosen] int64 has for its token, ids
    [num_rows] int64, and what `route` would weigh them by. No softmax."""
    (
        logits, num_rows, num_experts, num_chosen, norm_topk, chosen, weights, ids, table, by_sigmoid, scale,
    ) = fields(arguments)  # fmt: skip
    all_logits = carray(typed_pointer(logits, np.float32(0)), (num_rows, num_experts))
    rows = carray(typed_pointer(table, np.int64(0)), (1 << 40, num_chosen))
    token_of = carray(typed_pointer(ids, np.int64(0)), (num_rows,))
    places = carray(typed_pointer(chosen, np.int64(0)), (num_rows, num_chosen))
    shares = carray(typed_pointer(weights, np.float32(0)), (num_rows, num_chosen))
    nothing = np.float32(0.0)
    for r in share(num_rows, thread, team):
        place, row = places[r], rows[token_of[r]]
        for c in range(num_chosen):
            place[c] = row[c]
        _weigh(all_logits[r], place, nothing, nothing, by_sigmoid, norm_topk, np.float32(scale), shares[r])


@kernel()
def take_parts(arguments, thread, team):
    """Makes ready what experts compute of num_pairs pairs of a token and an expert, num_chosen of them for each token, chosen.

    An expert's pairs lie behind each other and are its part. parts [2] int64: how many there are, and how many of them threads
    compute alone. Of part i words [num_words] int64, at words and so many on for each, are the arguments of all steps:
    base[expert] + table @ (memory, num_pairs, first, count - 1), first being its first pair and count how many it has. At memory
    are x's rows [num_pairs, width] in the pairs' order; row_of [num_pairs] int64 says where in it a pair is. The counters of
    num_teams teams are 0. threads: those of the kernels behind this one, should it have none beside itself.
    """
    (
        tag, num_pairs, num_chosen, num_experts, chosen, parts, words, base, table, num_words, memory, x, width, item_bytes,
        row_of, teams, num_teams, team_bytes, threads,
    ) = fields(arguments)  # fmt: skip
    taken = carray(typed_pointer(chosen, np.int64(0)), (num_pairs,))
    rows = carray(typed_pointer(row_of, np.int64(0)), (num_pairs,))
    counts = carray(typed_pointer(parts, np.int64(0)), (2,))
    tokens = num_pairs // num_chosen
    whole = scratch(8 * (2 * num_experts + num_pairs + tokens + 2))  # by every thread for itself: nobody waits
    numbers = carray(typed_pointer(whole.ctypes.data, np.int64(0)), (2 * num_experts + num_pairs + tokens + 2,))
    begins, order = numbers[: num_experts + 1], numbers[num_experts + 1 : num_experts + 1 + num_pairs]
    used, ends = numbers[num_experts + 1 + num_pairs : -tokens - 1], numbers[-tokens - 1 :]
    num_parts = _sort_pairs(taken, begins, order, used, ends)
    if team != 0:
        threads = carray(typed_pointer(team, np.int64(0)), (1,))[0]
    if thread == 0:
        counts[0], counts[1] = num_parts, max(0, num_parts - MOST_TOGETHER * threads)
    for part in share(num_parts, thread, team):
        expert = used[part]
        first, end = begins[expert], begins[expert + 1]
        own = carray(typed_pointer(words + 8 * num_words * part, np.int64(0)), (num_words,))
        said = carray(typed_pointer(base + 8 * num_words * expert, np.int64(0)), (num_words,))
        more = carray(typed_pointer(table, np.int64(0)), (4, num_words))
        for j in range(num_words):
            own[j] = said[j] + more[0, j] * memory + more[1, j] * num_pairs + more[2, j] * first + more[3, j] * (end - first - 1)
        for place in range(first, end):
            pair = order[place]
            rows[pair] = place
            row = carray(typed_pointer(x + item_bytes * width * (pair // num_chosen), tag), (width,))
            copy = carray(typed_pointer(memory + item_bytes * width * place, tag), (width,))
            for j in range(width):
                copy[j] = row[j]
        for t in range(part, num_teams, num_parts):
            clear_team(teams + t * team_bytes, threads)
    keep(whole)


@inner
def _sort_pairs(taken, begins, order, used, ends):
    """order: pairs by the expert they have taken, of which begins[e] to begins[e + 1] - 1 are e's. used: the experts that have
    some, those with the most at the end, where all threads are of use. ends [tokens + 1]: scratch. Returns how many experts these
    are."""
    begins[:] = 0
    for pair in range(len(taken)):
        begins[taken[pair] + 1] += 1
    ends[:] = 0
    for e in range(len(begins) - 1):
        ends[begins[e + 1]] += 1
        begins[e + 1] += begins[e]
    for count in range(1, len(ends)):  # where experts of so many pairs end
        ends[count] += ends[count - 1]
    idle = ends[0]
    for e in range(len(begins) - 2, -1, -1):
        count = begins[e + 1] - begins[e]
        ends[count] -= 1
        if count:
            used[ends[count] - idle] = e
    for pair in range(len(taken)):  # begins[e] moves to where e ends, which is where the next one begins
        order[begins[taken[pair]]] = pair
        begins[taken[pair]] += 1
    for e in range(len(begins) - 1, 0, -1):
        begins[e] = begins[e - 1]
    begins[0] = 0
    return len(begins) - 1 - idle


@kernel()
def alone(arguments, thread, team):
    """Kernels, one after the other, of each part (see `take_parts`) but the last ones, each by one thread, which finds in its
    caches what the kernel before has left there. steps [num_steps, 2] int64: a kernel, and where in a part's words its arguments
    are."""
    steps, num_steps, parts, words, word_bytes = fields(arguments)
    table = carray(typed_pointer(steps, np.int64(0)), (num_steps, 2))
    for part in share(carray(typed_pointer(parts, np.int64(0)), (2,))[1], thread, team):
        for i in range(num_steps):
            run_kernel(table[i, 0], words + part * word_bytes + table[i, 1], 0, 0)


@kernel()
def gang(arguments, thread, team):
    """One kernel of each of the last parts at once, by all threads: nobody waits for the others before he takes part in the next.
    Each has a team of its own."""
    function, parts, words, word_bytes, teams, team_bytes = fields(arguments)
    counts = carray(typed_pointer(parts, np.int64(0)), (2,))
    for part in range(counts[1], counts[0]):
        run_kernel(function, words + part * word_bytes, thread, teams + (part - counts[1]) * team_bytes if team != 0 else 0)


@kernel(fastmath=FAST)
def sum_pairs(arguments, thread, team):
    """out [num_rows, width] = the sum over a row's num_chosen pairs, in order and in fp32, of weights [num_rows, num_chosen]
    fp32 times the row of y [num_pairs, width] that row_of [num_rows, num_chosen] int64 says."""
    tag, y, row_of, weights, out, num_rows, num_chosen, width = fields(arguments)
    sources = carray(typed_pointer(row_of, np.int64(0)), (num_rows, num_chosen))
    shares = carray(typed_pointer(weights, np.float32(0)), (num_rows, num_chosen))
    lines = carray(typed_pointer(y, tag), (num_rows * num_chosen, width))
    result = carray(typed_pointer(out, tag), (num_rows, width))
    memory = scratch(4 * width)
    total = floats_at(memory.ctypes.data, (width,))
    for r in share(num_rows, thread, team):
        for j in range(width):
            total[j] = np.float32(0.0)
        for c in range(num_chosen):
            line, weight = lines[sources[r, c]], shares[r, c]
            for j in range(width):
                total[j] += weight * load(line, j)
        target = result[r]
        for j in range(width):
            store(target, j, total[j])
    keep(memory)


@kernel(fastmath=FAST)
def add_weighted_rows(arguments, thread, team):
    """out [any, width] fp32: row rows[i] += weights[i] * y[i], for y [n, width]. No row comes twice."""
    tag, out, y, rows, weights, n, width = fields(arguments)
    source = carray(typed_pointer(y, tag), (n, width))
    row_of = carray(typed_pointer(rows, np.int64(0)), (n,))
    weight_of = carray(typed_pointer(weights, np.float32(0)), (n,))
    for i in share(n, thread, team):
        line, weight = source[i], weight_of[i]
        total = carray(typed_pointer(out + 4 * width * row_of[i], np.float32(0)), (width,))
        for j in range(width):
            total[j] += weight * load(line, j)


@kernel()
def add_onto(arguments, thread, team):
    """x [num_rows, width] = (x + y) * factor."""
    tag, x, y, num_rows, width, factor = fields(arguments)
    one, other = carray(typed_pointer(x, tag), (num_rows, width)), carray(typed_pointer(y, tag), (num_rows, width))
    for r in share(num_rows, thread, team):
        target, added = one[r], other[r]
        for i in range(width):
            store(target, i, (load(target, i) + load(added, i)) * np.float32(factor))
