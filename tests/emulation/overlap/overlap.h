// Programmatic dependent launch, emulated: what a kernel may not touch before the one ahead of it has ended is poisoned until its
// threads wait for that. Included after cuda_emulation.h, before a kernel's source.
#pragma once

#include <vector>

namespace emulation {

struct Hidden {
  unsigned char* at;
  std::vector<unsigned char> held;
};

inline std::vector<Hidden> hidden;

inline void show_hidden() {
  for (Hidden& memory : hidden) {
    for (size_t i = 0; i < memory.held.size(); ++i)
      if (memory.at[i] != POISON) fail("a kernel writes before the one ahead of it has ended");
    memcpy(memory.at, memory.held.data(), memory.held.size());
  }
  hidden.clear();
}

// All threads of a block have their turn up to here before the first of them goes on.
inline void wait_for_kernel_ahead() {
  if (hidden.empty()) return;
  give_way();
  show_hidden();
}

}  // namespace emulation

extern "C" {
// Until the next launch waits.
__attribute__((used)) inline void emulation_hide(unsigned char* at, size_t bytes) {
  emulation::hidden.push_back({at, std::vector<unsigned char>(at, at + bytes)});
  emulation::poison(at, bytes);
}
__attribute__((used)) inline int emulation_is_hidden() { return !emulation::hidden.empty(); }
}

#define wait_for_previous_kernel emulation::wait_for_kernel_ahead
