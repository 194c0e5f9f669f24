// What lanes, warps and blocks do together: barriers, shuffles, votes, ldmatrix.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

using Threads = std::vector<Thread*>;

// Of the lanes that a shuffle reaches: a clamp, applied within segments of the warp.
struct Limits {
  int most, least, segment;
};
bool up(int lane, int by, const Limits& limits, int& from) { return (from = lane - by) >= limits.most; }
bool across(int lane, int by, const Limits& limits, int& from) { return (from = lane ^ by) <= limits.most; }
bool at_index(int, int by, const Limits& limits, int& from) {
  return (from = limits.least | (by & ~limits.segment)) <= limits.most;
}

// SOURCE: the lane to read, and whether it is in the segment (PTX ISA, shfl.sync).
template <auto SOURCE>
void shuffle(Threads& threads, const Op& op) {
  uint32_t values[WARP], there = 0;
  for (Thread* t : threads) values[t->lane] = t->get<uint32_t>(op, 2), there |= 1u << t->lane;
  for (Thread* t : threads) {
    const int by = t->get<uint32_t>(op, 3) & 31, clamp = t->get<uint32_t>(op, 4) & 31, segment = t->get<uint32_t>(op, 4) >> 8 & 31;
    int source;
    const bool is_inside = SOURCE(t->lane, by, {(t->lane & segment) | (clamp & ~segment), t->lane & segment, segment}, source);
    if (!is_inside) source = t->lane;
    const bool takes_part = 0 <= source && source < WARP && there >> source & 1;
    if (!takes_part) fail("shfl.sync from lane " + std::to_string(source) + ", which takes no part");
    t->set<uint32_t>(op, 0, values[source]);
    t->set<uint64_t>(op, 1, is_inside);
  }
}

template <bool TRANSPOSED>
void load_matrices(Threads& threads, const Op& op) {
  if (threads.size() != WARP) fail("ldmatrix without all lanes");
  const unsigned char* rows[WARP];
  for (Thread* t : threads) note_traffic(*t, op, true, t->get<uint32_t>(op, 4) + (uint32_t)op.extra, 16);
  for (Thread* t : threads) rows[t->lane] = shared_at(*t, t->get<uint32_t>(op, 4) + (uint32_t)op.extra, 16, Access::READ);
  for (Thread* t : threads)
    for (int i = 0; i < 4; ++i) {
      uint32_t word = 0;
      for (int half = 0; half < 2; ++half) {
        int row = t->lane / 4, column = t->lane % 4 * 2 + half;
        if (TRANSPOSED) std::swap(row, column);
        uint16_t element;
        memcpy(&element, rows[8 * i + row] + 2 * column, 2);
        word |= (uint32_t)element << 16 * half;
      }
      t->set<uint32_t>(op, i, word);
    }
}

// The one that all threads of a block meet at: named ones, and those of some threads, are not in use.
template <int PLACE, int OPERANDS>
void check_barrier(Threads& threads, const Op& op) {
  if (op.count != OPERANDS) fail("a barrier of some threads");
  for (Thread* t : threads)
    if (t->get<uint32_t>(*t->at, PLACE)) fail("a barrier with a number");
}

void block_barrier(Threads& threads, const Op& op) {
  check_barrier<0, 1>(threads, op);
  next_epoch();
}

void block_or(Threads& threads, const Op& op) {
  check_barrier<1, 3>(threads, op);
  uint64_t any = 0;
  for (Thread* t : threads) any |= t->get<uint64_t>(*t->at, 2);
  for (Thread* t : threads) t->set<uint64_t>(*t->at, 0, any);
  next_epoch();
}

void warp_barrier(Threads& threads, const Op& op) {
  if (threads[0]->get<uint32_t>(op, 0) != ~0u) fail("a barrier of some lanes");  // epochs are the warp's
  uint32_t latest = 0;
  for (Thread* t : threads) latest = std::max(latest, t->warp_epoch);
  for (Thread* t : threads) t->warp_epoch = latest + 1;
}

void vote_any(Threads& threads, const Op& op) {
  uint64_t any = 0;
  for (Thread* t : threads) any |= t->get<uint64_t>(op, 1);
  for (Thread* t : threads) t->set<uint64_t>(op, 0, any);
}

// Bit l is lane l's, 0 where it takes no part (PTX ISA, vote.sync).
void vote_ballot(Threads& threads, const Op& op) {
  uint32_t bits = 0;
  for (Thread* t : threads) bits |= uint32_t(t->get<uint64_t>(op, 1) & 1) << t->lane;
  for (Thread* t : threads) t->set<uint32_t>(op, 0, bits);
}

void largest(Threads& threads, const Op& op) {
  uint32_t most = 0;
  for (Thread* t : threads) most = std::max(most, t->get<uint32_t>(op, 1));
  for (Thread* t : threads) t->set<uint32_t>(op, 0, most);
}

}  // namespace

void add_meetings(Table& table) {
  const auto lanes = [&](const char* name, Meet meet) { table[name] = {nullptr, meet, Kind::LANES}; };
  lanes("shfl.sync.up.b32", shuffle<up>);
  lanes("shfl.sync.bfly.b32", shuffle<across>);
  lanes("shfl.sync.idx.b32", shuffle<at_index>);
  lanes("vote.sync.any.pred", vote_any);
  lanes("vote.sync.ballot.b32", vote_ballot);
  lanes("redux.sync.max.u32", largest);
  lanes("bar.warp.sync", warp_barrier);
  table["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = {nullptr, load_matrices<false>, Kind::WARP};
  table["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = {nullptr, load_matrices<true>, Kind::WARP};
  table["bar.sync"] = {nullptr, block_barrier, Kind::BLOCK};
  table["bar.red.or.pred"] = {nullptr, block_or, Kind::BLOCK};
}

}  // namespace ptx
