// elsa::window_attention on the CPU, through PyTorch's stable ABI: no Python, ATen or c10 symbol.
#include "../elsa/window.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../elsa/gradient.h"
#include "../elsa/sizes.h"
#include "common.h"

namespace elsa_torch {
namespace {

constexpr const char* kName = "elsa::window_attention";
constexpr const char* kBackwardName = "elsa::window_attention_backward";

// `tensor` as a dense one of `type`: itself where it is that.
Tensor dense(const Tensor& tensor, ScalarType type) {
  Tensor same = tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  return same.is_contiguous() ? same : torch::stable::contiguous(same);
}

// The image, its geometry and its output's.
elsa::WindowAttention problem(const Tensor& qkv, int64_t heads, const std::vector<int64_t>& window,
                              const std::vector<int64_t>& shift, bool grid) {
  STD_TORCH_CHECK(qkv.dim() == 5, kName, ": qkv must have 5 dimensions, has ", qkv.dim());
  STD_TORCH_CHECK(window.size() == 3 && shift.size() == 3, kName,
                  ": window_size and shift_size must have 3 entries");
  const auto sizes = qkv.sizes();
  const auto strides = qkv.strides();
  elsa::WindowAttention a;
  a.dtype = dtype_of(qkv.scalar_type(), kName);
  STD_TORCH_CHECK(a.dtype != elsa::DType::kBool, kName, ": qkv must not be boolean");
  const int64_t group = elsa::product({3, heads});
  STD_TORCH_CHECK(group > 0 && sizes[4] > 0 && sizes[4] % group == 0, kName, ": ", sizes[4],
                  " channels are not 3 * ", heads, " heads * head_dim");
  STD_TORCH_CHECK(strides[4] == 1, kName, ": the channels of qkv must be dense");
  a.qkv = qkv.const_data_ptr();
  a.batch = sizes[0];
  a.depth = sizes[1];
  a.height = sizes[2];
  a.width = sizes[3];
  a.heads = heads;
  a.head_dim = sizes[4] / group;
  a.grid = grid;
  STD_TORCH_CHECK(a.head_dim <= elsa::kLargestHeadDim, kName, ": head_dim must be 1 to ",
                  elsa::kLargestHeadDim, ", got ", a.head_dim);
  for (int i = 0; i < 4; ++i) a.stride[i] = sizes[i] == 1 ? 0 : strides[i];
  for (int i = 0; i < 3; ++i) {
    a.window[i] = window[i];
    a.shift[i] = shift[i];
    STD_TORCH_CHECK(window[i] >= 1, kName, ": window_size must be positive, got ", window[i]);
    STD_TORCH_CHECK(shift[i] >= 0 && shift[i] < window[i], kName, ": shift_size ", shift[i],
                    " must be at least 0 and smaller than the window of ", window[i]);
    STD_TORCH_CHECK(!grid || (shift[i] == 0 && sizes[i + 1] % window[i] == 0), kName,
                    ": grid needs sizes that are multiples of the window, and no shift");
  }
  STD_TORCH_CHECK(elsa::fits(a), kName, ": an image of ", a.depth, " x ", a.height, " x ", a.width,
                  " in windows of ", window[0], " x ", window[1], " x ", window[2],
                  " tokens is too large");
  return a;
}

// A bias, or a table of one, where it lies.
elsa::View bias_view(const Tensor& bias, const elsa::WindowAttention& a) {
  elsa::View view;
  view.data = bias.const_data_ptr();
  view.dtype = dtype_of(bias.scalar_type(), kName);
  STD_TORCH_CHECK(view.dtype == elsa::DType::kFloat32 || view.dtype == a.dtype, kName,
                  ": bias must be float32 or qkv's dtype");
  for (int i = 0; i < bias.dim(); ++i) {
    view.stride[i] = bias.sizes()[i] == 1 ? 0 : bias.strides()[i];
  }
  return view;
}

// [heads, tokens, tokens] float32 from a table [rows, heads] and an index [tokens, tokens].
Tensor gathered(const Tensor& table, const Tensor& index, const elsa::WindowAttention& a,
                int64_t tokens) {
  STD_TORCH_CHECK(table.dim() == 2 && table.sizes()[1] == a.heads, kName,
                  ": with bias_index, bias must be a table [rows, ", a.heads, "]");
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long && index.dim() == 2 &&
                      index.sizes()[0] == tokens && index.sizes()[1] == tokens,
                  kName, ": bias_index must be int64 [", tokens, ", ", tokens, "]");
  Tensor out = empty<3>({a.heads, tokens, tokens});
  const Tensor positions = dense(index, ScalarType::Long);
  const bool inside = elsa::gather_bias(bias_view(table, a), table.sizes()[0], a.heads,
                                        static_cast<const int64_t*>(positions.const_data_ptr()),
                                        tokens * tokens, floats(out));
  STD_TORCH_CHECK(inside, kName, ": bias_index has entries outside [0, ", table.sizes()[0], ")");
  return out;
}

// The terms beside the image; `kept` holds what must live until the kernels are done.
struct Kept {
  std::optional<Tensor> bias, pad_qkv, logit_scale;
};

void add_terms(elsa::WindowAttention& a, Kept& kept, const Tensor& qkv,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& bias_index,
               const std::optional<Tensor>& pad_qkv, const std::optional<Tensor>& logit_scale,
               double scale, double mask_value, const std::string& layout) {
  STD_TORCH_CHECK(layout == "qkv" || layout == "head", kName, ": layout must be qkv or head");
  a.scale = static_cast<float>(scale);
  a.mask_value = static_cast<float>(mask_value);
  a.head_first = layout == "head";
  const int64_t tokens = a.window[0] * a.window[1] * a.window[2];
  const int64_t channels = a.heads * a.head_dim;
  if (bias.has_value()) {
    kept.bias = bias_index.has_value() ? gathered(*bias, *bias_index, a, tokens) : *bias;
    const auto sizes = kept.bias->sizes();
    STD_TORCH_CHECK(
        sizes.size() == 3 && sizes[0] == a.heads && sizes[1] == tokens && sizes[2] == tokens, kName,
        ": bias must be [", a.heads, ", ", tokens, ", ", tokens, "]");
    a.bias = bias_view(*kept.bias, a);
    if (tokens == 1) a.bias.stride[2] = 1;
  }
  if (pad_qkv.has_value()) {
    STD_TORCH_CHECK(pad_qkv->dim() == 1 && pad_qkv->sizes()[0] == 3 * channels, kName,
                    ": pad_qkv must be [", 3 * channels, "]");
    kept.pad_qkv = dense(*pad_qkv, qkv.scalar_type());
    a.pad_qkv = kept.pad_qkv->const_data_ptr();
  }
  if (logit_scale.has_value()) {
    STD_TORCH_CHECK(logit_scale->dim() == 1 && logit_scale->sizes()[0] == a.heads, kName,
                    ": logit_scale must be [", a.heads, "]");
    kept.logit_scale = dense(*logit_scale, ScalarType::Float);
    a.logit_scale = floats(*kept.logit_scale);
  }
}

Tensor window_attention(const Tensor& qkv, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& bias_index,
                        const std::optional<Tensor>& pad_qkv,
                        const std::optional<Tensor>& logit_scale, int64_t num_heads,
                        std::vector<int64_t> window_size, std::vector<int64_t> shift_size,
                        double scale, double mask_value, std::string layout, bool grid,
                        std::string precision) {
  elsa::WindowAttention a = problem(qkv, num_heads, window_size, shift_size, grid);
  Kept kept;
  add_terms(a, kept, qkv, bias, bias_index, pad_qkv, logit_scale, scale, mask_value, layout);
  Tensor out =
      empty<5>({a.batch, a.depth, a.height, a.width, a.heads * a.head_dim}, dtype_code(qkv));
  a.out = out.mutable_data_ptr();
  run(kName, [&](auto... how) { return elsa::window_attention(a, how...); });
  return out;
}

// A dense float32 gradient of an operand's shape, or nothing.
template <size_t N>
Tensor gradient(bool needed, const std::array<int64_t, N>& size, float*& data) {
  if (!needed) return nothing();
  Tensor result = empty<N>(size);
  data = floats(result);
  return result;
}

// As elsa::window_attention_backward of operands in float32; the bias's gradient is [heads, tokens,
// tokens], also where the bias is a table.
std::tuple<Tensor, Tensor, Tensor, Tensor> window_attention_backward(
    const Tensor& grad_out, const Tensor& qkv, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& bias_index, const std::optional<Tensor>& pad_qkv,
    const std::optional<Tensor>& logit_scale, int64_t num_heads, std::vector<int64_t> window_size,
    std::vector<int64_t> shift_size, double scale, double mask_value, std::string layout, bool grid,
    bool needs_qkv, bool needs_bias, bool needs_pad, bool needs_scale) {
  elsa::WindowGradient g;
  g.forward = problem(qkv, num_heads, window_size, shift_size, grid);
  elsa::WindowAttention& a = g.forward;
  Kept kept;
  add_terms(a, kept, qkv, bias, bias_index, pad_qkv, logit_scale, scale, mask_value, layout);
  const int64_t tokens = a.window[0] * a.window[1] * a.window[2];
  const int64_t channels = a.heads * a.head_dim;
  STD_TORCH_CHECK(a.dtype == elsa::DType::kFloat32 && tokens <= elsa::kMaxGradientTokens,
                  kBackwardName, ": the CPU kernel takes float32 and windows of up to ",
                  elsa::kMaxGradientTokens, " tokens");
  STD_TORCH_CHECK(
      grad_out.numel() * 3 == qkv.numel() && grad_out.scalar_type() == ScalarType::Float,
      kBackwardName, ": grad_out must be float32 and of the output's shape");
  const Tensor slopes = dense(grad_out, ScalarType::Float);
  g.grad_out = floats(slopes);
  Tensor grad_qkv =
      gradient<5>(needs_qkv, {a.batch, a.depth, a.height, a.width, 3 * channels}, g.qkv);
  Tensor grad_bias = gradient<3>(needs_bias && bias.has_value(), {a.heads, tokens, tokens}, g.bias);
  Tensor grad_pad = gradient<1>(needs_pad && pad_qkv.has_value(), {3 * channels}, g.pad_qkv);
  Tensor grad_scale = gradient<1>(needs_scale && logit_scale.has_value(), {a.heads}, g.logit_scale);
  run(kBackwardName, [&](auto... how) { return elsa::window_gradient(g, how...); });
  return {grad_qkv, grad_bias, grad_pad, grad_scale};
}

}  // namespace
}  // namespace elsa_torch

STABLE_TORCH_LIBRARY_FRAGMENT(elsa, m) {
  // As in attention.cpp: alone, the library brings its own schema.
  if (getenv("ELSA_SCHEMA_DEFINED_BY_PYTHON") == nullptr) {
    m.def(
        "window_attention(Tensor qkv, Tensor? bias, Tensor? bias_index, Tensor? pad_qkv, "
        "Tensor? logit_scale, int num_heads, int[] window_size, int[] shift_size, float scale, "
        "float mask_value, str layout, bool grid, str precision) -> Tensor");
  }
}

STABLE_TORCH_LIBRARY_IMPL(elsa, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&elsa_torch::window_attention));
  m.impl("window_attention_backward_native", TORCH_BOX(&elsa_torch::window_attention_backward));
}
