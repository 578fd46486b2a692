"""Attention by Triton whose sums follow the text: a query's result depends on the keys that it sees and on their order.

It does not depend on the columns that these keys are in, on hidden keys between them, or on other queries and rows, so
that a node of a tree has the bits that its token has in plain decoding. Keys are taken by their rank among those that a
query sees, in blocks and parts of fixed size, and parts are added in turn. A product's tile has a fixed size too, and
an element of it depends on its own row and column alone. Import it where Triton is installed.
"""

import torch
import triton
import triton.language as tl

LINES = 16  # of a tile, a line being one head of one query: the fewest that tensor cores multiply
BLOCK = 64  # keys of a tile
BLOCKS = 4  # of a part, which is computed in one go
NOTES = 4  # on each query behind the columns of its keys


@torch.library.custom_op("hf_specdec::key_order", mutates_args=())
def key_order(mask: torch.Tensor) -> torch.Tensor:
    """The columns of the keys that each query sees, in turn, in the place of a mask.

    Args:
        mask: `(B, 1, M, K)`, of booleans, or of numbers that are 0 where a key is seen.

    Returns:
        `(B, 1, M, K + NOTES)` of int32. The notes on a query are the number of its keys; its leader, the query with the
        most keys of those whose keys begin with its own; how many first keys are common to all queries that see any;
        and the query with the most keys.
    """
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    batch, num_queries, num_keys = seen.shape
    ranks = seen.cumsum(-1)  # from 1
    counts = ranks[..., -1]  # (B, M)
    order = torch.zeros((batch, num_queries, num_keys + NOTES), dtype=torch.int32, device=mask.device)
    numbers = torch.arange(num_keys, dtype=torch.int32, device=mask.device)
    order.scatter_(-1, torch.where(seen, ranks - 1, num_keys), numbers.expand_as(seen))
    last = order.gather(-1, (counts - 1).clamp(min=0)[..., None]).mT.long()  # (B, 1, M)
    both = seen.float() @ seen.float().mT  # keys that two queries see, (B, M, M)
    before = ranks.gather(-1, last.expand(-1, num_queries, -1)).mT  # keys of the second up to the first's last
    begins = (both == counts[..., None]) & (before == counts[..., None])
    leaders = torch.where(begins, counts[:, None], -1).argmax(-1)
    some, every = seen.any(1), (seen | (counts == 0)[..., None]).all(1)
    common = (some & ((some & ~every).cumsum(-1) == 0)).sum(-1, keepdim=True)
    notes = (counts, leaders, common.expand_as(counts), counts.argmax(-1, keepdim=True).expand_as(counts))
    order[..., num_keys:] = torch.stack(notes, dim=-1)
    return order[:, None]


@key_order.register_fake
def _(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((*mask.shape[:-1], mask.shape[-1] + NOTES), dtype=torch.int32)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _attend_parts(  # type: ignore[no-untyped-def]
    query, keys, values, order, sums, tops, totals,
    query_batch, query_head, query_row, key_batch, key_head, key_column, value_batch, value_head, value_column,
    num_rows, num_columns, num_heads, groups, scale, dim, value_dim,
    lines_of: tl.constexpr, block_of: tl.constexpr, blocks_of: tl.constexpr, notes_of: tl.constexpr,
    dim_of: tl.constexpr, value_dim_of: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one key/value head, for one tile of lines."""
    tile, part = tl.program_id(0), tl.program_id(2)
    batch, head = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    line_of_order = num_columns + notes_of
    order += batch * num_rows * line_of_order
    notes = order + num_columns
    lines = tile * lines_of + tl.arange(0, lines_of)
    rows, is_line = lines // groups, lines < num_rows * groups
    own_counts = tl.load(notes + rows * line_of_order, mask=is_line, other=0)
    own_leaders = tl.load(notes + rows * line_of_order + 1, mask=is_line, other=-1)
    places, value_places = tl.arange(0, dim_of), tl.arange(0, value_dim_of)
    starts = batch * query_batch + (head * groups + lines % groups) * query_head + rows * query_row
    is_number = is_line[:, None] & (places < dim)
    queries = tl.load(query + starts[:, None] + places, mask=is_number, other=0.0)
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    first, end = part * blocks_of, tl.minimum((part + 1) * blocks_of, tl.cdiv(tl.max(own_counts), block_of))
    num_shared = tl.minimum(tl.load(notes + 2) // block_of, end) - first  # blocks that all queries share
    num_shared = tl.maximum(num_shared, 0)
    longest = tl.load(notes + 3)
    first_row = tile * lines_of // groups
    num_here = tl.minimum(((tile + 1) * lines_of - 1) // groups, num_rows - 1) - first_row + 1
    top = tl.full((lines_of,), -1e30, dtype=tl.float32)  # under every score
    total = tl.zeros((lines_of,), dtype=tl.float32)
    found = tl.zeros((lines_of, value_dim_of), dtype=tl.float32)
    # First the shared blocks, then each other block once for every leader of the tile's queries.
    for item in range(num_shared + tl.maximum(end - first - num_shared, 0) * num_here):
        is_shared, after = item < num_shared, item - num_shared
        block = first + tl.where(is_shared, item, num_shared + after // num_here)
        row = first_row + tl.maximum(after, 0) % num_here
        leader = tl.where(is_shared, longest, tl.load(notes + row * line_of_order + 1))
        is_led = is_shared | (own_leaders == leader)
        if is_shared | (tl.min(tl.where(is_led, rows, num_rows)) == row):
            ranks = block * block_of + tl.arange(0, block_of)
            is_key = ranks < tl.load(notes + leader * line_of_order)
            column = tl.load(order + leader * line_of_order + ranks, mask=is_key, other=0)
            key_places = keys + column[None, :] * key_column + places[:, None]
            tile_keys = tl.load(key_places, mask=is_key[None, :] & (places < dim)[:, None], other=0.0)
            own_places = values + column[:, None] * value_column + value_places
            tile_values = tl.load(own_places, mask=is_key[:, None] & (value_places < value_dim), other=0.0)
            scores = tl.dot(queries, tile_keys, input_precision="ieee") * scale
            scores = tl.where(ranks < own_counts[:, None], scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            kept, weights = tl.exp2(top - new_top), tl.exp2(scores - new_top[:, None])
            new_total = total * kept + tl.sum(weights, 1)
            weighted = weights.to(tile_values.dtype)
            new_found = tl.dot(weighted, tile_values, found * kept[:, None], input_precision="ieee")
            is_own = is_led & (block * block_of < own_counts)  # others have numbers of no meaning
            top, total = tl.where(is_own, new_top, top), tl.where(is_own, new_total, total)
            found = tl.where(is_own[:, None], new_found, found)
    if first < end:
        slots = (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_rows * groups + lines
        tl.store(tops + slots, top, mask=is_line)
        tl.store(totals + slots, total, mask=is_line)
        is_value = is_line[:, None] & (value_places < value_dim)
        tl.store(sums + slots[:, None] * value_dim + value_places, found, mask=is_value)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _add_parts(  # type: ignore[no-untyped-def]
    sums, tops, totals, order, output, num_rows, num_columns, num_heads, groups, value_dim,
    lines_of: tl.constexpr, part_of: tl.constexpr, notes_of: tl.constexpr, value_dim_of: tl.constexpr,
):  # fmt: skip
    """One tile of lines: the parts of each in turn."""
    lines, places = tl.program_id(0) * lines_of + tl.arange(0, lines_of), tl.arange(0, value_dim_of)
    batch, rows, is_line = tl.program_id(1) // num_heads, lines // groups, lines < num_rows * groups
    all_rows = batch * num_rows + rows
    counts = tl.load(order + all_rows * (num_columns + notes_of) + num_columns, mask=is_line, other=0)
    top = tl.full((lines_of,), -1e30, dtype=tl.float32)
    total = tl.zeros((lines_of,), dtype=tl.float32)
    found = tl.zeros((lines_of, value_dim_of), dtype=tl.float32)
    for part in range(tl.cdiv(tl.max(counts), part_of)):
        is_own = part * part_of < counts
        slots = (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_rows * groups + lines
        own_top = tl.load(tops + slots, mask=is_own, other=-1e30)
        new_top = tl.maximum(top, own_top)
        kept, share = tl.exp2(top - new_top), tl.where(is_own, tl.exp2(own_top - new_top), 0.0)
        total = total * kept + tl.load(totals + slots, mask=is_own, other=0.0) * share
        is_number = is_own[:, None] & (places < value_dim)
        own = tl.load(sums + slots[:, None] * value_dim + places, mask=is_number, other=0.0)
        found = found * kept[:, None] + own * share[:, None]
        top = new_top
    found = found / tl.where(counts > 0, total, 1.0)[:, None]
    heads = (tl.program_id(1) % num_heads) * groups + lines % groups
    starts = (all_rows.to(tl.int64) * num_heads * groups + heads) * value_dim
    is_number = is_line[:, None] & (places < value_dim)
    tl.store(output + starts[:, None] + places, found.to(output.dtype.element_ty), mask=is_number)


@torch.library.custom_op("hf_specdec::attend_in_order", mutates_args=())
def attend_in_order(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys: `(B, M, Hq, Dv)`; zeros where no key is seen.

    Args:
        order: of `key_order`, contiguous.
    """
    batch, num_heads, num_rows, dim = query.shape
    num_kv_heads, num_columns, value_dim = key.shape[1], key.shape[2], value.shape[3]
    query, key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (query, key, value))
    groups, part_of = num_heads // num_kv_heads, BLOCK * BLOCKS
    parts, num_lines = triton.cdiv(num_columns, part_of), num_rows * groups
    lines = (parts, batch * num_kv_heads, num_lines)
    sums = query.new_empty((*lines, value_dim), dtype=torch.float32)
    tops, totals = (query.new_empty(lines, dtype=torch.float32) for _ in range(2))
    output = query.new_empty((batch, num_rows, num_heads, value_dim))
    sizes = {"dim_of": max(triton.next_power_of_2(dim), 16), "value_dim_of": max(triton.next_power_of_2(value_dim), 16)}
    _attend_parts[triton.cdiv(num_lines, LINES), batch * num_kv_heads, parts](
        query, key, value, order, sums, tops, totals,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        num_rows, num_columns, num_kv_heads, groups, scaling * 1.4426950408889634, dim, value_dim,
        lines_of=LINES, block_of=BLOCK, blocks_of=BLOCKS, notes_of=NOTES, **sizes,
    )  # fmt: skip
    _add_parts[triton.cdiv(num_lines, LINES), batch * num_kv_heads](
        sums, tops, totals, order, output, num_rows, num_columns, num_kv_heads, groups, value_dim,
        lines_of=LINES, part_of=part_of, notes_of=NOTES, value_dim_of=sizes["value_dim_of"],
    )  # fmt: skip
    return output


@attend_in_order.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    batch, num_heads, num_rows = query.shape[:3]
    return query.new_empty((batch, num_rows, num_heads, value.shape[3]))
