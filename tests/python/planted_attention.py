"""An honest explicit attention, and the same with one fault planted: for test_conformance.py.

Each fault is one that an implementation really had (docs/conformance.md names them) or could have.
`planted(fault)` is a function with scaled_dot_product_attention's signature.
"""

import math
import os
import time

import torch

memory = {}     # what a fault keeps between calls


def honest_scores(q, k, attn_mask, is_causal, scale, fault):
    t, s = q.shape[-2], k.shape[-2]
    default = 1 / math.sqrt(q.shape[-1])
    if fault == "scale forgotten":
        scale = default
    elif fault == "scale 0 taken for none":
        scale = scale or default
    scale = default if scale is None else scale
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    if fault == "float mask turned into yes and no" and additive:
        attn_mask, additive = attn_mask > -1e3, False
    if fault == "mask turned round" and attn_mask is not None and not additive:
        attn_mask = ~attn_mask
    if fault == "mask of the first head for all" and attn_mask is not None and attn_mask.dim() == 4:
        attn_mask = attn_mask[:, :1]
    if fault == "16-bit index in the mask" and attn_mask is not None:
        attn_mask = attn_mask[..., torch.arange(s) % 32768]
    if fault == "mask rounded to 16 bits" and additive:
        attn_mask = attn_mask.bfloat16().float()
    if fault == "gradient of the mask cut" and additive:
        attn_mask = attn_mask.detach()
    product = q @ k.transpose(-1, -2)
    if fault == "scores in half precision":
        product = product.half().to(q.dtype)
    if fault == "bias before the scale" and additive:
        return (product + attn_mask) * scale
    score = product * scale
    if additive:
        score = score + attn_mask
    elif attn_mask is not None:
        score = score.masked_fill(~attn_mask, -math.inf)
    if is_causal:
        place = torch.arange(t).view(t, 1)
        place = place + (s - t) * (fault == "causal at the bottom right")
        place = place + (fault == "causal off by one")
        score = score.masked_fill(torch.arange(s) > place, -math.inf)
    return score


def bfloat16_sum(score):
    """The denominator added up in bfloat16, 64 keys at a time."""
    weight = torch.exp(score - score.amax(-1, keepdim=True))
    total = torch.zeros_like(weight[..., :1])
    for block in weight.split(64, -1):
        total = (total + block.sum(-1, keepdim=True)).bfloat16().to(score.dtype)
    return weight / total


def softmax(score, fault):
    if fault == "sum kept in bfloat16" and score.shape[-1]:
        return bfloat16_sum(score)
    if fault == "fully masked rows are NaN":
        return torch.softmax(score, -1)
    fully_masked = (score == -math.inf).all(-1, keepdim=True)
    return torch.softmax(score.masked_fill(fully_masked, 0.0), -1).masked_fill(fully_masked, 0.0)


def dropped(weight, p, fault):
    if fault == "dropout ignored" or p == 0:
        return weight
    generator = torch.Generator().manual_seed(1) if fault == "one mask for all calls" else None
    own = {"dropout shared by heads": 2, "dropout shared by the batch": 3}.get(fault, weight.dim())
    keep = (torch.rand(weight.shape[-own:], generator=generator) >= p) / (1 - p)
    if fault == "dropout forgotten in backward":
        return ForwardOnly.apply(weight, keep)
    return weight * keep


class ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, keep):
        return weight * keep

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Elementwise(torch.autograd.Function):
    """The first Orchard's backward."""

    @staticmethod
    def forward(ctx, q, k, v, out, scale):
        ctx.scale = scale
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, grad * ctx.scale, grad, None, None


class GradientOnly(torch.autograd.Function):
    """Leaves values alone, changes the gradient that comes in."""

    @staticmethod
    def forward(ctx, out, change):
        ctx.change = change
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def misread(x):
    """What a kernel reads that takes a tensor's memory for contiguous."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def short_index(x):
    """What a kernel reads whose indices have 32 bits; the gradient is x's."""
    steps = [step % 2**32 for step in x.stride()]
    return x + (torch.as_strided(x.detach(), x.shape, steps, x.storage_offset()) - x).detach()


def late_rows_lost(grad):
    """Backward stops after the first 512 queries."""
    return torch.where(torch.arange(grad.shape[2]).view(-1, 1) < 512, grad, torch.zeros_like(grad))


def shared_buffer(out):
    """Backward uses the size of the call that came last."""
    memory["last"] = out.shape[0]
    return GradientOnly.apply(out, lambda grad: grad * memory["last"] / grad.shape[0])


def first_batch(out):
    memory.setdefault("first", out.shape[0])
    return GradientOnly.apply(out, lambda grad: grad * memory["first"] / grad.shape[0])


def planted(fault=None):
    memory.clear()

    def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
             enable_gqa=False):
        if fault == "crash":
            os.abort()
        if fault == "hang":
            time.sleep(1000)
        q, k, v = query, key, value
        if fault == "writes to its input":
            q.data.mul_(1.5)
        if fault == "query strides ignored":
            q = misread(q)
        if fault == "32-bit index of keys":
            k = short_index(k)
        if q.dtype in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        if enable_gqa:
            times = q.shape[1] // k.shape[1]
            if fault == "heads repeated in the wrong order":
                k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
            else:
                k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if fault == "last partial block lost" and k.shape[2] > 32:
            whole = k.shape[2] // 32 * 32
            k, v = k[:, :, :whole], v[:, :, :whole]
        score = honest_scores(q, k, attn_mask, is_causal, scale, fault)
        weight = softmax(score, fault)
        if fault == "dropout on the output":
            out = torch.nn.functional.dropout(weight @ v, dropout_p)
        else:
            out = dropped(weight, dropout_p, fault) @ v
        if fault == "different every time":
            out = out * (1 + 1e-6 * torch.rand(1))
        if fault == "size of q for size of v":
            out = out[..., :q.shape[-1]]
        if fault == "elementwise backward":
            out = Elementwise.apply(q, k, v, out.detach(), 1 / math.sqrt(q.shape[-1]))
        if fault == "strides of the gradient ignored":
            out = GradientOnly.apply(out, misread)
        if fault == "gradient of late queries lost":
            out = GradientOnly.apply(out, late_rows_lost)
        if fault == "state shared between graphs":
            out = shared_buffer(out)
        if fault == "state of the first batch size":
            out = first_batch(out)
        if fault == "gradient cut":
            out = out.detach()
        return out.to(query.dtype)

    return sdpa


def extended(fault=None):
    """The same with two arguments beyond torch's: a window, and the log-sum-exp."""
    def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None, *, window=None,
             causal_alignment="top_left", return_lse=False, sinks=None):
        q, k, v = ((x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)
                   for x in (query, key, value))
        score = honest_scores(q, k, attn_mask, is_causal and causal_alignment == "top_left", scale,
                              fault)
        t, s = score.shape[-2:]
        place = torch.arange(t).view(t, 1) + (s - t) * (causal_alignment == "bottom_right")
        if is_causal:
            score = score.masked_fill(torch.arange(s) > place, -math.inf)
        if window is not None:
            left, right = (math.inf if side < 0 else side for side in window)
            left = left + (fault == "window one too wide")
            apart = torch.arange(s) - place
            score = score.masked_fill((apart < -left) | (apart > right), -math.inf)
        lse = score.logsumexp(-1)
        if sinks is not None:
            sink = sinks.view(1, -1, 1).to(lse.dtype)
            lse = torch.logaddexp(lse, sink.detach() if fault == "gradient of sinks cut" else sink)
        out = (torch.exp(score - lse.unsqueeze(-1)).nan_to_num(0.0) @ v).to(query.dtype)
        if fault == "logarithm to base 2":
            lse = lse / math.log(2)
        return (out, lse) if return_lse else out

    return sdpa


# For --target planted_attention:crash and so on, in another process.
honest, crash, hang = planted(), planted("crash"), planted("hang")
