// How drivers cut problems, hand items to workers and keep a worker's memory. No instruction set in
// here.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "attention.h"

namespace elsa {
namespace {

constexpr int64_t kKeyGranule = 32;  // a multiple of every kernel's panel
constexpr int64_t kMaxStateRows = 512;
constexpr int64_t kPackingRows = 8;    // packing a head costs about as much as this many query rows
constexpr double kSerialWork = 2.5e5;  // multiply-adds below which waking threads does not pay

// The number of ranges, at least `least`, to cut the `rows` of each of `heads` into, so that
// `threads` taking turns at equal items finish first.
int64_t choose_splits(int64_t heads, int64_t rows, int64_t least, int64_t row_tile,
                      int64_t threads) {
  const int64_t most = ceil_div(rows, row_tile);
  int64_t best = least, best_cost = INT64_MAX;
  for (int64_t splits = least; splits <= most && splits <= least + 4 * threads; ++splits) {
    const int64_t tiles = ceil_div(ceil_div(rows, splits), row_tile);
    const int64_t cost = ceil_div(heads * splits, threads) * (tiles * row_tile + kPackingRows);
    if (cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

// A thread's memory, kept between calls: fresh pages cost more than a small attention.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      free(memory_);
      const size_t bytes = static_cast<size_t>((floats * 4 + 4095) / 4096 * 4096);
      memory_ = static_cast<float*>(aligned_alloc(4096, bytes));
      size_ = memory_ ? floats : 0;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  int64_t size_ = 0;
};

// Items [0, count) in as many runs as there are workers. Equal problems give a worker the same
// items each time, so that what its core has in cache is its own; workers that are done take from
// the others.
class Queues {
 public:
  Queues(int64_t items, int64_t workers) : count_(workers < kMost ? workers : kMost) {
    for (int64_t i = 0; i < count_; ++i) {
      queue_[i].next = i * items / count_;
      queue_[i].end = (i + 1) * items / count_;
    }
  }
  // An item that no worker has taken, or -1; `end`: that of the run it is from.
  int64_t take(int64_t worker, int64_t* end = nullptr) {
    for (int64_t i = 0; i < count_; ++i) {
      Queue& q = queue_[(worker + i) % count_];
      if (q.next.load(std::memory_order_relaxed) >= q.end) continue;
      const int64_t item = q.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= q.end) continue;
      if (end) *end = q.end;
      return item;
    }
    return -1;
  }
  // What this worker takes next unless others take it first, or -1. To fetch its operands is worth
  // it; to take it early would leave a worker that wakes late without any.
  int64_t next_of(int64_t worker) const {
    const Queue& q = queue_[worker % count_];
    const int64_t item = q.next.load(std::memory_order_relaxed);
    return item < q.end ? item : -1;
  }

 private:
  static constexpr int64_t kMost = 64;  // more workers than this share them
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  const int64_t count_;
  Queue queue_[kMost];
};

// The kernels of the instruction set that attention.cpp has chosen, or null (see isa_status).
template <class Kernel, size_t N>
const Kernel* chosen(const Kernel* const (&every)[N]) {
  const char* const name = isa_name();
  for (const Kernel* kernel : every) {
    if (name && strcmp(name, kernel->name) == 0) return kernel;
  }
  return nullptr;
}

// Of one head.
double scores_of(const Attention& a) {
  return static_cast<double>(a.queries) * static_cast<double>(a.keys) * (a.causal ? 0.5 : 1.0);
}

// Threads that so many multiply-adds are worth waking.
int64_t worth_waking(double multiply_adds, int threads) {
  return multiply_adds < kSerialWork || threads < 1 ? 1 : threads;
}

// A thread's memory for the work of this driver.
Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

// Calls run(worker, memory) once for each worker, with `floats` of memory.
template <class Run>
Status share_out(int64_t workers, int64_t floats, ParallelFor parallel_for, const Run& run) {
  struct Work {
    const Run& run;
    const int64_t floats;
    std::atomic<bool> out_of_memory{false};
  } work = {run, floats};
  const Body body = [](int64_t worker, int64_t, void* context) {
    Work& work = *static_cast<Work*>(context);
    float* const memory = scratch().get(work.floats);
    if (memory) {
      work.run(worker, memory);
    } else {
      work.out_of_memory = true;
    }
  };
  if (workers <= 1) {
    body(0, 1, &work);
  } else {
    parallel_for(workers, body, &work);
  }
  return work.out_of_memory ? Status::kOutOfMemory : Status::kOk;
}

// Hands `items` out to at most `most` workers: calls run(queues, worker, memory) once for each.
template <class Run>
Status hand_out(int64_t items, int64_t most, int64_t floats, ParallelFor parallel_for,
                const Run& run) {
  const int64_t workers = most < items ? most : items;
  Queues queues(items, workers);
  return share_out(workers, floats, parallel_for,
                   [&](int64_t worker, float* memory) { run(queues, worker, memory); });
}

// Calls run(item, memory) for each item.
template <class Run>
Status each_item(int64_t items, int64_t most, int64_t floats, ParallelFor parallel_for,
                 const Run& run) {
  return hand_out(items, most, floats, parallel_for,
                  [&](Queues& queues, int64_t worker, float* memory) {
                    for (int64_t item; (item = queues.take(worker)) >= 0;) run(item, memory);
                  });
}

}  // namespace
}  // namespace elsa
