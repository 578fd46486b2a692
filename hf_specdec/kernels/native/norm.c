/* RMSNorm of a few tokens, with the roundings of transformers': the normed numbers are rounded to the tokens' precision,
 * and their products with the weights once more. For x86 with AVX2. */

#include "core.h"
#include "halves.h"
#include "replay.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>
#include <math.h>

enum { LANES = 8 }; /* floats of a register; a token has a multiple of them */

AVX2 static inline __m256 rounded(__m256 eight, int kind) {
    if (kind == FP32) return eight;
    return kind == BF16 ? widened_bf16(as_bf16(eight)) : _mm256_cvtph_ps(as_fp16(eight));
}

AVX2 static inline float sum_of(__m256 eight) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* One token; called with a constant kind, for each of which there is code of its own then. */
AVX2 static inline void norm(const void *token, const void *weights, void *out, int64_t size, float epsilon, int kind) {
    __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t place = 0;
    for (; place + 4 * LANES <= size; place += 4 * LANES)
        UNROLLED for (int r = 0; r < 4; r++) {
            __m256 eight = eight_at(token, kind, place + r * LANES);
            squares[r] = _mm256_fmadd_ps(eight, eight, squares[r]);
        }
    for (; place < size; place += LANES) {
        __m256 eight = eight_at(token, kind, place);
        squares[0] = _mm256_fmadd_ps(eight, eight, squares[0]);
    }
    float sum = sum_of(_mm256_add_ps(_mm256_add_ps(squares[0], squares[1]), _mm256_add_ps(squares[2], squares[3])));
    __m256 scale = _mm256_set1_ps(1.0f / sqrtf(sum / (float)size + epsilon));
    for (place = 0; place < size; place += LANES) {
        __m256 normed = rounded(_mm256_mul_ps(eight_at(token, kind, place), scale), kind);
        put_eight(out, kind, place, _mm256_mul_ps(eight_at(weights, kind, place), normed));
    }
}

AVX2 void norms(const char *tokens, const void *weights, char *out, int64_t count, int64_t size, float epsilon,
                       int kind) {
    for (int64_t row = size * size_of(kind); count > 0; count--, tokens += row, out += row) {
        if (kind == FP32) norm(tokens, weights, out, size, epsilon, FP32);
        else if (kind == BF16) norm(tokens, weights, out, size, epsilon, BF16);
        else norm(tokens, weights, out, size, epsilon, FP16);
    }
}

PyObject *core_rms_norm(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long tokens, weights, out;
    long long count, size;
    float epsilon;
    int kind;
    if (!PyArg_ParseTuple(args, "KKKLLfi", &tokens, &weights, &out, &count, &size, &epsilon, &kind)) return NULL;
    if (kind < FP32 || kind > FP16 || size < LANES || size % LANES || tiles_for(FP32, size) == NULL) {
        PyErr_SetString(PyExc_ValueError, "no norm of such a size, of such numbers, or on this processor");
        return NULL;
    }
    norms((const char *)(uintptr_t)tokens, (const void *)(uintptr_t)weights, (char *)(uintptr_t)out, count, size,
          epsilon, kind);
    return new_none();
}
#endif
