/* Tiles for x86 with AVX2, with AVX-512 and with its products of pairs of bf16; elsewhere there are none. Halves are
 * multiplied and summed up as fp32. */

#include "halves.h"
#include "tiles.h"

#include <stddef.h>

#ifdef AVX2
#include <immintrin.h>

enum { LINE = 64 }; /* bytes that memory delivers at once */
enum { NEAR = 2 };  /* tokens: a tile of more computes for so long that the second cache is near enough */

/* How many of them a tile asks for each time; those of AVX2 read up to one and a half. */
#define LINES(outputs_, lanes_, Weight) (1 + ((outputs_) * (lanes_) * (int)sizeof(Weight) - LINE) / LINE)

/* A tile of so many tokens and outputs. What follows them is that of all tiles of a set: its name, the instructions,
 * how many numbers they multiply at once, the types of a token's and a weight's number, how either is loaded, the types
 * of what is loaded and of a sum, how a product is added to a sum, and how the totals of sums are written. */
#define DEFINE_TILE(tokens_, outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, load_token, load_weight, Lanes,     \
                    Sum, add, put_totals)                                                                              \
    INSTRUCTIONS static void name_##_##tokens_##_##outputs_(const void *tokens, const void *weights, int64_t num_in,   \
                                                            const char *ahead, int64_t step, float *products,          \
                                                            int64_t space) {                                           \
        Sum sums[tokens_][outputs_];                                                                                   \
        UNROLLED for (int t = 0; t < tokens_; t++) UNROLLED for (int o = 0; o < outputs_; o++) sums[t][o] = (Sum){0};  \
        for (int64_t i = 0; i < num_in; i += lanes_) {                                                                 \
            UNROLLED for (int l = 0; l < LINES(outputs_, lanes_, Weight); l++, ahead += step)                          \
                _mm_prefetch(ahead, (tokens_) <= NEAR ? _MM_HINT_T0 : _MM_HINT_T1);                                  \
            Lanes rows[outputs_];                                                                                      \
            UNROLLED for (int o = 0; o < outputs_; o++) rows[o] =                                                      \
                load_weight((const Weight *)weights + o * num_in + i);                                                 \
            UNROLLED for (int o = 0; o < outputs_; o++) __asm__("" : "+v"(rows[o])); /* else each token loads it */    \
            UNROLLED for (int t = 0; t < tokens_; t++) {                                                               \
                Lanes token = load_token((const Token *)tokens + t * num_in + i);                                      \
                UNROLLED for (int o = 0; o < outputs_; o++) sums[t][o] = add(sums[t][o], token, rows[o]);              \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int t = 0; t < tokens_; t++) put_totals(sums[t], outputs_, products + t * space);                \
    }

#define DEFINE_TILES(outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, ...)                                        \
    DEFINE_TILE(1, outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                  \
    DEFINE_TILE(2, outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                  \
    DEFINE_TILE(3, outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                  \
    DEFINE_TILE(4, outputs_, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                  \
    DEFINE_TILE(1, 1, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                         \
    DEFINE_TILE(2, 1, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                         \
    DEFINE_TILE(3, 1, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                         \
    DEFINE_TILE(4, 1, name_, INSTRUCTIONS, lanes_, Token, Weight, __VA_ARGS__)                                         \
    static const Tiles name_ = {                                                                                       \
        lanes_,                                                                                                        \
        outputs_,                                                                                                      \
        LINES(outputs_, lanes_, Weight),                                                                               \
        sizeof(Token) == sizeof(float),                                                                                \
        {name_##_1_##outputs_, name_##_2_##outputs_, name_##_3_##outputs_, name_##_4_##outputs_},                      \
        {name_##_1_1, name_##_2_1, name_##_3_1, name_##_4_1},                                                          \
    };

/* Of AVX2: 12 sums, 3 rows and a token are 16 registers. */

AVX2 static inline __m256 add_256(__m256 sum, __m256 token, __m256 row) { return _mm256_fmadd_ps(token, row, sum); }

/* Of three sums, or one, in the same order; what follows the last total, up to the fourth, is undefined. */
AVX2 static inline void put_totals_256(const __m256 *sums, int count, float *totals) {
    __m256 first = _mm256_hadd_ps(sums[0], sums[count > 1]), last = _mm256_hadd_ps(sums[count - 1], sums[count - 1]);
    __m256 pairs = _mm256_hadd_ps(first, last);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    if (count == 1) totals[0] = _mm_cvtss_f32(four);
    else _mm_storeu_ps(totals, four);
}

DEFINE_TILES(3, fp32_avx2, AVX2, 8, float, float, _mm256_loadu_ps, _mm256_loadu_ps, __m256, __m256, add_256,
             put_totals_256)
DEFINE_TILES(3, bf16_avx2, AVX2, 8, float, uint16_t, _mm256_loadu_ps, bf16_256, __m256, __m256, add_256,
             put_totals_256)
DEFINE_TILES(3, fp16_avx2, AVX2, 8, float, uint16_t, _mm256_loadu_ps, fp16_256, __m256, __m256, add_256,
             put_totals_256)

/* 24 sums, 6 rows and a token are 31 of 32 registers. */
#define AVX512 __attribute__((target("avx512f,fma,f16c")))

AVX512 static inline __m512 bf16_512(const uint16_t *halves) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
AVX512 static inline __m512 fp16_512(const uint16_t *halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}
AVX512 static inline __m512 add_512(__m512 sum, __m512 token, __m512 row) { return _mm512_fmadd_ps(token, row, sum); }
AVX512 static inline void put_totals_512(const __m512 *sums, int count, float *totals) {
    __m256 halves[TILE_OUTPUTS];
    UNROLLED for (int o = 0; o < count; o++) {
        __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(sums[o]), 1);
        halves[o] = _mm256_add_ps(_mm512_castps512_ps256(sums[o]), _mm256_castpd_ps(high));
    }
    put_totals_256(halves, count == 1 ? 1 : 3, totals);
    if (count > 3) put_totals_256(halves + 3, 3, totals + 3);
}

DEFINE_TILES(6, fp32_avx512, AVX512, 16, float, float, _mm512_loadu_ps, _mm512_loadu_ps, __m512, __m512, add_512,
             put_totals_512)
DEFINE_TILES(6, bf16_avx512, AVX512, 16, float, uint16_t, _mm512_loadu_ps, bf16_512, __m512, __m512, add_512,
             put_totals_512)
DEFINE_TILES(6, fp16_avx512, AVX512, 16, float, uint16_t, _mm512_loadu_ps, fp16_512, __m512, __m512, add_512,
             put_totals_512)

#if (defined(__clang__) && __clang_major__ >= 10) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAS_PAIRS __builtin_cpu_supports("avx512bf16")
#define AVX512_BF16 __attribute__((target("avx512f,avx512bf16,fma,f16c")))

AVX512_BF16 static inline __m512i pairs(const uint16_t *halves) { return _mm512_loadu_si512(halves); }
AVX512_BF16 static inline __m512 add_pairs(__m512 sum, __m512i token, __m512i row) {
    return _mm512_dpbf16_ps(sum, (__m512bh)token, (__m512bh)row);
}

DEFINE_TILES(6, bf16_pairs, AVX512_BF16, 32, uint16_t, uint16_t, pairs, pairs, __m512i, __m512, add_pairs,
             put_totals_512)
#else
#define HAS_PAIRS 0
static const Tiles bf16_pairs;
#endif

const Tiles *tiles_for(int kind, int64_t num_in) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NULL;
    if (kind == BF16 && HAS_PAIRS && num_in % 32 == 0) return &bf16_pairs;
    if (__builtin_cpu_supports("avx512f") && num_in % 16 == 0)
        return kind == FP32 ? &fp32_avx512 : kind == BF16 ? &bf16_avx512 : &fp16_avx512;
    if (num_in % 8) return NULL;
    return kind == FP32 ? &fp32_avx2 : kind == BF16 ? &bf16_avx2 : &fp16_avx2;
}

AVX2 void widen(const uint16_t *halves, int kind, int64_t count, float *floats) {
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(floats + i, kind == FP16 ? fp16_256(halves + i) : bf16_256(halves + i));
}
#else
const Tiles *tiles_for(int kind, int64_t num_in) {
    (void)kind, (void)num_in;
    return NULL;
}
#endif
