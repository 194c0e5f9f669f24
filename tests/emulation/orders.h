// The order in which threads, and blocks, get their turn.
#pragma once

#include <algorithm>
#include <vector>

// 0: as numbered; 1: backwards; others: shuffled by the seed.
inline std::vector<long> order_of(long count, unsigned seed) {
  std::vector<long> order(count);
  for (long i = 0; i < count; ++i) order[i] = i;
  if (seed == 1) std::reverse(order.begin(), order.end());
  if (seed > 1)
    for (long i = count - 1; i > 0; --i) {
      seed = seed * 1664525u + 1013904223u;
      std::swap(order[i], order[(seed >> 8) % (i + 1)]);
    }
  return order;
}
