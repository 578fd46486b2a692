/* e to a number, in loops that compilers vectorise. */

#ifndef HF_SPECDEC_EXPONENTIAL_H
#define HF_SPECDEC_EXPONENTIAL_H

#include <stdint.h>
#include <string.h>

#define LOWEST -87.0f      /* e to it is nearly the smallest normal float */
#define ROUNDS 12582912.0f /* 1.5 * 2**23: what is added to it loses its fraction */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Of the rest's polynomial, highest power first; its last two coefficients are 1. */
static const float COEFFICIENTS[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                     4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f
#define LN_2_HIGH 0.693359375f /* less LN_2_LOW is the logarithm of 2 */
#define LN_2_LOW 2.12194440e-4f

/* e to a power of at most 0, within 2e-7 of it: two to the next whole number, times a polynomial of the rest. 0 below
 * LOWEST; no number of what is none. */
static inline float exponential(float power) {
    float shifted = power * LOG2_E + ROUNDS, whole = shifted - ROUNDS;
    float rest = (power - whole * LN_2_HIGH) + whole * LN_2_LOW, value = COEFFICIENTS[0];
    for (int degree = 1; degree < 6; degree++) value = value * rest + COEFFICIENTS[degree];
    value = value * rest * rest + rest + 1.0f;
    value *= float_of((bits_of(shifted) + 127) << 23); /* the whole number stands in the last bits */
    return power < LOWEST ? 0.0f : value;
}

#endif
