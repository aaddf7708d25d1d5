// elsa::Attention and elsa::PackedAttention for ONNX Runtime.
#pragma once

#include "gpu.h"

namespace elsa::ort {
namespace {

// mask: broadcastable to [batch, heads, queries, keys] from the right.
View mask_view(const Context& c, const Tensor& mask, const Attention& a) {
  View view;
  if (!mask.present) return view;
  if (mask.rank > 4) c.fail("attn_mask has ", mask.rank, " dimensions, at most 4");
  view.dtype = c.dtype(mask, "attn_mask");
  if (view.dtype != DType::kBool && view.dtype != DType::kFloat32 && view.dtype != a.query.dtype) {
    c.fail("attn_mask must be bool, float or the query's type");
  }
  const int64_t full[4] = {a.batch, a.heads, a.queries, a.keys};
  int64_t stride = 1;
  for (size_t i = 4; i-- > 4 - mask.rank;) {
    const int64_t size = mask.size[i + mask.rank - 4];
    if (size != full[i] && size != 1) {
      c.fail("attn_mask has size ", size, " in dimension ", i, " of 4, must be 1 or ", full[i]);
    }
    view.stride[i] = size == 1 ? 0 : stride;
    stride *= size;
  }
  // One `true` lets everything take part: no mask at all. The host cannot read a GPU's.
  if (!c.gpu && stride == 1 && view.dtype == DType::kBool && *mask.data) return view;
  view.data = mask.data;
  return view;
}

// The attributes of both operators; the default of `scale` is 1 / sqrt(head_dim).
class Terms {
 public:
  explicit Terms(const Attributes& attributes)
      : causal_(attributes.integer("is_causal", 0) != 0),
        scale_(attributes.number("scale", __builtin_nanf(""))) {}

  // Checks the head dimensions too.
  void set(const Context& c, Attention& a) const {
    const int64_t most = kLargestHeadDim;
    if (a.head_dim < 1 || a.head_dim > most || a.value_dim < 1 || a.value_dim > most) {
      c.fail("head_dim must be 1 to ", most, ", got ", a.head_dim, " (query) and ", a.value_dim,
             " (value)");
    }
    a.causal = causal_;
    a.scale = scale_ == scale_ ? scale_ : 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  }

 private:
  bool causal_;
  float scale_;  // NaN for the default
};

// [batch, queries, heads, value_dim] into `out`.
void run_attention(Context& c, Attention& a, void* out) {
  if (!fits(a)) c.fail("the tensors have too many elements");
  if (c.gpu) return c.gpu->attention(c, a, out);
  struct Lse;
  const size_t rows = static_cast<size_t>(a.batch * a.heads * a.queries);
  a.out = out;
  a.lse = reinterpret_cast<float*>(scratch<Lse>(rows * sizeof(float)));
  c.run([&](auto... how) { return elsa::attention(a, how...); });
}

// query [B, H, Nq, D], key [B, Hkv, Nk, D], value [B, Hkv, Nk, Dv], attn_mask -> [B, H, Nq, Dv].
class AttentionKernel {
 public:
  static constexpr const char* kLabel = "elsa::Attention";
  static constexpr size_t kInputs = 4, kRequired = 3, kFree = 3;

  AttentionKernel(const OrtApi*, const Attributes& attributes) : terms_(attributes) {}

  void compute(Context& c) const {
    const Tensor q = c.required(0, "query", 4), k = c.required(1, "key", 4);
    const Tensor v = c.required(2, "value", 4), mask = c.input(3, "attn_mask");
    check_shapes(c, q, k, v);
    Attention a;
    a.batch = q.size[0];
    a.heads = q.size[1];
    a.kv_heads = k.size[1];
    a.queries = q.size[2];
    a.keys = k.size[2];
    a.head_dim = q.size[3];
    a.value_dim = v.size[3];
    terms_.set(c, a);
    const int64_t size[4] = {a.batch, a.heads, a.queries, a.value_dim};
    void* out = c.output(size, 4);
    if (q.empty()) return;
    a.query = dense(c, q);
    a.key = dense(c, k);
    a.value = dense(c, v);
    a.mask = mask_view(c, mask, a);
    if (merges_heads(a)) {
      run_attention(c, a, out);
    } else if (c.gpu) {
      c.fail(
          "on a GPU there must be as many key heads as query heads, and a mask one for all heads "
          "and images or one for each");
    } else {
      run_and_transpose(c, a, out);
    }
  }

 private:
  static void check_shapes(const Context& c, const Tensor& q, const Tensor& k, const Tensor& v) {
    if (k.size[0] != q.size[0] || v.size[0] != q.size[0]) {
      c.fail("batch sizes differ: query ", q.size[0], ", key ", k.size[0], ", value ", v.size[0]);
    }
    if (k.size[1] != v.size[1] || k.size[2] != v.size[2]) {
      c.fail("key has ", k.size[1], " heads of ", k.size[2], " tokens, value ", v.size[1], " of ",
             v.size[2]);
    }
    if (k.size[1] > 0 ? q.size[1] % k.size[1] != 0 : q.size[1] != 0) {
      c.fail(q.size[1], " query heads are no multiple of ", k.size[1], " key heads");
    }
    if (k.size[3] != q.size[3]) {
      c.fail("head_dim of query is ", q.size[3], " and of key ", k.size[3]);
    }
    if (k.type != q.type || v.type != q.type || q.type == kBool) {
      c.fail("query, key and value must have one floating type");
    }
  }

  static View dense(const Context& c, const Tensor& tensor) {
    View view;
    view.data = tensor.data;
    view.dtype = c.dtype(tensor, "query");
    tensor.strides(view.stride);
    view.stride[3] = 1;
    return view;
  }

  // The kernels write heads side by side, [batch, queries, heads, value_dim]. Taking every head for
  // a batch entry of its own gives the order that the output has, where all strides allow it.
  static bool merges_heads(Attention& a) {
    if (a.kv_heads != a.heads) return false;
    if (a.mask.data && a.batch > 1 && a.heads > 1 &&
        a.mask.stride[0] != a.mask.stride[1] * a.heads) {
      return false;
    }
    for (View* view : {&a.query, &a.key, &a.value, &a.mask}) {
      if (a.heads > 1) view->stride[0] = view->stride[1];
      view->stride[1] = 0;
    }
    a.batch *= a.heads;
    a.heads = a.kv_heads = 1;
    return true;
  }

  static void run_and_transpose(Context& c, Attention& a, void* out) {
    struct Out;
    const size_t row = static_cast<size_t>(a.value_dim * elsa::element_size(a.query.dtype));
    const size_t rows = static_cast<size_t>(a.batch * a.heads * a.queries);
    const char* from = scratch<Out>(rows * row);
    run_attention(c, a, const_cast<char*>(from));
    char* to = static_cast<char*>(out);
    for (int64_t b = 0; b < a.batch; ++b, from += a.heads * a.queries * row) {
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < a.queries; ++i, to += row) {
          memcpy(to, from + (i * a.heads + h) * row, row);
        }
      }
    }
  }

  Terms terms_;
};

// qkv [B, N, 3 * H * D], as the projection leaves it, attn_mask -> [B, N, H * D].
class PackedAttentionKernel {
 public:
  static constexpr const char* kLabel = "elsa::PackedAttention";
  static constexpr size_t kInputs = 2, kRequired = 1, kFree = 1;

  PackedAttentionKernel(const OrtApi* api, const Attributes& attributes)
      : heads_(attributes.integer("num_heads", 0)), terms_(attributes) {
    if (heads_ < 1 || heads_ > INT32_MAX) {
      fail(api, kLabel, ": the attribute num_heads must be positive");
    }
  }

  void compute(Context& c) const {
    const Tensor qkv = c.required(0, "qkv", 3), mask = c.input(1, "attn_mask");
    const int64_t channels = qkv.size[2] / 3;
    if (qkv.size[2] % 3 != 0 || channels % heads_ != 0) {
      c.fail(qkv.size[2], " channels are not 3 * ", heads_, " heads * head_dim");
    }
    if (qkv.type == kBool) c.fail("qkv must be floating");
    Attention a;
    a.batch = qkv.size[0];
    a.heads = a.kv_heads = heads_;
    a.queries = a.keys = qkv.size[1];
    a.head_dim = a.value_dim = channels / heads_;
    terms_.set(c, a);
    const int64_t size[3] = {a.batch, a.queries, channels};
    void* out = c.output(size, 3);
    if (qkv.empty()) return;
    const DType dtype = c.dtype(qkv, "qkv");
    const size_t part = static_cast<size_t>(channels * elsa::element_size(dtype));
    View* const views[3] = {&a.query, &a.key, &a.value};
    for (size_t i = 0; i < 3; ++i) {  // [batch, tokens, heads, dim] as [batch, heads, tokens, dim]
      View& view = *views[i];
      view.data = qkv.data + i * part;
      view.dtype = dtype;
      view.stride[0] = a.queries * 3 * channels;
      view.stride[1] = a.heads == 1 ? 0 : a.head_dim;
      view.stride[2] = 3 * channels;
      view.stride[3] = 1;
    }
    a.mask = mask_view(c, mask, a);
    run_attention(c, a, out);
  }

 private:
  int64_t heads_;
  Terms terms_;
};

}  // namespace
}  // namespace elsa::ort
