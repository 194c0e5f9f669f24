// What the accesses of warps cost in hardware, by the rules that NVIDIA publishes: shared memory answers from 32 banks of four bytes
// at once (a wavefront), global memory in sectors of 32 bytes. The n-th access of each lane at an instruction counts as the warp's
// n-th. Not counted: atomics, what cp.async writes to shared memory, what wgmma reads there.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "machine.h"

namespace ptx {
namespace {

struct Access32 {
  uint64_t address[WARP];
  uint32_t lanes;
  int bytes;
  bool is_shared;
};

struct Counts {
  int line, is_shared;
  long requests, actual, least;
};

bool is_wanted = false;
std::map<std::tuple<const Op*, int, uint32_t>, Access32> accesses;  // instruction, warp, which time
std::map<std::pair<const Op*, int>, uint32_t> times;                // by thread
std::map<const Op*, Counts> counts;

// Lanes are served together as long as they ask for 128 bytes in all.
int wavefronts(const Access32& access, int* least) {
  const int together = access.bytes <= 4 ? WARP : access.bytes == 8 ? WARP / 2 : WARP / 4;
  int total = 0;
  *least = 0;
  for (int first = 0; first < WARP; first += together) {
    std::set<uint64_t> words[32];
    bool any = false;
    for (int lane = first; lane < first + together; ++lane)
      if (access.lanes >> lane & 1)
        for (uint64_t word = access.address[lane] / 4; word <= (access.address[lane] + access.bytes - 1) / 4; ++word)
          words[word % 32].insert(word), any = true;
    size_t most = 0;
    for (const auto& bank : words) most = std::max(most, bank.size());
    total += most, *least += any;
  }
  return total;
}

int sectors(const Access32& access, int* least) {
  std::set<uint64_t> touched, bytes;
  for (int lane = 0; lane < WARP; ++lane)
    if (access.lanes >> lane & 1)
      for (uint64_t at = access.address[lane]; at < access.address[lane] + access.bytes; ++at)
        touched.insert(at / 32), bytes.insert(at);
  *least = (bytes.size() + 31) / 32;
  return touched.size();
}

}  // namespace

void note_traffic(const Thread& t, const Op& op, bool is_shared, uint64_t address, int bytes) {
  if (!is_wanted) return;
  Access32& access = accesses[{&op, t.warp, times[{&op, t.id}]++}];
  access.address[t.lane] = address, access.lanes |= 1u << t.lane, access.bytes = bytes, access.is_shared = is_shared;
}

void end_block_traffic() {
  for (const auto& [key, access] : accesses) {
    int least;
    Counts& sum = counts[std::get<0>(key)];
    sum.line = std::get<0>(key)->line, sum.is_shared = access.is_shared, ++sum.requests;
    sum.actual += access.is_shared ? wavefronts(access, &least) : sectors(access, &least);
    sum.least += least;
  }
  accesses.clear(), times.clear();
}

}  // namespace ptx

extern "C" {
void ptx_count_traffic(int wanted) {
  ptx::is_wanted = wanted;
  ptx::counts.clear(), ptx::accesses.clear(), ptx::times.clear();
}
// Up to `most` rows of line, is_shared, requests, actual, least; how many there are.
long ptx_traffic(long* rows, long most) {
  long i = 0;
  for (const auto& [op, count] : ptx::counts) {
    if (i < most) {
      const long row[] = {count.line, count.is_shared, count.requests, count.actual, count.least};
      std::copy(row, row + 5, rows + 5 * i);
    }
    ++i;
  }
  return i;
}
}
