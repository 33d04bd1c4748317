"""Convolution, gated delta rule and state space scan of a captured pass, as Triton device code.

Token by token, the state of a head stays in registers, so each state is read and written once in a pass.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.recurrent import L2_EPS

_L2 = tl.constexpr(L2_EPS)


@triton.jit(do_not_specialize=["tokens"])
def convolve_kernel(
    x,  # [sequences * tokens, channels], rows `stride` apart
    weight,  # fp32 [TAPS, channels]
    bias,  # fp32 [channels] or None
    state,  # fp32 [slots, TAPS - 1, channels]: the rows before the first
    y,  # [sequences * tokens, channels]
    starts,  # int32 [sequences]: at position 0 the state is zero
    slots,  # int64 [sequences]
    counts,  # int32 [sequences]: rows that are not padding
    advances,  # int32 [sequences]: 0 where the state must not change
    stride,
    channels,
    tokens,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (sequences, blocks of BLOCK_C channels)."""
    sequence, column = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, count, held = column < channels, tl.load(counts + sequence), tl.load(starts + sequence) > 0
    cells = state + tl.load(slots + sequence) * ((TAPS - 1) * channels) + column
    first_row = sequence.to(tl.int64) * tokens
    for first in tl.range(0, count, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(TAPS):
            place = token + tap - (TAPS - 1)
            before = inside[None, :] & (place < 0)[:, None] & held
            known = tl.load(cells[None, :] + (place + TAPS - 1)[:, None] * channels, mask=before, other=0.0)
            now = inside[None, :] & ((place >= 0) & (place < count))[:, None]
            new = tl.load(x + (first_row + place)[:, None] * stride + column[None, :], mask=now, other=0.0)
            total += (known + new.to(tl.float32)) * tl.load(weight + tap * channels + column, mask=inside)[None, :]
        if bias is not None:
            total += tl.load(bias + column, mask=inside)[None, :]
        if SILU:
            total *= 1.0 / (1.0 + tl.exp(-total))
        out = y + (first_row + token)[:, None] * channels + column[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=inside[None, :] & (token < count)[:, None])
    tl.debug_barrier()  # all warps have loaded the state
    if tl.load(advances + sequence) != 0:
        for tap in tl.static_range(TAPS - 1):  # a row is written after those that take its old value
            place = count + tap - (TAPS - 1)
            known = tl.load(cells + (place + TAPS - 1) * channels, mask=inside & (place < 0) & held, other=0.0)
            new = tl.load(x + (first_row + place) * stride + column, mask=inside & (place >= 0), other=0.0)
            tl.store(cells + tap * channels, known + new.to(tl.float32), mask=inside & (count > 0))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_state(
    state, starts, slots, count, key, value, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Return the state [key, value] of this program, zero at position 0; the places of its values; which there are."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    present = ((key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]) & (count > 0)
    place = (tl.load(slots + sequence) * HEADS + head) * (KEY_DIM * VALUE_DIM)
    cells = state + place + key[:, None] * VALUE_DIM + value[None, :]
    return tl.load(cells, mask=present & (tl.load(starts + sequence) > 0), other=0.0), cells, present


@triton.jit(do_not_specialize=["tokens"])
def delta_kernel(
    qkv,  # [sequences * tokens, 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM]
    gates,  # [sequences * tokens, heads + decays], rows `stride` apart
    rate,  # fp32 [heads]
    dt_bias,  # fp32 [decays]
    state,  # fp32 [slots, heads, KEY_DIM, VALUE_DIM]
    y,  # [sequences * tokens, heads * VALUE_DIM]
    starts,  # as in `convolve_kernel`
    slots,
    counts,
    advances,
    stride,
    tokens,
    beta_scale,
    floor,
    COPIES: tl.constexpr,  # heads that share a key
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FLOORED: tl.constexpr,
):
    """Grid (blocks of BLOCK_V columns of a state, heads, sequences)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    heads: tl.constexpr = COPIES * KEY_HEADS
    key, value = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_inside, value_inside = key < KEY_DIM, value < VALUE_DIM
    count, first_row = tl.load(counts + sequence), sequence.to(tl.int64) * tokens
    matrix, cells, present = _load_state(state, starts, slots, count, key, value, heads, KEY_DIM, VALUE_DIM)
    slope = tl.load(rate + head)
    if BY_CHANNEL:
        gate_column = heads + head * KEY_DIM + key
        shift = tl.load(dt_bias + head * KEY_DIM + key, mask=key_inside, other=0.0)
    else:
        shift = tl.load(dt_bias + head)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    for token in tl.range(count):
        row = first_row + token
        q_place = qkv + row * (WIDTH + heads * VALUE_DIM) + head // COPIES * KEY_DIM + key
        q = tl.load(q_place, mask=key_inside, other=0.0).to(tl.float32)
        k = tl.load(q_place + KEY_HEADS * KEY_DIM, mask=key_inside, other=0.0).to(tl.float32)
        v_place = qkv + row * (WIDTH + heads * VALUE_DIM) + WIDTH + head * VALUE_DIM + value
        v = tl.load(v_place, mask=value_inside, other=0.0).to(tl.float32)
        beta = _sigmoid(tl.load(gates + row * stride + head).to(tl.float32)) * beta_scale
        if BY_CHANNEL:
            step = tl.load(gates + row * stride + gate_column, mask=key_inside, other=0.0).to(tl.float32) + shift
        else:
            step = tl.load(gates + row * stride + heads + head).to(tl.float32) + shift
        decay = tl.exp(floor * _sigmoid(-slope * step) if FLOORED else slope * _softplus(step))
        q *= tl.rsqrt(tl.sum(q * q, 0) + _L2) * KEY_DIM**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + _L2)
        if BY_CHANNEL:
            matrix *= decay[:, None]
        else:
            matrix *= decay
        written = (v - tl.sum(matrix * k[:, None], 0)) * beta
        matrix += k[:, None] * written[None, :]
        out = y + row * (heads * VALUE_DIM) + head * VALUE_DIM + value
        tl.store(out, tl.sum(matrix * q[:, None], 0).to(y.dtype.element_ty), mask=value_inside)
    if tl.load(advances + sequence) != 0:
        tl.store(cells, matrix, mask=present)


@triton.jit(do_not_specialize=["tokens"])
def scan_kernel(
    x,  # [sequences * tokens, HEADS * HEAD_DIM + 2 * GROUPS * STATE_DIM]: x, B and C
    steps,  # [sequences * tokens, HEADS], by channel [.., HEAD_DIM], rows `stride` apart
    rate,  # fp32 [HEADS], as dt_bias and skip; by channel [STATE_DIM, HEAD_DIM], and these [HEAD_DIM]
    dt_bias,
    skip,
    state,  # fp32 [slots, HEADS, STATE_DIM, HEAD_DIM]
    y,  # [sequences * tokens, HEADS * HEAD_DIM]
    starts,  # as in `convolve_kernel`
    slots,
    counts,
    advances,
    stride,
    tokens,
    low,  # limits of a step
    high,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # a step of each column, and a rate of each value of a state; one head
):
    """Grid (blocks of BLOCK_V columns of a state, heads, sequences)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, BLOCK_S), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_inside, value_inside = key < STATE_DIM, value < HEAD_DIM
    count, first_row = tl.load(counts + sequence), sequence.to(tl.int64) * tokens
    matrix, cells, present = _load_state(state, starts, slots, count, key, value, HEADS, STATE_DIM, HEAD_DIM)
    if BY_CHANNEL:
        inside = key_inside[:, None] & value_inside[None, :]
        slope = tl.load(rate + key[:, None] * HEAD_DIM + value[None, :], mask=inside, other=0.0)
        shift = tl.load(dt_bias + value, mask=value_inside, other=0.0)
        passed = tl.load(skip + value, mask=value_inside, other=0.0)
    else:
        slope, shift, passed = tl.load(rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * STATE_DIM
    group = head // (HEADS // GROUPS)
    for token in tl.range(count):
        row = first_row + token
        values = tl.load(x + row * WIDTH + head * HEAD_DIM + value, mask=value_inside, other=0.0).to(tl.float32)
        b_place = x + row * WIDTH + HEADS * HEAD_DIM + group * STATE_DIM + key
        b = tl.load(b_place, mask=key_inside, other=0.0).to(tl.float32)
        c = tl.load(b_place + GROUPS * STATE_DIM, mask=key_inside, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            step = tl.load(steps + row * stride + value, mask=value_inside, other=0.0).to(tl.float32)
        else:
            step = tl.load(steps + row * stride + head).to(tl.float32)
        step = tl.minimum(tl.maximum(_softplus(step + shift), low), high)
        if BY_CHANNEL:
            matrix = matrix * tl.exp(step[None, :] * slope) + b[:, None] * (values * step)[None, :]
        else:
            matrix = matrix * tl.exp(step * slope) + b[:, None] * (values * step)[None, :]
        out = tl.sum(matrix * c[:, None], 0) + values * passed
        tl.store(y + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + value, out.to(y.dtype.element_ty), mask=value_inside)
    if tl.load(advances + sequence) != 0:
        tl.store(cells, matrix, mask=present)
