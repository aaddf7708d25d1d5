// Which kernels run, how a problem is cut into items, and who works on them.
#include "attention.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "kernel.h"

namespace elsa {
namespace {

struct Choice {
  const Kernel* kernel;
  Status status;
};

struct Candidate {
  const Kernel* kernel;
  bool supported;
};

Choice choose() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {
      {&kKernelAvx512, avx512}, {&kKernelAvx2, avx2}, {&kKernelBaseline, true}};
#elif defined(__aarch64__)
  const Candidate candidates[] = {{&kKernelNeon, true}};
#else
  const Candidate candidates[] = {{&kKernelBaseline, true}};
#endif
  const char* wanted = getenv("ELSA_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Candidate& c : candidates) {
    if (any ? c.supported : strcmp(wanted, c.kernel->name) == 0) {
      if (!c.supported) return {nullptr, Status::kUnsupportedIsa};
      return {c.kernel, Status::kOk};
    }
  }
  return {nullptr, Status::kUnknownIsa};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

constexpr int64_t kKeyGranule = 32;            // a multiple of every kernel's panel
constexpr int64_t kMaxPackedFloats = 1 << 19;  // 2 MiB: about what a core's own cache holds
constexpr int64_t kMaxStateRows = 512;
constexpr int64_t kPackingRows = 8;    // packing a head costs about as much as this many query rows
constexpr double kSerialWork = 2.5e5;  // multiply-adds below which waking threads does not pay

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The number of query ranges per head that finishes first when `threads` take turns at equal items.
int64_t choose_splits(const Attention& a, int64_t least, int64_t row_tile, int64_t threads) {
  const int64_t heads = a.batch * a.heads;
  const int64_t most = ceil_div(a.queries, row_tile);
  int64_t best = least, best_cost = INT64_MAX;
  for (int64_t splits = least; splits <= most && splits <= least + 4 * threads; ++splits) {
    const int64_t rows = round_up(ceil_div(a.queries, splits), row_tile) + kPackingRows;
    const int64_t cost = ceil_div(heads * splits, threads) * rows;
    if (cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

Plan make_plan(const Attention& a, const Kernel& kernel, int64_t threads) {
  Plan plan = {};
  plan.key_blocks = ceil_div(a.keys, kMaxKeyBlock);
  plan.key_block = round_up(ceil_div(a.keys, plan.key_blocks), kKeyGranule);
  plan.key_blocks = ceil_div(a.keys, plan.key_block);
  const int64_t packed = plan.key_blocks * plan.key_block * (a.head_dim + a.value_dim);
  plan.keep_packed = plan.key_blocks == 1 || packed <= kMaxPackedFloats;
  const int64_t least = plan.key_blocks > 1 ? ceil_div(a.queries, kMaxStateRows) : 1;
  plan.splits = choose_splits(a, least, kernel.row_tile, threads);
  const int64_t operands = a.batch * (a.kv_heads * a.keys * (a.head_dim + a.value_dim) +
                                      a.heads * a.queries * a.head_dim);
  plan.prefetch = plan.splits == 1 && plan.key_blocks == 1 && operands > kMaxPackedFloats;
  plan.items = a.batch * a.heads * plan.splits;
  return plan;
}

// Threads that a problem of this size is worth waking.
int worth_waking(const Attention& a, int threads) {
  const double multiply_adds =
      static_cast<double>(a.batch * a.heads * a.queries) * static_cast<double>(a.keys) *
      static_cast<double>(a.head_dim + a.value_dim) * (a.causal ? 0.5 : 1.0);
  return multiply_adds < kSerialWork || threads < 1 ? 1 : threads;
}

// A thread's memory, kept between calls: fresh pages cost more than a small attention.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      free(memory_);
      const size_t bytes = static_cast<size_t>(round_up(floats * 4, 4096));
      memory_ = static_cast<float*>(aligned_alloc(4096, bytes));
      size_ = memory_ ? floats : 0;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  int64_t size_ = 0;
};

// The items of one worker. Equal problems give a worker the same items each time, so that what its
// core has in cache is its own; workers that are done take from the others.
struct alignas(64) Queue {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};
constexpr int64_t kMaxQueues = 64;  // more workers than this share them

struct Work {
  const Attention* problem;
  const Kernel* kernel;
  Plan plan;
  int64_t workspace;
  int64_t queues;
  Queue queue[kMaxQueues];
  std::atomic<bool> out_of_memory{false};

  int64_t take(int64_t worker) {
    for (int64_t i = 0; i < queues; ++i) {
      Queue& q = queue[(worker + i) % queues];
      if (q.next.load(std::memory_order_relaxed) >= q.end) continue;
      const int64_t item = q.next.fetch_add(1, std::memory_order_relaxed);
      if (item < q.end) return item;
    }
    return -1;
  }
};

void work_on_items(int64_t worker, int64_t, void* context) {
  Work& work = *static_cast<Work*>(context);
  static thread_local Scratch scratch;
  Workspace workspace = {scratch.get(work.workspace), -1};
  if (workspace.memory == nullptr) {
    work.out_of_memory = true;
    return;
  }
  for (int64_t item = work.take(worker); item >= 0;) {
    const int64_t upcoming = work.take(worker);
    work.kernel->run(*work.problem, work.plan, item, upcoming, workspace);
    item = upcoming;
  }
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void fill_empty(const Attention& a) {
  const int64_t rows = a.batch * a.heads * a.queries;
  memset(a.out, 0, static_cast<size_t>(rows * a.value_dim * element_size(a.query.dtype)));
  for (int64_t i = 0; i < rows; ++i) a.lse[i] = -__builtin_inff();
}

}  // namespace

const char* isa_name() { return choice().kernel ? choice().kernel->name : nullptr; }
Status isa_status() { return choice().status; }

Status cut(const Attention& a, int threads, Cut* answer) {
  if (choice().status != Status::kOk) return choice().status;
  const Kernel& kernel = *choice().kernel;
  threads = worth_waking(a, threads);
  const Plan plan = make_plan(a, kernel, threads);
  answer->key_block = plan.key_block;
  answer->key_blocks = plan.key_blocks;
  answer->query_ranges = plan.splits;
  answer->workers = threads < plan.items ? threads : plan.items;
  answer->block_rows = kernel.block_rows;
  answer->sum_chain = kernel.sum_chain;
  answer->workspace_bytes = kernel.workspace(a, plan) * static_cast<int64_t>(sizeof(float));
  return Status::kOk;
}

Status attention(const Attention& a, int threads, ParallelFor parallel_for) {
  if (choice().status != Status::kOk) return choice().status;
  const int64_t rows = a.batch * a.heads * a.queries;
  if (rows == 0) return Status::kOk;
  if (a.keys == 0) {
    fill_empty(a);
    return Status::kOk;
  }
  threads = worth_waking(a, threads);

  Work work;
  work.problem = &a;
  work.kernel = choice().kernel;
  work.plan = make_plan(a, *work.kernel, threads);
  work.workspace = work.kernel->workspace(a, work.plan);
  const int64_t workers = threads < work.plan.items ? threads : work.plan.items;
  work.queues = workers < kMaxQueues ? workers : kMaxQueues;
  for (int64_t i = 0; i < work.queues; ++i) {
    work.queue[i].next = i * work.plan.items / work.queues;
    work.queue[i].end = (i + 1) * work.plan.items / work.queues;
  }
  if (workers == 1) {
    work_on_items(0, 1, &work);
  } else {
    parallel_for(workers, work_on_items, &work);
  }
  return work.out_of_memory ? Status::kOutOfMemory : Status::kOk;
}

}  // namespace elsa
