/* Attention of a few queries: each key and value is read from memory once for all queries of its group. A softmax over
 * blocks of keys, each of which scales what was summed up before it to the largest score so far. For x86 with AVX2;
 * halves are multiplied and summed up as fp32, and each result is rounded once.
 *
 * A query's result depends on the keys that it sees and their order alone, to the last bit: not on hidden keys before,
 * between or after them, nor on the other queries. */

#include "core.h"
#include "halves.h"
#include "replay.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEYS = 96, SPACE = KEYS + TILE_SPACE }; /* of a block, whole tiles; from one query's scores to the next one's */
enum { LANES = 8, TOGETHER = 8 };              /* floats of a register; queries whose weights are summed up at once */
#define LEAST_POWER -1e30f                     /* of two; of any less it is 0 too */

/* What a thread keeps of the queries of a group: (rows, dim), (rows, SPACE), (rows, value_dim), (rows,), (rows,). */
typedef struct {
    char *queries; /* as the tiles read them */
    float *scores, *sums, *base, *totals; /* `base` is a power of two that the sums are relative to */
} Room;

/* The products of all queries of a group with `count` keys. */
static void score(const Attention *job, const Room *room, int64_t rows, const char *keys, int64_t count) {
    const Tiles *tiles = job->tiles;
    int64_t row = job->dim * size_of(job->kind), query = job->dim * (tiles->widens_tokens ? 4 : size_of(job->kind));
    int64_t step = tiles->outputs * row / (job->dim / tiles->lanes * tiles->lines);
    for (int64_t r = 0; r < rows; r += TILE_TOKENS, step = 0) {
        int64_t some = min_of(rows - r, TILE_TOKENS);
        for (int64_t k = 0, width; k < count; k += width) {
            width = count - k < tiles->outputs ? 1 : tiles->outputs;
            Tile *tile = (width == tiles->outputs ? tiles->whole : tiles->single)[some - 1];
            const char *key = keys + k * row;
            float *scores = room->scores + r * SPACE + k;
            tile(room->queries + r * query, key, job->dim, key + tiles->outputs * row, step, scores, SPACE);
        }
    }
}

/* Two to whole powers of at most 0; 0 below 2**-126. */
AVX2 static inline __m256 powers_of_two(__m256 whole) {
    __m256 least = _mm256_set1_ps(-126.0f);
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_max_ps(whole, least)), _mm256_set1_epi32(127));
    return _mm256_and_ps(_mm256_cmp_ps(whole, least, _CMP_GE_OQ), _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)));
}

AVX2 static inline __m256 nearest_whole(__m256 numbers) {
    __m256 rounds = _mm256_set1_ps(ROUNDS);
    return _mm256_sub_ps(_mm256_add_ps(numbers, rounds), rounds);
}

/* Two to the power of at most half a unit, as `exponential` has e's, less 1 and plus `one`. */
AVX2 static inline __m256 fractions_of_two(__m256 power, float one) {
    __m256 rest = _mm256_mul_ps(power, _mm256_set1_ps(LN_2)), value = _mm256_set1_ps(COEFFICIENTS[0]);
    UNROLLED for (int degree = 1; degree < 6; degree++) value =
        _mm256_fmadd_ps(value, rest, _mm256_set1_ps(COEFFICIENTS[degree]));
    return _mm256_fmadd_ps(_mm256_mul_ps(value, rest), rest, _mm256_add_ps(rest, _mm256_set1_ps(one)));
}

/* (1 - p) / (1 + p) of p, e to minus twice a number; no number stays none. */
AVX2 static inline __m256 hyperbolic_tangents(__m256 numbers) {
    __m256 minus = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    __m256 power = _mm256_mul_ps(_mm256_or_ps(numbers, minus), _mm256_set1_ps(2.0f * LOG2_E));
    power = _mm256_max_ps(_mm256_set1_ps(LEAST_POWER), power);
    __m256 nearest = nearest_whole(power), scale = powers_of_two(nearest); /* p - 1, exact where p is nearly 1: */
    __m256 less = _mm256_fmadd_ps(scale, fractions_of_two(_mm256_sub_ps(power, nearest), 0.0f), _mm256_sub_ps(scale, one));
    __m256 size = _mm256_div_ps(less, _mm256_add_ps(less, _mm256_set1_ps(2.0f)));
    return _mm256_xor_ps(size, _mm256_andnot_ps(numbers, minus));
}

/* Make one query's scores of `count` keys weights, and what it summed up before comparable to them. Weights are relative
 * to a whole power of two, so that another base is an exact scale. A hidden key weighs 0. */
AVX2 static void weigh(const Attention *job, const Room *room, int64_t r, const float *mask, int64_t count) {
    float *scores = room->scores + r * SPACE, *sums = room->sums + r * job->value_dim, cap = job->cap;
    float lanes[LANES], before = room->base[r], most = before;
    int64_t whole = count / LANES * LANES; /* the rest's lanes after the last key are hidden */
    for (int l = 0; l < LANES; l++) lanes[l] = whole + l >= count ? -INFINITY : mask == NULL ? 0.0f : mask[whole + l];
    __m256 scale = _mm256_set1_ps((cap > 0.0f ? cap : job->scale) * LOG2_E), share = _mm256_set1_ps(job->scale / cap);
    __m256 log2_e = _mm256_set1_ps(LOG2_E), least = _mm256_set1_ps(LEAST_POWER), hidden = _mm256_set1_ps(-INFINITY);
    __m256 rest = _mm256_loadu_ps(lanes), largest = hidden;
    for (int64_t k = 0; k < count; k += LANES) {
        __m256 added = k == whole ? rest : mask == NULL ? _mm256_setzero_ps() : _mm256_loadu_ps(mask + k);
        __m256 score = _mm256_loadu_ps(scores + k);
        if (cap > 0.0f) score = hyperbolic_tangents(_mm256_mul_ps(score, share));
        score = _mm256_max_ps(least, _mm256_fmadd_ps(score, scale, _mm256_mul_ps(added, log2_e))); /* as above */
        score = _mm256_blendv_ps(score, hidden, _mm256_cmp_ps(added, hidden, _CMP_EQ_OQ));
        largest = _mm256_max_ps(score, largest);
        _mm256_storeu_ps(scores + k, score);
    }
    _mm256_storeu_ps(lanes, nearest_whole(largest));
    for (int l = 0; l < LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    if (most > before && room->totals[r] > 0.0f) {
        float share = before - most < -126.0f ? 0.0f : float_of((uint32_t)(int32_t)(before - most + 127.0f) << 23);
        room->totals[r] *= share;
        for (int64_t d = 0; d < job->value_dim; d++) sums[d] *= share;
    }
    room->base[r] = most;
    __m256 base = _mm256_set1_ps(most == -INFINITY ? 0.0f : most);
    for (int64_t k = 0; k < count; k += LANES) {
        __m256 score = _mm256_loadu_ps(scores + k), power = _mm256_max_ps(least, score), nearest = nearest_whole(power);
        __m256 weights = _mm256_mul_ps(fractions_of_two(_mm256_sub_ps(power, nearest), 1.0f),
                                       powers_of_two(_mm256_sub_ps(nearest, base)));
        weights = _mm256_andnot_ps(_mm256_cmp_ps(score, hidden, _CMP_EQ_OQ), weights);
        _mm256_storeu_ps(scores + k, weights);
    }
}

/* Add the weights of `count` keys to the totals of some queries: key by key, so that hidden ones between them change
 * nothing. Called with a constant number of queries, for each of which there is code of its own then. */
static inline void add_weights(const float *scores, float *totals, const int rows, int64_t count) {
    float sums[TOGETHER];
    UNROLLED for (int r = 0; r < rows; r++) sums[r] = totals[r];
    for (int64_t k = 0; k < count; k++) UNROLLED for (int r = 0; r < rows; r++) sums[r] += scores[r * SPACE + k];
    UNROLLED for (int r = 0; r < rows; r++) totals[r] = sums[r];
}

/* The same of all queries; there is room after the last. */
static void sum_up(const float *scores, float *totals, int64_t rows, int64_t count) {
    for (; rows > TILE_TOKENS; rows -= TOGETHER, scores += TOGETHER * SPACE, totals += TOGETHER)
        add_weights(scores, totals, TOGETHER, count);
    if (rows > 0) add_weights(scores, totals, TILE_TOKENS, count);
}

/* All queries of one group, in one row of the batch. */
AVX2 static void attend(const Attention *job, const Room *room, int64_t b, int64_t head) {
    const int64_t *packed = job->packed, *strides = job->query_strides;
    int64_t first_query = packed ? packed[b] : b * job->num_queries, start = packed ? packed[b] * strides[2] : b * strides[0];
    int64_t num_queries = packed ? packed[b + 1] - packed[b] : job->num_queries;
    int64_t num_keys = job->num_keys - (packed ? packed[job->batch + 1 + b] : 0);
    int64_t size = size_of(job->kind), space = job->value_strides[2], rows = job->groups * num_queries, heads = job->groups * job->kv_heads;
    const char *keys = job->key + (b * job->key_strides[0] + head * job->key_strides[1]) * size;
    const char *values = job->value + (b * job->value_strides[0] + head * job->value_strides[1]) * size;
    memset(room->sums, 0, (size_t)(rows * job->value_dim) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        int64_t h = head * job->groups + r / num_queries, t = r % num_queries;
        const char *query = job->query + (start + h * strides[1] + t * strides[2]) * size;
        if (job->kind == FP32 || !job->tiles->widens_tokens)
            memcpy(room->queries + r * job->dim * size, query, (size_t)(job->dim * size));
        else widen((const uint16_t *)query, job->kind, job->dim, (float *)room->queries + r * job->dim);
        float sink = job->sinks == NULL ? -INFINITY : job->sinks[h] * LOG2_E;
        room->base[r] = rintf(sink);
        room->totals[r] = sink == -INFINITY ? 0.0f : exp2f(sink - room->base[r]);
    }
    for (int64_t first = 0; first < num_keys; first += KEYS) {
        int64_t count = min_of(num_keys - first, KEYS);
        score(job, room, rows, keys + first * job->dim * size, count);
        for (int64_t r = 0; r < rows; r++) {
            const float *mask = job->mask;
            if (mask != NULL) mask += b * job->mask_strides[0] + r % num_queries * job->mask_strides[1] + first;
            weigh(job, room, r, mask, count);
        }
        sum_up(room->scores, room->totals, rows, count);
        for (int64_t r = 0; r < rows; r += TILE_TOKENS)
            mixes[job->kind][min_of(rows - r, TILE_TOKENS) - 1](
                room->scores + r * SPACE, SPACE, values + first * space * size, space, count, job->value_dim,
                room->sums + r * job->value_dim, job->value_dim, 0);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t h = head * job->groups + r / num_queries, t = r % num_queries;
        int64_t place = ((first_query + t) * heads + h) * job->value_dim;
        float total = room->totals[r], share = total == 0.0f ? 0.0f : 1.0f / total; /* a query that sees nothing: 0 */
        for (int64_t d = 0; d < job->value_dim; d++)
            put_number(job->out, job->kind, place + d, room->sums[r * job->value_dim + d] * share);
    }
}

/* What one thread does: groups of queries, each of them whichever is next. */
void attention_work(void *argument) {
    Attention *job = argument;
    int64_t rows = (job->groups * job->num_queries + TOGETHER - 1) / TOGETHER * TOGETHER, unit;
    float *numbers = calloc((size_t)(rows * (job->dim + SPACE + job->value_dim + 2)), sizeof(float));
    if (numbers == NULL) {
        __atomic_store_n(&job->has_no_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    Room room = {.queries = (char *)numbers, .scores = numbers + rows * job->dim};
    room.sums = room.scores + rows * SPACE;
    room.base = room.sums + rows * job->value_dim;
    room.totals = room.base + rows;
    while ((unit = __atomic_fetch_add(job->next, 1, __ATOMIC_RELAXED)) < job->batch * job->kv_heads)
        attend(job, &room, unit / job->kv_heads, unit % job->kv_heads);
    free(numbers);
}

PyObject *core_attention(PyObject *Py_UNUSED(module), PyObject *args) {
    int64_t first = 0;
    Attention job = {.next = &first};
    unsigned long long query, key, value, mask, sinks, out, packed, team;
    unsigned num_threads;
    int64_t *q = job.query_strides, *k = job.key_strides, *v = job.value_strides, *m = job.mask_strides;
    if (!PyArg_ParseTuple(args, "(KKKKKKK)(LLLLLLL)(LLLLLLLLLL)(ff)iIK", &query, &key, &value, &mask, &sinks, &out, &packed,
                          &job.batch, &job.kv_heads, &job.groups, &job.num_queries, &job.num_keys, &job.dim,
                          &job.value_dim, &q[0], &q[1], &q[2], &k[0], &k[1], &v[0], &v[1], &v[2], &m[0], &m[1],
                          &job.scale, &job.cap, &job.kind, &num_threads, &team))
        return NULL;
    job.packed = (const int64_t *)(uintptr_t)packed;
    if (job.kind >= FP32 && job.kind <= FP16 && job.dim > 0) job.tiles = tiles_for(job.kind, job.dim);
    if (job.tiles == NULL || job.value_dim % MIX_WIDTH || num_threads < 1 || (num_threads > 1 && team == 0)) {
        PyErr_SetString(PyExc_ValueError, "no attention of such a size, of such numbers, or on this processor");
        return NULL;
    }
    job.query = (const char *)(uintptr_t)query;
    job.key = (const char *)(uintptr_t)key;
    job.value = (const char *)(uintptr_t)value;
    job.mask = (const float *)(uintptr_t)mask;
    job.sinks = (const float *)(uintptr_t)sinks;
    job.out = (void *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    if (num_threads > 1) ((Team *)(uintptr_t)team)(attention_work, &job, num_threads, 0);
    else attention_work(&job);
    Py_END_ALLOW_THREADS
    if (job.has_no_memory) return PyErr_NoMemory();
    return new_none();
}
#endif
