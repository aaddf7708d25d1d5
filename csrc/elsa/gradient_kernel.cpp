// The gradient kernels of one instruction set. Compiled once per set with that set's flags and
// ELSA_KERNEL naming the table it defines.
#include "gradient_kernel.h"

#include "gradient_head.h"
#include "pack.h"
#include "window_tokens.h"

#ifndef ELSA_KERNEL
#error "define ELSA_KERNEL (the table) and ELSA_KERNEL_NAME (its name)"
#endif

namespace elsa {
namespace {

constexpr int64_t kGradientKeys = 256;  // the most keys of a block

float dot(const float* x, const float* y, int64_t count) {  // of a multiple of kLanes
  Floats sum = {};
  for (int64_t d = 0; d < count; d += kLanes) sum += load(x + d) * load(y + d);
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  return total;
}

GradientLayout attention_layout(const AttentionGradient& g) {
  const Attention& a = g.forward;
  const int64_t blocks = ceil_div(a.keys, kGradientKeys);
  const int64_t block = round_up(ceil_div(a.keys, blocks), kPanel);
  return GradientLayout(a.queries, a.keys, block, a.head_dim, a.value_dim, a.dropout != nullptr,
                        g.shard);
}

// One key head of one batch entry, and the query heads that share it.
class AttentionItem {
 public:
  AttentionItem(const AttentionGradient& g, int64_t item, float* memory)
      : g_(g),
        a_(g.forward),
        at_(attention_layout(g)),
        head_(at_, memory, a_.scale, a_.causal),
        mask_copy_(memory + at_.total),
        batch_(item / a_.kv_heads),
        kv_head_(item % a_.kv_heads) {}

  void run() {
    const int64_t group = a_.heads / a_.kv_heads;
    const MatrixRows keys{key_}, values{value_};
    head_.clear_keys();
    for (int64_t i = 0; i < group; ++i) {
      query_head_ = kv_head_ * group + i;
      const Matrix query = matrix(a_.query, batch_, query_head_);
      const Matrix grad_out = matrix(g_.grad_out, batch_, query_head_);
      for (int64_t row = 0; row < a_.queries; ++row) {
        copy_padded(query, row, a_.head_dim, at_.width, head_.query(row));
        copy_padded(grad_out, row, a_.value_dim, at_.value_width, head_.grad_out(row));
      }
      head_.drop(a_.dropout, batch_ * a_.heads + query_head_);
      head_.clear_query();
      if (!head_.whole()) prepare(keys, values);
      for (int64_t block = 0; block < at_.key_blocks; ++block) {
        if (!head_.whole() || i == 0) head_.pack(block, keys, values);
        fold();
      }
      write_rows(g_.query, batch_, query_head_, 0, a_.queries, a_.head_dim, a_.scale,
                 head_.grad_query(0), at_.width);
    }
    write_rows(g_.key, batch_, kv_head_, 0, a_.keys, a_.head_dim, a_.scale, head_.grad_key(0),
               at_.width);
    write_rows(g_.value, batch_, kv_head_, 0, a_.keys, a_.value_dim, 1.0f, head_.grad_value(0),
               at_.value_width);
  }

 private:
  int64_t first_row() const { return lse_offset(a_, batch_, query_head_); }
  const float* lse_slope() const { return g_.grad_lse ? g_.grad_lse + first_row() : nullptr; }

  // Sets a tile's bias to a copy of the mask's part.
  auto bias() {
    return [this](ScoreTile& t, int64_t row, int64_t rows, int64_t key, int64_t keys) {
      if (a_.mask.data == nullptr) return;
      read_mask(matrix(a_.mask, batch_, query_head_), row, rows, key, keys, mask_copy_,
                at_.score_stride, t);
    };
  }

  // What each row's weights need where no block holds all keys.
  void prepare(const MatrixRows& keys, const MatrixRows& values) {
    const Matrix out = matrix(g_.out, batch_, query_head_);
    const float* const lse = a_.lse + first_row();
    const float* const slope = lse_slope();
    bool again = false;
    for (int64_t i = 0; i < a_.queries; ++i) {
      copy_padded(out, i, a_.value_dim, at_.value_width, mask_copy_);
      head_.delta()[i] =
          dot(head_.grad_out(i), mask_copy_, at_.value_width) - (slope ? slope[i] : 0.0f);
      const bool dead = lse[i] == -kInf;
      head_.reference()[i] = dead ? 0.0f : lse[i];
      head_.factor()[i] = dead ? 0.0f : 1.0f;
      again |= !dead && (lse[i] > kLargestLse || lse[i] < -kLargestLse);
    }
    if (!again || g_.shard) return;
    for (int64_t i = 0; i < a_.queries; ++i) {
      head_.reference()[i] = -kInf;
      head_.factor()[i] = 0.0f;
    }
    for (int64_t block = 0; block < at_.key_blocks; ++block) {
      head_.pack(block, keys, values);
      for (int64_t i = 0; i < a_.queries; i += head_.block_rows()) {
        head_.normalise(i, bias());
      }
    }
    for (int64_t i = 0; i < a_.queries; ++i) {
      const float sum = head_.factor()[i];
      head_.factor()[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (head_.reference()[i] == -kInf) head_.reference()[i] = 0.0f;
    }
  }

  void fold() {
    const Wanted wanted = {g_.query.data != nullptr, g_.key.data != nullptr,
                           g_.value.data != nullptr};
    for (int64_t i = 0; i < a_.queries; i += head_.block_rows()) {
      head_.row_block(i, lse_slope(), wanted, bias(), [](int64_t, int64_t, const float*) {});
    }
  }

  const AttentionGradient& g_;
  const Attention& a_;
  const GradientLayout at_;
  HeadGradient<NoFetch> head_;
  float* const mask_copy_;  // [block_rows][score_stride], or one row of the output
  const int64_t batch_, kv_head_;
  const Matrix key_ = matrix(a_.key, batch_, kv_head_);
  const Matrix value_ = matrix(a_.value, batch_, kv_head_);
  int64_t query_head_ = 0;
};

int64_t attention_workspace(const AttentionGradient& g) {
  const GradientLayout at = attention_layout(g);
  const int64_t mask = g.forward.mask.data ? at.block_rows * at.score_stride : 0;
  return at.total + (mask > at.value_width ? mask : at.value_width) + kPanel;
}

void attention(const AttentionGradient& g, int64_t item, float* memory) {
  AttentionItem(g, item, memory).run();
}

GradientLayout window_layout(const WindowAttention& a, const WindowPlan& plan) {
  return GradientLayout(plan.tokens, plan.tokens, round_up(plan.tokens, kPanel), a.head_dim,
                        a.head_dim);
}

// The gradient of a row before normalise(), from that of the row after it, in place.
void normalise_gradient(const float* raw, int64_t width, float* grad) {
  const float length = __builtin_sqrtf(dot(raw, raw, width));
  if (length < kNormEps) {
    for (int64_t d = 0; d < width; d += kLanes) store(grad + d, load(grad + d) / kNormEps);
    return;
  }
  const float along = dot(raw, grad, width) / length / length;
  for (int64_t d = 0; d < width; d += kLanes) {
    store(grad + d, (load(grad + d) - load(raw + d) * along) / length);
  }
}

// Fetches what one head of the next window reads and writes into the second-level cache, a token at
// a time: a head's channels are short runs at a long distance, which the hardware does not follow.
class TokenFetch {
 public:
  // offsets: bytes from a token's channels to the head's query, key and value; out: to the head's
  // in grad_out, where `tokens` points. gradient: of qkv, or null.
  void start(const Tokens& tokens, int64_t count, const int64_t (&offsets)[3], int64_t out,
             int64_t bytes, const void* grad_out, const float* gradient) {
    source_ = tokens.source;
    target_ = tokens.target;
    left_ = count;
    for (int i = 0; i < 3; ++i) offset_[i] = offsets[i];
    out_ = out;
    bytes_ = bytes;
    grad_out_ = static_cast<const char*>(grad_out);
    gradient_ = reinterpret_cast<const char*>(gradient);
  }
  ELSA_INLINE void step() {
    if (left_ == 0) return;
    --left_;
    const char* const source = *source_++;
    const char* const target = *target_++;
    for (const int64_t offset : offset_) fetch(source + offset);
    if (target == nullptr) return;
    fetch(target + out_);
    if (gradient_ == nullptr) return;
    const char* const written = gradient_ + 3 * (target - grad_out_);
    for (const int64_t offset : offset_) fetch(written + offset);
  }

 private:
  ELSA_INLINE void fetch(const char* from) const {
    for (int64_t i = 0; i < bytes_; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  const char* const* source_ = nullptr;
  const char* const* target_ = nullptr;
  int64_t left_ = 0, out_ = 0, bytes_ = 0;
  int64_t offset_[3] = {};
  const char* grad_out_ = nullptr;
  const char* gradient_ = nullptr;
};

// One head of a run of windows.
class WindowItem {
 public:
  WindowItem(const WindowGradient& g, const WindowGradientPlan& plan, int64_t item, float* memory)
      : g_(g),
        a_(g.forward),
        plan_(plan),
        at_(window_layout(a_, plan.windows)),
        head_index_(item % a_.heads),
        run_(item / a_.heads),
        scale_(a_.logit_scale ? a_.logit_scale[head_index_] : a_.scale),
        head_(at_, memory, scale_, false),
        part_(plan.parts + item * plan.part) {
    float* rest = memory + at_.total;
    for (Tokens& tokens : all_tokens_) {
      place(a_, plan.windows, rest, tokens);
      rest += round_up(token_floats(a_, plan.windows), 16);
    }
    raw_ = rest;
    mixed_bias_ = rest + at_.width;
  }

  void run() {
    for (int64_t i = 0; i < plan_.part; ++i) part_[i] = 0.0f;
    const WindowPlan& windows = plan_.windows;
    const int64_t count = a_.batch * windows.windows[0] * windows.windows[1] * windows.windows[2];
    const int64_t end = (run_ + 1) * count / plan_.runs;
    int64_t w = run_ * count / plan_.runs;
    if (w < end) find_tokens(a_, windows, w, all_tokens_[w % 2]);
    for (; w < end; ++w) {
      tokens_ = &all_tokens_[w % 2];
      if (w + 1 < end) fetch(w + 1);
      window();
    }
  }

 private:
  int64_t channel(int64_t which) const {
    return (a_.head_first ? 3 * head_index_ + which : which * a_.heads + head_index_) * a_.head_dim;
  }
  TokenRows operand(int64_t which) const {
    const bool normalised = a_.logit_scale && which < 2;
    return {tokens_->source, channel(which) * 4, DType::kFloat32, normalised};
  }

  void fetch(int64_t index) {
    Tokens& next = all_tokens_[index % 2];
    find_tokens(a_, plan_.windows, index, next);
    const int64_t offsets[3] = {4 * channel(0), 4 * channel(1), 4 * channel(2)};
    head_.fetch().start(next, plan_.windows.tokens, offsets, 4 * head_index_ * a_.head_dim,
                        4 * a_.head_dim, a_.out, g_.qkv);
  }

  // Sets a tile's bias: the problem's own rows, or a copy with what keeps tokens from mixing.
  auto bias() {
    return [this](ScoreTile& t, int64_t row, int64_t rows, int64_t, int64_t keys) {
      const WindowPlan& windows = plan_.windows;
      const float* from = nullptr;
      if (windows.bias) {
        from = windows.bias + head_index_ * windows.bias_stride[0] + row * windows.bias_stride[1];
        t.bias = from;
        t.bias_stride = windows.bias_stride[1];
      }
      if (!tokens_->masked) return;
      for (int64_t i = 0; i < rows; ++i) {
        const float* const mask = tokens_->mask + tokens_->region[row + i] * mask_stride(windows);
        float* const out = mixed_bias_ + i * at_.score_stride;
        for (int64_t j = 0; j < keys; ++j) {
          out[j] = mask[j] + (from ? from[i * windows.bias_stride[1] + j] : 0.0f);
        }
      }
      t.bias = mixed_bias_;
      t.bias_stride = at_.score_stride;
    };
  }

  void window() {
    const WindowPlan& windows = plan_.windows;
    const TokenRows query = operand(0);
    for (int64_t i = 0; i < windows.tokens; ++i) {
      float* const q = head_.query(i);
      float* const slope = head_.grad_out(i);
      query.copy(i, 0, a_.head_dim, q);
      for (int64_t d = a_.head_dim; d < at_.width; ++d) q[d] = 0.0f;
      if (const char* const from = tokens_->target[i]) {
        copy_padded(Matrix{from + head_index_ * a_.head_dim * 4, 0, 1, DType::kFloat32}, 0,
                    a_.head_dim, at_.width, slope);
      } else {
        for (int64_t d = 0; d < at_.width; d += kLanes) store(slope + d, Floats{});
      }
    }
    head_.clear_query();
    head_.clear_keys();
    head_.pack(0, operand(1), operand(2));
    const bool rows = g_.qkv || g_.pad_qkv || g_.logit_scale;
    const Wanted wanted = {rows, rows, rows};
    for (int64_t row = 0; row < windows.tokens; row += head_.block_rows()) {
      head_.row_block(row, nullptr, wanted, bias(),
                      [this](int64_t i, int64_t keys, const float* slope) {
                        if (g_.bias == nullptr) return;
                        float* const sum = part_ + i * plan_.windows.tokens;
                        int64_t j = 0;
                        for (; j + kLanes <= keys; j += kLanes)
                          store(sum + j, load(sum + j) + load(slope + j));
                        for (; j < keys; ++j) sum[j] += slope[j];
                      });
    }
    if (rows) write();
  }

  // Carries the window's gradients to the image, to what padding holds and to logit_scale.
  void write() {
    const float* const base = static_cast<const float*>(a_.out);
    double of_scale = 0.0;
    for (int64_t i = 0; i < plan_.windows.tokens; ++i) {
      float* const rows[3] = {head_.grad_query(i), head_.grad_key(i), head_.grad_value(i)};
      if (g_.logit_scale) of_scale += dot(head_.query(i), rows[0], at_.width);
      float* target = nullptr;
      if (tokens_->target[i] == nullptr) {
        if (g_.pad_qkv == nullptr) continue;
      } else if (g_.qkv) {
        target = g_.qkv + 3 * (reinterpret_cast<const float*>(tokens_->target[i]) - base);
      } else {
        continue;
      }
      for (int64_t which = 0; which < 3; ++which) {
        float* const row = rows[which];
        const float factor = which < 2 ? scale_ : 1.0f;
        if (a_.logit_scale && which < 2) {
          copy_padded(Matrix{tokens_->source[i] + channel(which) * 4, 0, 1, DType::kFloat32}, 0,
                      a_.head_dim, at_.width, raw_);
          normalise_gradient(raw_, at_.width, row);
        }
        if (target) {
          store_row(row, factor, a_.head_dim, DType::kFloat32, target + channel(which));
        } else {
          float* const sum = part_ + plan_.part_padding + which * a_.head_dim;
          for (int64_t d = 0; d < a_.head_dim; ++d) sum[d] += row[d] * factor;
        }
      }
    }
    if (g_.logit_scale == nullptr) return;
    float* const sum = part_ + plan_.part_scale;  // in two floats: its terms cancel
    of_scale += static_cast<double>(sum[0]) + sum[1];
    sum[0] = static_cast<float>(of_scale);
    sum[1] = static_cast<float>(of_scale - sum[0]);
  }

  const WindowGradient& g_;
  const WindowAttention& a_;
  const WindowGradientPlan& plan_;
  const GradientLayout at_;
  const int64_t head_index_, run_;
  const float scale_;
  HeadGradient<TokenFetch> head_;
  float* const part_;  // [tokens][tokens] of the bias, [3][head_dim] of padding, [2] of logit_scale
  Tokens all_tokens_[2];  // this window's and the next one's
  const Tokens* tokens_ = nullptr;
  float* raw_;         // [width]
  float* mixed_bias_;  // [block_rows][score_stride]
};

int64_t window_workspace(const WindowGradient& g, const WindowGradientPlan& plan) {
  const GradientLayout at = window_layout(g.forward, plan.windows);
  const int64_t tokens = round_up(token_floats(g.forward, plan.windows), 16);
  return at.total + 2 * tokens + at.width + at.block_rows * at.score_stride + kPanel;
}

void window(const WindowGradient& g, const WindowGradientPlan& plan, int64_t item, float* memory) {
  WindowItem(g, plan, item, memory).run();
}

}  // namespace

const GradientKernel ELSA_KERNEL = {ELSA_KERNEL_NAME, attention_workspace, attention,
                                    window_workspace, window};

}  // namespace elsa
