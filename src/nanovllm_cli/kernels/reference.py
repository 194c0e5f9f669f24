"""Every op in plain torch, as its formula reads: the oracle of the kernel tests. fp32 inside (float64 for float64 inputs),
rounded to the input's type.

Legend: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, P blocks in a table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm_cli.kernels.mixing_rules import mixing
from nanovllm_cli.kernels.mixture import Groups, Scoring, shares_among_near

_GELUS = {"gelu": "none", "gelu_tanh": "tanh"}


def wide(x: torch.Tensor) -> torch.Tensor:
    """The type to compute in."""
    return x if x.dtype == torch.float64 else x.float()


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, k] @ weight [n, k].T + bias [n]."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    centered: bool = False,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place, then residual / rms(residual) * (offset + weight). Without a residual, x itself is normalised.
    Zhang and Sennrich 2019. centered: of what a row is without its mean (layer norm, Ba et al. 2016), plus shift."""
    if residual is not None:
        residual.copy_((wide(residual) + wide(x)).to(x.dtype))
        x = residual
    rows = wide(x)
    if centered:
        rows = rows - rows.mean(-1, keepdim=True)
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.float())
    return (normed if shift is None else normed + shift.float()).to(x.dtype)


def norm_sum(
    x: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Layer norm of stream + x, which is rounded first: gains weight [width], and shift [width] added. Ba et al. 2016."""
    rows = wide(stream if x is None else (wide(stream) + wide(x)).to(stream.dtype))
    return F.layer_norm(rows, rows.shape[-1:], wide(weight), None if shift is None else wide(shift), eps).to(stream.dtype)


def join_and_norm(
    x: torch.Tensor,
    gains: torch.Tensor,
    residual: torch.Tensor,
    factor: float,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
) -> torch.Tensor | None:
    """residual = (residual + norm of x, with gains) * factor, in place; then the norm of it, where there is a weight."""
    added = add_rms_norm(x, None, gains, eps, offset)
    residual.copy_((wide(residual) + wide(added)) * factor)
    return None if weight is None else add_rms_norm(residual, None, weight, eps, offset)


def scale(x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """x * factor; with a cap above 0, cap * tanh(x * factor / cap), which stays within it (Gemma 2, Riviere et al. 2024)."""
    scaled = wide(x) * factor
    return (cap * torch.tanh(scaled / cap) if cap > 0 else scaled).to(x.dtype)


def altup_predict(streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, factor: float) -> torch.Tensor:
    """streams [S, T, width] + coefficients of them [S * S, S] by tanh(logits [T, S] * factor): what each is going to be (AltUp,
    Baykal et al. 2023, as in Gemma 3n)."""
    count = len(streams)
    weights = (torch.tanh(wide(logits) * factor) @ wide(coefficients).T).view(-1, count, count)
    return (wide(streams) + torch.einsum("tks,stw->ktw", weights, wide(streams))).to(streams.dtype)


def altup_correct(
    streams: torch.Tensor, found: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, factor: float
) -> torch.Tensor:
    """streams [S, T, width], predictions, + (1 + coefficients [S, S] @ tanh(logits [T, S] * factor)) times what found [T, width]
    has that the first had not."""
    weights = 1 + torch.tanh(wide(logits) * factor) @ wide(coefficients).T
    return (wide(streams) + weights.T[:, :, None] * (wide(found) - wide(streams[0]))).to(streams.dtype)


def altup_match(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """rows [T, width] with the root mean squares of like's, their own taken to be those of 1e-5 at least."""
    wanted, own = (wide(each).pow(2).mean(-1, keepdim=True) for each in (like, rows))
    return (wide(rows) * wanted.sqrt() / own.clamp(min=1e-5).sqrt()).to(rows.dtype)


def read_streams(
    streams: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, least: float, most: float,
    rounds: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum [T, width] of streams [S, T, width], each times a weight, and the weights [T, S] by which all are written, or
    none (hyper-connections, Zhu et al. 2024, as in Hy4): sigmoids of what matrix [S or 2 S, S * width] makes of all streams
    of a token, which are divided by their root mean square. base [S or 2 S]; scale: of those that read, and of those that
    write. With rounds there are S * S more of each, weights [T, S + S * S], whose last ones are `mixing`
    of what is made."""
    count = len(streams)
    flat = wide(streams).transpose(0, 1).flatten(1)
    normed = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + eps)
    kinds = torch.arange(len(base)).div(count, rounding_mode="floor").clamp_max(2)
    logits = (normed @ wide(matrix).T) * wide(scale)[kinds] + wide(base)
    sigmoids = torch.sigmoid(logits[:, : 2 * count])
    read = torch.einsum("ts,stw->tw", sigmoids[:, :count] + least, wide(streams)).to(streams.dtype)
    written = most * sigmoids[:, count:] + (0.0 if rounds else least)
    mixed = mixing(logits[:, 2 * count :].reshape(-1, count, count), rounds, least).flatten(1) if written.numel() else written
    return read, torch.cat([written, mixed], 1) if rounds else written


def write_streams(streams: torch.Tensor, found: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """streams [S, T, width] + found [T, width] times weights [T, S]; with weights [T, S + S * S] the k-th is found times the k-th
    weight plus, over all j, stream j times the weight S + j * S + k."""
    if (count := len(streams)) != weights.shape[1]:
        mixed = torch.einsum("tjk,jtw->ktw", wide(weights[:, count:]).reshape(-1, count, count), wide(streams))
        return (mixed + wide(weights[:, :count]).T[:, :, None] * wide(found)).to(streams.dtype)
    return (wide(streams) + wide(weights).T[:, :, None] * wide(found)).to(streams.dtype)


def norm_streams(streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """streams [S, T, width], each row divided by its root mean square and times offset + gains [S * width], those of a token
    behind each other: [T, S * width]."""
    rows = wide(streams).transpose(0, 1)
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * (offset + wide(gains))).to(streams.dtype)


def mix_streams(
    normed: torch.Tensor, gates: torch.Tensor, count: int, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The mean over `count` streams of normed * sigmoid(gates), both [T, S * width], and 2 * sigmoid(weights / S) of weights [T,
    S], where there are some (Qwen4-Exp)."""
    mean = (wide(normed) * torch.sigmoid(wide(gates))).view(len(normed), count, -1).mean(1)
    return mean.to(normed.dtype), None if weights is None else 2 * torch.sigmoid(weights / count)


def sparse_gate(x: torch.Tensor, cutoff: float) -> torch.Tensor:
    """What numbers are above the mean of their row and cutoff times its deviation, or 0: of normal ones few (Gemma 3n; Spark
    Transformer, You et al. 2025)."""
    rows = wide(x)
    bound = rows.mean(-1, keepdim=True) + cutoff * rows.std(-1, keepdim=True, unbiased=False)
    return torch.relu(rows - bound).to(x.dtype)


def scale_ranks(x: torch.Tensor, scales: torch.Tensor, modules: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, R] fp32 times what each row takes of each rank's adapter, scales [T, A] and modules [R]; 0 where that is 0, whatever
    x is. Punica (Chen et al. 2023) has a product for each adapter instead."""
    taken = scales[:, modules.long()]
    return torch.where(taken == 0, 0.0, x * taken).to(dtype)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(first half of the columns) * second half. Shazeer 2020. activation: silu, gelu_tanh, gelu; or swiglu_oai, gpt-oss's
    gate * sigmoid(1.702 gate) * (1 + up), of a gate of at most 7 and an up between -7 and 7. Or relu2, which has no gate:
    relu(x) ** 2 of all columns (So et al. 2021), which relu2_gated has of the gate (BitNet); relu_gated has it as it is
    (SmallThinker). lone_gelu and lone_gelu_tanh are without one, too."""
    if activation == "relu2":
        return F.relu(wide(x)).square().to(x.dtype)
    if activation.startswith("lone_"):
        return F.gelu(wide(x), approximate=_GELUS[activation.removeprefix("lone_")]).to(x.dtype)
    gate, up = wide(x).chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        gate = gate * torch.sigmoid(1.702 * gate)
    elif activation in ("relu2_gated", "relu_gated"):
        gate = F.relu(gate)
        gate = gate if activation == "relu_gated" else gate.square()
    elif activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate=_GELUS[activation])
    return (gate * up).to(x.dtype)


def best_gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """x [T, n], row by row times the sigmoid of the largest of logits [T, E]."""
    return (wide(x) * torch.sigmoid(logits.amax(1, keepdim=True).to(wide(x).dtype))).to(x.dtype)


def temper(x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
    """x [T, n], row by row times 1 + scale * log(1 + floor((position + offset) / length)), of positions [T] int64."""
    steps = torch.div(positions + offset, length, rounding_mode="floor")
    return (wide(x) * (1 + scale * torch.log1p(steps.double())).to(wide(x).dtype)[:, None]).to(x.dtype)


def xielu(x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
    """positive * x ** 2 + slope * x above 0, else negative * (expm1(min(x, edge)) - x) + slope * x (Huang and Schlag 2024)."""
    x, dtype = wide(x), x.dtype
    below = negative * (torch.expm1(x.clamp(max=edge)) - x)
    return (torch.where(x > 0, positive * x * x, below) + slope * x).to(dtype)


def gated_conv(
    projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, C] and inputs [T, C] of one sequence's projected [T, 3 C], which is b, c and h behind each other. inputs = b * h,
    rounded; out = c * conv(inputs), where conv is causal and each channel's own: the sum of weight [width, C] times the inputs of
    the last width tokens, the token's own last, plus bias [C]. before [width - 1, C]: inputs of the tokens before, zeros in front
    of the first. LFM2's short convolution (Liquid AI 2025)."""
    b, c, h = wide(projected).chunk(3, dim=-1)
    inputs = (b * h).to(projected.dtype)
    known = wide(torch.cat([before, inputs]))
    total = sum(wide(row) * known[i : i + len(inputs)] for i, row in enumerate(weight))
    return (c * (total if bias is None else total + wide(bias))).to(projected.dtype), inputs


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
    """x [T, n] * sigmoid(gate), or softplus(gate), of gate [T, c], each for n / c numbers."""
    factor = F.softplus(wide(gate)) if softplus else torch.sigmoid(wide(gate))
    return (wide(x) * factor.repeat_interleave(x.shape[1] // gate.shape[1], dim=1)).to(x.dtype)


def in_groups(ranks: torch.Tensor, groups: Groups) -> torch.Tensor:
    """ranks [T, E], minus infinity for experts of groups that are not looked at: see `Groups`. DeepSeek-AI 2024."""
    grouped = ranks.view(len(ranks), groups.num_groups, -1)
    best = grouped.topk(groups.num_best, dim=-1).values.sum(dim=-1)
    taken = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : groups.num_taken]
    looked_at = torch.zeros_like(best, dtype=torch.bool).scatter_(1, taken, True)
    return grouped.masked_fill(~looked_at[..., None], float("-inf")).view_as(ranks)


def route(
    logits: torch.Tensor, num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, num_chosen] int64 in ascending order, and weights [T, num_chosen] of logits' type, of logits [T, E]: those with
    the largest, the lower number first among equals. Weights are the softmax of all logits, or of theirs alone. Shazeer et al.
    2017. scoring: see there; by sigmoids, DeepSeek-AI 2024."""
    scores = ranks = logits
    if scoring is not None and scoring.nearness is None:
        scores = scores_of(logits, scoring)
        ranks = (logits if scoring.by_logit else scores) + (0.0 if scoring.bias is None else scoring.bias)
        if scoring.groups is not None:
            ranks = in_groups(ranks, scoring.groups)
    chosen = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :num_chosen].sort(dim=-1).values
    if scoring is not None and scoring.nearness is not None:
        return chosen, shares_among_near(logits, chosen, scoring.nearness)
    if scoring is not None:
        taken = scores.gather(-1, chosen)
        weights = (taken / taken.sum(dim=-1, keepdim=True) if norm_topk else taken) * scoring.scale
        return chosen, weights if scoring.expert_scale is None else weights * scoring.expert_scale[chosen]
    if norm_topk:
        return chosen, torch.softmax(logits.gather(-1, chosen), dim=-1)
    return chosen, torch.softmax(logits, dim=-1).gather(-1, chosen)


def scores_of(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[T, E] of logits alike: roots of softpluses (DeepSeek-V4), sigmoids, or a softmax of all."""
    if scoring.root_softplus:
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if scoring.sigmoid else logits.softmax(dim=-1)


def add_weighted_rows(out: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """out [T, width]: row rows[i] += weights[i] * y[i], in out's type, for y [n, width] and weights [n]. No row comes twice."""
    out[rows] += weights[:, None] * y.to(out.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, H, D] with the first 2 * cos.shape[1] dims rotated. Pairs are (i, half + i), or (2i, 2i + 1) if interleaved.
    Su et al. 2021."""
    half = cos.shape[-1]
    rotated, rest = wide(x)[..., : 2 * half], wide(x)[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def rope_tables(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: float,
    lengths: torch.Tensor | None = None,
    long_frequencies: torch.Tensor | None = None,
    original_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, half] of positions [T]. Tokens with lengths [T] past original_len take long_frequencies. Ding et al. 2024."""
    if lengths is not None and long_frequencies is not None:
        frequencies = torch.where((lengths > original_len)[:, None], long_frequencies, frequencies)
    angles = positions.float()[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def qk_norm_rope(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    turned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, heads, D] and k, v [T, kv_heads, D] of qkv [T, (heads + 2 kv_heads) * D]: their heads normed, where there is a norm
    [D], then those of q and k rotated; or with turned rotated first, with gains of each head of q, [heads, D]. Not rounded
    yet."""
    head_rows = wide(qkv).reshape(qkv.shape[0], heads + 2 * kv_heads, -1)
    q, k, v = torch.split(head_rows, [heads, kv_heads, kv_heads], dim=1)
    if turned:
        q, k = (rope(x, cos, sin, interleaved) for x in (q, k))
    parts = zip((q, k, v), (q_norm, k_norm, v_norm), strict=True)
    q, k, v = (x if norm is None else add_rms_norm(x, None, norm, eps, norm_offset) for x, norm in parts)
    if not turned:
        q, k = (rope(x, cos, sin, interleaved) for x in (q, k))
    return q, k, v


def write_cache(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    """cache [N, K, S, D] at slots [T] (block * S + offset; -1: nowhere) = rows [T, K, D], in fp8 divided by scale [K]."""
    if scale is not None:
        largest = torch.finfo(cache.dtype).max
        rows = (rows / scale[:, None]).clamp(-largest, largest)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            cache[slot // cache.shape[2], :, slot % cache.shape[2]] = row.to(cache.dtype)


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., D] fp32 as a cache of int8 keeps them: codes, and a scale [...] of each. Of rows that are finite."""
    scales = rows.abs().amax(dim=-1) / 127
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    return (rows / scales[..., None]).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8), scales


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """weight[ids] * scale; with tokens [n], weight[tokens[ids]] * scale. Where an index is out of range, zeros."""
    rows = torch.zeros(ids.shape[0], weight.shape[1], dtype=weight.dtype)
    for row, index in zip(rows, ids.tolist(), strict=True):
        if tokens is not None:
            index = int(tokens[index]) if 0 <= index < tokens.shape[0] else -1
        if 0 <= index < weight.shape[0]:
            row.copy_((wide(weight[index]) * scale).to(weight.dtype))
    return rows


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    both_ways: bool = False,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: q [T, H, D] at positions first_position, …; k, v [L, K, D] from position 0. Returns [T, H, D]. Causal,
    but with both_ways.

    window: keys seen, the query's own included, with both_ways on either side; 0 for all. softcap * tanh(score / softcap) where
    softcap > 0. sinks [H]: a logit that takes part in the sum and has no value. distances [H, 2R + 64]: what a score gets whose
    key lies d places behind its query, in column R + d.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = first_position + torch.arange(tokens)[:, None]
    key = torch.arange(k.shape[0])[None]
    if distances is not None:
        scores = scores + distances[:, key - position + (distances.shape[1] - 64) // 2]
    hidden = (key > position) & (not both_ways)
    if window > 0:
        hidden = hidden | ((key - position).abs() >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(heads, tokens, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """How each token of one whole sequence ranks those up to it, minus infinity for the others: q [T, H, D] and keys [T, D] as
    they are rotated, weights [T, H] -> [T, T] (DeepSeek-V3.2, equation 1, without factors that are the same for all)."""
    products = torch.einsum("thd,sd->ths", wide(q), wide(keys)).relu()
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("th,ths->ts", wide(weights), products).masked_fill(future, float("-inf"))


def latent_attention(
    q: torch.Tensor,
    kept: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    offset: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    scale: float,
    unseen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal latent attention of one whole sequence (Liu et al. 2024, DeepSeek-V2, equations 9 to 19), with keys and values made
    of what is kept: q [T, H * (key_dim + rotary)], kept [T, rank + rotary], keys [H, rank, key_dim], values [H, value_dim, rank],
    cos and sin [T, rotary / 2] -> [T, H * value_dim]. unseen [T, T] bool: what a query does not see, beside what is behind it."""
    tokens, rotary, rank = len(q), 2 * cos.shape[1], norm.shape[0]
    heads = wide(q).view(tokens, keys.shape[0], -1)
    latent = add_rms_norm(kept[:, :rank], None, norm, eps, offset)
    turned = rope(torch.cat([heads[..., -rotary:], wide(kept)[:, None, rank:]], 1), cos, sin, interleaved)
    own_keys = torch.einsum("tr,hrd->thd", wide(latent), wide(keys))
    shared = turned[:, -1:].expand(-1, keys.shape[0], -1)
    scores = torch.einsum(
        "thd,shd->hts", torch.cat([heads[..., :-rotary], turned[:, :-1]], -1), torch.cat([own_keys, shared], -1)
    )
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    hidden = hidden if unseen is None else hidden | unseen
    weights = torch.softmax((scores * scale).masked_fill(hidden, float("-inf")), -1)
    found = torch.einsum("hts,shd->thd", weights, torch.einsum("tr,hdr->thd", wide(latent), wide(values)))
    return found.flatten(1).to(q.dtype)
