// elsa::WindowAttention for ONNX Runtime.
#pragma once

#include "gpu.h"

namespace elsa::ort {
namespace {

// qkv [B, depth, height, width, 3 * H * D], bias [H, T, T], pad_qkv [3 * H * D], logit_scale [H]
// -> [B, depth, height, width, H * D].
class WindowAttentionKernel {
 public:
  static constexpr const char* kLabel = "elsa::WindowAttention";
  static constexpr size_t kInputs = 4, kRequired = 1, kFree = 1;

  WindowAttentionKernel(const OrtApi* api, const Attributes& attributes) {
    a_.heads = attributes.integer("num_heads", 0);
    a_.scale = attributes.number("scale", __builtin_nanf(""));
    a_.mask_value = attributes.number("mask_value", -100.0f);
    a_.head_first = attributes.equals("layout", "head");
    a_.grid = attributes.integer("grid", 0) != 0;
    if (a_.heads < 1 || a_.heads > INT32_MAX) {
      fail(api, kLabel, ": the attribute num_heads must be positive");
    }
    if (!attributes.triple("window_size", a_.window) ||
        !attributes.triple("shift_size", a_.shift)) {
      fail(api, kLabel, ": window_size and shift_size must be attributes of 3 integers");
    }
    for (int i = 0; i < 3; ++i) {
      if (a_.window[i] < 1 || a_.window[i] > kMaxTokens || a_.shift[i] < 0 ||
          a_.shift[i] >= a_.window[i] || (a_.grid && a_.shift[i] != 0)) {
        fail(api, kLabel, ": window_size ", a_.window[i], " and shift_size ", a_.shift[i],
             " do not fit");
      }
    }
    const int64_t tokens = product(a_.window, 3);
    if (tokens > kMaxTokens || product({a_.heads, tokens, tokens}) < 0) {
      fail(api, kLabel, ": a window holds at most ", kMaxTokens,
           " tokens, and a bias 2^48 numbers");
    }
  }

  void compute(Context& c) const {
    const Tensor qkv = c.required(0, "qkv", 5);
    WindowAttention a = a_;
    const int64_t channels = qkv.size[4] / 3;
    if (qkv.size[4] % 3 != 0 || channels % a.heads != 0 || channels < a.heads ||
        channels / a.heads > kLargestHeadDim || qkv.type == kBool) {
      c.fail(qkv.size[4], " channels are not 3 * ", a.heads, " heads * head_dim (1 to ",
             kLargestHeadDim, ", floating)");
    }
    a.head_dim = channels / a.heads;
    a.dtype = c.dtype(qkv, "qkv");
    for (int i = 0; i < 3; ++i) {
      if (a.grid && qkv.size[i + 1] % a.window[i] != 0) {
        c.fail("grid needs sizes that are multiples of the window");
      }
    }
    const int64_t size[5] = {qkv.size[0], qkv.size[1], qkv.size[2], qkv.size[3], channels};
    a.out = c.output(size, 5);
    a.batch = size[0];
    a.depth = size[1];
    a.height = size[2];
    a.width = size[3];
    if (!fits(a)) c.fail("the image is too large for its windows");
    const Tensor bias = c.input(1, "bias"), pad = c.input(2, "pad_qkv");
    const Tensor logit_scale = c.input(3, "logit_scale");
    check_terms(c, a, bias, pad, logit_scale, qkv);
    if (qkv.empty()) return;
    a.qkv = qkv.data;
    int64_t strides[5];
    qkv.strides(strides);
    std::copy_n(strides, 4, a.stride);
    if (c.gpu) return c.gpu->window_attention(c, a);
    c.run([&](auto... how) { return elsa::window_attention(a, how...); });
  }

 private:
  static constexpr int64_t kMaxTokens = 1 << 16;  // the workspace grows with them

  // Checks the optional inputs and points the problem at them.
  static void check_terms(const Context& c, WindowAttention& a, const Tensor& bias,
                          const Tensor& pad, const Tensor& logit_scale, const Tensor& qkv) {
    const int64_t tokens = a.window[0] * a.window[1] * a.window[2];
    if (bias.present) {
      if (!bias.is({a.heads, tokens, tokens}) || (bias.type != kFloat && bias.type != qkv.type)) {
        c.fail("bias must be [", a.heads, ", ", tokens, ", ", tokens, "], float or qkv's type");
      }
      a.bias.data = bias.data;
      a.bias.dtype = c.dtype(bias, "bias");
      bias.strides(a.bias.stride);
      a.bias.stride[2] = 1;
    }
    if (pad.present && (!pad.is({qkv.size[4]}) || pad.type != qkv.type)) {
      c.fail("pad_qkv must be [", qkv.size[4], "] of qkv's type");
    }
    a.pad_qkv = pad.data;
    if (logit_scale.present && (!logit_scale.is({a.heads}) || logit_scale.type != kFloat)) {
      c.fail("logit_scale must be [", a.heads, "] float");
    }
    a.logit_scale = reinterpret_cast<const float*>(logit_scale.data);
    if (a.scale != a.scale) a.scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  }

  WindowAttention a_;  // the geometry; sizes and operands are a call's
};

}  // namespace
}  // namespace elsa::ort
