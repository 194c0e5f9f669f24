// Attention of one query token a sequence over the paged cache, on tensor cores: a decode step's.
//
//   out[b, h] = sum_j softmax_j(score_j) v[j],   score_j = scale * q[b, h] . k[j],  softcap * tanh(score_j / softcap) where > 0
//
// out [B, H, D] DTYPE, caches [N, KH, BLOCK_SIZE, D] KV_DTYPE, block_tables [B, P], kv_lens [B]; D a multiple of 16, ROWS 8 or
// 16. decode_split.cuh says how the work is split over blocks, and where q and the newest k and v come from.
//
// A warp takes tiles of 16 tokens and loads their fragments from the cache straight into registers, up to 16 bytes a lane: the
// order of the head's dims within a product, and of the result's columns, is ours to choose, so the loop needs no shared memory
// for K and V, no barriers, and has no bank conflicts. The next K loads start when the scores are done, the next V loads when
// the values are summed, so 4 to 8 KiB a warp are under way at any time: with 8 to 12 warps 32 to 96 KiB a multiprocessor,
// where 4.3 TB/s over 132 of them at 1 us ask for 33. Queries fill 8 of the 16 rows; the other 8 hold what a softmax weight
// loses when it is rounded to 16 bits, so that weights count as in fp32, at no cost. With more than 8 queries the lost part has
// a product of its own. fp8 and int8 become half, exactly; so do their queries, after division by a power of two. Small groups
// take the same way: the products of a tile are a tenth of the time that its bytes need.
//
// Scales of int8 meet scores and weights. A lane loads one for each tile, of K or of V, and has the others' from it. Weights times
// V's are in units of the largest that the warp has met, a power of two, so that half holds them, whatever V's size.
#include "decode_split.cuh"

template <class T>
struct OperandOf { typedef T type; };
template <>
struct OperandOf<fp8> { typedef half type; };
template <>
struct OperandOf<int8_t> { typedef half type; };
typedef OperandOf<KV_DTYPE>::type Operand;

// The largest divisor of `dims` up to `most` that is a multiple of 64, or of 16 if none is.
constexpr int part_of(int dims, int most) {
  for (int unit : {64, 16})
    for (int part = most; part >= unit; part -= unit)
      if (dims % part == 0) return part;
  return 0;
}

constexpr int BYTES = sizeof(KV_DTYPE), HALVES = ROWS / 8, TILE = 16;
// A warp holds a part of the head's dims at a time. Beyond 128 the result's registers leave room for less.
constexpr int K_PART = part_of(HEAD_DIM, 128), K_PARTS = HEAD_DIM / K_PART, STEPS = K_PART / 16;
constexpr int V_PART = part_of(HEAD_DIM, HEAD_DIM > 128 ? 64 : 128), V_PARTS = HEAD_DIM / V_PART;
constexpr int TILES = HEAD_DIM > 128 || HEAD_DIM * BYTES > 128 ? 1 : HEAD_DIM * BYTES > 64 ? 2 : 4;  // of a warp, at a time
#if __CUDA_ARCH__ == 900
constexpr int DIMS_OF_THREE = BYTES == 1 ? 96 : 128;
#elif __CUDA_ARCH__ < 1000
constexpr int DIMS_OF_THREE = 96;  // beyond, some spill, and there is less bandwidth to fill
#else
constexpr int DIMS_OF_THREE = 0;  // most need no more than that anyway, and one spills
#endif
constexpr int MIN_BLOCKS = ROWS == 8 && HEAD_DIM <= DIMS_OF_THREE ? 3 : 2;
// Of K a lane takes a quarter of a token's row, of V an eighth, in loads of VECTOR elements.
constexpr int K_VECTOR = largest_power(K_PART / 4, 16 / BYTES), K_LOADS = K_PART / 4 / K_VECTOR;
constexpr int V_VECTOR = largest_power(V_PART / 8, 16 / BYTES), V_LOADS = V_PART / 8 / V_VECTOR;
constexpr int K_WORDS = K_VECTOR * BYTES / 4, V_WORDS = (V_VECTOR * BYTES + 3) / 4;

// The result in the order of registers: what a warp's lanes add at once, their sums [i][k], lies side by side, four to a row, and
// rows are four banks apart. Gaps of eight keep apart the threads that read four dims each. of(dim): where a dim lies.
struct Registers {
  static constexpr int GAP = 8, END = HEAD_DIM + (HEAD_DIM - 1) / 32 * GAP, FLOATS = END + (4 - END % 32 + 32) % 32;

  static DEVICE int of(int i, int k, int quarter) {
    const int place = (i * 2 + k) * 4 + quarter;
    return place + place / 32 * GAP;
  }
  static DEVICE int of(int dim) {
    const int vector = dim % V_PART / V_VECTOR, i = dim / V_PART * (V_PART / 8) + vector / 8 * V_VECTOR + dim % V_VECTOR;
    return of(i, vector % 2, vector % 8 / 2);
  }
};
// Weights go up to 2^SHIFT, so that small ones keep their bits as halves.
constexpr float SHIFT = 12.0f;

#if !defined(EMULATION) && __CUDA_ARCH__ >= 890
constexpr float FP8_UNIT = 1.0f;
// The two fp8 in the lower half of the word, as halves.
DEVICE uint32_t halves_of(uint32_t bytes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)bytes, __NV_E4M3);
  return pair.x | (uint32_t)pair.y << 16;
}
#else
constexpr float FP8_UNIT = 256.0f;
// The same, in FP8_UNIT: sign, exponent and fraction moved to where a half has them.
DEVICE uint32_t halves_of(uint32_t bytes) {
  const uint32_t high = __byte_perm(bytes, 0, 0x1404);
  return (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
}
#endif
constexpr float UNIT = BYTES == 1 && !INT8 ? FP8_UNIT : 1.0f;

// A lane's elements of a token's row, which come in several loads.
template <class By>
DEVICE void load_key(uint32_t* words, const KV_DTYPE* source) {
#pragma unroll
  for (int i = 0; i < K_LOADS; ++i) load_words<K_VECTOR * BYTES, By>(words + i * K_WORDS, source + i * 4 * K_VECTOR);
}

template <class By>
DEVICE void load_value(uint32_t* words, const KV_DTYPE* source) {
#pragma unroll
  for (int i = 0; i < V_LOADS; ++i) load_words<V_VECTOR * BYTES, By>(words + i * V_WORDS, source + i * 8 * V_VECTOR);
}

// Elements 4 * step to 4 * step + 3 of a lane's, as an operand; those of int8 in the order 0, 2, 1, 3.
DEVICE void key_operand(uint32_t* operand, const uint32_t* words, int step) {
  if constexpr (INT8) {
    operand[0] = halves_of_even_codes(words[step]);
    operand[1] = halves_of_even_codes(words[step] >> 8);
  } else if constexpr (BYTES == 1) {
    operand[0] = halves_of(words[step] & 0xffff);
    operand[1] = halves_of(words[step] >> 16);
  } else {
    operand[0] = words[2 * step];
    operand[1] = words[2 * step + 1];
  }
}

// Element i of two tokens.
DEVICE uint32_t value_pair(const uint32_t* a, const uint32_t* b, int i) {
  if constexpr (INT8) {
    return halves_of_even_codes(__byte_perm(a[i / 4], b[i / 4], i % 4 < 2 ? 0x5410 : 0x7632) >> i % 2 * 8);
  } else if constexpr (BYTES == 1) {
    const uint32_t pairs = __byte_perm(a[i / 4], b[i / 4], i % 4 < 2 ? 0x5140 : 0x7362);
    return halves_of(i % 2 ? pairs >> 16 : pairs & 0xffff);
  } else {
    return __byte_perm(a[i / 2], b[i / 2], i % 2 ? 0x7632 : 0x5410);
  }
}

DEVICE __nv_bfloat162 pair_of(float low, float high, bf16) { return __floats2bfloat162_rn(low, high); }
DEVICE __half2 pair_of(float low, float high, half) { return __floats2half2_rn(low, high); }

// Two weights rounded, and what they lost by it.
DEVICE void pack_weights(float low, float high, uint32_t& rounded, uint32_t& lost) {
  const auto kept = pair_of(low, high, Operand());
  const auto rest = pair_of(low - to_float(kept.x), high - to_float(kept.y), Operand());
  rounded = *reinterpret_cast<const uint32_t*>(&kept);
  lost = *reinterpret_cast<const uint32_t*>(&rest);
}

// For each row the power of two that brings its queries below 2, which half holds with all the bits that count.
DEVICE void find_powers(float* powers, const Heads& heads, int rows) {
  for (int row = threadIdx.x / WARP_SIZE; row < rows; row += WARPS) {
    float largest = 0.0f;
    for (int i = threadIdx.x % WARP_SIZE; i < HEAD_DIM; i += WARP_SIZE)
      largest = fmaxf(largest, fabsf(to_float(heads.queries[row][i])));
    const uint32_t exponent = __float_as_uint(warp_max(largest)) >> 23;
    powers[row] = __uint_as_float(min(max(exponent, 1u), 253u) << 23);
  }
}

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS)
decode_attention(const DTYPE* qkv, const DTYPE* q_norm, const DTYPE* k_norm, const float* cos, const float* sin,
                 KV_DTYPE* k_cache, KV_DTYPE* v_cache, const int* block_tables, const int* kv_lens, const float* sinks,
                 float* k_scale, float* v_scale, float* partials, float* sums, int* counters, DTYPE* out,
                 int kv_heads, int group, int num_angles, int interleaved, int table_width, int window, int least_split,
                 float eps, float norm_offset, float scale, float softcap
#if VALUE_NORM
                 , const DTYPE* v_norm
#endif
#if DISTANCES
                 , const float* distances, int columns
#endif
) {
  typedef Vector<uint32_t, 2 * HALVES> Fragment;
  __shared__ Result<Registers> result;
  __shared__ Heads heads;
  __shared__ Fragment queries[HEAD_DIM / 16][WARP_SIZE];
  __shared__ float powers[ROWS];
  const int lane = threadIdx.x % WARP_SIZE, row = lane / 4, quarter = lane % 4;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP_SIZE, 0);  // tells the compiler that the lanes agree on it
  Split split;
  find_heads(split, kv_heads, group);
  if (!find_tokens(split, kv_lens, window, least_split)) return write_zeros(split, kv_heads, group, out);
  if (blockIdx.x >= split.splits) return;

  const int* table = block_tables + (int64_t)blockIdx.z * table_width;
  uint32_t keys[TILES][2][K_LOADS * K_WORDS], values[TILES][4][V_LOADS * V_WORDS];
  float scales[TILES];  // of int8: the lane's of each tile, of K's row lane % 16 or of V's, and what of V's is one
  uint32_t unit = 1u << 23;
  int blocks[TILES], next_blocks[TILES];
  const auto tile_token = [&](int tile, int i) { return (tile + i * WARPS) * TILE; };
  const auto find_blocks = [&](int* blocks, int tile) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) blocks[i] = block_of(table, clamped(tile_token(tile, i), split));
  };
  // The lane's tokens of a tile, load(words, i, token) for each: for K row and row + 8, for V the four whose weights it has,
  // 2 * quarter, one more, and 8 more.
  const auto each_key = [&](int tile, auto load) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) load(keys[i][j], i, clamped(tile_token(tile, i) + 8 * j + row, split));
  };
  const auto each_value = [&](int tile, auto load) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        load(values[i][j], i, clamped(tile_token(tile, i) + j / 2 * 8 + 2 * quarter + j % 2, split));
  };
  const auto load_keys = [&](const int* blocks, int tile, int part) {
    each_key(tile, [&](uint32_t* words, int i, int token) {
      const int column = token % BLOCK_SIZE * HEAD_DIM + part * K_PART + quarter * K_VECTOR;
      load_key<PastL1>(words, k_cache + block_offset(blocks[i], split.kv_head, kv_heads) + column);
    });
  };
  const auto load_values = [&](const int* blocks, int tile, int part) {
    each_value(tile, [&](uint32_t* words, int i, int token) {
      const int column = token % BLOCK_SIZE * HEAD_DIM + part * V_PART + row * V_VECTOR;
      load_value<PastL1>(words, v_cache + block_offset(blocks[i], split.kv_head, kv_heads) + column);
    });
  };
  const auto load_scales = [&](const int* blocks, int tile) {
    if constexpr (INT8) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const int64_t row = first_scale(blocks[i], split.kv_head, kv_heads) + tile_token(tile, i) % BLOCK_SIZE + lane % TILE;
        scales[i] = __ldcg((lane < TILE ? k_scale : v_scale) + row);
      }
    }
  };
  // Warps take tiles in turn, by position.
  const int first_tile = split.begin / TILE, end_tile = (split.end + TILE - 1) / TILE;
  int tile = first_tile + ((warp - first_tile) & (WARPS - 1));
  if (tile < end_tile) {
    find_blocks(blocks, tile);
    find_blocks(next_blocks, tile + WARPS * TILES);
  }
  if (tile < end_tile) {
    load_keys(blocks, tile, 0);
    load_values(blocks, tile, 0);
    load_scales(blocks, tile);
  }
  const Projected projected = {qkv, q_norm, SHARED ? nullptr : k_norm, v_norm, cos, sin, num_angles, interleaved != 0, eps,
                               norm_offset};
  take_heads(heads, projected, split, kv_heads, group, table, k_cache, v_cache, k_scale, v_scale);
#if !SHARED
  if (split.has_newest) {  // its place was read before it was there
    each_key(tile, [&](uint32_t* words, int, int token) {
      if (token == split.end - 1) load_key<FromShared>(words, heads.newest[0] + quarter * K_VECTOR);
    });
    each_value(tile, [&](uint32_t* words, int, int token) {
      if (token == split.end - 1) load_value<FromShared>(words, heads.newest[1] + row * V_VECTOR);
    });
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (INT8 && tile_token(tile, i) + lane % TILE == split.end - 1) scales[i] = heads.newest_scale(lane >= TILE);
  }
#endif
  if (BYTES == 1) {
    find_powers(powers, heads, split.rows);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < (HEAD_DIM / 16 + WARPS - 1) / WARPS; ++i) {
    const int step = i * WARPS + warp, element = step % STEPS * 4;
    const int dim = step / STEPS * K_PART + element / K_VECTOR * 4 * K_VECTOR + quarter * K_VECTOR + element % K_VECTOR;
    if (step >= HEAD_DIM / 16) break;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int query = min(h * 8 + row, split.rows - 1);  // rows that are not needed repeat the last that is
      const float factor = BYTES == 1 ? __uint_as_float((254u << 23) - __float_as_uint(powers[query])) : 1.0f;
      const auto four = Vector<DTYPE, 4>::load(heads.queries[query] + dim);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int first = INT8 ? j : 2 * j, second = INT8 ? j + 2 : 2 * j + 1;
        const auto pair = pair_of(to_float(four.at[first]) * factor, to_float(four.at[second]) * factor, Operand());
        queries[step][lane].at[j * HALVES + h] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }
  float factors[HALVES], tops[HALVES], weight_sums[HALVES] = {}, out_sums[HEAD_DIM / 8][4] = {};
#pragma unroll
  for (int i = 0; i < HALVES; ++i) {
    factors[i] = UNIT * score_factor(scale, softcap, k_scale, split.kv_head);
    if (BYTES == 1) factors[i] *= powers[min(i * 8 + row, split.rows - 1)];
    tops[i] = NEGATIVE_INFINITY;
  }
  __syncthreads();

  for (; tile < end_tile; tile += WARPS * TILES) {
    const bool more = tile + WARPS * TILES < end_tile;
    __syncwarp();  // keeps the compiler from holding all queries in registers
    // Of each tile 8 tokens by 8 or 16 queries in [i][0], and the next 8 tokens in [i][1]: of the lane two tokens at 2 * quarter.
    float scores[TILES][2][4] = {};
#pragma unroll
    for (int part = 0; part < K_PARTS; ++part) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Fragment fragment = queries[part * STEPS + step][lane];
        uint32_t a[4] = {};
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) a[i * 2 / HALVES] = fragment.at[i];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            uint32_t b[2];
            key_operand(b, keys[i][j], step);
            mma_m16n8k16<Operand>(scores[i][j], a, b);
          }
      }
      if (part + 1 < K_PARTS) {
        load_keys(blocks, tile, part + 1);
      } else if (more) {
        load_keys(next_blocks, tile + WARPS * TILES, 0);
      }
    }
    float corrections[HALVES], rescaling = 1.0f;
    if constexpr (INT8) {
      uint32_t largest = unit;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        if (!is_seen(tile_token(tile, i) + lane % TILE, split)) scales[i] = 0.0f;  // what lies there may be anything
        if (lane >= TILE) largest = max(largest, __float_as_uint(scales[i]));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float scale = __shfl_sync(ALL_LANES, scales[i], k / 2 * 8 + 2 * quarter + k % 2);
          for (int h = 0; h < HALVES; ++h) scores[i][k / 2][h * 2 + k % 2] *= scale;
        }
      }
      largest = min(warp_max(largest) & 0x7f800000u, 253u << 23);  // of a NaN, too
      rescaling = __uint_as_float(max((127 << 23) + (int)unit - (int)largest, 0));
      unit = largest;
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      float top = tops[h];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& score = scores[i][k / 2][h * 2 + k % 2];
          const int token = tile_token(tile, i) + k / 2 * 8 + 2 * quarter + k % 2;
          score = is_seen(token, split) ? score_of(score, factors[h], softcap) : NEGATIVE_INFINITY;
          if constexpr (DISTANCES) score += LOG2E * __ldg(by_distance(distances, columns, split, h * 8 + row) + clamped(token, split));
          top = fmaxf(top, score);
        }
      top = warp_max(top, 4);
      corrections[h] = exp2f(tops[h] - top);
      tops[h] = top;
      weight_sums[h] *= corrections[h];
      if constexpr (INT8) corrections[h] *= rescaling;  // of the output's sums
    }
    uint32_t weights[TILES][4] = {}, lost[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      float value_scales[4] = {};  // of the lane's four tokens, in units
      if constexpr (INT8) {
        const float scale = scales[i] * __uint_as_float((254u << 23) - unit);
#pragma unroll
        for (int k = 0; k < 4; ++k) value_scales[k] = __shfl_sync(ALL_LANES, scale, TILE + k / 2 * 8 + 2 * quarter + k % 2);
      }
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float low = exp2f(scores[i][j][h * 2] - (tops[h] - SHIFT));
          float high = exp2f(scores[i][j][h * 2 + 1] - (tops[h] - SHIFT));
          weight_sums[h] += low + high;
          if constexpr (INT8) {
            low *= value_scales[j * 2];
            high *= value_scales[j * 2 + 1];
          }
          pack_weights(low, high, weights[i][j * 2 + h], HALVES == 1 ? weights[i][j * 2 + 1] : lost[i][j * 2 + h]);
        }
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) out_sums[i][k] *= corrections[k / 2 * (HALVES - 1)];
#pragma unroll
    for (int part = 0; part < V_PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int element = 0; element < V_PART / 8; ++element) {
          const int at = element / V_VECTOR * V_WORDS;
          const uint32_t b[2] = {value_pair(values[i][0] + at, values[i][1] + at, element % V_VECTOR),
                                 value_pair(values[i][2] + at, values[i][3] + at, element % V_VECTOR)};
          mma_m16n8k16<Operand>(out_sums[part * (V_PART / 8) + element], weights[i], b);
          if (HALVES == 2) mma_m16n8k16<Operand>(out_sums[part * (V_PART / 8) + element], lost[i], b);
        }
      if (part + 1 < V_PARTS) {
        load_values(blocks, tile, part + 1);
      } else if (more) {
        load_values(next_blocks, tile + WARPS * TILES, 0);
        load_scales(next_blocks, tile + WARPS * TILES);
      }
    }
    for (int i = 0; i < TILES; ++i) blocks[i] = next_blocks[i];
    if (more) find_blocks(next_blocks, tile + 2 * WARPS * TILES);
  }

#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    weight_sums[h] = warp_sum(weight_sums[h], 4);
    if (quarter == 0) result.tops[warp][h * 8 + row] = tops[h] - SHIFT;
  }
  __syncthreads();
  in_order_of_warps([&](bool is_first) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const float factor = exp2f(tops[h] - SHIFT - block_top(result, h * 8 + row));
      if (quarter == 0) add(result.sum[h * 8 + row], factor * weight_sums[h], is_first);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float sum = HALVES == 1 ? out_sums[i][k] + out_sums[i][k + 2] : out_sums[i][h * 2 + k];
          add(result.out[h * 8 + row][Registers::of(i, k, quarter)], factor * (INT8 ? __uint_as_float(unit) : UNIT) * sum, is_first);
        }
    }
  });
  finish(result, split, kv_heads, group, sinks, v_scale, partials, sums, counters, out);
}
EXPORT(decode_attention)
