// Where in its state a step of a sequence goes on, and where it leaves what it finds, for one head (states.py): what the
// convolution and the scan of Mamba's first rule have in common. A block takes a head of a sequence, grid (B, V), a thread a channel.
#pragma once
#include "common.cuh"

constexpr int MAX_THREADS = 64;

// The step's rows, from `begin` on: `count` of them, the first of which is at `position`, and so many known ones. These lengths are
// read before the kernel before has ended. place: of all states' places the first of the sequence's.
struct Lengths {
  int begin, count, len, position, known, place;

  static DEVICE Lengths load(const int* starts, const int* lens, const int* known_lens, const int* state_of, int sequence) {
    const int begin = __ldcg(starts + sequence), count = __ldcg(starts + sequence + 1) - begin, len = __ldcg(lens + sequence);
    const int position = len - count;
    return {begin, count, len, position, __ldcg(known_lens + sequence) - position, __ldcg(state_of + sequence) * 2};
  }
};

// stamp: behind how many tokens the place is that is read, 0 where the sequence begins. held: guesses behind it that are kept.
// first_guess: the position of the first guess that the step keeps, in the place that it writes.
struct Places {
  bool is_there;
  int stamp, place, target, held, first_guess;

  static DEVICE Places find(const Lengths& own, const int* stamps, const int* reaches, int num_values, int head) {
    Places found = {own.position == 0, 0, own.place, own.place + 1, 0, own.known > 0 ? own.known : 0};
    if (own.position <= 0) return found;
    const Index first = (Index)own.place * num_values + head, second = first + num_values;
    int stamp = stamps[first], reach = reaches[first];
    const int other = stamps[second];
    if (other <= own.position && (other > stamp || stamp > own.position)) stamp = other, reach = reaches[second], ++found.place;
    found.is_there = stamp > 0 && stamp <= own.position && reach >= own.position;
    found.stamp = stamp, found.held = own.position - stamp;
#ifdef BUG_NOTHING_HELD
    found.held = 0;
#endif
    found.target = own.known > 0 ? found.place ^ 1 : found.place;
#ifdef BUG_SAME_PLACE
    found.target = found.place;
#endif
    found.first_guess = own.known > 0 ? own.position + own.known : stamp;
    return found;
  }
};

// What a sequence finds that has nothing to go on from: NaN; and a row of padding: zeros.
DEVICE void fill(DTYPE* out, const Lengths& own, int channels) {
  const DTYPE filling = from_float<DTYPE>(own.len > 0 ? __uint_as_float(0x7fc00000u) : 0.0f);
#pragma unroll 1
  for (int t = 0; t < own.count; ++t) out[(Index)t * channels] = filling;
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
