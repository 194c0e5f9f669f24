// A head of q, k or v between its projection and attention: norm, rotation by position, one rounding. Kernels that share this
// leave the same bits.
//
//   qkv [T, heads + 2 kv_heads, dim] DTYPE: the heads of q, then of k, then of v; row_heads heads from row to row
//   gains [dim] DTYPE: head / rms(head) * (offset + gain)
//   cos, sin [T, num_angles] fp32: rotation of the first 2 * num_angles dims, in pairs (i, num_angles + i), or (2i, 2i + 1) if
//   interleaved
//
// TURNED: heads are normed behind their rotation. Not an argument: it is nothing to those that are not.
//
// Everything is fp32 between the load and the one rounding at the store, as on the CPU.
//
// A head belongs to `lanes` lanes (a power of two), a lane's elements to COUNT units of two loads of LOAD elements: for
// half-split pairs one load from either half, so that both ends of a pair meet in one lane and nothing is exchanged. With 16-byte
// loads a head of 128 takes 8 lanes and a warp four heads. COUNT is 1 but for odd heads that 32 narrow loads don't cover.
#pragma once
#include "int8_rows.cuh"

#ifndef TURNED
#define TURNED 0
#endif

// Which of a head's elements a lane has. Both layouts of pairs have angle j for a unit's pair j.
template <int LOAD>
struct Place {
  int lane, lanes, dim, num_angles;
  bool interleaved;

  DEVICE int first_angle(int unit) const { return (lane + unit * lanes) * LOAD; }
  DEVICE bool turns(int unit) const { return first_angle(unit) < num_angles; }
  DEVICE int column(int unit, int part) const {
    const int angle = first_angle(unit);
    return turns(unit) && !interleaved ? angle + part * num_angles : 2 * angle + part * LOAD;
  }
  DEVICE bool has(int unit, int part) const { return column(unit, part) < dim; }
};

template <int LOAD, int COUNT>
struct Angles {
  Vector<float, LOAD> cos[COUNT], sin[COUNT];

  // From a token's row of each table.
  DEVICE void load(const Place<LOAD>& place, const float* cos_row, const float* sin_row) {
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      if (place.turns(unit)) {
        cos[unit] = Vector<float, LOAD>::load(cos_row + place.first_angle(unit));
        sin[unit] = Vector<float, LOAD>::load(sin_row + place.first_angle(unit));
      }
  }
};

// A lane's elements of a head: part 0 of a unit, then part 1. Loads are calls of their own, so that all are under way before the
// first is waited for.
template <int LOAD, int COUNT>
struct Head {
  typedef Vector<DTYPE, LOAD> Elements;
  Elements gains[COUNT][2], loaded[COUNT][2];
  float values[COUNT][2 * LOAD];

  DEVICE void load_gains(const Place<LOAD>& place, const DTYPE* source) { load_all(place, gains, source); }

  DEVICE void load(const Place<LOAD>& place, const DTYPE* source) { load_all(place, loaded, source); }

  // To fp32, normed where there are gains, and rotated where it is to be. All lanes of a warp call it with the same any_gains:
  // whether one of them has some.
  DEVICE void norm_and_rotate(const Place<LOAD>& place, bool any_gains, bool has_gains, float eps, float offset, bool rotates,
                              const Angles<LOAD, COUNT>& angles) {
    widen();
    if (TURNED && rotates) rotate(place, angles);
    if (any_gains) norm(place, has_gains, eps, offset);
    if (!TURNED && rotates) rotate(place, angles);
  }

  DEVICE void widen() {
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int i = 0; i < 2 * LOAD; ++i) values[unit][i] = to_float(loaded[unit][i / LOAD].at[i % LOAD]);
  }

  DEVICE void norm(const Place<LOAD>& place, bool has_gains, float eps, float offset) {
    float squares = 0.0f;
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int part = 0; part < 2; ++part) {
        float sum = 0.0f;
        for (int j = 0; j < LOAD; ++j) {
          const float value = values[unit][part * LOAD + j];
          sum = fmaf(value, value, sum);
        }
#ifndef BUG_UNMASKED_TAIL
        if (!place.has(unit, part)) sum = 0.0f;
#endif
        squares += sum;
      }
    const float inverse = rsqrtf(warp_sum(squares, place.lanes) / place.dim + eps);
    if (!has_gains) return;
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int i = 0; i < 2 * LOAD; ++i) values[unit][i] *= inverse * (offset + to_float(gains[unit][i / LOAD].at[i % LOAD]));
  }

  DEVICE void rotate(const Place<LOAD>& place, const Angles<LOAD, COUNT>& angles) {
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit) {
      if (!place.turns(unit)) continue;
      const auto turn = [&](int j, float& a, float& b) {
        const float cos = angles.cos[unit].at[j], sin = angles.sin[unit].at[j], before = a;
        a = fmaf(a, cos, -(b * sin));
        b = fmaf(b, cos, before * sin);
      };
      if (place.interleaved) {
#pragma unroll
        for (int j = 0; j < LOAD; ++j) turn(j, values[unit][2 * j], values[unit][2 * j + 1]);
      } else {
#pragma unroll
        for (int j = 0; j < LOAD; ++j) turn(j, values[unit][j], values[unit][LOAD + j]);
      }
    }
  }

  // Of the lane, the bits of the largest magnitude; a NaN is larger than any.
  DEVICE uint32_t largest(const Place<LOAD>& place) const {
    uint32_t most = 0;
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int i = 0; i < 2 * LOAD; ++i)
        if (place.has(unit, i / LOAD)) most = max(most, __float_as_uint(values[unit][i]) & 0x7fffffffu);
    return most;
  }

  // The scale of the head as a row of int8, by all lanes of a warp.
  DEVICE float own_scale(const Place<LOAD>& place) const {
    uint32_t most = largest(place);
    for (int bits = place.lanes / 2; bits; bits >>= 1) most = max(most, __shfl_xor_sync(ALL_LANES, most, bits));
    return int8_scale(most);
  }

  // Rounded, to where the head begins, which may be in several places. Divided by the scale where the type has eight bits.
  template <class T, class... More>
  DEVICE void store(const Place<LOAD>& place, float scale, T* target, More*... more) const {
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int part = 0; part < 2; ++part) {
        Vector<T, LOAD> rounded;
#pragma unroll
        for (int j = 0; j < LOAD; ++j) {
          rounded.at[j] = kept<T>(values[unit][part * LOAD + j], scale);
        }
        if (!place.has(unit, part)) continue;
        rounded.store(target + place.column(unit, part));
        (rounded.store(more + place.column(unit, part)), ...);
      }
  }

 private:
  // What lies beyond the head's end is its begin instead.
  static DEVICE void load_all(const Place<LOAD>& place, Elements (&target)[COUNT][2], const DTYPE* source) {
#pragma unroll
    for (int unit = 0; unit < COUNT; ++unit)
      for (int part = 0; part < 2; ++part)
        target[unit][part] = Elements::load(source + (place.has(unit, part) ? place.column(unit, part) : 0));
  }
};
