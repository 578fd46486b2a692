/* Sums of weighted rows, for x86 with AVX2: 8 sums, 2 registers of a row and a weight. */

#include "halves.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>

enum { LANES = 8 }; /* floats of a register */

#define DEFINE_MIX(kind_, Value, load, rows_)                                                                          \
    AVX2 static void kind_##_mix_##rows_(const float *weights, int64_t weight_space, const void *values,               \
                                         int64_t value_space, int64_t count, int64_t width, float *sums,               \
                                         int64_t sum_space, int64_t ahead) {                                           \
        for (int64_t d = 0; d < width; d += MIX_WIDTH) {                                                               \
            __m256 low[rows_], high[rows_];                                                                            \
            UNROLLED for (int r = 0; r < rows_; r++) {                                                                 \
                low[r] = _mm256_loadu_ps(sums + r * sum_space + d);                                                    \
                high[r] = _mm256_loadu_ps(sums + r * sum_space + d + LANES);                                           \
            }                                                                                                          \
            for (int64_t k = 0; k < count; k++) {                                                                      \
                const Value *row = (const Value *)values + k * value_space + d;                                        \
                _mm_prefetch((const char *)row + ahead, _MM_HINT_T0);                                                  \
                __m256 first = load(row), second = load(row + LANES);                                                  \
                UNROLLED for (int r = 0; r < rows_; r++) {                                                             \
                    __m256 weight = _mm256_broadcast_ss(weights + r * weight_space + k);                               \
                    low[r] = _mm256_fmadd_ps(weight, first, low[r]);                                                   \
                    high[r] = _mm256_fmadd_ps(weight, second, high[r]);                                                \
                }                                                                                                      \
            }                                                                                                          \
            UNROLLED for (int r = 0; r < rows_; r++) {                                                                 \
                _mm256_storeu_ps(sums + r * sum_space + d, low[r]);                                                    \
                _mm256_storeu_ps(sums + r * sum_space + d + LANES, high[r]);                                           \
            }                                                                                                          \
        }                                                                                                              \
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
