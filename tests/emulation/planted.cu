// One error of each kind that the sanitizers are there for, and a kernel with none; see planted.py.
//
// data [numel] float, numel a multiple of the block's threads; dynamic shared memory: a float a thread.
#include "common.cuh"

enum Kind { SOUND, GLOBAL_STORE, GLOBAL_LOAD, DYNAMIC_SHARED_STORE, STATIC_SHARED_STORE, STACK_STORE, MISALIGNED_LOAD, OVERFLOW };

KERNEL planted(float* data, int numel, int kind) {
  __shared__ float row[64];
  DYNAMIC_SHARED(memory);
  float* dynamic = reinterpret_cast<float*>(memory);
  const int thread = threadIdx.x, last = blockDim.x - 1;
  float own[4];
  for (int i = 0; i < 4; ++i) own[i] = thread + i;
  row[thread % 64] = dynamic[thread] = thread;
  __syncthreads();
  // The neighbour's, so that the array below is alive while others have their turn.
  float sum = row[(thread + 1) % 64] + dynamic[last - thread] + warp_sum(own[thread % 4]);
  const int next = thread + 1;
  if (thread == last) {
    if (kind == GLOBAL_STORE) data[numel] = sum;
    if (kind == GLOBAL_LOAD) sum += data[numel + 3];
    if (kind == DYNAMIC_SHARED_STORE) dynamic[next] = sum;
    if (kind == STATIC_SHARED_STORE) *(row + 64 + next % 2) = sum;
    if (kind == STACK_STORE) own[next % 4 + 4] = sum;
    if (kind == MISALIGNED_LOAD) sum += Vector<float, 4>::load(data + 1).at[0];
    if (kind == OVERFLOW) sum += numel * 0x7fffffff;
  }
  __syncthreads();
  for (int i = thread; i < numel; i += blockDim.x) data[i] = sum + own[i % 4];
}
EXPORT(planted)
