/* Numbers of half the width, one or eight at a time: see FP32, BF16 and FP16 in tiles.h. */

#ifndef HF_SPECDEC_HALVES_H
#define HF_SPECDEC_HALVES_H

#include "exponential.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>

static inline int64_t size_of(int kind) { return kind == FP32 ? 4 : 2; }

/* Eight of them as fp32. */
AVX2 static inline __m256 bf16_256(const uint16_t *halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves)), 16));
}
AVX2 static inline __m256 fp16_256(const uint16_t *halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

/* The number at a place. */
AVX2 static inline float number_at(const void *numbers, int kind, int64_t place) {
    if (kind == FP32) return ((const float *)numbers)[place];
    uint16_t half = ((const uint16_t *)numbers)[place];
    return kind == FP16 ? _cvtsh_ss(half) : float_of((uint32_t)half << 16);
}

/* Put a number at a place, rounded to the nearest. */
AVX2 static inline void put_number(void *numbers, int kind, int64_t place, float number) {
    uint32_t bits = bits_of(number);
    uint16_t *halves = numbers;
    if (kind == FP32) ((float *)numbers)[place] = number;
    else if (kind == FP16) halves[place] = (uint16_t)_cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT);
    else if (number != number) halves[place] = (uint16_t)(bits >> 16 | 0x40); /* no number stays none */
    else halves[place] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
#endif

#endif
