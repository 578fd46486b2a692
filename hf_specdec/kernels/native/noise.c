/* Exponentially distributed numbers, of uniform ones: those that torch computes one at a time, four at once. For x86 with
 * AVX2. */

#include "core.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>
#include <math.h>

enum { FOUR = 4, TERMS = 10 };
#define ERROR 1e-12 /* bound on the relative error of `minus_log` */

/* Of numbers in (0, 1], by the series of the inverse hyperbolic tangent. */
AVX2 static inline __m256d minus_log(__m256d numbers) {
    const __m256d one = _mm256_set1_pd(1.0), large = _mm256_set1_pd(0x1p52);
    __m256i bits = _mm256_castpd_si256(numbers), exponent = _mm256_srli_epi64(bits, 52);
    __m256d exponents = _mm256_castsi256_pd(_mm256_or_si256(exponent, _mm256_castpd_si256(large)));
    exponents = _mm256_sub_pd(exponents, _mm256_set1_pd(0x1p52 + 1023.0));
    bits = _mm256_and_si256(bits, _mm256_set1_epi64x(0x000FFFFFFFFFFFFF));
    __m256d mantissa = _mm256_castsi256_pd(_mm256_or_si256(bits, _mm256_castpd_si256(one)));
    __m256d is_high = _mm256_cmp_pd(mantissa, _mm256_set1_pd(1.4142135623730951), _CMP_GT_OQ);
    mantissa = _mm256_blendv_pd(mantissa, _mm256_mul_pd(mantissa, _mm256_set1_pd(0.5)), is_high);
    exponents = _mm256_add_pd(exponents, _mm256_and_pd(is_high, one));
    __m256d ratio = _mm256_div_pd(_mm256_sub_pd(mantissa, one), _mm256_add_pd(mantissa, one));
    __m256d square = _mm256_mul_pd(ratio, ratio), sum = _mm256_setzero_pd();
    for (int term = TERMS - 1; term >= 0; term--)
        sum = _mm256_add_pd(_mm256_mul_pd(sum, square), _mm256_set1_pd(2.0 / (2 * term + 1)));
    __m256d log = _mm256_add_pd(_mm256_mul_pd(exponents, _mm256_set1_pd(0.6931471805599453)), _mm256_mul_pd(ratio, sum));
    return _mm256_sub_pd(_mm256_setzero_pd(), log);
}

/* (uniform, out, count): fp64 in [0, 1), multiples of 2^-53, and fp32; `-log1p(-u)`, rounded once. */
AVX2 static void exponential(const double *uniform, float *out, int64_t count) {
    const __m256d least = _mm256_set1_pd(1.0 - ERROR), most = _mm256_set1_pd(1.0 + ERROR);
    int64_t i = 0;
    for (; i + FOUR <= count; i += FOUR) {
        __m256d wide = minus_log(_mm256_sub_pd(_mm256_set1_pd(1.0), _mm256_loadu_pd(uniform + i)));
        __m128 low = _mm256_cvtpd_ps(_mm256_mul_pd(wide, least)), high = _mm256_cvtpd_ps(_mm256_mul_pd(wide, most));
        _mm_storeu_ps(out + i, low);
        if (_mm_movemask_ps(_mm_cmpneq_ps(low, high))) /* between two numbers: the exact value decides */
            for (int64_t j = i; j < i + FOUR; j++) out[j] = (float)-log1p(-uniform[j]);
    }
    for (; i < count; i++) out[i] = (float)-log1p(-uniform[i]);
}

PyObject *core_exponential(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long uniform, out;
    long long count;
    if (!PyArg_ParseTuple(args, "KKL", &uniform, &out, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    exponential((const double *)(uintptr_t)uniform, (float *)(uintptr_t)out, count);
    Py_END_ALLOW_THREADS
    return new_none();
}
#endif
