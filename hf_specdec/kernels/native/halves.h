/* Numbers of half the width, one or eight at a time: see FP32, BF16 and FP16 in tiles.h. */

#ifndef HF_SPECDEC_HALVES_H
#define HF_SPECDEC_HALVES_H

#include "exponential.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>

static inline int64_t size_of(int kind) { return kind == FP32 ? 4 : 2; }

/* Eight of them as fp32. */
AVX2 static inline __m256 widened_bf16(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
AVX2 static inline __m256 bf16_256(const uint16_t *halves) {
    return widened_bf16(_mm_loadu_si128((const __m128i *)halves));
}
AVX2 static inline __m256 fp16_256(const uint16_t *halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

/* Eight of fp32, rounded to the nearest; no number stays none. */
AVX2 static inline __m128i as_fp16(__m256 eight) { return _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT); }
AVX2 static inline __m128i as_bf16(__m256 eight) {
    __m256i bits = _mm256_castps_si256(eight), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(eight, eight, _CMP_UNORD_Q));
    near = _mm256_srli_epi32(near, 16);
    near = _mm256_blendv_epi8(near, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), none);
    return _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
}

/* Eight numbers from a place on. */
AVX2 static inline __m256 eight_at(const void *numbers, int kind, int64_t place) {
    if (kind == FP32) return _mm256_loadu_ps((const float *)numbers + place);
    const uint16_t *halves = (const uint16_t *)numbers + place;
    return kind == BF16 ? bf16_256(halves) : fp16_256(halves);
}

/* Put eight numbers from a place on, rounded to the nearest. */
AVX2 static inline void put_eight(void *numbers, int kind, int64_t place, __m256 eight) {
    if (kind == FP32) _mm256_storeu_ps((float *)numbers + place, eight);
    else _mm_storeu_si128((__m128i *)((uint16_t *)numbers + place), kind == BF16 ? as_bf16(eight) : as_fp16(eight));
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
