/* Linear layers of a few tokens: every row of weights is read from memory once, whatever the number of tokens. For x86
 * with AVX2; elsewhere `has_linear` says that there are none. Halves are multiplied and summed up as fp32, and each
 * result is rounded once. */

#include "core.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define UNROLLED _Pragma("GCC unroll 8")

/* As in hf_specdec/kernels/linear.py. */
enum { FP32, BF16, FP16 };
enum { LANES = 8, TOKENS = 4, OUTPUTS = 3 }; /* of a tile: 12 sums, 3 rows of weights and a token fill 16 registers */
enum { BLOCK = 24, BLOCK_FLOATS = 24 * 1280 }; /* weights that stay in the second cache while all tokens meet them */

typedef struct {
    const float *tokens; /* (num_tokens, num_in) */
    const void *weights, *bias;
    void *out;
    int64_t num_tokens, num_out, num_in, block, next;
    int kind, has_no_memory;
} Job;

typedef void Team(void (*work)(void *), void *job, unsigned num_threads, unsigned flags); /* libgomp's GOMP_parallel */

static inline int64_t min_of(int64_t one, int64_t other) { return one < other ? one : other; }

/* Where the block that begins at an output ends. */
static inline int64_t end_of(const Job *job, int64_t first) { return min_of(first + job->block, job->num_out); }

/* The first output of a block that no thread has taken yet. */
static inline int64_t next_block(Job *job) { return __atomic_fetch_add(&job->next, job->block, __ATOMIC_RELAXED); }

AVX2 static inline float sum_of(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The products of some tokens with some rows of weights, token after token. Meanwhile memory is asked for what lies
 * `ahead`, `step` bytes further each time: asked for at once, it would be waited for. */
#define DEFINE_TILE(tokens_, outputs_)                                                                                 \
    AVX2 static void tile_##tokens_##_##outputs_(const float *tokens, const float *weights, int64_t num_in,            \
                                                 const char *ahead, int64_t step, float *products) {                   \
        __m256 sums[tokens_][outputs_];                                                                                \
        UNROLLED for (int t = 0; t < tokens_; t++) UNROLLED for (int o = 0; o < outputs_; o++) sums[t][o] =            \
            _mm256_setzero_ps();                                                                                       \
        for (int64_t i = 0; i < num_in; i += LANES, ahead += step) {                                                   \
            _mm_prefetch(ahead, _MM_HINT_T1);                                                                          \
            __m256 row[outputs_];                                                                                      \
            UNROLLED for (int o = 0; o < outputs_; o++) row[o] = _mm256_loadu_ps(weights + o * num_in + i);            \
            UNROLLED for (int t = 0; t < tokens_; t++) {                                                               \
                __m256 token = _mm256_loadu_ps(tokens + t * num_in + i);                                               \
                UNROLLED for (int o = 0; o < outputs_; o++) sums[t][o] = _mm256_fmadd_ps(token, row[o], sums[t][o]);   \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int t = 0; t < tokens_; t++) UNROLLED for (int o = 0; o < outputs_; o++)                         \
            products[t * outputs_ + o] = sum_of(sums[t][o]);                                                           \
    }

DEFINE_TILE(4, 3) DEFINE_TILE(3, 3) DEFINE_TILE(2, 3) DEFINE_TILE(1, 3)
DEFINE_TILE(4, 1) DEFINE_TILE(3, 1) DEFINE_TILE(2, 1) DEFINE_TILE(1, 1)

typedef void Tile(const float *tokens, const float *weights, int64_t num_in, const char *ahead, int64_t step,
                  float *products);
static Tile *const whole_tiles[TOKENS] = {tile_1_3, tile_2_3, tile_3_3, tile_4_3};
static Tile *const single_tiles[TOKENS] = {tile_1_1, tile_2_1, tile_3_1, tile_4_1};

/* `count` halves as fp32; a multiple of LANES. */
AVX2 static void widen(const uint16_t *halves, int kind, int64_t count, float *floats) {
    for (int64_t i = 0; i < count; i += LANES) {
        __m128i eight = _mm_loadu_si128((const __m128i *)(halves + i));
        __m256 wide = kind == FP16 ? _mm256_cvtph_ps(eight)
                                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
        _mm256_storeu_ps(floats + i, wide);
    }
}

static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40); /* no number stays none */
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* The number at a place of weights, bias or output. */
AVX2 static float number_at(const void *numbers, int kind, int64_t place) {
    if (kind == FP32) return ((const float *)numbers)[place];
    uint16_t half = ((const uint16_t *)numbers)[place];
    if (kind == FP16) return _cvtsh_ss(half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

AVX2 static void put(const Job *job, int64_t token, int64_t output, float product) {
    int64_t place = token * job->num_out + output;
    if (job->bias != NULL) product += number_at(job->bias, job->kind, output);
    if (job->kind == FP32) ((float *)job->out)[place] = product;
    else if (job->kind == FP16) ((uint16_t *)job->out)[place] = (uint16_t)_cvtss_sh(product, _MM_FROUND_TO_NEAREST_INT);
    else ((uint16_t *)job->out)[place] = bf16_of(product);
}

/* All tokens with the outputs from `first` to `end`, whose weights are in fp32. The weights of the block that begins at
 * `next` come from memory meanwhile, where the tokens fill more than one tile: in a single one, they come as fast. */
AVX2 static void multiply(const Job *job, const float *weights, int64_t first, int64_t end, int64_t next) {
    float products[TOKENS * OUTPUTS];
    int64_t num_tiles = (job->num_tokens + TOKENS - 1) / TOKENS * ((end - first) / OUTPUTS + (end - first) % OUTPUTS);
    int64_t row = job->num_in * (job->kind == FP32 ? 4 : 2), num_steps = num_tiles * job->num_in / LANES, step = 0;
    const char *ahead = job->weights;
    if (next < job->num_out && job->num_tokens > TOKENS) {
        step = (end_of(job, next) - next) * row / num_steps;
        ahead += next * row;
    }
    for (int64_t token = 0; token < job->num_tokens; token += TOKENS) {
        int64_t count = min_of(job->num_tokens - token, TOKENS);
        for (int64_t output = first, width; output < end; output += width) {
            width = end - output < OUTPUTS ? 1 : OUTPUTS;
            Tile *tile = (width == OUTPUTS ? whole_tiles : single_tiles)[count - 1];
            tile(job->tokens + token * job->num_in, weights + (output - first) * job->num_in, job->num_in, ahead, step,
                 products);
            ahead += step * (job->num_in / LANES);
            for (int64_t t = 0; t < count; t++)
                for (int64_t o = 0; o < width; o++) put(job, token + t, output + o, products[t * width + o]);
        }
    }
}

/* What one thread does: blocks of outputs, each of them whichever is next. */
static void work(void *argument) {
    Job *job = argument;
    float *widened = NULL;
    if (job->kind != FP32 && (widened = malloc((size_t)(job->block * job->num_in) * sizeof(float))) == NULL) {
        __atomic_store_n(&job->has_no_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t first = next_block(job), next; first < job->num_out; first = next) {
        next = next_block(job);
        int64_t end = end_of(job, first), place = first * job->num_in;
        const float *weights = (const float *)job->weights + place;
        if (job->kind != FP32) {
            widen((const uint16_t *)job->weights + place, job->kind, (end - first) * job->num_in, widened);
            weights = widened;
        }
        multiply(job, weights, first, end, next);
    }
    free(widened);
}

/* As many outputs as fit into the cache, and few enough that every thread gets some; a multiple of OUTPUTS. */
static int64_t block_of(int64_t num_out, int64_t num_in, int64_t num_threads) {
    int64_t block = BLOCK_FLOATS / num_in, share = num_out / (2 * num_threads) + 1;
    if (block > BLOCK) block = BLOCK;
    if (block > share) block = share;
    return block < OUTPUTS ? OUTPUTS : block - block % OUTPUTS;
}

static int has_linear(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int run(Job *job, Team *team, unsigned num_threads) {
    float *widened = NULL;
    if (job->kind != FP32) {
        int64_t count = job->num_tokens * job->num_in;
        if ((widened = malloc((size_t)count * sizeof(float))) == NULL) return 0;
        widen((const uint16_t *)job->tokens, job->kind, count, widened);
        job->tokens = widened;
    }
    job->block = block_of(job->num_out, job->num_in, num_threads);
    if (num_threads > 1) team(work, job, num_threads, 0);
    else work(job);
    free(widened);
    return !job->has_no_memory;
}

PyObject *core_linear(PyObject *Py_UNUSED(module), PyObject *args) {
    Job job = {0};
    unsigned long long tokens, weights, bias, out, team;
    long long num_tokens, num_out, num_in;
    unsigned num_threads;
    if (!PyArg_ParseTuple(args, "KKKKLLLiIK", &tokens, &weights, &bias, &out, &num_tokens, &num_out, &num_in, &job.kind,
                          &num_threads, &team))
        return NULL;
    if (!has_linear() || num_in % LANES || num_in < LANES || job.kind < FP32 || job.kind > FP16 || num_threads < 1 ||
        (num_threads > 1 && team == 0)) {
        PyErr_SetString(PyExc_ValueError, "no product of such a size, of such numbers, or on this processor");
        return NULL;
    }
    job.tokens = (const float *)(uintptr_t)tokens;
    job.weights = (const void *)(uintptr_t)weights;
    job.bias = (const void *)(uintptr_t)bias;
    job.out = (void *)(uintptr_t)out;
    job.num_tokens = num_tokens, job.num_out = num_out, job.num_in = num_in;
    int is_done;
    Py_BEGIN_ALLOW_THREADS
    is_done = run(&job, (Team *)(uintptr_t)team, num_threads);
    Py_END_ALLOW_THREADS
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
#else
static int has_linear(void) { return 0; }

PyObject *core_linear(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    PyErr_SetString(PyExc_ValueError, "there are no linear layers for this processor");
    return NULL;
}
#endif

PyObject *core_has_linear(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    return PyBool_FromLong(has_linear());
}
