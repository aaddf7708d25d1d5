// Exact attention, forward, in float32 FMA: no matrix instruction, no header, no library.
//
// One block of threads folds the keys for a tile of queries of one head. A state is (m, S, W) of
// ELSA, Eq. 4: the maximum, the sum of the weights and the weighted sum of the values. Keys come in
// tiles; each tile has sums of its own, which are then merged into the state, so that chains of
// additions are as long as a tile and as the number of tiles, not as the number of keys.
//
// A thread has ROWS queries and KEYS keys of the scores, and the same ROWS queries and VALUE /
// LANES columns of the output: LANES threads of a warp share a row, and a warp's rows are its own
// from the scores to the output. With 8 x 8 each way it reads one 16-byte word of shared memory for
// 16 FMA.
//
// Compiled by NVRTC, one instance at a time; the macros ELSA_* are its parameters:
//   HEAD: head_dim, rounded up to a multiple of 4.      VALUE: value_dim, rounded up to a multiple
//   of LANES * WIDTH.                                   LOAD: floats of one load from the inputs.
//   WIDTH: floats of one load of values from shared memory, 2 or 4.
//   LANES: threads that share a row, 8 or 16.           ROWS, KEYS: of one thread.
//   WARPS: of a block.                                  BLOCKS: of a multiprocessor, at least.
//   MASK: 0 none, 1 bool, 2 float32.                    CAUSAL: 0 or 1.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define ELSA_ASYNC
#endif

#ifdef __CUDACC_RTC__
#define ELSA_INLINE __device__ __forceinline__
#define ELSA_INFINITY __int_as_float(0x7f800000)

ELSA_INLINE float weight_of(float x) {  // 2^x
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The product, rounded: compilers make one instruction of it and a sum that follows, unrounded.
ELSA_INLINE float rounded(float a, float b) { return __fmul_rn(a, b); }

#ifdef ELSA_ASYNC
// Copies BYTES to shared memory, zeros unless `inside`; done where `wait_for_copies` returns.
template <int BYTES>
ELSA_INLINE void copy(float* to, const float* from, bool inside) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = inside ? BYTES : 0;
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(BYTES), "r"(bytes)
                 : "memory");
  }
}

ELSA_INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
#endif

struct Arguments {
  const float* query;
  const float* key;
  const float* value;
  const void* mask;
  float* out;
  float* lse;
  // of batch, head, token and dim, in elements; of the mask batch, head, query and key
  long long query_strides[4];
  long long key_strides[4];
  long long value_strides[4];
  long long mask_strides[4];
  long long out_strides[3];  // columns of the output are dense
  int batch_heads, heads, heads_of_key, queries, keys, head_dim, value_dim;
  // A score is query . key, with an additive mask query . key * factor + mask; its weight is
  // 2^(score * to_log2 - the largest such). Both are positive.
  float factor, to_log2;
};

extern __shared__ float4 elsa_shared[];

namespace {

constexpr int kHead = ELSA_HEAD, kValue = ELSA_VALUE, kLoad = ELSA_LOAD, kWidth = ELSA_WIDTH;
constexpr int kLanes = ELSA_LANES, kRows = ELSA_ROWS, kKeys = ELSA_KEYS, kWarps = ELSA_WARPS;
constexpr int kMask = ELSA_MASK;
constexpr bool kCausal = ELSA_CAUSAL;

constexpr int kThreads = 32 * kWarps;
constexpr int kGroups = 32 / kLanes;  // rows that a warp has side by side
constexpr int kWarpRows = kGroups * kRows, kTileRows = kWarps * kWarpRows;
constexpr int kTileKeys = kLanes * kKeys;
constexpr int kTailKeys = 2;  // of a thread, where few keys are left in the last tile
constexpr int kColumns = kValue / kLanes;
// Row strides in shared memory, in floats. Eight rows of query or key, 16 bytes of each, lie in
// eight different groups of four banks; so do the rows of weights that a warp writes or reads.
constexpr int kHeadStride = kHead % 8 == 4 ? kHead : kHead + 4;
constexpr int kWeightStride = kTileKeys + kLanes;

static_assert(kHead % 4 == 0 && kValue % (kLanes * kWidth) == 0 && kColumns % kWidth == 0, "dims");
static_assert(kLanes == 8 || kLanes == 16, "the mapping of lanes");
static_assert(kKeys % 2 == 0, "rows of weights start at multiples of 16 bytes");

template <int N>
struct alignas(4 * N) Words {
  float at[N];
};

// A tile of ROWS_ rows of an input on its way to shared memory. Where the pieces of a row divide
// the threads, a thread loads one column of pieces, so that few instructions make its addresses.
template <int ROWS_, int WIDE, int STRIDE>
struct Tile {
  static constexpr int kPieces = WIDE / kLoad, kAll = ROWS_ * kPieces;
  static constexpr bool kOneColumn = kThreads % kPieces == 0;
  static constexpr int kTurns = (kAll + kThreads - 1) / kThreads;
  float* shared;
  const float* input;
  long long row_stride, dim_stride;
  int rows, dims;
#ifndef ELSA_ASYNC
  Words<kLoad> held[kTurns];
#endif

  // Starts to load the rows from `first` on; what is outside of the input becomes zero.
  ELSA_INLINE void issue(int first, int thread) {
    if constexpr (kOneColumn) {
      constexpr int kStep = kThreads / kPieces;
      const int row = thread / kPieces, dim = thread % kPieces * kLoad;
      const float* from = input + (first + row) * row_stride + dim * dim_stride;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (kAll % kThreads == 0 || turn * kThreads + thread < kAll) {
          load(turn, row + turn * kStep, dim, from, first);
        }
        from += kStep * row_stride;
      }
    } else {
#ifdef ELSA_ASYNC
#pragma unroll 4  // all of their addresses would not fit into registers
#else
#pragma unroll
#endif
      for (int turn = 0; turn < kTurns; ++turn) {
        const int piece = turn * kThreads + thread;
        const int row = piece / kPieces, dim = piece % kPieces * kLoad;
        if (kAll % kThreads != 0 && piece >= kAll) break;
        load(turn, row, dim, input + (first + row) * row_stride + dim * dim_stride, first);
      }
    }
  }

  ELSA_INLINE void load(int turn, int row, int dim, const float* from, int first) {
    const bool inside = first + row < rows && dim < dims;
#ifdef ELSA_ASYNC
    copy<4 * kLoad>(shared + row * STRIDE + dim, from, inside);
#else
    held[turn] = inside ? *reinterpret_cast<const Words<kLoad>*>(from) : Words<kLoad>{};
#endif
  }

  // Ends the load: after the next barrier every thread sees the tile.
  ELSA_INLINE void land(int thread) {
#ifdef ELSA_ASYNC
    wait_for_copies();
#else
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int piece = turn * kThreads + thread;
      if (kAll % kThreads != 0 && piece >= kAll) break;
      float* to = shared + piece / kPieces * STRIDE + piece % kPieces * kLoad;
      *reinterpret_cast<Words<kLoad>*>(to) = held[turn];
    }
#endif
  }
};

// The rows of one thread: where they lie, and their state.
struct Rows {
  int lane, first;               // `first` and every kGroups-th after it, in the input
  const float* query;            // of the first row, in shared memory
  float* weight;                 // of the first row, in shared memory
  long long mask;                // offset of the first row
  float largest[kRows];          // m, of scores
  float sum[kRows];              // S, of this thread's keys
  float total[kRows][kColumns];  // W

  ELSA_INLINE int row(int i) const { return first + kGroups * i; }
};

ELSA_INLINE float largest_of_row(float x) {
#pragma unroll
  for (int step = 2; step < 2 * kLanes; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}

ELSA_INLINE float sum_of_row(float x) {
#pragma unroll
  for (int step = 2; step < 2 * kLanes; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The products of KEYS_ keys, from `key` on in shared memory, with the thread's rows.
template <int KEYS_>
ELSA_INLINE void products(const Rows& rows, const float* key, float (&score)[kRows][KEYS_]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < KEYS_; ++j) score[i][j] = 0.0f;
  }
#pragma unroll 2
  for (int d = 0; d < kHead; d += 4) {
    Words<4> query[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      query[i] = *reinterpret_cast<const Words<4>*>(rows.query + kGroups * i * kHeadStride + d);
    }
#pragma unroll
    for (int j = 0; j < KEYS_; ++j) {
      const Words<4> of_key =
          *reinterpret_cast<const Words<4>*>(key + (rows.lane + kLanes * j) * kHeadStride + d);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          score[i][j] = fmaf(query[i].at[c], of_key.at[c], score[i][j]);
        }
      }
    }
  }
}

// Products to scores: -inf for keys that a row does not see, and an additive mask.
template <int KEYS_>
ELSA_INLINE void mask_scores(const Arguments& a, const Rows& rows, int first_key,
                             float (&score)[kRows][KEYS_]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int end = kCausal ? min(a.keys, rows.row(i) + 1) : a.keys;
#pragma unroll
    for (int j = 0; j < KEYS_; ++j) {
      const int key = first_key + rows.lane + kLanes * j;
      bool seen = key < end;
      float added = 0.0f;
      if (kMask != 0 && seen && rows.row(i) < a.queries) {
        const long long at = rows.mask + kGroups * i * a.mask_strides[2] + key * a.mask_strides[3];
        if (kMask == 1) seen = static_cast<const unsigned char*>(a.mask)[at] != 0;
        if (kMask == 2) added = static_cast<const float*>(a.mask)[at];
      }
      if (kMask == 2) score[i][j] = fmaf(score[i][j], a.factor, added);
      if (!seen) score[i][j] = -ELSA_INFINITY;
    }
  }
}

// Scores to weights, in shared memory; gives the factors of the former state.
template <int KEYS_>
ELSA_INLINE void weigh(const Arguments& a, Rows& rows, float (&score)[kRows][KEYS_],
                       float (&former)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float largest = rows.largest[i];
#pragma unroll
    for (int j = 0; j < KEYS_; ++j) largest = fmaxf(largest, score[i][j]);
    largest = largest_of_row(largest);
    // What the state refers to is the same wherever it is taken: while the maximum stays, the factor
    // of the former state is 1. One that is not quite 1 would make early keys count for more, or
    // less, by each tile that follows. A row of scores next to the least finite number has none.
    float reference = rounded(largest, a.to_log2);
    if (largest == -ELSA_INFINITY || fabsf(reference) == ELSA_INFINITY) reference = 0.0f;
    former[i] = weight_of(rounded(rows.largest[i], a.to_log2) - reference);
    rows.largest[i] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS_; ++j) {
      const float weight = weight_of(fmaf(score[i][j], a.to_log2, -reference));
      sum += weight;
      rows.weight[kGroups * i * kWeightStride + rows.lane + kLanes * j] = weight;
    }
    rows.sum[i] = fmaf(rows.sum[i], former[i], sum);
  }
  __syncwarp();
}

// Merges the weighted sum of KEYS_ * kLanes values, from `value` on in shared memory.
template <int KEYS_>
ELSA_INLINE void add_values(Rows& rows, const float* value, const float (&former)[kRows]) {
  float sum[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[i][c] = 0.0f;
  }
#pragma unroll 2
  for (int k = 0; k < KEYS_ * kLanes; k += 4) {
    Words<4> weight[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      weight[i] = *reinterpret_cast<const Words<4>*>(rows.weight + kGroups * i * kWeightStride + k);
    }
#pragma unroll
    for (int of = 0; of < 4; ++of) {
      const float* at = value + (k + of) * kValue + rows.lane * kWidth;
#pragma unroll
      for (int c = 0; c < kColumns; c += kWidth) {
        const Words<kWidth> words = *reinterpret_cast<const Words<kWidth>*>(at + c * kLanes);
#pragma unroll
        for (int n = 0; n < kWidth; ++n) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            sum[i][c + n] = fmaf(weight[i].at[of], words.at[n], sum[i][c + n]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      rows.total[i][c] = fmaf(rows.total[i][c], former[i], sum[i][c]);
    }
  }
  __syncwarp();  // the weights may be written again
}

ELSA_INLINE void write(const Arguments& a, const Rows& rows, int batch, int head) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float sum = sum_of_row(rows.sum[i]);
    const int row = rows.row(i);
    if (row >= a.queries) continue;
    if (rows.lane == 0) {
      // ln 2 in two parts: the second has what the first lacks
      const float reference = rounded(rows.largest[i], a.to_log2);
      const float log = fmaf(reference, -1.90465421e-9f, logf(sum));
      a.lse[static_cast<long long>(batch * a.heads + head) * a.queries + row] =
          sum == 0.0f ? -ELSA_INFINITY : fmaf(reference, 0.693147182f, log);
    }
    float* out =
        a.out + batch * a.out_strides[0] + head * a.out_strides[1] + row * a.out_strides[2];
#pragma unroll
    for (int c = 0; c < kColumns; c += kWidth) {
      const int column = rows.lane * kWidth + c * kLanes;
      Words<kWidth> words;
#pragma unroll
      for (int n = 0; n < kWidth; ++n) {
        words.at[n] = sum == 0.0f ? 0.0f : rows.total[i][c + n] / sum;
      }
      if (a.value_dim % kWidth == 0) {
        if (column < a.value_dim) *reinterpret_cast<Words<kWidth>*>(out + column) = words;
        continue;
      }
#pragma unroll
      for (int n = 0; n < kWidth; ++n) {
        if (column + n < a.value_dim) out[column + n] = words.at[n];
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, ELSA_BLOCKS)
    elsa_portable_attention(const Arguments a) {
  // the last tile of queries, which may have few rows, is the last of the grid for every head
  const int tile = blockIdx.x / a.batch_heads, place = blockIdx.x % a.batch_heads;
  const int batch = place / a.heads, head = place % a.heads, of_key = head / a.heads_of_key;
  const int thread = threadIdx.x, warp = thread / 32, in_warp = thread % 32;
  // Lanes 2n and 2n + 1 read the same keys and values: a warp's 16-byte reads then take two turns.
  const int group = (in_warp & 1) | (kLanes == 8 ? in_warp >> 4 << 1 : 0);
  const int warp_row = warp * kWarpRows;
  const int first = tile * kTileRows;

  float* shared = reinterpret_cast<float*>(elsa_shared);
  float* key_shared = shared + kTileRows * kHeadStride;
  float* value_shared = key_shared + kTileKeys * kHeadStride;
  float* weights = value_shared + kTileKeys * kValue;

  Rows rows;
  rows.lane = in_warp >> 1 & (kLanes - 1);
  rows.first = first + warp_row + group;
  rows.query = shared + (warp_row + group) * kHeadStride;
  rows.weight = weights + (warp_row + group) * kWeightStride;
  rows.mask = 0;
  if (kMask != 0) {
    rows.mask =
        batch * a.mask_strides[0] + head * a.mask_strides[1] + rows.first * a.mask_strides[2];
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rows.largest[i] = -ELSA_INFINITY;
    rows.sum[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) rows.total[i][c] = 0.0f;
  }

  {
    const float* query = a.query + batch * a.query_strides[0] + head * a.query_strides[1];
    Tile<kTileRows, kHead, kHeadStride> queries{
        shared, query, a.query_strides[2], a.query_strides[3], a.queries, a.head_dim};
    queries.issue(first, thread);
    queries.land(thread);
  }
  Tile<kTileKeys, kHead, kHeadStride> keys{
      key_shared,       a.key + batch * a.key_strides[0] + of_key * a.key_strides[1],
      a.key_strides[2], a.key_strides[3],
      a.keys,           a.head_dim};
  Tile<kTileKeys, kValue, kValue> values{
      value_shared,
      a.value + batch * a.value_strides[0] + of_key * a.value_strides[1],
      a.value_strides[2],
      a.value_strides[3],
      a.keys,
      a.value_dim};

  // Warps without rows fold nothing, nor do rows that see none of a tile's keys.
  const int warp_first = first + warp_row;
  const int end = kCausal ? min(a.keys, first + kTileRows) : a.keys;
  int warp_end = warp_first < a.queries ? end : 0;
  if (kCausal) warp_end = min(warp_end, warp_first + kWarpRows);

  if (end > 0) keys.issue(0, thread);
  for (int at = 0; at < end; at += kTileKeys) {
    const int left = warp_end - at;  // keys that the warp still folds
    const bool last = at + kTileKeys >= end;
    const bool whole = left > 0 && !(last && left <= kTileKeys / 2);
    float former[kRows];
    keys.land(thread);
    __syncthreads();  // every warp is done with the values of the tile before
    values.issue(at, thread);
    if (whole) {
      float score[kRows][kKeys];
      products<kKeys>(rows, key_shared, score);
      const int seen_by_all = kCausal ? min(a.keys, warp_first + 1) : a.keys;
      if (kMask != 0 || at + kTileKeys > seen_by_all) mask_scores<kKeys>(a, rows, at, score);
      weigh<kKeys>(a, rows, score, former);
    }
    values.land(thread);
    __syncthreads();  // every warp is done with the keys, unless the tile is the last
    if (!last) keys.issue(at + kTileKeys, thread);
    if (whole) {
      add_values<kKeys>(rows, value_shared, former);
      continue;
    }
    for (int pass = 0; pass < left; pass += kTailKeys * kLanes) {
      float score[kRows][kTailKeys];
      products<kTailKeys>(rows, key_shared + pass * kHeadStride, score);
      mask_scores<kTailKeys>(a, rows, at + pass, score);
      weigh<kTailKeys>(a, rows, score, former);
      add_values<kTailKeys>(rows, value_shared + pass * kValue, former);
    }
  }
  write(a, rows, batch, head);
}
