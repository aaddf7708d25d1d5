// The alpha-entmax kernels of one instruction set. Compiled once per set with that set's flags and
// ELSA_KERNEL naming the table it defines.
#include "entmax_kernel.h"

#include "entmax_scores.h"

#ifndef ELSA_KERNEL
#error "define ELSA_KERNEL (the table) and ELSA_KERNEL_NAME (its name)"
#endif

namespace elsa {
namespace {

int64_t list_stride(int64_t keys) { return round_up(keys, kLanes) + kLanes; }

int64_t list_rows(int64_t keys) {
  const int64_t rows = kEntmaxListFloats / (2 * list_stride(keys)) / kBlockRows * kBlockRows;
  return rows < kBlockRows ? kBlockRows : smaller(rows, kEntmaxMostRows);
}

// The lists of some rows, one after another in a workspace.
struct ListLayout {
  int64_t values, keys, counts, stride;

  ListLayout(Carve& carve, int64_t rows, int64_t key_count) : stride(list_stride(key_count)) {
    values = carve.take(rows * stride);
    keys = carve.take(rows * stride);
    counts = carve.take(rows);
  }
  List list(float* memory, int64_t row) const {
    return {memory + values + row * stride,
            reinterpret_cast<int32_t*>(memory + keys) + row * stride, count(memory, row)};
  }
  int32_t& count(float* memory, int64_t row) const {
    return reinterpret_cast<int32_t*>(memory + counts)[row];
  }
};

struct Layout {
  ScoreLayout scores;
  ListLayout lists;
  int64_t columns, values, out, maximum, slope, total, size;

  Layout(Carve carve, const Attention& a, const Plan& plan)
      : scores(carve, a, plan), lists(carve, ceil_div(a.queries, plan.splits), a.keys) {
    const int64_t rows = ceil_div(a.queries, plan.splits);
    const int64_t width = round_up(a.value_dim, kLanes);
    columns = carve.take(round_up(a.keys, kLanes) * kLanes);
    values = carve.take(is_padded(a.value, a.value_dim) ? 0 : plan.key_block * width);
    out = carve.take(rows * width);
    maximum = carve.take(rows + kLanes);
    slope = carve.take(rows + kLanes);
    total = carve.take(rows + kLanes);
    size = carve.total();
  }
};

// A range of query rows of one head.
class Item {
 public:
  Item(const Entmax& p, const Plan& plan, int64_t item, Workspace& workspace)
      : p_(p),
        a_(p.attention),
        plan_(plan),
        at_(Carve(), a_, plan),
        workspace_(workspace),
        memory_(workspace.memory),
        head_index_(item / plan.splits),
        batch_(head_index_ / a_.heads),
        head_(head_index_ % a_.heads),
        kv_head_(head_ / (a_.heads / a_.kv_heads)),
        width_(round_up(a_.value_dim, kLanes)),
        exponent_(p.a[head_index_]),
        scores_(a_, plan, at_.scores, memory_, batch_) {
    // The last rows of a causal problem see the most keys: they go first.
    const int64_t position = item - head_index_ * plan.splits;
    const int64_t split = a_.causal ? plan.splits - 1 - position : position;
    first_row_ = split * a_.queries / plan.splits;
    rows_ = (split + 1) * a_.queries / plan.splits - first_row_;
    const int64_t last = first_row_ + rows_ - 1;
    blocks_ = a_.causal ? smaller(plan.key_blocks, last / plan.key_block + 1) : plan.key_blocks;
    scores_.of_head(head_);
  }

  void run() {
    list_keys();
    for (int64_t i = 0; i < rows_; i += kLanes) solve_rows(i);
    for (int64_t i = 0; i < rows_; ++i) weigh(i);
    add_values();
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = (batch_ * a_.queries + first_row_ + i) * a_.heads + head_;
      const int64_t size = element_size(a_.query.dtype);
      store_row(memory_ + at_.out + i * width_, 1.0f, a_.value_dim, a_.query.dtype,
                static_cast<char*>(a_.out) + row * a_.value_dim * size);
    }
  }

 private:
  ELSA_NOINLINE void list_keys() {
    float* const maximum = memory_ + at_.maximum;
    for (int64_t i = 0; i < rows_; ++i) {
      maximum[i] = -kInf;
      at_.lists.count(memory_, i) = 0;
    }
    const int64_t packed_index = batch_ * a_.kv_heads + kv_head_;
    const bool packed = workspace_.packed_head == packed_index;
    if (!packed) workspace_.packed_head = -1;
    const Matrix key = matrix(a_.key, batch_, kv_head_);
    for (int64_t block = 0; block < blocks_; ++block) {
      scores_.go_to(block, key, packed);
      scores_.each_block(first_row_, rows_, [&](int64_t row, int64_t rows) {
        if (scores_.seen_by(row + rows - 1) <= 0) return;
        scores_.compute([](int64_t) { return true; });
        for (int64_t i = 0; i < rows; i += kLanes) {
          float* const known = maximum + (row - first_row_) + i;
          const Floats top = max(row_maxima(scores_.row_max(i)), load(known));
          store_first(known, top, rows - i);
        }
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t seen = scores_.seen_by(row + i), local = row - first_row_ + i;
          const float base = maximum[local] == -kInf ? 0.0f : maximum[local];
          List list = at_.lists.list(memory_, local);
          list.append(scores_.scores(i), scores_.first_key(), seen, base, -exponent_.reach);
          at_.lists.count(memory_, local) = static_cast<int32_t>(list.count);
        }
      });
    }
    if (plan_.keep_packed && blocks_ == plan_.key_blocks) workspace_.packed_head = packed_index;
  }

  ELSA_NOINLINE void solve_rows(int64_t first) {
    List lists[kLanes];
    const int64_t rows = smaller(kLanes, rows_ - first);
    for (int64_t i = 0; i < rows; ++i) lists[i] = at_.lists.list(memory_, first + i);
    const Solved found = solve(lists, rows, load(memory_ + at_.maximum + first), a_.keys, exponent_,
                               memory_ + at_.columns);
    for (int64_t i = 0; i < rows; ++i) {
      at_.lists.count(memory_, first + i) = static_cast<int32_t>(lists[i].count);
    }
    store(memory_ + at_.slope + first, found.slope);
    store(memory_ + at_.total + first, found.total);
    const int64_t all = a_.batch * a_.heads * a_.queries;
    float* const out = p_.rows + head_index_ * a_.queries + first_row_ + first;
    store_first(out, found.top, rows);
    store_first(out + all, found.slope, rows);
    store_first(out + 2 * all, found.total, rows);
  }

  // The row's weights, and a note of the tiles that hold them.
  void weigh(int64_t row) {
    List list = at_.lists.list(memory_, row);
    const float slope = memory_[at_.slope + row], total = memory_[at_.total + row];
    if (exponent_.form == Form::kHalf) {
      list.weigh<Form::kHalf>(slope, total, exponent_);
    } else if (exponent_.form == Form::kOne) {
      list.weigh<Form::kOne>(slope, total, exponent_);
    } else {
      list.weigh<Form::kAny>(slope, total, exponent_);
    }
    at_.lists.count(memory_, row) = static_cast<int32_t>(list.count);
    const int64_t row_tile = head_index_ * tiles_of(a_.queries) + (first_row_ + row) / kEntmaxTile;
    uint8_t* const tiles = p_.tiles + row_tile * tiles_of(a_.keys);
    int64_t last = -1;
    for (int64_t e = 0; e < list.count; ++e) {
      const int64_t tile = list.keys[e] / kEntmaxTile;
      // Rows of one tile may be different workers'.
      if (tile != last) __atomic_store_n(tiles + tile, uint8_t{1}, __ATOMIC_RELAXED);
      last = tile;
    }
  }

  ELSA_NOINLINE void add_values() {
    float* const out = memory_ + at_.out;
    for (int64_t i = 0; i < rows_ * width_; i += kLanes) store(out + i, Floats{});
    const Matrix value = matrix(a_.value, batch_, kv_head_);
    const bool in_place = is_padded(a_.value, a_.value_dim);
    int32_t* const done = reinterpret_cast<int32_t*>(memory_ + at_.slope);  // read no more
    for (int64_t i = 0; i < rows_; ++i) done[i] = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t first = block * plan_.key_block;
      const int64_t keys = smaller(plan_.key_block, a_.keys - first);
      Dense values = {reinterpret_cast<const float*>(value.at(first, 0)), value.row_stride};
      if (!in_place) {
        float* const copy = memory_ + at_.values;
        for (int64_t j = 0; j < keys; ++j) {
          copy_padded(value, first + j, a_.value_dim, width_, copy + j * width_);
        }
        values = {copy, width_};
      }
      for (int64_t i = 0; i < rows_; ++i) {
        const List list = at_.lists.list(memory_, i);
        const int64_t begin = done[i];
        int64_t end = begin;
        if (block == blocks_ - 1) {
          end = list.count;
        } else {
          while (end < list.count && list.keys[end] < first + keys) ++end;
        }
        done[i] = static_cast<int32_t>(end);
        if (end == begin) continue;
        gather(list.values + begin, list.keys + begin, end - begin, first, values, width_,
               out + i * width_);
      }
    }
  }

  const Entmax& p_;
  const Attention& a_;
  const Plan& plan_;
  const Layout at_;
  Workspace& workspace_;
  float* const memory_;
  const int64_t head_index_, batch_, head_, kv_head_, width_;
  const Exponent exponent_;
  Scores scores_;
  int64_t first_row_, rows_, blocks_;
};

int64_t workspace(const Entmax& p, const Plan& plan) {
  return Layout(Carve(), p.attention, plan).size;
}

void run(const Entmax& p, const Plan& plan, int64_t item, Workspace& workspace) {
  Item(p, plan, item, workspace).run();
}

// Query rows whose gradients of keys and values are added up by themselves: longer chains round
// more.
constexpr int64_t kChainRows = 512;

struct GradientLayout {
  ScoreLayout scores;
  ListLayout lists;
  int64_t rows, width, value_width;
  bool long_sums;
  int64_t weights, ratios, slopes, dots, query, grad_out, grad_query;  // of one row
  int64_t keys, values;                                // copies, where they are not read in place
  int64_t grad_key, grad_value, some_key, some_value;  // [keys][width]; the latter for one chain
  int64_t size;

  GradientLayout(Carve carve, const EntmaxGradient& g, const Plan& plan)
      : scores(carve, g.forward.attention, plan),
        lists(carve, ceil_div(g.forward.attention.queries, plan.splits), g.forward.attention.keys) {
    const Attention& a = g.forward.attention;
    rows = ceil_div(a.queries, plan.splits);
    width = round_up(a.head_dim, kLanes);
    value_width = round_up(a.value_dim, kLanes);
    long_sums = a.queries * (a.heads / a.kv_heads) > kChainRows;
    weights = carve.take(lists.stride);
    ratios = carve.take(lists.stride);
    slopes = carve.take(lists.stride);
    dots = carve.take(kLanes * kLanes);
    query = carve.take(width);
    grad_out = carve.take(value_width);
    grad_query = carve.take(width);
    keys = carve.take(is_padded(a.key, a.head_dim) ? 0 : a.keys * width);
    values = carve.take(is_padded(a.value, a.value_dim) ? 0 : a.keys * value_width);
    grad_key = carve.take(g.key.data ? a.keys * width : 0);
    grad_value = carve.take(g.value.data ? a.keys * value_width : 0);
    some_key = long_sums ? carve.take(g.key.data ? a.keys * width : 0) : grad_key;
    some_value = long_sums ? carve.take(g.value.data ? a.keys * value_width : 0) : grad_value;
    size = carve.total();
  }
};

// One key head of one batch entry, and the query heads that share it.
class GradientItem {
 public:
  GradientItem(const EntmaxGradient& g, const Plan& plan, int64_t item, float* memory)
      : g_(g),
        p_(g.forward),
        a_(p_.attention),
        plan_(plan),
        at_(Carve(), g, plan),
        memory_(memory),
        batch_(item / a_.kv_heads),
        kv_head_(item % a_.kv_heads),
        keys_(padded(a_.key, a_.head_dim, at_.width, at_.keys)),
        values_(padded(a_.value, a_.value_dim, at_.value_width, at_.values)),
        exponent_(1.0),
        scores_(a_, plan, at_.scores, memory, batch_) {}

  void run() {
    clear(at_.grad_key, at_.grad_value);
    if (at_.long_sums) clear(at_.some_key, at_.some_value);
    const int64_t group = a_.heads / a_.kv_heads;
    for (int64_t i = 0; i < group; ++i) {
      head_ = kv_head_ * group + i;
      head_index_ = batch_ * a_.heads + head_;
      exponent_ = Exponent(p_.a[head_index_]);
      of_alpha_ = 0.0;
      scores_.of_head(head_);
      for (int64_t split = 0; split < plan_.splits; ++split) {
        const int64_t first = split * a_.queries / plan_.splits;
        const int64_t rows = (split + 1) * a_.queries / plan_.splits - first;
        list_keys(first, rows);
        for (int64_t row = 0; row < rows; ++row) {
          add_row(first, row);
          if (at_.long_sums && ++chained_ == kChainRows) end_chain();
        }
      }
      if (g_.alpha) g_.alpha[head_index_] = static_cast<float>(of_alpha_);
    }
    if (at_.long_sums) end_chain();
    write_rows(g_.key, batch_, kv_head_, 0, a_.keys, a_.head_dim, a_.scale, memory_ + at_.grad_key,
               at_.width);
    write_rows(g_.value, batch_, kv_head_, 0, a_.keys, a_.value_dim, 1.0f, memory_ + at_.grad_value,
               at_.value_width);
  }

 private:
  Dense padded(const View& view, int64_t columns, int64_t width, int64_t start) const {
    const Matrix m = matrix(view, batch_, kv_head_);
    if (is_padded(view, columns)) {
      return {reinterpret_cast<const float*>(m.at(0, 0)), m.row_stride};
    }
    for (int64_t j = 0; j < a_.keys; ++j) {
      copy_padded(m, j, columns, width, memory_ + start + j * width);
    }
    return {memory_ + start, width};
  }

  void clear(int64_t of_keys, int64_t of_values) {
    for (int64_t i = 0; g_.key.data && i < a_.keys * at_.width; i += kLanes) {
      store(memory_ + of_keys + i, Floats{});
    }
    for (int64_t i = 0; g_.value.data && i < a_.keys * at_.value_width; i += kLanes) {
      store(memory_ + of_values + i, Floats{});
    }
  }

  void end_chain() {
    chained_ = 0;
    const auto move = [this](int64_t from, int64_t to, int64_t floats) {
      for (int64_t i = 0; i < floats; i += kLanes) {
        store(memory_ + to + i, load(memory_ + to + i) + load(memory_ + from + i));
        store(memory_ + from + i, Floats{});
      }
    };
    if (g_.key.data) move(at_.some_key, at_.grad_key, a_.keys * at_.width);
    if (g_.value.data) move(at_.some_value, at_.grad_value, a_.keys * at_.value_width);
  }

  const float* of_rows() const { return p_.rows + head_index_ * a_.queries; }
  int64_t all_rows() const { return a_.batch * a_.heads * a_.queries; }

  // Whether a tile of these rows and the key's tile holds a weight.
  bool weighs(int64_t row, int64_t rows, int64_t key) const {
    const int64_t columns = tiles_of(a_.keys);
    const uint8_t* const tiles =
        p_.tiles + head_index_ * tiles_of(a_.queries) * columns + key / kEntmaxTile;
    for (int64_t i = row / kEntmaxTile; i <= (row + rows - 1) / kEntmaxTile; ++i) {
      if (tiles[i * columns]) return true;
    }
    return false;
  }

  // Lists the distances of keys that weigh something, of tiles that hold a weight.
  ELSA_NOINLINE void list_keys(int64_t first, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) at_.lists.count(memory_, i) = 0;
    const Matrix key = matrix(a_.key, batch_, kv_head_);
    const float* const tops = of_rows();
    const float* const slopes = tops + all_rows();
    for (int64_t block = 0; block < plan_.key_blocks; ++block) {
      scores_.go_to(block, key, packed_);
      scores_.each_block(first, rows, [&](int64_t row, int64_t count) {
        if (scores_.seen_by(row + count - 1) <= 0) return;
        const auto wanted = [&](int64_t j) { return weighs(row, count, j); };
        scores_.compute(wanted);
        const int64_t begin = scores_.first_key(), end = begin + scores_.key_count();
        for (int64_t from = begin; from < end;) {
          const int64_t to = smaller(end, (from / kEntmaxTile + 1) * kEntmaxTile);
          if (wanted(from)) {
            for (int64_t i = 0; i < count; ++i) {
              const int64_t seen = smaller(scores_.seen_by(row + i), to - begin) - (from - begin);
              const float top = tops[row + i];
              if (seen <= 0 || top == -kInf) continue;
              List list = at_.lists.list(memory_, row - first + i);
              list.append(scores_.scores(i) + (from - begin), from, seen, top,
                          -kSlack / slopes[row + i]);
              at_.lists.count(memory_, row - first + i) = static_cast<int32_t>(list.count);
            }
          }
          from = to;
        }
      });
    }
    packed_ = plan_.keep_packed;
  }

  // kLanes products of grad_out with the values of listed keys.
  ELSA_INLINE Floats products(const int32_t* keys) {
    float* const dots = memory_ + at_.dots;
    const float* const grad_out = memory_ + at_.grad_out;
    for (int e = 0; e < kLanes; ++e) {
      const float* const value = values_.data + keys[e] * values_.stride;
      Floats sum = {};
      for (int64_t d = 0; d < at_.value_width; d += kLanes) {
        sum = sum + load(grad_out + d) * load(value + d);
      }
      store(dots + e * kLanes, sum);
    }
    return ::elsa::row_sums(dots);
  }

  struct RowSum {
    float ratios, weighted;  // sum(U), sum(U dP)
  };

  // The row's weights, U without its factor Z^(a - 1), and dP.
  template <Form F>
  ELSA_NOINLINE RowSum weigh(const List& list, float top, float slope, float total) {
    float* const weights = memory_ + at_.weights;
    float* const ratios = memory_ + at_.ratios;
    float* const slopes = memory_ + at_.slopes;
    for (int64_t i = 0; i < kLanes; ++i) list.keys[list.count + i] = list.keys[0];
    Sum sum, weighted;
    for (int64_t j = 0; j < list.count; j += kLanes) {
      const Floats x = load(list.values + j) - top;
      const Powers p = powers<F>(x, splat(slope), exponent_);
      const Ints inside = first_lanes(list.count - j);
      const Floats over = inside ? p.over : Floats{};
      store(weights + j, inside ? p.r / total : Floats{});
      store(ratios + j, over);
      const Floats dot = inside ? products(list.keys + j) : Floats{};
      store(slopes + j, dot);
      sum.add(over);
      weighted.add(over * dot);
    }
    return {sum_of(sum.lanes()), sum_of(weighted.lanes())};
  }

  RowSum weigh(const List& list, float top, float slope, float total) {
    if (exponent_.form == Form::kHalf) return weigh<Form::kHalf>(list, top, slope, total);
    if (exponent_.form == Form::kOne) return weigh<Form::kOne>(list, top, slope, total);
    return weigh<Form::kAny>(list, top, slope, total);
  }

  ELSA_NOINLINE void add_row(int64_t first, int64_t local) {
    const int64_t row = first + local;
    float* const grad_query = memory_ + at_.grad_query;
    for (int64_t d = 0; d < at_.width; d += kLanes) store(grad_query + d, Floats{});
    const List list = at_.lists.list(memory_, local);
    if (list.count > 0) {
      const float* const of_row = of_rows() + row;
      const float top = of_row[0], slope = of_row[all_rows()], total = of_row[2 * all_rows()];
      copy_padded(matrix(a_.query, batch_, head_), row, a_.head_dim, at_.width,
                  memory_ + at_.query);
      copy_padded(matrix(g_.grad_out, batch_, head_), row, a_.value_dim, at_.value_width,
                  memory_ + at_.grad_out);
      const RowSum sums = weigh(list, top, slope, total);
      const float delta = sums.weighted / (sums.ratios == 0.0f ? 1.0f : sums.ratios);
      if (g_.alpha) add_to_alpha(list.count, delta, total);
      differentiate(list.count, delta, total);
      add_products(list);
    }
    write_rows(g_.query, batch_, head_, row, 1, a_.head_dim, a_.scale, grad_query, at_.width);
  }

  // dP -> dS.
  void differentiate(int64_t count, float delta, float total) {
    const float* const ratios = memory_ + at_.ratios;
    float* const slopes = memory_ + at_.slopes;
    const float factor =
        exponent_.form == Form::kOne
            ? 1.0f
            : static_cast<float>(__builtin_pow(static_cast<double>(total), exponent_.exact - 1.0));
    for (int64_t j = 0; j < count; j += kLanes) {
      store(slopes + j, load(ratios + j) * factor * (load(slopes + j) - delta));
    }
  }

  ELSA_NOINLINE void add_to_alpha(int64_t count, float delta, float total) {
    const float* const weights = memory_ + at_.weights;
    const float* const ratios = memory_ + at_.ratios;
    const float* const slopes = memory_ + at_.slopes;
    const float power =
        static_cast<float>(__builtin_pow(static_cast<double>(total), exponent_.exact));
    Sum sum;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Floats p = load(weights + j);
      const Floats u = load(ratios + j) * (power / total);  // p^(1 - a)
      const Floats h = slant(p, u / p, exponent_) * (load(slopes + j) - delta);
      sum.add(p == 0.0f ? Floats{} : h);
    }
    of_alpha_ += static_cast<double>(sum_of(sum.lanes()));
  }

  ELSA_NOINLINE void add_products(const List& list) {
    const float* const weights = memory_ + at_.weights;
    const float* const slopes = memory_ + at_.slopes;
    if (g_.query.data) {
      gather(slopes, list.keys, list.count, 0, keys_, at_.width, memory_ + at_.grad_query);
    }
    if (g_.key.data) {
      scatter(slopes, list, memory_ + at_.query, at_.width, memory_ + at_.some_key);
    }
    if (g_.value.data) {
      scatter(weights, list, memory_ + at_.grad_out, at_.value_width, memory_ + at_.some_value);
    }
  }

  // out[key] += weights[e] * row, for all entries.
  static void scatter(const float* weights, const List& list, const float* row, int64_t width,
                      float* out) {
    int64_t c = 0;
    for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
      scatter_columns<4>(weights, list, row + c, width, out + c);
    }
    for (; c < width; c += kLanes) scatter_columns<1>(weights, list, row + c, width, out + c);
  }
  template <int V>
  static ELSA_INLINE void scatter_columns(const float* weights, const List& list, const float* row,
                                          int64_t width, float* out) {
    Floats x[V];
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) x[v] = load(row + v * kLanes);
    for (int64_t e = 0; e < list.count; ++e) {
      float* const target = out + list.keys[e] * width;
      const Floats w = splat(weights[e]);
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) {
        store(target + v * kLanes, load(target + v * kLanes) + w * x[v]);
      }
    }
  }

  const EntmaxGradient& g_;
  const Entmax& p_;
  const Attention& a_;
  const Plan& plan_;
  const GradientLayout at_;
  float* const memory_;
  const int64_t batch_, kv_head_;
  const Dense keys_, values_;
  Exponent exponent_;
  Scores scores_;
  bool packed_ = false;
  int64_t head_ = 0, head_index_ = 0, chained_ = 0;
  double of_alpha_ = 0.0;
};

int64_t gradient_workspace(const EntmaxGradient& g, const Plan& plan) {
  return GradientLayout(Carve(), g, plan).size;
}

void gradient(const EntmaxGradient& g, const Plan& plan, int64_t item, float* memory) {
  GradientItem(g, plan, item, memory).run();
}

}  // namespace

const EntmaxKernel ELSA_KERNEL = {
    ELSA_KERNEL_NAME, kTileRows, list_rows, workspace, run, gradient_workspace, gradient,
};

}  // namespace elsa
