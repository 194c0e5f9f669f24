// Hopper's wgmma for the emulation, as the PTX ISA (9.7.15.5) describes it: a product may read its registers and shared memory, and
// write its sums, at any time between the instruction and the wait. So operands are checked at both ends, sums are poison between
// them, and what would be a race on a GPU ends the launch or gives NaN.
//
// B lies in shared memory as its descriptor says, K-major, in any of the four patterns. Products read it past the way that threads
// write it: bytes that a cp.async wrote count only once the thread that copied them has fenced. Ordinary stores are not followed.
// Not seen: a missing fence of sums that were written, and what a compiler moves between fence and product.
#include <array>
#include <unordered_map>
#include <vector>

#include "cuda_emulation.h"

namespace emulation {
namespace {

constexpr int WARPGROUP = 4, CHUNK_BYTES = 16;
constexpr uint32_t WINDOW = 1152;  // where dynamic shared memory begins: a kernel must see to larger patterns itself

struct Product {
  float* d;
  const uint32_t* a;
  std::array<uint32_t, 4> a_then;  // at the fence before it
  uint64_t b;
  int columns;
  float (*number)(const void*);
};

struct Lane {
  std::unordered_map<const uint32_t*, std::array<uint32_t, 4>> fenced;  // A's registers since the last group, as they were
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;
  std::unordered_map<float*, std::vector<float>> sums;  // while products are under way
  std::vector<size_t> written;                          // chunks, since the last fence
};

std::vector<Lane> lanes;
bool products_began;  // since lanes were made new
std::vector<std::vector<uint64_t>> issued;  // by warpgroup: descriptors, in order
std::vector<size_t> counts;                 // by warp
std::vector<int> writers;                   // by chunk of shared memory: thread + 1 whose copy is not fenced; UNDER_WAY
constexpr int UNDER_WAY = -1;

int thread_index() { return current->warp * WARP + current->lane; }
Lane& mine() { return lanes[thread_index()]; }

// Where 16 bytes of B are: row n, eight columns from 8 * chunk on.
const unsigned char* chunk_at(uint64_t descriptor, int n, int chunk) {
  const auto field = [&](int first) { return (uint32_t)(descriptor >> first & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const int bits = (int[]){0, 3, 2, 1}[descriptor >> 62];  // of the pattern's exclusive or
  if (descriptor >> 49 & 7) fail("wgmma: a base offset, which is not emulated");
  if (bits && start >> 7 & ((1 << bits) - 1)) fail("wgmma: B does not begin in the first row of a pattern");
  uint32_t address = start + n / 8 * stride + n % 8 * (CHUNK_BYTES << bits) + chunk * (bits ? CHUNK_BYTES : leading);
  address ^= (address >> 7 & ((1 << bits) - 1)) << 4;
  if (address < WINDOW || address + CHUNK_BYTES > WINDOW + dynamic_bytes) fail("wgmma: B lies outside of shared memory");
  return dynamic_shared + (address - WINDOW);
}

// Of a lane's columns of B: that products may read them.
void check_operands(const Product& product) {
  if (memcmp(product.a, product.a_then.data(), sizeof product.a_then)) fail("wgmma: registers of A change behind their fence");
  for (int n = 0; n < product.columns; ++n) {
    if (n % 8 / 2 != current->lane % 4) continue;
    for (int chunk = 0; chunk < 2; ++chunk) {
      const int writer = writers[(chunk_at(product.b, n, chunk) - dynamic_shared) / CHUNK_BYTES];
      if (writer == UNDER_WAY) fail("wgmma: B is still being copied");
      if (writer) fail("wgmma: B was written without a fence");
    }
  }
}

// A lane's sums: rows lane / 4 and 8 more of its warp's sixteen, of each eight columns 2 * (lane % 4) and the next.
void run(const Product& product, const Product* quad[4], std::vector<float>& sums) {
  float a[2][16];  // its rows of A: register r of lane c of the four has row r % 2, columns 2 c + r / 2 * 8 and the next
  for (int c = 0; c < 4; ++c)
    for (int i = 0; i < 8; ++i)
      a[i / 2 % 2][2 * c + i / 4 * 8 + i % 2] = product.number((const uint16_t*)&quad[c]->a[i / 2] + i % 2);
  for (int i = 0; i < product.columns / 4; ++i) {
    const int n = i / 2 * 8 + current->lane % 4 * 2 + i % 2;
    float b[16];
    for (int k = 0; k < 16; ++k) b[k] = product.number(chunk_at(product.b, n, k / 8) + k % 8 * 2);
    for (int row = 0; row < 2; ++row) {
      float& sum = sums[i / 2 * 4 + row * 2 + i % 2];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
    }
  }
}

template <class T>
float number(const void* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return (float)value;
}

}  // namespace

void start_products() {
  const int threads = block_dim.x * block_dim.y * block_dim.z, warps = (threads + WARP - 1) / WARP;
  if (std::exchange(products_began, false)) lanes.clear();
  if ((int)lanes.size() < threads) lanes.resize(threads);
  for (Lane& lane : lanes) lane.written.clear();
  issued.assign((warps + WARPGROUP - 1) / WARPGROUP, {});
  counts.assign(warps, 0);
  writers.assign((dynamic_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES, 0);
}

void end_products() {
  if (!mine().open.empty() || !mine().groups.empty()) fail("a thread ends with wgmma products not waited for");
}

void note_copy(const void* target, bool landed) {
  const size_t offset = (const unsigned char*)target - dynamic_shared;
  if (offset >= dynamic_bytes) return;
  writers[offset / CHUNK_BYTES] = landed ? thread_index() + 1 : UNDER_WAY;
  if (landed) mine().written.push_back(offset / CHUNK_BYTES);
}

void begin_product(float* d, const uint32_t* a, uint64_t b, int columns, bool in_bf16) {
  Lane& lane = mine();
  const auto fenced = lane.fenced.find(a);
  if (fenced == lane.fenced.end()) fail("wgmma: no wgmma.fence of A's registers before it");
  Product product = {d, a, fenced->second, b, columns, in_bf16 ? number<__nv_bfloat16> : number<__half>};
  check_operands(product);
  if (!lane.sums.count(d)) {
    lane.sums[d].assign(d, d + columns / 2);
    poison(d, columns / 2 * sizeof *d);
  }
  lane.open.push_back(product);
  if (current->lane) return;
  auto& others = issued[current->warp / WARPGROUP];
  size_t& count = counts[current->warp];
  if (count == others.size()) others.push_back(b);
  if (others[count++] != b) fail("wgmma: warps of a warpgroup multiply by other matrices");
}

void fence_registers(const uint32_t* a, int count) {
  if (!with_products) fail("wgmma: in a kernel that was said to have none");
  products_began = true;
  for (; count; --count, a += 4) memcpy(mine().fenced[a].data(), a, sizeof mine().fenced[a]);
}

void commit_products() {
  products_began = true;
  mine().groups.push_back(std::move(mine().open));
  mine().open.clear();
  mine().fenced.clear();
}

void wait_products(int left) {
  warp_barrier(FULL_MASK);
  Lane& lane = mine();
  Lane* const quad = &lanes[current->warp * WARP + current->lane / 4 * 4];
  const size_t finished = std::max(0, (int)lane.groups.size() - left);
  for (size_t i = 0; i < finished; ++i)
    for (size_t j = 0; j < lane.groups[i].size(); ++j) {
      const Product* products[4];
      for (int c = 0; c < 4; ++c) {
        if (quad[c].groups.size() != lane.groups.size() || quad[c].groups[i].size() != lane.groups[i].size())
          fail("wgmma: lanes of a warp began other products");
        products[c] = &quad[c].groups[i][j];
      }
      check_operands(lane.groups[i][j]);
      run(lane.groups[i][j], products, lane.sums[lane.groups[i][j].d]);
    }
  warp_barrier(FULL_MASK);  // all have read all
  lane.groups.erase(lane.groups.begin(), lane.groups.begin() + finished);
  for (auto sum = lane.sums.begin(); sum != lane.sums.end();) {
    bool under_way = false;
    for (const auto& group : lane.groups)
      for (const Product& product : group) under_way |= product.d == sum->first;
    for (const Product& product : lane.open) under_way |= product.d == sum->first;
    for (const float& value : std::vector<float>(sum->first, sum->first + sum->second.size()))
      if (__builtin_bit_cast(uint32_t, value) != ~0u) fail("wgmma: sums are written under way");
    if (under_way) {
      ++sum;
      continue;
    }
    std::copy(sum->second.begin(), sum->second.end(), sum->first);
    sum = lane.sums.erase(sum);
  }
}

void fence_copies() {
  for (size_t chunk : mine().written)
    if (writers[chunk] == thread_index() + 1) writers[chunk] = 0;
  mine().written.clear();
}

uint32_t shared_address(const void* pointer) {
  const size_t offset = (const unsigned char*)pointer - dynamic_shared;
  if (offset > dynamic_bytes) fail("an address that is not in dynamic shared memory");
  return WINDOW + offset;
}

}  // namespace emulation
