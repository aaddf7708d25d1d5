// The window kernels of one instruction set. Compiled once per set with that set's flags and
// ELSA_KERNEL naming the table it defines.
#include "window_kernel.h"

#include "blocks.h"
#include "window_tokens.h"

#ifndef ELSA_KERNEL
#error "define ELSA_KERNEL (the table) and ELSA_KERNEL_NAME (its name)"
#endif

namespace elsa {
namespace {

// Register tiles whose scores are in cache together: at most these, and at most kCachedWeights.
constexpr int64_t kWindowTiles = ceil_div(56, kTileRows);
constexpr int64_t kWindowRows = kWindowTiles * kTileRows;
constexpr int64_t kCachedWeights = 4096;  // 16 KiB, half of a first-level cache
// Floats from one narrow key's scores to the next's: those of a block's rows, in whole vectors.
constexpr int64_t kNarrowStride = (kWindowRows + 4 + 15) / 16 * 16;
constexpr int64_t kSumChain = 64;         // keys summed in one chain of additions
constexpr int64_t kCachedBias = 1 << 17;  // 512 KiB, half of a second-level cache
int64_t value_width(const WindowAttention& a) { return round_up(a.head_dim, kLanes); }

// Register tiles of a block of rows, whose scores with all keys of a window exist at a time.
int64_t tiles_together(const WindowPlan& plan) {
  const int64_t cached = kCachedWeights / (kTileRows * round_up(plan.tokens, kLanes));
  return cached < 1 ? 1 : smaller(cached, kWindowTiles);
}

// Offsets of a thread's arrays in its workspace, in floats.
struct Layout {
  int64_t tokens[2], keys, values, query, scores, narrow, row_max, reference, bias, rows, out, sum,
      total;
  int64_t score_stride, query_stride;

  Layout(const WindowAttention& a, const WindowPlan& plan) {
    const int64_t most = tiles_together(plan) * kTileRows;
    Carve carve;
    // An odd number of registers spreads rows over the sets of a cache.
    const auto spread = [](int64_t floats) {
      return (round_up(floats, kLanes) / kLanes | 1) * kLanes;
    };
    score_stride = spread(plan.tokens);
    query_stride = spread(a.head_dim);
    for (int i = 0; i < 2; ++i) tokens[i] = carve.take(token_floats(a, plan));
    keys = carve.take((round_up(plan.tokens, kPanel) + kPanel) * a.head_dim);
    values = carve.take(plan.tokens * value_width(a));
    query = carve.take(most * query_stride);
    scores = carve.take(most * score_stride);
    narrow = carve.take(kNarrow * kNarrowStride);
    row_max = carve.take(round_up(most, kLanes) * kLanes);
    reference = carve.take(most + kLanes);
    bias = carve.take(shifted(a) ? most * score_stride : 0);
    rows = carve.take(kLanes * round_up(a.head_dim, kLanes));
    out = carve.take(most * value_width(a));
    sum = carve.take(most + kLanes);
    total = carve.total();
  }
};

int64_t workspace(const WindowAttention& a, const WindowPlan& plan) {
  return Layout(a, plan).total;
}

// Fetches the tokens of the next window, what is read and where the output goes, into the
// second-level cache, a few cache lines at a time: in straight lines, because a loop over single
// ones costs more than they do. Whole tokens, not one head's part of each: every visit to a page
// costs a look-up of its address.
struct Fetch {
  static constexpr int kLines = 8;  // of a step
  const char* const* source = nullptr;
  char* const* target = nullptr;
  int64_t left = 0;  // tokens
  int64_t source_bytes = 0, target_bytes = 0;
  bool reads = true;  // what follows is of `source`
  const char* place = nullptr;
  const char* end = nullptr;

  void start() {
    reads = true;
    place = *source;
    end = place + source_bytes;
  }
  static int64_t steps(int64_t bytes) { return ceil_div(bytes, 64 * kLines); }
  int64_t steps() const { return left * (steps(source_bytes) + steps(target_bytes)); }
  // The last step of a run of lines goes beyond it, to neighbours or nowhere: nothing is read.
  ELSA_INLINE void step(int64_t count) {
    for (; count > 0 && left > 0; --count) {
      ELSA_UNROLL
      for (int i = 0; i < kLines; ++i) __builtin_prefetch(place + 64 * i, 0, 2);
      place += 64 * kLines;
      if (place < end) continue;
      if (reads && *target) {
        reads = false;
        place = *target;
        end = place + target_bytes;
        continue;
      }
      ++source;
      ++target;
      if (--left > 0) start();
    }
  }
};

// A worker: takes items, each a range of query rows of one window and head, and folds the keys into
// them in row blocks of a few register tiles.
class Worker {
 public:
  Worker(const WindowAttention& a, const WindowPlan& plan, float* memory)
      : a_(a),
        plan_(plan),
        at_(a, plan),
        memory_(memory),
        width_(value_width(a)),
        size_(element_size(a.dtype)),
        in_place_(a.dtype == DType::kFloat32 && a.head_dim % 4 == 0 && !a.logit_scale),
        direct_(a.dtype == DType::kFloat32 && width_ == a.head_dim),
        fetches_bias_(kLanes == 16 && plan.bias &&
                      a.heads * plan.tokens * plan.tokens > kCachedBias),
        keys_(plan.tokens),
        wide_(wide_keys(plan.tokens)) {
    for (int i = 0; i < 2; ++i) place(a, plan, memory + at_.tokens[i], tokens_[i]);
  }

  void item(int64_t item, int64_t end) {
    index_ = item / plan_.splits;
    const int64_t split = item - index_ * plan_.splits;
    const int64_t window = index_ / a_.heads;
    head_ = index_ - window * a_.heads;
    const int64_t first = split * keys_ / plan_.splits;
    const int64_t rows = (split + 1) * keys_ / plan_.splits - first;
    if (tokens_[current_].window != window) {
      current_ ^= 1;
      if (tokens_[current_].window != window) find_tokens(a_, plan_, window, tokens_[current_]);
    }
    window_ = &tokens_[current_];
    scale_ = a_.logit_scale ? a_.logit_scale[head_] : a_.scale;
    scaled_ = plan_.bias != nullptr || window_->masked || !(scale_ > 0.0f);
    for (int i = 0; i < 3; ++i) {
      operand_[i] = {window_->source, offset(head_, i), a_.dtype, a_.logit_scale && i < 2};
    }
    const int64_t tiles = ceil_div(rows, kTileRows);
    const int64_t together = tiles_together(plan_);
    const int64_t blocks = ceil_div(tiles, together);
    prepare_fetch(item, end, rows, tiles);
    if (packed_ != index_) pack();
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t tile = b * tiles / blocks;
      block_.cut(first, rows, tiles, tile, (b + 1) * tiles / blocks - tile);
      point_at_rows();
      scores();
      softmax();
      weigh_values();
      if (!direct_) write_out();
    }
  }

 private:
  // Bytes from a token's channels to the head's query (0), key (1) or value (2).
  int64_t offset(int64_t head, int64_t which) const {
    const int64_t index = a_.head_first ? 3 * head + which : which * a_.heads + head;
    return index * a_.head_dim * size_;
  }

  // Each item of a window fetches its share of the next one's tokens.
  void prepare_fetch(int64_t item, int64_t end, int64_t rows, int64_t tiles) {
    fetch_ = {};
    const int64_t items = a_.heads * plan_.splits;
    const int64_t window = window_->window + 1;
    if (window * items >= end) return;
    Tokens& next = tokens_[current_ ^ 1];
    if (next.window != window) find_tokens(a_, plan_, window, next);
    const int64_t share = item - window_->window * items;
    const int64_t first = share * plan_.tokens / items;
    const int64_t channels = a_.heads * a_.head_dim * size_;
    fetch_.source = next.source + first;
    fetch_.target = next.target + first;
    fetch_.left = (share + 1) * plan_.tokens / items - first;
    if (fetch_.left == 0) return;
    fetch_.source_bytes = 3 * channels;
    fetch_.target_bytes = channels;
    fetch_.start();
    const int64_t calls =
        rows + tiles * (ceil_div(plan_.tokens, kPanel) + ceil_div(width_, kPanel));
    steps_per_call_ = ceil_div(fetch_.steps(), calls);
  }

  ELSA_NOINLINE void pack() {
    packed_ = index_;
    pack_keys(operand_[1], 0, keys_, a_.head_dim, memory_ + at_.rows, memory_ + at_.keys,
              paired_keys(wide_));
    pack_values(operand_[2], 0, keys_, a_.head_dim, memory_ + at_.values);
  }

  // Where queries are read and sums are written: the image itself, or copies of this block's rows.
  void point_at_rows() {
    const char* const* source = window_->source + block_.row;
    char* const* target = window_->target + block_.row;
    const int64_t column = head_ * a_.head_dim, padded = round_up(a_.head_dim, 4);
    for (int64_t i = 0; i < block_.rows; ++i) {
      if (in_place_) {
        query_rows_[i] = reinterpret_cast<const float*>(source[i] + operand_[0].offset);
      } else {
        float* const q = memory_ + at_.query + i * at_.query_stride;
        query_rows_[i] = q;
        operand_[0].copy(block_.row + i, 0, a_.head_dim, q);
        for (int64_t d = a_.head_dim; d < padded; ++d) q[d] = 0.0f;
      }
      out_rows_[i] = memory_ + at_.out + i * width_;
      if (direct_ && target[i]) out_rows_[i] = reinterpret_cast<float*>(target[i]) + column;
    }
  }

  ELSA_NOINLINE void scores() {
    float* row_max = memory_ + at_.row_max;
    forget_maxima(row_max, block_.rows);
    ScoreTile t = {};
    t.depth = a_.head_dim;
    t.visible = kAllVisible;
    t.scaled = scaled_;
    t.scale = scale_;
    t.score_stride = at_.score_stride;
    prepare_bias(t);
    if (wide_ < keys_) narrow_scores(t);
    const float* bias = t.bias;
    t.few = wide_ <= kLanes;
    const auto tile_at = [&](int64_t row, int64_t panel) {
      t.query_rows = query_rows_ + row;
      t.scores = memory_ + at_.scores + row * at_.score_stride + panel;
      t.row_max = row_max + row * kLanes;
      if (bias) t.bias = bias + row * t.bias_stride + panel;
    };
    const int64_t paired = paired_keys(wide_);
    for (int64_t panel = 0; panel < paired; panel += kPanel) {
      t.panel = memory_ + at_.keys + panel * a_.head_dim;
      t.valid = wide_ - panel;
      for (const Tile& tile : block_) {
        tile_at(tile.local, panel);
        Tiles::score<true>[t.valid > kLanes][tile.rows - 1](t);
        fetch_.step(steps_per_call_);
      }
    }
    if constexpr (kTripleRows > 0) {
      if (paired == wide_) return;
      // The last panel has three vectors: tiles of fewer rows.
      t.panel = memory_ + at_.keys + paired * a_.head_dim;
      t.valid = wide_ - paired;
      const int64_t tiles = ceil_div(block_.rows, kTripleRows);
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = i * block_.rows / tiles, next = (i + 1) * block_.rows / tiles;
        tile_at(row, paired);
        TilesOf<kTripleRows>::triple[next - row - 1](t);
        fetch_.step(steps_per_call_);
      }
    }
  }

  // The scores of the keys in the narrow panel, a row for each of them: softmax() then takes
  // kLanes queries at a time instead of a vector with few lanes in use for each query. They are
  // the first ones computed, lest softmax() loads what has only just been stored in parts.
  void narrow_scores(ScoreTile t) {
    float* const narrow = memory_ + at_.narrow;
    const int64_t count = keys_ - wide_;
    t.panel = memory_ + at_.keys + round_up(wide_, kPanel) * a_.head_dim;
    t.valid = count;
    t.score_stride = kNarrowStride;
    for (const Tile& tile : block_) {
      t.query_rows = query_rows_ + tile.local;
      t.scores = narrow + tile.local;
      Tiles::narrow_key[tile.rows - 1](t);
    }
    if (!t.scaled) return;
    for (int64_t j = 0; j < count; ++j) {
      float* const scores = narrow + j * kNarrowStride;
      const float* bias = t.bias ? t.bias + wide_ + j : nullptr;
      for (int64_t i = 0; i < block_.rows; ++i) {
        scores[i] = rounded_product(scores[i] * t.scale) + (bias ? bias[i * t.bias_stride] : 0.0f);
      }
    }
  }

  // The bias itself, or where tokens do not mix a copy of this block's part with the mask added.
  void prepare_bias(ScoreTile& t) {
    const float* bias = nullptr;
    if (plan_.bias) {
      bias = plan_.bias + head_ * plan_.bias_stride[0] + block_.row * plan_.bias_stride[1];
    }
    t.bias = bias;
    t.bias_stride = plan_.bias_stride[1];
    if (!window_->masked) return;
    float* copy = memory_ + at_.bias;
    t.bias = copy;
    t.bias_stride = at_.score_stride;
    for (int64_t i = 0; i < block_.rows; ++i, copy += at_.score_stride) {
      const int64_t region = window_->region[block_.row + i];
      const float* mask = window_->mask + region * mask_stride(plan_);
      int64_t j = 0;
      if (bias == nullptr) {
        for (; j < keys_; j += kLanes) store(copy + j, load(mask + j));
        continue;
      }
      for (; j + kLanes <= keys_; j += kLanes) store(copy + j, load(bias + j) + load(mask + j));
      for (; j < keys_; ++j) copy[j] = bias[j] + mask[j];
      bias += plan_.bias_stride[1];
    }
  }

  // Weights relative to the maximum of each row, and the factors that normalise them.
  ELSA_NOINLINE void softmax() {
    const float to_log2 = scaled_ ? kLog2E : scale_ * kLog2E;
    float* const lanes = memory_ + at_.row_max;  // [rows][kLanes]: maxima, then sums
    float* const reference = memory_ + at_.reference;
    float* const narrow = memory_ + at_.narrow;
    const int64_t few = keys_ - wide_;
    for (int64_t i = 0; i < block_.rows; i += kLanes) {
      Floats m = row_maxima(lanes + i * kLanes);
      for (int64_t j = 0; j < few; ++j) m = max(load(narrow + j * kNarrowStride + i), m);
      store(reference + i, m == splat(-kInf) ? Floats{} : m);
    }
    const int64_t count = round_up(wide_, kLanes);
    float* row = memory_ + at_.scores;
    for (int64_t i = 0; i < block_.rows; ++i, row += at_.score_stride) {
      if (fetches_bias_) fetch_bias(block_.row + block_.rows + i);
      store(lanes + i * kLanes, exponentiate(row, count, reference[i], to_log2));
      fetch_.step(steps_per_call_);
    }
    for (int64_t i = 0; i < block_.rows; i += kLanes) {
      Floats s = row_sums(lanes + i * kLanes);
      for (int64_t j = 0; j < few; ++j) {
        float* const scores = narrow + j * kNarrowStride + i;
        const Floats e = exp2_nonpositive((load(scores) - load(reference + i)) * to_log2);
        store(scores, e);
        s += e;
      }
      store(memory_ + at_.sum + i, s == 0.0f ? Floats{} : 1.0f / s);
    }
  }

  // Fetches what the scores of a row will add. Rows after a head's last are the next
  // one's where the bias is dense, and else not read.
  ELSA_INLINE void fetch_bias(int64_t row) const {
    const float* p = plan_.bias + head_ * plan_.bias_stride[0] + row * plan_.bias_stride[1];
    for (int64_t j = 0; j < keys_; j += 64) {
      ELSA_UNROLL
      for (int i = 0; i < 64; i += 16) __builtin_prefetch(p + j + i, 0, 2);
    }
  }

  // scores * values, into memory or (normalised) the output itself.
  ELSA_NOINLINE void weigh_values() {
    const int64_t chunks = ceil_div(keys_, kSumChain);
    ValueTile t = {};
    t.weight_stride = at_.score_stride;
    t.narrow_stride = kNarrowStride;
    const float* panel = memory_ + at_.values;
    for (; t.column < width_; t.column += kPanel) {
      t.value_stride = smaller(kPanel, width_ - t.column);
      for (int64_t chunk = 0, key = 0; chunk < chunks; ++chunk) {
        const int64_t end = (chunk + 1) * keys_ / chunks;
        t.values = panel + key * t.value_stride;
        t.accumulate = key > 0;
        t.count = smaller(end, wide_) - key;
        t.narrow_count = end == keys_ ? keys_ - wide_ : 0;
        for (const Tile& tile : block_) {
          t.weights = memory_ + at_.scores + tile.local * at_.score_stride + key;
          t.narrow = memory_ + at_.narrow + tile.local;
          t.out_rows = out_rows_ + tile.local;
          t.factor = direct_ && end == keys_ ? memory_ + at_.sum + tile.local : nullptr;
          Tiles::value<true>[t.value_stride > kLanes][tile.rows - 1](t);
          fetch_.step(steps_per_call_);
        }
        key = end;
      }
      panel += keys_ * t.value_stride;
    }
  }

  ELSA_NOINLINE void write_out() {
    const int64_t column = head_ * a_.head_dim * size_;
    for (int64_t i = 0; i < block_.rows; ++i) {
      char* const target = window_->target[block_.row + i];
      if (target == nullptr) continue;  // padding
      float* row = memory_ + at_.out + i * width_;
      const float factor = memory_[at_.sum + i];
      if (factor == 0.0f) {  // no key was seen: zeros, whatever the values hold
        for (int64_t d = 0; d < width_; d += kLanes) store(row + d, Floats{});
      }
      store_row(row, factor, a_.head_dim, a_.dtype, target + column);
    }
  }

  const WindowAttention& a_;
  const WindowPlan& plan_;
  const Layout at_;
  float* const memory_;
  const int64_t width_, size_;
  const bool in_place_;      // queries are read where they lie
  const bool direct_;        // outputs are written where they belong
  const bool fetches_bias_;  // while softmax() computes
  const int64_t keys_;       // the tokens of a window
  const int64_t wide_;       // of the keys, those that do not lie in a narrow panel
  Tokens tokens_[2];         // this item's window, and the next one's
  int current_ = 0;
  int64_t packed_ = -1;  // window * heads + head whose packed keys are in memory, or -1
  // The current item.
  int64_t index_, head_;
  Tokens* window_;
  float scale_;
  bool scaled_;
  TokenRows operand_[3];  // query, key, value
  Fetch fetch_;
  int64_t steps_per_call_ = 0;
  RowBlock<kWindowTiles> block_;
  const float* query_rows_[kWindowRows];
  float* out_rows_[kWindowRows];
};

void run(const WindowAttention& a, const WindowPlan& plan, float* memory,
         int64_t (*take)(void* context, int64_t* end), void* context) {
  Worker worker(a, plan, memory);
  int64_t end;
  for (int64_t item; (item = take(context, &end)) >= 0;) worker.item(item, end);
}

}  // namespace

const WindowKernel ELSA_KERNEL = {ELSA_KERNEL_NAME, kTileRows, workspace, run};

}  // namespace elsa
