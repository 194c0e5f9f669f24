// What latent_attention.cu and latent_combine.cu have to agree about: which tokens a group has, and how their keys are split.
//
// Lengths, block tables and groups are there before a step's first layer, and are read past the L1: see decode_split.cuh.
#pragma once
#include "common.cuh"

constexpr int GRAIN = 64;  // splits begin at multiples of it
constexpr float LOG2_E = 1.4426950408889634f;

struct Work {
  int first_token, tokens;
  int first_len;  // of the first token; each other has one key more than the one before
  int sequence;
  int end;  // keys of the last token; 0 for padding
  int split_size, splits;
};

// groups [G] (first token, tokens, length of the first, sequence); null where each token is a group of its own, with lens [T] and
// sequences [T], or, where that is null too, sequences of their own. As many splits as `most`, but none below least_split keys.
DEVICE Work find_work(int group, const int* lens, const int* sequences, const int4* groups, int least_split, int most) {
  Work work = {group, 1, 0, group, 0, least_split, 0};
  if (groups) {
    const int4 words = __ldcg(groups + group);
    work.first_token = words.x;
    work.tokens = words.y;
    work.first_len = words.z;
    work.sequence = words.w;
  } else {
    work.first_len = __ldcg(lens + group);
    if (sequences) work.sequence = __ldcg(sequences + group);
  }
  if (work.first_len == 0) return work;
  work.end = work.first_len + work.tokens - 1;
  if ((int64_t)least_split * most < work.end) work.split_size = ((work.end + most - 1) / most + GRAIN - 1) / GRAIN * GRAIN;
  work.splits = (work.end + work.split_size - 1) / work.split_size;
  return work;
}
