/* Tiles of packed weights for one set of instructions. packed.c defines what they need before it includes this file, and
 * there is no guard, as it does so for each set:
 *
 *   TARGET, NAMED(name)                   attribute of functions; a name of this set
 *   LANES, MOST                           rows that are multiplied at once; most tokens of a tile
 *   Integers, Floats                      LANES numbers of 32 bits
 *   codes_at, halves_at, bytes_at, signed_at   LANES codes of four columns, fp16 numbers, bytes and signed bytes
 *   all                                   a number for all lanes
 *   low_bits(codes, mask), moved_down(codes, bits), moved_up(codes, bits)   of bytes, all but `low_bits` with others'
 *   add_products(sums, weights, token)    adds the products of each lane's four codes with a token's four
 *   add_eight_bits(...)                   the same of Q8_0's codes, less OFFSET
 *   floats_of, same, multiply, add_multiplied, put_floats */

/* The scale of rows from `first` on in a block; Q6_K has one for each half. */
TARGET static inline Floats NAMED(scale_of)(int format, const uint8_t *scales, int64_t block, int half, int first) {
    int64_t place = block % SUPER_BLOCKS;
    const uint8_t *halves = scales + scale_bytes_of(format) * (block - (format >= Q4_K ? place : 0)) + 2 * first;
    if (format < Q4_K) return halves_at(halves);
    const uint8_t *bytes = halves - first + 2 * GROUP;
    if (format == Q4_K) return multiply(halves_at(halves), bytes_at(bytes + (2 + place) * GROUP));
    return multiply(halves_at(halves), signed_at(bytes + (2 * place + half) * GROUP));
}

/* What is added to each number of rows from `first` on: of Q4_1 and Q4_K. */
TARGET static inline Floats NAMED(least_of)(int format, const uint8_t *scales, int64_t block, int first) {
    int64_t place = block % SUPER_BLOCKS;
    const uint8_t *halves = scales + scale_bytes_of(format) * (block - (format == Q4_K ? place : 0)) + 2 * first;
    if (format == Q4_1) return halves_at(halves + 2 * GROUP);
    const uint8_t *bytes = halves - first + 4 * GROUP;
    return multiply(multiply(halves_at(halves + 2 * GROUP), same(-1.0f)), bytes_at(bytes + (SUPER_BLOCKS + place) * GROUP));
}

/* The codes of four columns: those of a block's eight that `line` says. */
TARGET static inline Integers NAMED(line_of)(int format, const uint8_t *codes, int line) {
    if (format == Q8_0) return codes_at(codes + line * LINE_BYTES);
    Integers low = codes_at(codes + line % 4 * LINE_BYTES);
    low = low_bits(line < 4 ? low : moved_down(low, 4), 0x0F);
    if (format != Q6_K) return low;
    Integers high = moved_down(codes_at(codes + (4 + line / 4) * LINE_BYTES), 2 * (line % 4));
    return either(low, moved_up(low_bits(high, 0x03), 4));
}

/* The sums of `count` tokens for the rows from `first` on of a group. Meanwhile memory is asked for what is `ahead`. */
TARGET static inline ALWAYS void NAMED(tile)(int format, int count, const uint8_t *codes, const uint8_t *scales,
                                             const TokenBlock *tokens, int64_t num_blocks, int64_t ahead, int first,
                                             float *sums) {
    const int num_halves = format == Q6_K ? 2 : 1, num_lines = 8 / num_halves, code_bytes = code_bytes_of(format);
    Floats totals[MOST];
    UNROLLED for (int t = 0; t < count; t++) totals[t] = same(0.0f);
    codes += 4 * first;
    for (int64_t block = 0; block < num_blocks; block++, codes += code_bytes, tokens += count) {
        if (ahead && first == 0)
            UNROLLED for (int l = 0; l < code_bytes; l += LINE_BYTES)
                _mm_prefetch((const char *)codes + ahead + l, _MM_HINT_T0);
        UNROLLED for (int half = 0; half < num_halves; half++) {
            Integers products[MOST];
            UNROLLED for (int t = 0; t < count; t++) products[t] =
                all(num_halves == 1 ? tokens[t].start : tokens[t].starts[half]);
            UNROLLED for (int l = 0; l < num_lines; l++) {
                int line = half * num_lines + l;
                Integers weights = NAMED(line_of)(format, codes, line);
                UNROLLED for (int t = 0; t < count; t++) {
                    const int8_t *token = tokens[t].codes + 4 * line;
                    if (format == Q8_0) products[t] = add_eight_bits(products[t], weights, token);
                    else products[t] = add_products(products[t], weights, token);
                }
            }
            Floats scale = NAMED(scale_of)(format, scales, block, half, first);
            UNROLLED for (int t = 0; t < count; t++) totals[t] =
                add_multiplied(totals[t], floats_of(products[t]), multiply(scale, same(tokens[t].scale)));
        }
        if (format != Q4_1 && format != Q4_K) continue;
        Floats least = NAMED(least_of)(format, scales, block, first);
        UNROLLED for (int t = 0; t < count; t++) totals[t] = add_multiplied(totals[t], least, same(tokens[t].total));
    }
    UNROLLED for (int t = 0; t < count; t++) put_floats(sums + t * GROUP + first, totals[t]);
}
