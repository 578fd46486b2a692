/* Weights of 8, 6 and 4 bits, and their products with tokens that are rounded to 8 bits by block.
 *
 * 16 rows of weights are a group, and their numbers are interleaved: for each block of 32 columns the codes of a group
 * are lines of 64 bytes, four columns of each row in a line. A line of 4-bit codes holds the columns 4j to 4j + 3 of a
 * block in the low halves of its bytes, and the columns 4j + 16 to 4j + 19 in the high halves. The codes of all groups
 * come first, then their scales. A row is padded to whole blocks, and the last group to 16 rows. The formats are those
 * of GGUF files:
 *
 *           bytes of a block's codes, and of its scales, for 16 rows   a number
 *   Q8_0    512, 32 (scale in fp16)                                    scale * (code - 128)
 *   Q4_0    256, 32 (scale in fp16)                                    scale * (code - 8)
 *   Q4_1    256, 64 (scale and least in fp16)                          scale * code + least
 *   Q4_K    256, 40                                                    super * scale * code - super_least * least
 *   Q6_K    384, 36                                                    super * scale * (code - 32)
 *
 * Q4_K and Q6_K have numbers in fp16 for eight blocks: Q4_K's scales are (super, super_least, 8 x scale, 8 x least), the
 * last 16 in bytes; Q6_K's are (super, 16 x scale), two scales a block in signed bytes. A block of Q6_K is four lines
 * of the codes' lowest 4 bits and two of their highest 2 bits, the columns 4j + 16h to 4j + 3 + 16h in bits 2j and
 * 2j + 1 of line h. */

#ifndef HF_SPECDEC_PACKED_H
#define HF_SPECDEC_PACKED_H

#include "tiles.h"

enum { Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, NUM_FORMATS }; /* as in hf_specdec/kernels/packed.py */
enum { GROUP = 16, BLOCK_COLUMNS = 32, SUPER_BLOCKS = 8, LINE_BYTES = 64 };

/* 32 numbers of a token: scale * code each. */
typedef struct {
    int8_t codes[BLOCK_COLUMNS];
    int32_t start, starts[2]; /* what sums of products, and those of each half, begin with: codes of weights have no sign */
    float scale, total;       /* the total of the numbers */
} TokenBlock;

/* The product of tokens with packed weights: each sum has one order for any number of tokens and of threads. */
typedef struct {
    const void *tokens, *bias; /* (num_tokens, num_in) and (num_out); a bias may be NULL */
    const uint8_t *weights;
    void *out; /* (num_tokens, num_out) */
    int64_t num_tokens, num_out, num_in;
    int kind, format;
    TokenBlock *blocks;      /* from here on: what `run_packed` needs itself */
    int64_t *next, num_taken; /* the first group that no thread has taken, and how many one takes at once */
} PackedJob;

/* Compute a product; 0 where there is no memory for it. Without several threads `team` is not read. */
int run_packed(PackedJob *job, Team *team, unsigned num_threads);
/* What one of several threads does of a product, whose groups they take from `job->next`; 0 where there is no memory. */
int share_packed(PackedJob *job, unsigned num_threads);

#endif
