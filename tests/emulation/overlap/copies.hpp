// cp.async may read at once, as here, what the emulation reads at its wait: from memory that is hidden it brings poison. Included
// after overlap.h. Not a .h, for only kernels that overlap are compiled anew when this changes.
#pragma once

namespace emulation {

inline void copy_async_16_at_once(void* target, const void* source, bool in_range = true) {
  alignas(16) static unsigned char nothing_yet[16];
  const auto* bytes = (const unsigned char*)source;
  for (const Hidden& memory : hidden) {
    if (!in_range || bytes + 16 <= memory.at || memory.at + memory.held.size() <= bytes) continue;
    memset(nothing_yet, POISON, 16);
    if ((uintptr_t)source % 16 == 0) source = nothing_yet;
    break;
  }
  ::copy_async_16(target, source, in_range);
}

}  // namespace emulation

#define copy_async_16 emulation::copy_async_16_at_once
