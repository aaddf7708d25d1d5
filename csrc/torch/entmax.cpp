// elsa::entmax_attention on the CPU, through PyTorch's stable ABI: no Python, ATen or c10 symbol.
#include "../elsa/entmax.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "problem.h"

namespace elsa_torch {
namespace {

constexpr const char* kName = "elsa::entmax_attention";
constexpr const char* kBackwardName = "elsa::entmax_attention_backward";
// As `_LEAST` in elsa_core/backends/eager_entmax.py.
constexpr double kLeast = 0x1p-60;

// alpha - 1, or NaN outside [1, 4].
double exponent(double alpha) {
  if (!(alpha >= 1.0 && alpha <= 4.0)) return std::nan("");
  return alpha - 1.0 > kLeast ? alpha - 1.0 : kLeast;
}

// As float32, which the plain PyTorch of this operator takes it to.
template <class Number>
double float_at(const Tensor& t, int64_t offset) {
  return static_cast<double>(
      static_cast<float>(static_cast<const Number*>(t.const_data_ptr())[offset]));
}

double read(const Tensor& t, int64_t offset) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return float_at<float>(t, offset);
    case ScalarType::Double:
      return float_at<double>(t, offset);
    case ScalarType::Half:
      return float_at<torch::headeronly::Half>(t, offset);
    case ScalarType::BFloat16:
      return float_at<torch::headeronly::BFloat16>(t, offset);
    default:
      STD_TORCH_CHECK(false, kName, ": head_alpha must be floating");
  }
}

// alpha - 1 of each [batch, head], from the number or from head_alpha [batch or 1, heads or 1, 1,
// 1].
std::vector<double> exponents(const std::optional<Tensor>& head_alpha, double alpha,
                              const elsa::Attention& a) {
  std::vector<double> found(a.batch * a.heads, exponent(alpha));
  if (!head_alpha.has_value()) return found;
  const Tensor& t = *head_alpha;
  const bool fits = t.dim() == 4 && (t.size(0) == 1 || t.size(0) == a.batch) &&
                    (t.size(1) == 1 || t.size(1) == a.heads) && t.size(2) == 1 && t.size(3) == 1;
  STD_TORCH_CHECK(fits, kName, ": head_alpha must be [batch or 1, heads or 1, 1, 1]");
  const int64_t batch_stride = t.size(0) == 1 ? 0 : t.stride(0);
  const int64_t head_stride = t.size(1) == 1 ? 0 : t.stride(1);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      found[b * a.heads + h] = exponent(read(t, b * batch_stride + h * head_stride));
    }
  }
  return found;
}

std::tuple<Tensor, Tensor, Tensor> entmax_attention(const Tensor& query, const Tensor& key,
                                                    const Tensor& value,
                                                    const std::optional<Tensor>& attn_mask,
                                                    const std::optional<Tensor>& head_alpha,
                                                    double alpha, bool is_causal, double scale,
                                                    std::string precision) {
  elsa::Entmax p;
  p.attention = problem(query, key, value, attn_mask, is_causal, scale);
  elsa::Attention& a = p.attention;
  const std::vector<double> given = exponents(head_alpha, alpha, a);
  p.a = given.data();
  Tensor out = output(query, a);
  Tensor rows = empty<4>({3, a.batch, a.heads, a.queries});
  Tensor tiles = empty<4>({a.batch, a.heads, elsa::tiles_of(a.queries), elsa::tiles_of(a.keys)},
                          aoti_torch_dtype_uint8());
  p.rows = floats(rows);
  p.tiles = static_cast<uint8_t*>(tiles.mutable_data_ptr());
  run(kName, [&](auto... how) { return elsa::entmax_attention(p, how...); });
  return {out, rows, tiles};
}

Tensor dense(const Tensor& t, int64_t count, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.numel() == count && t.scalar_type() == type, kBackwardName, ": ", name,
                  " must be what the forward gave");
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// As elsa::entmax_attention_backward of operands in float32, without a gradient of the mask; that
// of alpha is [batch, heads, 1, 1].
std::tuple<Tensor, Tensor, Tensor, Tensor> entmax_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& head_alpha,
    const Tensor& rows, const Tensor& tiles, double alpha, bool is_causal, double scale,
    bool needs_query, bool needs_key, bool needs_value, bool needs_alpha) {
  elsa::EntmaxGradient g;
  g.forward.attention = problem(query, key, value, attn_mask, is_causal, scale);
  const elsa::Attention& a = g.forward.attention;
  STD_TORCH_CHECK(a.query.dtype == elsa::DType::kFloat32, kBackwardName,
                  ": the CPU kernel takes float32");
  const std::vector<double> given = exponents(head_alpha, alpha, a);
  g.forward.a = given.data();
  g.grad_out = output_view(grad_out, a, "grad_out");
  const int64_t all = a.batch * a.heads;
  const Tensor kept_rows = dense(rows, 3 * all * a.queries, ScalarType::Float, "rows");
  const Tensor kept_tiles = dense(tiles, all * elsa::tiles_of(a.queries) * elsa::tiles_of(a.keys),
                                  ScalarType::Byte, "tiles");
  // read, not written
  g.forward.rows = floats(kept_rows);
  g.forward.tiles = const_cast<uint8_t*>(static_cast<const uint8_t*>(kept_tiles.const_data_ptr()));
  Tensor grad_query = gradient_of(query, needs_query, g.query);
  Tensor grad_key = gradient_of(key, needs_key, g.key);
  Tensor grad_value = gradient_of(value, needs_value, g.value);
  Tensor grad_alpha = nothing();
  if (needs_alpha) {
    grad_alpha = empty<4>({a.batch, a.heads, 1, 1});
    g.alpha = floats(grad_alpha);
  }
  run(kBackwardName, [&](auto... how) { return elsa::entmax_gradient(g, how...); });
  return {grad_query, grad_key, grad_value, grad_alpha};
}

}  // namespace
}  // namespace elsa_torch

STABLE_TORCH_LIBRARY_IMPL(elsa, CPU, m) {
  m.impl("entmax_attention", TORCH_BOX(&elsa_torch::entmax_attention));
  m.impl("entmax_attention_backward_native", TORCH_BOX(&elsa_torch::entmax_attention_backward));
}
