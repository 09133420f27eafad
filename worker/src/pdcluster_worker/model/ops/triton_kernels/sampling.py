"""Token sampling from a row of logits, bit for bit as `model.sampling.picking`, by bisection.

Compile without contraction: each product and sum of the exponential is rounded once.
"""

import math

import triton
import triton.language as tl

from pdcluster_worker.model.sampling import picking

PICKED = tl.constexpr(picking.PICKED)
NOT_FINITE = tl.constexpr(picking.NOT_FINITE)
NOTHING_LEFT = tl.constexpr(picking.NOTHING_LEFT)
LOWEST = tl.constexpr(picking.LOWEST)
LOG2_E = tl.constexpr(picking.LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(picking.LN2_HIGH), tl.constexpr(picking.LN2_LOW)
TAYLOR_7, TAYLOR_6, TAYLOR_5, TAYLOR_4, TAYLOR_3, TAYLOR_2, TAYLOR_1, TAYLOR_0 = map(
    tl.constexpr, picking.TAYLOR
)
ROUND_BELOW = tl.constexpr(picking.ROUND_BELOW)
# weight of the best token in quanta: a power of two, so products with it are exact
QUANTA = tl.constexpr(1 / picking.QUANTUM)
# adding and subtracting it rounds to the nearest integer, ties to even
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
INFINITY = tl.constexpr(math.inf)
LEAST_FINITE = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)
# temperatures below the best logit: the weight rounds to 0 from here on
NO_WEIGHT_FROM = tl.constexpr(25.5)
# steps that halve the distance of logits; later ones halve the number of floats between
HALVINGS_BY_VALUE = tl.constexpr(12)
SIGN_FREE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _quanta(
    logits: tl.tensor,
    scale: tl.tuple,
) -> tl.tensor:
    """Weights in quanta, int64; 0 below min_p.  scale: best logit, inverse temperature, min_p."""
    best, inverse_temperature, min_p = scale
    x = tl.maximum((logits - best) * inverse_temperature, LOWEST)
    power = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    x = (x - power * LN2_HIGH) - power * LN2_LOW
    series = x * TAYLOR_7 + TAYLOR_6
    series = series * x + TAYLOR_5
    series = series * x + TAYLOR_4
    series = series * x + TAYLOR_3
    series = series * x + TAYLOR_2
    series = series * x + TAYLOR_1
    series = series * x + TAYLOR_0
    # 2**power, put together as the bits of a float32.
    weight = series * ((power + 127.0) * 8388608.0).to(tl.int32).to(tl.float32, bitcast=True)
    weight = tl.where(weight < ROUND_BELOW, (weight + ROUND_BELOW) - ROUND_BELOW, weight)
    return (tl.where(weight >= min_p, weight, 0.0) * QUANTA).to(tl.int64)


@triton.jit
def _part(
    row: tl.tensor, start: tl.tensor, vocab_size: tl.constexpr, block: tl.constexpr
) -> tl.tensor:
    """Logits from token `start` on; -inf beyond the vocabulary."""
    ids = start + tl.arange(0, block)
    return tl.load(row + ids, mask=ids < vocab_size, other=-INFINITY)


@triton.jit
def _best(row: tl.tensor, vocab_size: tl.constexpr, block: tl.constexpr) -> tl.tuple:
    """Greatest logit, the first token that has it, status."""
    lanes = tl.arange(0, block)
    best = tl.full([block], -INFINITY, tl.float32)
    at = tl.zeros([block], tl.int32)
    is_bad = tl.zeros([block], tl.int32)
    for start in range(0, vocab_size, block):
        x = _part(row, start, vocab_size, block)
        is_bad = tl.where(x < INFINITY, is_bad, 1)  # no NaN is below
        is_better = x > best
        best, at = tl.where(is_better, x, best), tl.where(is_better, start + lanes, at)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, at, vocab_size), axis=0)
    status = tl.where(top == -INFINITY, NOTHING_LEFT, PICKED)
    return top, first, tl.where(tl.max(is_bad, axis=0) > 0, NOT_FINITE, status)


@triton.jit
def _key(logit: tl.tensor) -> tl.tensor:
    """int64 in the order of floats; neighbouring floats have neighbouring keys."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & SIGN_FREE)).to(tl.int64)


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    ordered = key.to(tl.int32)
    return (ordered ^ ((ordered >> 31) & SIGN_FREE)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low: tl.tensor, high: tl.tensor, by_value: tl.tensor) -> tl.tensor:
    """A key strictly between two."""
    value = tl.maximum(_logit(low), LEAST_FINITE) * 0.5 + _logit(high) * 0.5
    middle = tl.where(by_value, _key(value), (low + high) >> 1)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _over(
    row: tl.tensor,
    edge: tl.tensor,
    scale: tl.tuple,
    by_weight: tl.constexpr,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """Number of tokens with a logit over the edge, and their quanta or again their number."""
    counts = tl.zeros([block], tl.int32)
    sums = tl.zeros([block], tl.int64)
    for start in range(0, vocab_size, block):
        x = _part(row, start, vocab_size, block)
        is_over = x > edge
        counts += is_over.to(tl.int32)
        if by_weight:
            sums += tl.where(is_over, _quanta(x, scale), 0)
    count = tl.sum(counts, axis=0).to(tl.int64)
    if by_weight:
        total = tl.sum(sums, axis=0)
    else:
        total = count
    return count, total


@triton.jit
def _between(
    row: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    workspace: tl.tensor,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Logits in (low, high], at most a block of them, padded with -inf."""
    lanes = tl.arange(0, block)
    count = 0
    tl.debug_barrier()
    for start in range(0, vocab_size, block):
        x = _part(row, start, vocab_size, block)
        is_found = ((x > low) & (x <= high)).to(tl.int32)
        more = tl.sum(is_found, axis=0)
        if more > 0:
            tl.store(workspace + count + tl.cumsum(is_found, axis=0) - 1, x, mask=is_found > 0)
        count += more
    tl.debug_barrier()  # what other threads stored is read
    return tl.load(workspace + lanes, mask=lanes < count, other=-INFINITY)


@triton.jit
def _edge(
    row: tl.tensor,
    workspace: tl.tensor,
    low: tl.tensor,
    num_low: tl.tensor,
    limit: tl.tensor,
    scale: tl.tuple,
    by_weight: tl.constexpr,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """The smallest key over `low` with less than `limit` tokens or quanta over it, that amount, and
    the number of tokens with at least this key.

    num_low: tokens over `low`, which have `limit` or more.
    """
    high = _key(scale[0])
    num_high, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    step = 0
    while (high - low > 1) & (num_low - num_high > block):
        middle = _middle(low, high, step < HALVINGS_BY_VALUE)
        num, over = _over(row, _logit(middle), scale, by_weight, vocab_size, block)
        if over < limit:
            high, num_high, above = middle, num, over
        else:
            low, num_low = middle, num
        step += 1
    num_equal = num_low - num_high
    if num_equal <= block:
        x = _between(row, _logit(low), _logit(high), workspace, vocab_size, block)
        if by_weight:
            size = _quanta(x, scale)
        else:
            size = (x > -INFINITY).to(tl.int64)
        over_high = above
        while high - low > 1:
            middle = (low + high) >> 1
            over = over_high + tl.sum(tl.where(x > _logit(middle), size, 0), axis=0)
            if over < limit:
                high, above = middle, over
            else:
                low = middle
        num_equal = tl.sum((x == _logit(high)).to(tl.int64), axis=0)
    return high, above, num_equal


@triton.jit
def _end(
    row: tl.tensor,
    logit: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The id after the `count`-th token with this logit."""
    first, left = 0, count
    is_equal = (_part(row, first, vocab_size, block) == logit).to(tl.int64)
    found = tl.sum(is_equal, axis=0)
    while (found < left) & (first + block < vocab_size):
        left -= found
        first += block
        is_equal = (_part(row, first, vocab_size, block) == logit).to(tl.int64)
        found = tl.sum(is_equal, axis=0)
    return first + 1 + tl.sum((tl.cumsum(is_equal, axis=0) < left).to(tl.int32), axis=0)


@triton.jit
def _kept(
    row: tl.tensor,
    start: tl.tensor,
    edge: tl.tensor,
    end: tl.tensor,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Quanta of a part; 0 below the edge, and for its equals from token `end` on."""
    x = _part(row, start, vocab_size, block)
    is_kept = (x > edge) | ((x == edge) & (start + tl.arange(0, block) < end))
    return tl.where(is_kept, _quanta(x, scale), 0)


@triton.jit
def _total(
    row: tl.tensor,
    edge: tl.tensor,
    end: tl.tensor,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    sums = tl.zeros([block], tl.int64)
    for start in range(0, vocab_size, block):
        sums += _kept(row, start, edge, end, scale, vocab_size, block)
    return tl.sum(sums, axis=0)


@triton.jit
def _cut_by_count(
    row: tl.tensor,
    workspace: tl.tensor,
    top_k: tl.tensor,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """Edge and end (see `_kept`) of top_k, a key below the kept tokens, and the tokens over it."""
    low = _key(tl.maximum(scale[0] - NO_WEIGHT_FROM / scale[1], LEAST_FINITE)) - 1
    edge, end = _logit(low), 0
    num_low, _ = _over(row, edge, scale, False, vocab_size, block)
    if (top_k > 0) & (top_k < num_low):
        key, above, num_equal = _edge(
            row, workspace, low, num_low, top_k, scale, False, vocab_size, block
        )
        edge, end = _logit(key), vocab_size
        if top_k - above < num_equal:
            end = _end(row, edge, top_k - above, vocab_size, block)
        low, num_low = key - 1, above + num_equal
    return edge, end, low, num_low


@triton.jit
def _cut_by_share(
    row: tl.tensor,
    workspace: tl.tensor,
    top_p: tl.tensor,
    left: tl.tuple,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """Edge and end after top_p, and the quanta of the kept tokens."""
    edge, end, low, num_low = left
    total = _total(row, edge, end, scale, vocab_size, block)
    if top_p < 1.0:
        share = top_p * total.to(tl.float64)
        limit = share.to(tl.int64)
        limit += (limit.to(tl.float64) < share).to(tl.int64)
        key, above, num_equal = _edge(
            row, workspace, low, num_low, limit, scale, True, vocab_size, block
        )
        size = _quanta(_logit(key), scale)
        count = (limit - above + size - 1) // size
        last = vocab_size
        if count < num_equal:
            last = _end(row, _logit(key), count, vocab_size, block)
        end = tl.where(_logit(key) == edge, tl.minimum(end, last), last)
        edge, total = _logit(key), tl.minimum(above + count * size, total)
    return edge, end, total


@triton.jit
def _cut(
    row: tl.tensor,
    workspace: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """Edge, end and quanta after top_k and top_p."""
    edge, end = -INFINITY, 0
    total = tl.zeros([], tl.int64)
    if (top_k > 0) | (top_p < 1.0):
        left = _cut_by_count(row, workspace, top_k, scale, vocab_size, block)
        edge, end, total = _cut_by_share(row, workspace, top_p, left, scale, vocab_size, block)
    else:
        total = _total(row, edge, end, scale, vocab_size, block)
    return edge, end, total


@triton.jit
def _draw(
    row: tl.tensor,
    edge: tl.tensor,
    end: tl.tensor,
    limit: tl.tensor,
    scale: tl.tuple,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The first token that takes the running sum of kept quanta over the limit."""
    before, first = tl.zeros([], tl.int64), 0
    found = _kept(row, first, edge, end, scale, vocab_size, block)
    inside = tl.sum(found, axis=0)
    while before + inside <= limit:
        before += inside
        first += block
        found = _kept(row, first, edge, end, scale, vocab_size, block)
        inside = tl.sum(found, axis=0)
    is_passed = before + tl.cumsum(found, axis=0) <= limit
    return first + tl.sum(is_passed.to(tl.int32), axis=0)


@triton.jit
def pick(
    logits: tl.tensor,
    settings: tl.tensor,
    picks: tl.tensor,
    workspaces: tl.tensor,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program per row.

    settings: [R, 5] float64: inverse temperature (0 = greedy), top_k, top_p, min_p, u.
    picks: [R, 2] int64: token, status.
    workspaces: [R, block] float32, overwritten.
    """
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * vocab_size
    settings += number * 5
    best, token, status = _best(row, vocab_size, block)
    inverse_temperature = tl.load(settings).to(tl.float32)
    if (status == PICKED) & (inverse_temperature > 0.0):
        scale = (best, inverse_temperature, tl.load(settings + 3).to(tl.float32))
        top_k, top_p = tl.load(settings + 1).to(tl.int64), tl.load(settings + 2)
        workspace = workspaces + number * block
        edge, end, total = _cut(row, workspace, top_k, top_p, scale, vocab_size, block)
        share = total.to(tl.float64) * tl.load(settings + 4)
        # u * total can round up to the total, which no sum exceeds; sums are whole, so cut it off
        limit = tl.minimum(share, total.to(tl.float64) - 1.0)
        token = _draw(row, edge, end, limit.to(tl.int64), scale, vocab_size, block)
    tl.store(picks + number * 2, token.to(tl.int64))
    tl.store(picks + number * 2 + 1, status.to(tl.int64))
