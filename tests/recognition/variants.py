"""Ways in which people write attention, and modules that look alike and are none.

Each is a function of (module, q, k, v), [B, H, N, D] each, that returns [B, H, N, D] or what
`Site` can bring to it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, DIM, TOKENS = 2, 8, 12
INF = float("-inf")


class Site(nn.Module):
    """An attention layer whose forward is one of the ways."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.proj = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.softmax = nn.Softmax(dim=-1)
        self.attn_drop = nn.Dropout(0.0)
        self.scale = DIM**-0.5
        self.mix = nn.Linear(HEADS, HEADS)
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 0.4))
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.rel = nn.Parameter(torch.randn(TOKENS // 4, TOKENS // 4, DIM))
        self.rel_w = nn.Parameter(torch.randn(4, 4, DIM))
        hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
        hidden[:, 7:] = True
        hidden[2, :3] = True
        self.register_buffer("hidden", hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        out = WAYS[self.name](self, q, k, v)
        if out.dim() == 4:
            out = out.transpose(1, 2).reshape(b, n, -1)
        return self.proj(out)


Way = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Way] = {
    "divided": lambda m, q, k, v: (
        torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(DIM), -1) @ v
    ),
    "scaled_by_tensor": lambda m, q, k, v: ((q @ k.mT) * m.temperature).softmax(-1) @ v,
    "divided_by_tensor": lambda m, q, k, v: ((q @ k.mT) / m.temperature).softmax(-1) @ v,
    "scaled_per_query": lambda m, q, k, v: (
        ((q @ k.mT) * q.norm(dim=-1, keepdim=True)).softmax(-1) @ v
    ),
    "number_first": lambda m, q, k, v: (0.1 + m.scale * (q @ k.mT)).softmax(-1) @ v,
    "bias_first_then_scale": lambda m, q, k, v: ((m.bias + q @ k.mT) * m.scale).softmax(-1) @ v,
    "row_bias": lambda m, q, k, v: (q @ k.mT * m.scale + m.bias[:, :1]).softmax(-1) @ v,
    "float_scores": lambda m, q, k, v: ((q @ k.mT).float() * m.scale).softmax(-1).type_as(v) @ v,
    "one_query": lambda m, q, k, v: ((q[:, :, :1] @ k.mT).softmax(-1) @ v).expand_as(v),
    "shared_keys": lambda m, q, k, v: (q @ k[:, :1].mT * m.scale).softmax(-1) @ v[:, :1],
    "scaled_after": lambda m, q, k, v: (
        m.attn_drop((q @ k.transpose(-2, -1) * m.scale).softmax(dim=-1)) @ v
    ),
    "scaled_queries": lambda m, q, k, v: m.attn_drop(
        m.softmax(torch.matmul(q * m.scale, k.transpose(2, 3)))
    ).matmul(v),
    "two_biases": lambda m, q, k, v: (
        (q @ k.mT + m.bias + m.bias.mean(0, keepdim=True) - 0.5 * m.bias.mT).softmax(-1) @ v
    ),
    "masked_fill": lambda m, q, k, v: (
        (q @ k.mT * m.scale).masked_fill(m.hidden, INF).softmax(-1) @ v
    ),
    "where": lambda m, q, k, v: torch.where(~m.hidden, q @ k.mT * m.scale, INF).softmax(-1) @ v,
    "bias_and_mask": lambda m, q, k, v: (
        (q @ k.mT * m.scale + m.bias).masked_fill(m.hidden, INF).softmax(-1) @ v
    ),
    "einsum_keys_first": lambda m, q, k, v: torch.einsum(
        "bhmn,bhmd->bhnd", torch.einsum("bhmd,bhnd->bhmn", k, q).softmax(-2), v
    ),
    "einsum_mixed": lambda m, q, k, v: torch.einsum(
        "axyb,xybz->xyaz", torch.einsum("xyac,xybc->axyb", q, k).softmax(-1), v
    ),
    "transposed_axis": lambda m, q, k, v: (
        v.transpose(-2, -1) @ (k @ q.transpose(-2, -1)).softmax(dim=-2)
    ).transpose(-2, -1),
    "chunks_of_queries": lambda m, q, k, v: torch.cat(
        [(part @ k.mT * m.scale).softmax(-1) @ v for part in q.chunk(3, dim=2)], dim=2
    ),
    "operator": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias),
}
LOOK_ALIKES: dict[str, Way] = {
    "no_softmax": lambda m, q, k, v: (
        (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.temperature) @ v
    ),
    "sigmoid": lambda m, q, k, v: (q @ k.mT * m.scale).sigmoid() @ v,
    "two_softmaxes": lambda m, q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v,
    "softmax_over_heads": lambda m, q, k, v: (q @ k.mT).softmax(1) @ v,
    "softmax_over_queries": lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v,
    # what is added to a row alike is not alike behind factors of keys
    "moved_scores_times_keys": lambda m, q, k, v: (
        ((q @ k.mT + 1.5) * k.norm(dim=-1).unsqueeze(-2)).softmax(-1) @ v
    ),
    "moved_below_what_is_filled_in": lambda m, q, k, v: (
        (q @ k.mT - 2e4).masked_fill(m.hidden, -1e4).softmax(-1) @ v
    ),
    "clamped": lambda m, q, k, v: (q @ k.mT).clamp(-0.5, 0.5).softmax(-1) @ v,
    "linear_attention": lambda m, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "log_weights": lambda m, q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "talking_heads": lambda m, q, k, v: (
        m.mix((q @ k.mT * m.scale).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v
    ),
    "talking_weights": lambda m, q, k, v: (
        m.mix((q @ k.mT * m.scale).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v
    ),
    "filled_scores_of_little_weight": lambda m, q, k, v: (
        ((q @ k.mT).masked_fill(m.hidden, -1e4) * 1e-4).softmax(-1) @ v
    ),
    "gated_positions": lambda m, q, k, v: (
        (0.7 * (q @ k.mT * m.scale).softmax(-1) + 0.3 * m.bias.softmax(-1)) @ v
    ),
    "small_fill": lambda m, q, k, v: (q @ k.mT).masked_fill(m.hidden, -2.0).softmax(-1) @ v,
}
WAYS |= LOOK_ALIKES


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def look_alike(function: Way) -> Way:
    WAYS[function.__name__] = LOOK_ALIKES[function.__name__] = function
    return function


@way
def scaled_both(m, q, k, v):
    s = math.sqrt(m.scale)
    return F.softmax((q * s) @ (k * s).mT, dim=3) @ v


@way
def cosine(m, q, k, v):
    attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return (attn * m.temperature.clamp(max=4.0).exp() + m.bias).softmax(-1) @ v


@way
def relative_bias(m, q, k, v):
    attn = q * m.scale @ k.transpose(-2, -1)
    attn = attn + m.bias.unsqueeze(0)
    return attn.softmax(dim=-1) @ v


@way
def in_place(m, q, k, v):
    attn = q @ k.mT
    attn *= m.scale
    attn += m.bias
    return attn.softmax(-1) @ v


@way
def masked_fill_in_place(m, q, k, v):
    attn = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    attn.masked_fill_(m.hidden[None], torch.finfo(attn.dtype).min)
    return torch.bmm(attn.softmax(-1), v.flatten(0, 1)).view(q.shape)


@way
def hidden_rows(m, q, k, v):
    hidden = m.hidden.clone()
    hidden[3] = True
    attn = (q @ k.mT + m.bias).masked_fill(hidden, -1e9)
    return attn.softmax(-1) @ v


@way
def additive_mask(m, q, k, v):
    mask = torch.zeros_like(m.hidden, dtype=q.dtype).masked_fill(m.hidden, INF)
    return (q @ k.mT * m.scale + mask).softmax(-1) @ v


@way
def float_softmax(m, q, k, v):
    attn = F.softmax(q @ k.mT * m.scale, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(attn, 0.3, training=False) @ v


@way
def einsum_heads(m, q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attn = torch.einsum("bnhd,bmhd->bhnm", q, k) * m.scale
    return torch.einsum("bhnm,bmhd->bnhd", attn.softmax(-1), v).flatten(2)


@way
def einsum_dots(m, q, k, v):
    attn = torch.einsum("... i d, ... j d -> ... i j", q, k).softmax(dim=-1)
    return torch.einsum("...ij,...jd->...id", attn, v)


@way
def values_first(m, q, k, v):
    q, k, v = (t.transpose(-2, -1) for t in (q, k, v))  # [B, H, D, N]
    attn = (q.transpose(-2, -1) @ k * m.scale).softmax(dim=-1)
    return (v @ attn.transpose(-2, -1)).transpose(-2, -1)


@way
def bmm(m, q, k, v):
    q, k, v = (t.reshape(-1, TOKENS, DIM) for t in (q, k, v))
    attn = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(attn, v).view(-1, HEADS, TOKENS, DIM)


@way
def baddbmm(m, q, k, v):
    bias = m.bias.repeat(q.shape[0], 1, 1)
    q, k, v = (t.reshape(-1, TOKENS, DIM) for t in (q, k, v))
    attn = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=m.scale).softmax(-1)
    return attn.bmm(v).view(-1, HEADS, TOKENS, DIM)


@way
def maximum_subtracted(m, q, k, v):
    attn = q @ k.mT
    return (attn - attn.max(dim=-1, keepdim=True)[0]).softmax(-1) @ v


@way
def softmax_by_hand(m, q, k, v):
    attn = q @ k.mT * m.scale
    attn = torch.exp(attn - attn.amax(-1, keepdim=True).detach())
    return attn / attn.sum(dim=-1, keepdim=True) @ v


@way
def windows(m, q, k, v):
    mask = q.new_zeros(3, 4, 4)
    mask[1, :2, 2:] = -100.0
    q, k, v = (t.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    attn = q * m.scale @ k.transpose(-2, -1)
    attn = attn.view(-1, 3, HEADS, 4, 4) + mask.unsqueeze(1).unsqueeze(0)
    attn = attn.view(-1, HEADS, 4, 4).softmax(-1)
    return (attn @ v).unflatten(0, (-1, 3)).transpose(1, 2).flatten(2, 3)


@way
def decomposed_positions(m, q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    h, w = TOKENS // 4, 4
    grid = q.reshape(-1, h, w, DIM)
    rel_h = torch.einsum("bhwc,hkc->bhwk", grid, m.rel)
    rel_w = torch.einsum("bhwc,wkc->bhwk", grid, m.rel_w)
    attn = (q * m.scale) @ k.transpose(-2, -1)
    attn = attn.view(-1, h, w, h, w) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]
    attn = attn.view(-1, h * w, h * w).softmax(dim=-1)
    return (attn @ v).view(-1, HEADS, TOKENS, DIM)


@way
def one_head_at_a_time(m, q, k, v):
    heads = [
        (q[:, i] @ k[:, i].transpose(1, 2) * m.scale).softmax(-1) @ v[:, i] for i in range(HEADS)
    ]
    return torch.stack(heads, dim=1)


@way
def image_layout(m, q, k, v):
    q, k, v = (t.transpose(2, 3).flatten(1, 2) for t in (q, k, v))  # [B, H * D, N]
    q, k, v = (t.view(-1, HEADS, DIM, TOKENS) for t in (q, k, v))
    attn = torch.einsum("bhdn,bhdm->bhnm", q, k).mul(m.scale).softmax(-1)
    return torch.einsum("bhnm,bhdm->bhdn", attn, v).flatten(1, 2).transpose(1, 2)


@way
def detour_of_views(m, q, k, v):
    attn = (q @ k.mT).contiguous().flatten(0, 1).unsqueeze(1).squeeze(1)
    attn = attn.reshape(-1, HEADS, TOKENS, TOKENS).clone().permute(0, 1, 3, 2)
    return attn.softmax(2).transpose(2, 3) @ v


@look_alike
def relu(m, q, k, v):
    attn = F.relu(q @ k.mT) + 0.1
    return attn / attn.sum(-1, keepdim=True) @ v


@look_alike
def centred_scores_times_keys(m, q, k, v):
    attn = q @ k.mT
    attn = (attn - attn.amax(-1, keepdim=True)) / (1 + k[..., :1].mT.square())
    return attn.softmax(-1) @ v


@look_alike
def top_weights(m, q, k, v):
    attn = (q @ k.mT).softmax(-1)
    return attn.masked_fill(attn < attn.topk(4, dim=-1).values[..., -1:], 0.0) @ v


@look_alike
def top_scores(m, q, k, v):
    attn = q @ k.mT
    attn = attn.masked_fill(attn < attn.topk(4, dim=-1).values[..., -1:], INF)
    return torch.where(attn > 0, attn, 0.0).softmax(-1) @ v


@look_alike
def squared_weights(m, q, k, v):
    attn = (q @ k.mT).softmax(-1)
    return attn * attn @ v


@look_alike
def normalised_again(m, q, k, v):
    attn = (q @ k.mT).softmax(-1)
    return attn / (1e-9 + attn.sum(dim=1, keepdim=True)) @ v


@look_alike
def written_into(m, q, k, v):
    attn = (q @ k.mT).softmax(-1).clone()
    attn[..., 0] = 0.0
    return attn @ v


@look_alike
def squared_distance(m, q, k, v):
    scores = q.square().sum(-1, keepdim=True) - 2 * (q @ k.mT) + k.square().sum(-1)[..., None, :]
    return (-scores).softmax(-1) @ v


@look_alike
def a_sink(m, q, k, v):
    attn = torch.cat((q @ k.mT, m.temperature.expand(q.shape[0], -1, TOKENS, 1)), -1)
    return attn.softmax(-1)[..., :-1] @ v
