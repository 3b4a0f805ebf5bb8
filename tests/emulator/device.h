// CUDA C++ as TileLang generates it for Ampere, on a CPU: just the names that our kernels use.
//
// A thread is a fiber. Warps run in random order for random stretches, so missing barriers show as wrong results;
// cp.async data lands only at its wait, and until then the destination holds NaN; so does shared memory at the start.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

using std::max;
using std::min;
typedef unsigned char uchar;
typedef unsigned int uint;
#define __shared__
#define __align__(x)
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY

struct uint1 { uint x; };
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim { int x, y, z; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint2 make_uint2(uint a, uint b) { return {a, b}; }
inline uint4 make_uint4(uint a, uint b, uint c, uint d) { return {a, b, c, d}; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = value != value ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }

enum State { READY, AT_WARP, AT_BARRIER, DONE };
struct Copy { void *to; const void *from; int size; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  // what the other lanes of a warp-wide instruction look at
  const void *address, *operands[2];
  int value;
};

// matrix loads, bank conflicts among them, matrix products, barriers, clusters of copies
struct Counts { long loads, conflicts, products, barriers, copies; };
static Counts counts;
static const int STACK = 256 << 10;
alignas(1024) static uchar buf_dyn_shmem[256 << 10];
static dim threadIdx, blockIdx, blockDim;
static std::vector<Thread> threads;
static std::function<void()> body;
static ucontext_t scheduler;
static int current;

static void pause(State state) {
  threads[current].state = state;
  swapcontext(&threads[current].context, &scheduler);
}
static void enter() {
  body();
  pause(DONE);
}
static Thread &lane(int index) { return threads[current / 32 * 32 + index]; }

inline void __syncwarp(uint = 0) { pause(AT_WARP); }
inline void __syncthreads() { pause(AT_BARRIER); }
template <class T> T __shfl_sync(uint, T value, int from, int width = 32) {
  static_assert(sizeof(T) == 4, "");
  memcpy(&threads[current].value, &value, 4);
  pause(AT_WARP);
  int self = current % 32;
  memcpy(&value, &lane(self / width * width + (from & (width - 1))).value, 4);
  pause(AT_WARP);
  return value;
}
template <class T> T __shfl_xor_sync(uint mask, T value, int bits, int = 32) {
  return __shfl_sync(mask, value, (current % 32) ^ bits);
}
inline int __any_sync(uint, int value) {
  threads[current].value = value;
  pause(AT_WARP);
  int any = 0;
  for (int i = 0; i < 32; i++) any |= lane(i).value;
  pause(AT_WARP);
  return any != 0;
}

namespace tl {
enum class DataType { kBFloat16, kFloat32 };

template <int N> void cp_async_gs_conditional(const void *to, const void *from, bool wanted) {
  static const char zeros[16] = {};
  threads[current].open.push_back({(void *)to, wanted ? from : zeros, N});
  memset((void *)to, 0xff, N);
  counts.copies++;
}
template <int N> void cp_async_gs(const void *to, const void *from) { cp_async_gs_conditional<N>(to, from, true); }
inline void cp_async_commit() {
  threads[current].groups.push_back(std::move(threads[current].open));
  threads[current].open.clear();
}
template <int N> void cp_async_wait() {
  auto &groups = threads[current].groups;
  while ((int)groups.size() > N) {
    for (auto &copy : groups[0]) memcpy(copy.to, copy.from, copy.size);
    groups.erase(groups.begin());
  }
}

inline void load_matrices(const void *row, void *to, bool transposed) {
  threads[current].address = row;
  pause(AT_WARP);
  int self = current % 32;
  for (int m = 0; m < 4; m++) {
    bool banks[8] = {};
    uint16_t pair[2];
    for (int i = 0; i < 8 && self == 0; i++) {
      bool &taken = banks[uintptr_t(lane(m * 8 + i).address) / 16 % 8];
      counts.conflicts += taken;
      taken = true;
    }
    for (int j = 0; j < 2; j++) {
      int across = self % 4 * 2 + j, down = self / 4;
      if (transposed) std::swap(across, down);
      pair[j] = ((const uint16_t *)lane(m * 8 + down).address)[across];
    }
    memcpy((char *)to + 4 * m, pair, 4);
  }
  counts.loads += self == 0;
  pause(AT_WARP);
}
inline void ptx_ldmatrix_x4(const void *row, void *to) { load_matrices(row, to, false); }
inline void ptx_ldmatrix_x4_trans(const void *row, void *to) { load_matrices(row, to, true); }

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB>
void mma_sync(float *sums, const unsigned *a, const unsigned *b) {
  static_assert(A == DataType::kBFloat16 && M == 16 && N == 8 && K == 16 && !TA && TB, "not written yet");
  threads[current].operands[0] = a;
  threads[current].operands[1] = b;
  pause(AT_WARP);
  int self = current % 32;
  for (int i = 0; i < 4; i++) {
    int row = self / 4, column = self % 4 * 2 + i % 2;
    double sum = sums[i];
    for (int k = 0; k < 16; k++) {
      // operand A: registers (row half, column half); operand B: registers (row half)
      auto *from_a = (const bfloat16_t *)lane(row * 4 + k % 8 / 2).operands[0];
      auto *from_b = (const bfloat16_t *)lane(column * 4 + k % 8 / 2).operands[1];
      sum += double(float(from_a[(i / 2 + k / 8 * 2) * 2 + k % 2])) * float(from_b[k / 8 * 2 + k % 2]);
    }
    sums[i] = float(sum);
  }
  counts.products += self == 0;
  pause(AT_WARP);
}
}  // namespace tl

static int in_state(int warp, State state) {
  return std::count_if(&threads[warp * 32], &threads[warp * 32] + 32, [=](Thread &t) { return t.state == state; });
}
// runs each ready thread of the warp until it stops; releases the warp if all of them meet
static bool step(int warp) {
  for (int i = warp * 32; i < warp * 32 + 32; i++) {
    if (threads[i].state != READY) continue;
    current = i;
    threadIdx = {i, 0, 0};
    swapcontext(&scheduler, &threads[i].context);
  }
  int waiting = in_state(warp, AT_WARP);
  if (waiting == 0 || waiting + in_state(warp, DONE) < 32) return false;
  for (int i = warp * 32; i < warp * 32 + 32; i++)
    if (threads[i].state == AT_WARP) threads[i].state = READY;
  return true;
}

// false: the threads of a CTA wait for each other and none can go on
static bool run_cta(std::mt19937 &random) {
  memset(buf_dyn_shmem, 0xff, sizeof buf_dyn_shmem);
  for (auto &thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
    thread.state = READY;
    thread.groups.clear();
    thread.open.clear();
  }
  int warps = threads.size() / 32;
  while (true) {
    std::vector<int> ready;
    int done = 0, waiting = 0;
    for (int warp = 0; warp < warps; warp++) {
      if (in_state(warp, READY)) ready.push_back(warp);
      done += in_state(warp, DONE);
      waiting += in_state(warp, AT_BARRIER);
    }
    if (done == warps * 32) return true;
    if (!ready.empty()) {
      int warp = ready[random() % ready.size()];
      for (int left = 1 + random() % 200; left && step(warp); left--) {}
    } else {
      if (waiting + done < warps * 32 || waiting == 0) return false;
      counts.barriers++;
      for (auto &thread : threads)
        if (thread.state == AT_BARRIER) thread.state = READY;
    }
  }
}

static int launch(const int *grid, int size, unsigned seed, Counts *result, std::function<void()> kernel) {
  std::mt19937 random(seed);
  body = kernel;
  counts = {};
  blockDim = {size, 1, 1};
  threads.resize(size);
  for (auto &thread : threads)
    if (!thread.stack) thread.stack.reset(new char[STACK]);
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        if (!run_cta(random)) return 1;
      }
  *result = counts;
  return 0;
}
