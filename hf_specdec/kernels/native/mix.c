/* Sums of weighted rows, for x86 with AVX2: 8 sums, 2 registers of a row and a weight; 1 of the last 8 numbers. */

#include "halves.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>

enum { LANES = 8 }; /* floats of a register */

/* Of so many rows and registers of each. */
#define DEFINE_BLOCK(kind_, Value, load, rows_, registers_)                                                            \
    AVX2 static inline void kind_##_block_##rows_##_##registers_(                                                      \
        const float *weights, int64_t weight_space, const Value *values, int64_t value_space, int64_t count,           \
        float *sums, int64_t sum_space, int64_t ahead) {                                                               \
        __m256 block[rows_][registers_];                                                                               \
        UNROLLED for (int r = 0; r < rows_; r++) UNROLLED for (int l = 0; l < registers_; l++) block[r][l] =           \
            _mm256_loadu_ps(sums + r * sum_space + l * LANES);                                                         \
        for (int64_t k = 0; k < count; k++, values += value_space) {                                                   \
            _mm_prefetch((const char *)values + ahead, _MM_HINT_T0);                                                   \
            __m256 row[registers_];                                                                                    \
            UNROLLED for (int l = 0; l < registers_; l++) row[l] = load(values + l * LANES);                           \
            UNROLLED for (int r = 0; r < rows_; r++) {                                                                 \
                __m256 weight = _mm256_broadcast_ss(weights + r * weight_space + k);                                   \
                UNROLLED for (int l = 0; l < registers_; l++) block[r][l] =                                            \
                    _mm256_fmadd_ps(weight, row[l], block[r][l]);                                                      \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < rows_; r++) UNROLLED for (int l = 0; l < registers_; l++)                         \
            _mm256_storeu_ps(sums + r * sum_space + l * LANES, block[r][l]);                                           \
    }
#define DEFINE_MIX(kind_, Value, load, rows_)                                                                          \
    DEFINE_BLOCK(kind_, Value, load, rows_, 1)                                                                         \
    DEFINE_BLOCK(kind_, Value, load, rows_, 2)                                                                         \
    AVX2 static void kind_##_mix_##rows_(const float *weights, int64_t weight_space, const void *values,               \
                                         int64_t value_space, int64_t count, int64_t width, float *sums,               \
                                         int64_t sum_space, int64_t ahead) {                                           \
        const Value *row = values;                                                                                     \
        int64_t d = 0;                                                                                                 \
        for (; d + LANES < width; d += 2 * LANES)                                                                      \
            kind_##_block_##rows_##_2(weights, weight_space, row + d, value_space, count, sums + d, sum_space, ahead); \
        if (d < width)                                                                                                 \
            kind_##_block_##rows_##_1(weights, weight_space, row + d, value_space, count, sums + d, sum_space, ahead); \
    }
#define DEFINE_MIXES(kind_, Value, load)                                                                               \
    DEFINE_MIX(kind_, Value, load, 1) DEFINE_MIX(kind_, Value, load, 2)                                                \
    DEFINE_MIX(kind_, Value, load, 3) DEFINE_MIX(kind_, Value, load, 4)

DEFINE_MIXES(fp32, float, _mm256_loadu_ps)
DEFINE_MIXES(bf16, uint16_t, bf16_256)
DEFINE_MIXES(fp16, uint16_t, fp16_256)

Mix *const mixes[][TILE_TOKENS] = {
    [FP32] = {fp32_mix_1, fp32_mix_2, fp32_mix_3, fp32_mix_4},
    [BF16] = {bf16_mix_1, bf16_mix_2, bf16_mix_3, bf16_mix_4},
    [FP16] = {fp16_mix_1, fp16_mix_2, fp16_mix_3, fp16_mix_4},
};
#endif
