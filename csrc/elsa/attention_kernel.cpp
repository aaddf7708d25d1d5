// The kernels of one instruction set. Compiled once per set with that set's flags and ELSA_KERNEL
// naming the table it defines.
#include "blocks.h"
#include "kernel.h"
#include "philox.h"

#ifndef ELSA_KERNEL
#error "define ELSA_KERNEL (the table) and ELSA_KERNEL_NAME (its name)"
#endif

namespace elsa {
namespace {

// Above this many query rows, reading values in place costs more than packing them first.
constexpr int64_t kDirectRows = 64;

constexpr int64_t kSpanRows = ceil_div(kBlockRows, kLanes) * kLanes;

// Offsets of a thread's arrays in its workspace, in floats.
struct Layout {
  int64_t keys, values, query, scores, block_out, row_max, reference, rescale, bias, rows, out,
      maximum, sum, span_max, span_top, total;
};

int64_t value_width(const Attention& a) { return round_up(a.value_dim, kLanes); }

bool values_in_place(const Attention& a, const Plan& plan) {
  return a.value.dtype == DType::kFloat32 && a.value.stride[3] == 1 && a.value_dim % kLanes == 0 &&
         a.value.stride[2] == a.value_dim && plan.key_blocks == 1 &&
         ceil_div(a.queries, plan.splits) <= kDirectRows;
}

// Dense rows need no copy; a narrow panel reads four head dimensions at a time.
bool queries_in_place(const Attention& a) {
  return a.query.dtype == DType::kFloat32 && a.query.stride[3] == 1 && a.head_dim % 4 == 0 &&
         a.query.stride[2] == a.head_dim;
}

// One key block's panels, with room for a narrow one after the last.
int64_t packed_key_stride(const Attention& a, const Plan& plan) {
  return (plan.key_block + kPanel) * a.head_dim;
}

Layout layout(const Attention& a, const Plan& plan) {
  const int64_t blocks = plan.keep_packed ? plan.key_blocks : 1;
  const int64_t state = plan.key_blocks > 1 ? ceil_div(a.queries, plan.splits) : kBlockRows;
  Carve carve;
  Layout l;
  l.keys = carve.take(blocks * packed_key_stride(a, plan));
  l.values = carve.take(values_in_place(a, plan) ? 0 : blocks * plan.key_block * value_width(a));
  l.query = carve.take(queries_in_place(a) ? 0 : kBlockRows * row_stride(a.head_dim));
  l.scores = carve.take(kBlockRows * row_stride(plan.key_block));
  l.block_out = carve.take(kBlockRows * value_width(a));
  l.row_max = carve.take(round_up(kBlockRows, kLanes) * kLanes);
  l.reference = carve.take(kBlockRows + kLanes);
  l.rescale = carve.take(kBlockRows + kLanes);
  l.bias = carve.take(a.mask.data ? kBlockRows * row_stride(plan.key_block) : 0);
  l.rows = carve.take(kLanes * round_up(a.head_dim, kLanes));
  l.out = carve.take(state * value_width(a));
  l.maximum = carve.take(state + kLanes);  // these two are read in whole vectors
  l.sum = carve.take(state + kLanes);
  const int64_t spans = a.sparse ? ceil_div(plan.key_block, kSpan) : 0;
  l.span_max = carve.take(spans * kSpanRows * kLanes);
  l.span_top = carve.take(spans * kSpanRows);
  l.total = carve.total();
  return l;
}

int64_t workspace(const Attention& a, const Plan& plan) { return layout(a, plan).total; }

// One item: a range of query rows of one head against all keys, in row blocks of a few register
// tiles.
class Item {
 public:
  Item(const Attention& a, const Plan& plan, int64_t item, int64_t upcoming, Workspace& workspace)
      : a_(a), plan_(plan), workspace_(workspace), at_(layout(a, plan)), memory_(workspace.memory) {
    const int64_t index = item / plan.splits;
    const int64_t position = item - index * plan.splits;
    // The last rows of a causal problem see the most keys: they go first.
    const int64_t split = a.causal ? plan.splits - 1 - position : position;
    batch_ = index / a.heads;
    head_ = index - batch_ * a.heads;
    kv_head_ = head_ / (a.heads / a.kv_heads);
    first_row_ = split * a.queries / plan.splits;
    rows_ = (split + 1) * a.queries / plan.splits - first_row_;
    width_ = value_width(a);
    scaled_ = a.mask.data != nullptr || !(a.scale > 0.0f);
    few_ = a.queries <= kFewQueries || wide_keys(a.keys) <= kLanes;
    values_in_place_ = values_in_place(a, plan);
    queries_in_place_ = queries_in_place(a);
    query_stride_ = queries_in_place_ ? a.query.stride[2] : row_stride(a.head_dim);
    score_stride_ = row_stride(plan.key_block);
    query_ = matrix(a.query, batch_, head_);
    key_ = matrix(a.key, batch_, kv_head_);
    value_ = matrix(a.value, batch_, kv_head_);
    if (upcoming >= 0 && plan.prefetch) {
      const int64_t batch = upcoming / a.heads, head = upcoming - batch * a.heads;
      const int64_t kv_head = head / (a.heads / a.kv_heads);
      next_[0] = Prefetch(matrix(a.key, batch, kv_head), a.keys, a.head_dim);
      next_[1] = Prefetch(matrix(a.value, batch, kv_head), a.keys, a.value_dim);
      next_[2] = Prefetch(matrix(a.query, batch, head), a.queries, a.head_dim);
      const int64_t tiles = ceil_div(rows_, kTileRows);
      const int64_t calls =
          tiles * (round_up(a.keys, kPanel) / kPanel +
                   round_up(width_, kPanel) / kPanel * ceil_div(a.keys, kSumChunk));
      for (const Prefetch& p : next_) lines_per_call_ += ceil_div(p.lines(), calls);
    }
  }

  void run() {
    const int64_t blocks = blocks_for(first_row_ + rows_ - 1);
    const int64_t tiles = ceil_div(rows_, kTileRows);
    const int64_t middle = (first_row_ + rows_ / 2) * a_.keys / a_.queries / plan_.key_block;
    local_ = !a_.sparse ? 0 : a_.causal ? blocks - 1 : smaller(blocks - 1, middle);
    for (int64_t position = 0; position < blocks; ++position) {
      // 0, then the local one, then the others
      block_ = local_ == 0          ? position
               : position <= 1      ? position * local_
               : position <= local_ ? position - 1
                                    : position;
      first_key_ = block_ * plan_.key_block;
      keys_ = smaller(plan_.key_block, a_.keys - first_key_);
      pack();
      // The same in every block, a shorter last one too: a row block is finished in the last block
      // that its last row sees, and no other row block may hold its rows there.
      const int64_t together = block_tiles(smaller(plan_.key_block, a_.keys));
      for (int64_t tile = 0; tile < tiles; tile += together) {
        rows_of_.cut(first_row_, rows_, tiles, tile, smaller(together, tiles - tile));
        row_block();
      }
    }
    if (plan_.keep_packed && blocks == plan_.key_blocks) workspace_.packed_head = packed_index();
    if (a_.sparse) {
      int64_t* const counts = a_.sparse->counts + (batch_ * a_.heads + head_) * kCounts;
      for (int i = 0; i < kCounts; ++i) __atomic_fetch_add(counts + i, count_[i], __ATOMIC_RELAXED);
    }
  }

 private:
  int64_t packed_index() const { return batch_ * a_.kv_heads + kv_head_; }
  // Key blocks that `row` sees at least a part of.
  int64_t blocks_for(int64_t row) const {
    return a_.causal ? smaller(plan_.key_blocks, row / plan_.key_block + 1) : plan_.key_blocks;
  }
  float* packed_keys() const {
    return memory_ + at_.keys + (plan_.keep_packed ? block_ * packed_key_stride(a_, plan_) : 0);
  }
  float* packed_values() const {
    return memory_ + at_.values + (plan_.keep_packed ? first_key_ * width_ : 0);
  }

  ELSA_NOINLINE void pack() {
    if (workspace_.packed_head == packed_index()) return;
    workspace_.packed_head = -1;
    pack_keys(MatrixRows{key_}, first_key_, keys_, a_.head_dim, memory_ + at_.rows, packed_keys());
    if (values_in_place_) return;
    pack_values(MatrixRows{value_}, first_key_, keys_, a_.value_dim, packed_values());
  }

  // Keys of the block that some row of the tile sees; may be negative.
  int64_t keys_of(const Tile& tile) const {
    return a_.causal ? smaller(keys_, rows_of_.row + tile.local + tile.rows - first_key_) : keys_;
  }

  // Folds the key block into a block of rows.
  void row_block() {
    most_keys_ = keys_of(rows_of_.tiles[rows_of_.count - 1]);
    // State rows are kept for the whole item when several key blocks pass over it.
    state_ = plan_.key_blocks > 1 ? rows_of_.row - first_row_ : 0;
    if (most_keys_ <= 0) return;
    // Whether this block is the last one that is folded into the row block.
    const int64_t most = blocks_for(rows_of_.row + rows_of_.rows - 1) - 1;
    const bool last = block_ == (most > 1 && most == local_ ? most - 1 : most);
    scores();
    if (a_.sparse) {
      softmax_of_spans();
    } else {
      softmax();
    }
    const bool any_empty = last && finish_rows();
    const bool direct = last && !a_.sparse && block_ == 0 && !any_empty &&
                        a_.query.dtype == DType::kFloat32 && width_ == a_.value_dim;
    if (a_.dropout) drop();
    if (a_.sparse) {
      weigh_spans();
    } else {
      weigh_values(direct);
    }
    if (block_ > 0) merge();
    if (last && !direct) write_out();
  }

  void prefetch() {
    int64_t lines = lines_per_call_;
    if (lines == 0) return;
    for (Prefetch& p : next_) lines = p.step(lines);
  }

  ELSA_NOINLINE void scores() {
    const int64_t row = rows_of_.row, rows = rows_of_.rows;
    float* const row_max = memory_ + (a_.sparse ? at_.span_max : at_.row_max);
    for (int64_t span = 0; span < (a_.sparse ? ceil_div(most_keys_, kSpan) : 1); ++span) {
      forget_maxima(row_max + span * kSpanRows * kLanes, rows);
    }
    ScoreTile t = {};
    t.query = reinterpret_cast<const float*>(query_.at(row, 0));
    if (!queries_in_place_) {
      float* const copy = memory_ + at_.query;
      t.query = copy;
      for (int64_t i = 0; i < rows; ++i) {
        copy_padded(query_, row + i, a_.head_dim, round_up(a_.head_dim, 4),
                    copy + i * query_stride_);
      }
    }
    t.query_stride = query_stride_;
    t.depth = a_.head_dim;
    t.scores = memory_ + at_.scores;
    t.score_stride = score_stride_;
    t.row_max = row_max;
    t.few = few_;
    t.scaled = scaled_;
    t.scale = a_.scale;
    if (a_.mask.data) {
      read_mask(matrix(a_.mask, batch_, head_), row, rows, first_key_, most_keys_,
                memory_ + at_.bias, score_stride_, t);
    }
    const int64_t visible = a_.causal ? row + 1 - first_key_ : kAllVisible;
    const Panels panels = {packed_keys(), keys_, most_keys_, visible,
                           a_.sparse ? kSpanRows * kLanes : 0};
    each_score_tile(
        t, rows_of_, panels, [this](const Tile& tile, int64_t) { return keys_of(tile); },
        [this] { prefetch(); });
  }

  // Makes m the maxima of rows [i, ...), and rescale what carries the state over from `previous`.
  ELSA_INLINE void move_to(Floats m, Floats previous, int64_t i, float to_log2) {
    const Floats base = m == splat(-kInf) ? Floats{} : m;
    store(memory_ + at_.reference + i, base);
    store(memory_ + at_.rescale + i, exp2_nonpositive((previous - base) * to_log2));
    store_first(memory_ + at_.maximum + state_ + i, m, rows_of_.rows - i);
  }

  // Adds the sums of the lanes that stand in the place of the rows' maxima.
  ELSA_INLINE void add_sums() {
    for (int64_t i = 0; i < rows_of_.rows; i += kLanes) {
      float* const sum = memory_ + at_.sum + state_ + i;
      const Floats added = row_sums(memory_ + at_.row_max + i * kLanes);
      const Floats rescale = load(memory_ + at_.rescale + i);
      store_first(sum, block_ == 0 ? added : load(sum) * rescale + added, rows_of_.rows - i);
    }
  }

  // Weights relative to the running maximum of each row; the older part of the state is rescaled to
  // it.
  ELSA_NOINLINE void softmax() {
    const float to_log2 = scaled_ ? kLog2E : a_.scale * kLog2E;
    float* const lanes = memory_ + at_.row_max;  // [rows][kLanes]: maxima, then sums
    float* const reference = memory_ + at_.reference;
    for (int64_t i = 0; i < rows_of_.rows; i += kLanes) {
      const float* const maximum = memory_ + at_.maximum + state_ + i;
      const Floats previous = block_ == 0 ? splat(-kInf) : load(maximum);
      const Floats m = max(row_maxima(lanes + i * kLanes), previous);
      move_to(m, previous, i, to_log2);
    }
    for (const Tile& tile : rows_of_) {
      const int64_t count = round_up(keys_of(tile), kLanes);
      for (int64_t i = tile.local; i < tile.local + tile.rows; ++i) {
        float* row = memory_ + at_.scores + i * score_stride_;
        store(lanes + i * kLanes, exponentiate(row, count, reference[i], to_log2));
      }
    }
    add_sums();
  }

  // As softmax(), span by span: those that may be left out are, of weights and sums alike.
  ELSA_NOINLINE void softmax_of_spans() {
    const float to_log2 = scaled_ ? kLog2E : a_.scale * kLog2E;
    const bool skips = a_.sparse->threshold > -kInf;
    const float limit = a_.sparse->threshold / to_log2;
    float* const lanes = memory_ + at_.row_max;
    float* const reference = memory_ + at_.reference;
    float* const tops = memory_ + at_.span_top;  // [spans][kSpanRows]
    for (int64_t i = 0; i < rows_of_.rows; i += kLanes) {
      float* const maximum = memory_ + at_.maximum + state_ + i;
      const Floats previous = block_ == 0 ? splat(-kInf) : load(maximum);
      Floats m = previous;
      for (int64_t span = 0; span < ceil_div(most_keys_, kSpan); ++span) {
        const int64_t at = span * kSpanRows + i;
        const Floats top = row_maxima(memory_ + at_.span_max + at * kLanes);
        store(tops + at, top);
        m = max(top, m);
      }
      move_to(m, previous, i, to_log2);
    }
    for (int64_t t = 0; t < rows_of_.count; ++t) {
      const Tile& tile = rows_of_.tiles[t];
      const int64_t keys = keys_of(tile), seen = keys > 0 ? ceil_div(keys, kSpan) : 0;
      kept_[t] = 0;
      count_[kSeen] += seen;
      count_[kMaxima] += seen;
      for (int64_t span = 0; span < seen; ++span) {
        bool kept = !skips;
        for (int64_t i = tile.local; i < tile.local + tile.rows && !kept; ++i) {
          // the difference: of large scores reference + limit would be the reference itself
          kept = !(tops[span * kSpanRows + i] - reference[i] <= limit);
        }
        kept_[t] |= static_cast<uint32_t>(kept) << span;
        count_[kLeftOut] += !kept;
      }
      for (int64_t i = tile.local; i < tile.local + tile.rows; ++i) {
        float* const row = memory_ + at_.scores + i * score_stride_;
        Floats sum = {};
        for (int64_t span = 0; span < seen; ++span) {
          if (!(kept_[t] >> span & 1)) continue;
          const int64_t first = span * kSpan;
          const int64_t count = round_up(smaller(kSpan, keys - first), kLanes);
          sum += exponentiate(row + first, count, reference[i], to_log2);
        }
        store(lanes + i * kLanes, sum);
      }
    }
    add_sums();
  }

  // t.weights times the values from `key` on, all of their panels, into the tile's rows of `out`.
  ELSA_INLINE void weigh(ValueTile& t, const Tile& tile, int64_t key, float* out) {
    const float* panel =
        values_in_place_ ? reinterpret_cast<const float*>(value_.data) : packed_values();
    for (int64_t c = 0; c < width_; c += kPanel) {
      const int64_t columns = smaller(kPanel, width_ - c);
      t.value_stride = values_in_place_ ? value_.row_stride : columns;
      t.values = panel + key * t.value_stride;
      t.out = out + tile.local * t.out_stride + c;
      Tiles::value<false>[columns > kLanes][tile.rows - 1](t);
      prefetch();
      panel += values_in_place_ ? columns : keys_ * columns;
    }
  }

  // As weigh_values(), of the spans that are kept.
  ELSA_NOINLINE void weigh_spans() {
    ValueTile t = {};
    t.weight_stride = score_stride_;
    t.few = a_.queries <= kFewQueries;
    float* const out = memory_ + (block_ == 0 ? at_.out + state_ * width_ : at_.block_out);
    t.out_stride = width_;
    for (int64_t i = 0; i < rows_of_.count; ++i) {
      const Tile& tile = rows_of_.tiles[i];
      if (block_ > 0 || kept_[i] != 0) continue;
      for (int64_t j = 0; j < tile.rows * width_; j += kLanes) {
        store(out + tile.local * width_ + j, Floats{});
      }
    }
    for (int64_t span = 0; span < ceil_div(most_keys_, kSpan); ++span) {
      const int64_t key = span * kSpan;
      for (int64_t i = 0; i < rows_of_.count; ++i) {
        const Tile& tile = rows_of_.tiles[i];
        if (!(kept_[i] >> span & 1)) continue;
        t.accumulate = (kept_[i] & ((1u << span) - 1)) != 0;
        t.count = smaller(kSpan, keys_of(tile) - key);
        t.weights = memory_ + at_.scores + tile.local * score_stride_ + key;
        weigh(t, tile, key, out);
      }
    }
  }

  ELSA_NOINLINE void drop() {
    for (const Tile& tile : rows_of_) {
      const int64_t count = round_up(keys_of(tile), kLanes);
      for (int64_t i = tile.local; i < tile.local + tile.rows; ++i) {
        float* const row = memory_ + at_.scores + i * score_stride_;
        each_factor(*a_.dropout, batch_ * a_.heads + head_, rows_of_.row + i, first_key_, count,
                    [row](int64_t j, Floats keep) { store(row + j, load(row + j) * keep); });
      }
    }
  }

  // lse of each row, and in place of its sum the factor that normalises it. Whether some row sees
  // no key.
  bool finish_rows() {
    const int64_t first = lse_offset(a_, batch_, head_) + rows_of_.row;
    float* const lse = a_.lse + first;
    const float unit = scaled_ ? 1.0f : a_.scale;
    bool any_empty = false;
    for (int64_t i = 0; i < rows_of_.rows; i += kLanes) {
      const Floats sum = load(memory_ + at_.sum + state_ + i);
      const Floats maximum = load(memory_ + at_.maximum + state_ + i);
      const Ints empty = sum == 0.0f;
      // The scaled maximum is rounded like the scores of gradients, from which lse is subtracted.
      const Floats top = maximum * unit, rest = log_positive(sum), both = top + rest;
      store_first(lse + i, empty ? splat(-kInf) : both, rows_of_.rows - i);
      if (a_.lse_low) {  // the error of that sum: Knuth, TAOCP 2, 4.2.2
        const Floats part = both - top;
        const Floats low = (top - (both - part)) + (rest - part);
        store_first(a_.lse_low + first + i, empty || !(low == low) ? Floats{} : low,
                    rows_of_.rows - i);
      }
      store_first(memory_ + at_.sum + state_ + i, empty ? Floats{} : 1.0f / sum, rows_of_.rows - i);
      for (int64_t r = 0; r < smaller(kLanes, rows_of_.rows - i); ++r) any_empty |= empty[r] != 0;
    }
    return any_empty;
  }

  // scores * values, into the state, this block's own sums, or (normalised) the output itself.
  ELSA_NOINLINE void weigh_values(bool direct) {
    const int64_t chunks = ceil_div(keys_, kSumChunk);
    ValueTile t = {};
    t.weight_stride = score_stride_;
    t.few = a_.queries <= kFewQueries;
    float* out = direct ? static_cast<float*>(out_row(rows_of_.row))
                        : memory_ + (block_ == 0 ? at_.out + state_ * width_ : at_.block_out);
    t.out_stride = direct ? a_.heads * a_.value_dim : width_;
    for (int64_t chunk = 0, key = 0; chunk < chunks && key < most_keys_; ++chunk) {
      const int64_t end = (chunk + 1) * keys_ / chunks;
      t.accumulate = key > 0;
      for (const Tile& tile : rows_of_) {
        t.count = smaller(end, keys_of(tile)) - key;
        if (t.count <= 0) continue;
        t.weights = memory_ + at_.scores + tile.local * score_stride_ + key;
        t.factor =
            direct && end >= keys_of(tile) ? memory_ + at_.sum + state_ + tile.local : nullptr;
        weigh(t, tile, key, out);
      }
      key = end;
    }
  }

  // The monoid's merge of the state so far with this block's, both relative to the new maximum.
  ELSA_NOINLINE void merge() {
    for (int64_t t = 0; t < rows_of_.count; ++t) {
      const Tile& tile = rows_of_.tiles[t];
      if (keys_of(tile) <= 0 || (a_.sparse && kept_[t] == 0)) continue;
      ++count_[kRescaled];
      for (int64_t i = tile.local; i < tile.local + tile.rows; ++i) {
        const float rescale = memory_[at_.rescale + i];
        float* out = memory_ + at_.out + (state_ + i) * width_;
        const float* added = memory_ + at_.block_out + i * width_;
        for (int64_t d = 0; d < width_; d += kLanes) {
          store(out + d, load(out + d) * rescale + load(added + d));
        }
      }
    }
  }

  void* out_row(int64_t row) const {
    const int64_t offset = ((batch_ * a_.queries + row) * a_.heads + head_) * a_.value_dim;
    return static_cast<char*>(a_.out) + offset * element_size(a_.query.dtype);
  }

  ELSA_NOINLINE void write_out() {
    for (int64_t i = 0; i < rows_of_.rows; ++i) {
      float* row = memory_ + at_.out + (state_ + i) * width_;
      const float factor = memory_[at_.sum + state_ + i];
      if (factor == 0.0f) {  // no key was seen: zeros, whatever the values hold
        for (int64_t d = 0; d < width_; d += kLanes) store(row + d, Floats{});
      }
      store_row(row, factor, a_.value_dim, a_.query.dtype, out_row(rows_of_.row + i));
    }
  }

  const Attention& a_;
  const Plan& plan_;
  Workspace& workspace_;
  const Layout at_;
  float* const memory_;
  int64_t batch_, head_, kv_head_, first_row_, rows_, width_;
  bool scaled_, few_, values_in_place_, queries_in_place_;
  int64_t query_stride_, score_stride_;
  Matrix query_, key_, value_;
  Prefetch next_[3];  // the upcoming item's operands
  int64_t lines_per_call_ = 0;
  // The current key block and row block.
  int64_t block_, first_key_, keys_;
  int64_t state_, most_keys_;
  RowBlock<kBlockTiles> rows_of_;
  // Of sparse problems.
  int64_t local_ = 0;           // the block around the rows, which goes second; 0: all in order
  uint32_t kept_[kBlockTiles];  // the spans of each tile that are not left out, a bit each
  int64_t count_[kCounts] = {};
};

int64_t block_rows(int64_t keys) { return block_tiles(keys) * kTileRows; }

void run(const Attention& a, const Plan& plan, int64_t item, int64_t upcoming,
         Workspace& workspace) {
  Item(a, plan, item, upcoming, workspace).run();
}

}  // namespace

const Kernel ELSA_KERNEL = {ELSA_KERNEL_NAME, kTileRows, block_rows, workspace, run};

}  // namespace elsa
