// What csrc/cuda/portable/attention.cu takes of CUDA, on the CPU: the threads of a block are
// fibers, and a warp runs as far as its next block barrier before the next warp does. A result that
// depends on the order of warps or lanes has a race. Tests compile the kernel's source with it.
//
// SHIM_COPIES: 0 for a GPU without asynchronous copies; else they are done where they are started
// (1) or where they are waited for (2).
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#define ELSA_INLINE inline
#define ELSA_INFINITY HUGE_VALF
#define __global__
#define __launch_bounds__(...)
#define __shared__
#if SHIM_COPIES
#define ELSA_ASYNC
#endif

using std::min;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  int x = 0;
};
static Index threadIdx, blockIdx;
constexpr int kSharedBytes = 227 << 10;
float4 elsa_shared[kSharedBytes / sizeof(float4)];

namespace shim {

enum class State { ready, at_warp_barrier, at_block_barrier, done };

struct Copy {
  float* to;
  const float* from;
  int count;
  bool inside;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  State state = State::ready;
  float given = 0;
  std::vector<Copy> copies;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static void (*body)();

inline Fiber& current() { return fibers[threadIdx.x]; }

inline void wait(State state) {
  current().state = state;
  swapcontext(&current().context, &scheduler);
}

inline void start() {
  body();
  current().state = State::done;
}

inline void run(int thread) {
  threadIdx.x = thread;
  fibers[thread].state = State::ready;
  swapcontext(&scheduler, &fibers[thread].context);
}

// The state of all threads from `first` on, which must be one.
inline State state_of(int first, int count) {
  const State state = fibers[first].state;
  for (int i = 1; i < count; ++i) {
    if (fibers[first + i].state != state) {
      std::fprintf(stderr, "threads wait at different barriers\n");
      std::abort();
    }
  }
  return state;
}

inline void run_block(int threads, bool backwards, void (*given)()) {
  body = given;
  if (fibers.size() != static_cast<size_t>(threads)) fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, start, 0);
    fiber.state = State::ready;
  }
  const auto place = [&](int n, int of) { return backwards ? of - 1 - n : n; };
  do {
    for (int w = 0; w < threads / 32; ++w) {
      const int first = 32 * place(w, threads / 32);
      do {
        for (int n = 0; n < 32; ++n) run(first + place(n, 32));
      } while (state_of(first, 32) == State::at_warp_barrier);
    }
  } while (state_of(0, threads) != State::done);
}

}  // namespace shim

inline void __syncthreads() { shim::wait(shim::State::at_block_barrier); }
inline void __syncwarp() { shim::wait(shim::State::at_warp_barrier); }

inline float __shfl_xor_sync(unsigned, float x, int mask) {
  shim::current().given = x;
  __syncwarp();
  const float found = shim::fibers[threadIdx.x ^ mask].given;
  __syncwarp();
  return found;
}

inline float weight_of(float x) { return exp2f(x); }

inline float rounded(float a, float b) {
  volatile float product = a * b;
  return product;
}

inline void copy_now(const shim::Copy& copy) {
  for (int i = 0; i < copy.count; ++i) copy.to[i] = copy.inside ? copy.from[i] : 0.0f;
}

template <int BYTES>
inline void copy(float* to, const float* from, bool inside) {
  const shim::Copy found{to, from, BYTES / 4, inside};
  if (SHIM_COPIES == 1) {
    copy_now(found);
  } else {
    shim::current().copies.push_back(found);
  }
}

inline void wait_for_copies() {
  for (const shim::Copy& copy : shim::current().copies) copy_now(copy);
  shim::current().copies.clear();
}

#include SHIM_SOURCE

static const Arguments* given_arguments;

// Runs every block of a grid, the last one first if `backwards`; shared memory starts as NaN.
extern "C" void run_grid(const Arguments* arguments, int blocks, bool backwards) {
  given_arguments = arguments;
  for (int n = 0; n < blocks; ++n) {
    blockIdx.x = backwards ? blocks - 1 - n : n;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill(elsa_shared, elsa_shared + kSharedBytes / sizeof(float4), float4{nan, nan, nan, nan});
    shim::run_block(32 * ELSA_WARPS, backwards, [] { elsa_portable_attention(*given_arguments); });
  }
}
