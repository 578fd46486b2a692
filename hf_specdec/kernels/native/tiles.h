/* Products of a few tokens with a few rows of weights, and sums of weighted rows. */

#ifndef HF_SPECDEC_TILES_H
#define HF_SPECDEC_TILES_H

#include <stdint.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma,f16c"))) /* the least that there are products for */
#define UNROLLED _Pragma("GCC unroll 8")
#endif

/* Runs work on several threads: libgomp's GOMP_parallel. */
typedef void Team(void (*work)(void *), void *job, unsigned num_threads, unsigned flags);

static inline int64_t min_of(int64_t one, int64_t other) { return one < other ? one : other; }

enum { FP32, BF16, FP16 }; /* as in hf_specdec/kernels/cpu.py */
enum { TILE_TOKENS = 4, TILE_OUTPUTS = 6, TILE_SPACE = 8 }; /* the most of a tile; what it may write for a token */

/* The products of some tokens with some rows of weights, a token's `space` numbers after those of the one before.
 * Meanwhile memory is asked for what lies `ahead`, a line every `step` bytes: asked for at once, it would be waited
 * for. */
typedef void Tile(const void *tokens, const void *weights, int64_t num_in, const char *ahead, int64_t step,
                  float *products, int64_t space);

/* Tiles for one kind of weights; the first is of one token. */
typedef struct {
    int lanes;         /* numbers of a row that are multiplied at once; a row is a multiple of them */
    int outputs;       /* rows of weights in `whole`; in `single` it is one */
    int lines;         /* of memory that `whole` asks for each time that it multiplies */
    int widens_tokens; /* whether tokens are read in fp32 */
    Tile *whole[TILE_TOKENS], *single[TILE_TOKENS];
} Tiles;

/* The fastest on this processor for rows of so many numbers; NULL where there are none. */
const Tiles *tiles_for(int kind, int64_t num_in);
/* Halves as fp32; a multiple of 8. */
void widen(const uint16_t *halves, int kind, int64_t count, float *floats);

/* Adds `count` rows of `width` values to the sums of some tokens, each by the token's weight for the row; in fp32. The
 * spaces are from one token's weights, one row, and one token's sums to the next. Meanwhile memory is asked for what
 * lies so many bytes ahead of the values. */
typedef void Mix(const float *weights, int64_t weight_space, const void *values, int64_t value_space, int64_t count,
                 int64_t width, float *sums, int64_t sum_space, int64_t ahead);

enum { MIX_WIDTH = 8 };                 /* widths are a multiple of it */
extern Mix *const mixes[][TILE_TOKENS]; /* by the kind of the values, and the number of tokens less one */

#endif
