/* A recorded forward: instructions of the core, one after the other, without Python between them. Several threads share
 * each large instruction and wait for one another before what it writes is read. For x86 with AVX2. */

#include "core.h"
#include "halves.h"
#include "packed.h"
#include "replay.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* As in hf_specdec/forward/recorded/program.py. A place in memory is two numbers: which of `bases`, and bytes after it. */
enum { PRODUCT, NORM, ATTENTION, UPDATE, MAP, LOOKUP, PACKED };
enum { COPY, NEGATE, ADD, SUBTRACT, MULTIPLY, TABLE };
enum { LANES = 8, DIMS = 5, LAYER = 9, MASK = 3 };
enum { SOME = 8192 };     /* numbers that a thread takes of a map at once */
enum { PATIENCE = 4096 }; /* looks at a barrier before the processor is given away */

typedef struct {
    const int64_t *code, *end;
    char *const *bases;
    const int64_t *layers, *masks, *rows, *columns, *packed, packed_width;
    int64_t *counters; /* one for each instruction, zero */
    float *room;       /* of each thread, `room_size` numbers */
    int64_t room_size;
    int (*team_size)(void); /* omp_get_num_threads: a team may have fewer threads than were asked for */
    int num_threads, arrived, phase, entered, has_no_memory, is_outside;
} Run;

static inline char *place(const Run *run, const int64_t *code) { return run->bases[code[0]] + code[1]; }

static inline float real(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}

/* All threads of a team wait here for the last one. */
static void meet(Run *run) {
    if (run->num_threads == 1) return;
    int phase = __atomic_load_n(&run->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&run->arrived, 1, __ATOMIC_ACQ_REL) == run->num_threads) {
        __atomic_store_n(&run->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&run->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int looks = 0; __atomic_load_n(&run->phase, __ATOMIC_ACQUIRE) == phase;)
        if (++looks < PATIENCE) _mm_pause();
        else sched_yield();
}

static void product(Run *run, const int64_t *code, int64_t *counter, float *room) {
    Product job = {.tokens = place(run, code), .weights = place(run, code + 2), .out = place(run, code + 6),
                   .num_tokens = code[8], .num_out = code[9], .num_in = code[10], .next = counter, .kind = (int)code[11],
                   .is_transposed = (int)code[12]};
    job.bias = code[4] || code[5] ? place(run, code + 4) : NULL;
    product_begin(&job, run->num_threads, room);
    product_work(&job);
    if (job.has_no_memory) __atomic_store_n(&run->has_no_memory, 1, __ATOMIC_RELAXED);
}

static void packed_product(Run *run, const int64_t *code, int64_t *counter) {
    PackedJob job = {.tokens = place(run, code), .weights = (const uint8_t *)place(run, code + 2),
                     .out = place(run, code + 6), .num_tokens = code[8], .num_out = code[9], .num_in = code[10],
                     .kind = (int)code[11], .format = (int)code[12], .next = counter};
    job.bias = code[4] || code[5] ? place(run, code + 4) : NULL;
    if (!share_packed(&job, (unsigned)run->num_threads)) __atomic_store_n(&run->has_no_memory, 1, __ATOMIC_RELAXED);
}

static void attention(Run *run, const int64_t *code, int64_t *counter) {
    const int64_t *layer = run->layers + code[4] * LAYER, *mask = code[5] < 0 ? NULL : run->masks + code[5] * MASK;
    Attention job = {.query = place(run, code), .out = place(run, code + 2), .key = (const char *)(uintptr_t)layer[0],
                     .value = (const char *)(uintptr_t)layer[1], .batch = code[8], .kv_heads = code[9],
                     .groups = code[10], .num_queries = code[11], .num_keys = layer[7], .dim = code[12],
                     .value_dim = code[13], .query_strides = {code[14], code[15], code[16]},
                     .key_strides = {layer[2], layer[3]}, .value_strides = {layer[4], layer[5], layer[6]},
                     .scale = real(code[17]), .cap = real(code[18]), .kind = (int)code[19], .next = counter};
    if (mask != NULL && mask[0]) {
        job.mask = (const float *)(uintptr_t)mask[0];
        job.mask_strides[0] = mask[1], job.mask_strides[1] = mask[2];
    }
    if (run->packed != NULL) job.packed = run->packed, job.num_queries = run->packed_width;
    if (code[6] || code[7]) job.sinks = (const float *)(const void *)place(run, code + 6);
    job.tiles = tiles_for(job.kind, job.dim);
    attention_work(&job);
    if (job.has_no_memory) __atomic_store_n(&run->has_no_memory, 1, __ATOMIC_RELAXED);
}

/* New keys and values to their rows and columns of the cache; the states are (batch, heads, tokens, dim). */
static void update(const Run *run, const int64_t *code) {
    const int64_t *layer = run->layers + code[4] * LAYER;
    int64_t batch = code[5], heads = code[6], tokens = code[7], size = size_of((int)code[16]);
    for (int part = 0; part < 2; part++) {
        const char *states = place(run, code + 2 * part);
        const int64_t *strides = code + 10 + 3 * part, *to = layer + (part ? 4 : 2);
        int64_t dim = code[8 + part], step = part ? layer[6] : dim;
        for (int64_t b = 0; b < batch; b++)
            for (int64_t t = 0; t < tokens; t++) {
                int64_t token = b * tokens + t, column = run->columns[token] - layer[8];
                char *out = (char *)(uintptr_t)layer[part] + (run->rows[token] * to[0] + column * step) * size;
                const char *state = states + (b * strides[0] + t * strides[2]) * size;
                for (int64_t h = 0; h < heads; h++)
                    memcpy(out + h * to[1] * size, state + h * strides[1] * size, (size_t)(dim * size));
            }
    }
}

AVX2 static inline __m256 mapped(int function, __m256 a, __m256 b) {
    switch (function) {
    case NEGATE: return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
    case ADD: return _mm256_add_ps(a, b);
    case SUBTRACT: return _mm256_sub_ps(a, b);
    case MULTIPLY: return _mm256_mul_ps(a, b);
    default: return a;
    }
}

typedef struct {
    void *out;
    const void *a, *b; /* `b` is NULL where a number takes its place */
    int kinds[3];
    float number;
} Operands;

/* `count` numbers from places on; `steps` from one to the next, 1 or 0 of what is read. */
AVX2 static inline void line(int function, const Operands *of, const int kinds[3], int64_t out, int64_t a, int64_t b,
                             const int64_t steps[3], int64_t count) {
    __m256 number = _mm256_set1_ps(of->number);
    int64_t i = 0;
    if (function == TABLE) { /* `b` has the result for each of the halves that there are */
        const uint16_t *table = of->b, *read = of->a;
        uint16_t *written = of->out;
        for (; i < count; i++) written[out + i * steps[0]] = table[read[a + i * steps[1]]];
        return;
    }
    if (steps[0] == 1 && steps[1] <= 1 && steps[2] <= 1) {
        __m256 first = steps[1] ? number : _mm256_set1_ps(number_at(of->a, kinds[1], a)), second = number;
        if (of->b != NULL && !steps[2]) second = _mm256_set1_ps(number_at(of->b, kinds[2], b));
        for (; i + LANES <= count; i += LANES) {
            if (steps[1]) first = eight_at(of->a, kinds[1], a + i);
            if (of->b != NULL && steps[2]) second = eight_at(of->b, kinds[2], b + i);
            put_eight(of->out, kinds[0], out + i, mapped(function, first, second));
        }
    }
    for (; i < count; i++) {
        __m256 first = _mm256_set1_ps(number_at(of->a, kinds[1], a + i * steps[1])), second = number;
        if (of->b != NULL) second = _mm256_set1_ps(number_at(of->b, kinds[2], b + i * steps[2]));
        put_number(of->out, kinds[0], out + i * steps[0], _mm256_cvtss_f32(mapped(function, first, second)));
    }
}

/* Returns whether a map pays for threads. */
static int is_large(const int64_t *code) {
    int64_t count = 1;
    for (int d = 0; d < DIMS; d++) count *= code[11 + d];
    return count >= 2 * SOME;
}

/* A function of single numbers, over tensors of at most DIMS dimensions: sizes, and steps of the result and of each
 * operand. A thread takes about `share` numbers at once. */
static void map(Run *run, const int64_t *code, int64_t *counter, int64_t share) {
    const int64_t *sizes = code + 11, *out = sizes + DIMS, *a = out + DIMS, *b = a + DIMS;
    int function = (int)code[0], kinds[3] = {(int)code[1], (int)code[2], (int)code[3]};
    Operands of = {.out = place(run, code + 4), .a = place(run, code + 6), .number = real(code[10])};
    if (code[8] || code[9]) of.b = place(run, code + 8);
    int64_t steps[3] = {out[DIMS - 1], a[DIMS - 1], b[DIMS - 1]}, count = sizes[DIMS - 1], lines = 1, at;
    for (int d = 0; d < DIMS - 1; d++) lines *= sizes[d];
    if (lines <= 0 || count <= 0) return;
    int64_t some = share / count < 1 ? 1 : share / count;
    while ((at = __atomic_fetch_add(counter, some, __ATOMIC_RELAXED)) < lines)
        for (int64_t l = at, end = lines - at < some ? lines : at + some; l < end; l++) {
            int64_t places[3] = {0, 0, 0}, rest = l;
            for (int d = DIMS - 2; d >= 0; d--) {
                int64_t index = rest % sizes[d];
                rest /= sizes[d];
                places[0] += index * out[d], places[1] += index * a[d], places[2] += index * b[d];
            }
            line(function, &of, kinds, places[0], places[1], places[2], steps, count);
        }
}

/* Rows of an embedding; ids are 64 bits wide. */
static void lookup(Run *run, const int64_t *code) {
    const char *weights = place(run, code);
    const int64_t *ids = (const int64_t *)(const void *)place(run, code + 2);
    for (int64_t t = 0; t < code[6]; t++)
        if (ids[t] < 0 || ids[t] >= code[8]) run->is_outside = 1;
        else memcpy(place(run, code + 4) + t * code[7], weights + ids[t] * code[7], (size_t)code[7]);
}

/* What the first thread does alone. */
static void alone(Run *run, int64_t name, const int64_t *operands, int64_t *counter) {
    if (name == MAP) map(run, operands, counter, INT64_MAX);
    else if (name == UPDATE) update(run, operands);
    else if (name == LOOKUP) lookup(run, operands);
    else
        norms(place(run, operands), place(run, operands + 2), place(run, operands + 4), operands[6], operands[7],
              real(operands[8]), (int)operands[9]);
}

/* Returns whether the next instruction is a product of the same tokens, which reads nothing that this one writes. */
static int reads_the_same(const int64_t *code, const int64_t *end) {
    const int64_t *next = code + code[1];
    return next < end && (code[0] == PRODUCT || code[0] == PACKED) && next[0] == code[0] && next[2] == code[2] &&
           next[3] == code[3];
}

/* What one thread does: its share of large instructions; all wait before these, and after them unless the next one
 * reads the same tokens. */
static void follow(void *argument) {
    Run *run = argument;
    if (run->num_threads > 1) __atomic_store_n(&run->num_threads, run->team_size(), __ATOMIC_RELAXED);
    int thread = __atomic_fetch_add(&run->entered, 1, __ATOMIC_RELAXED), is_apart = 0;
    float *room = run->room + thread * run->room_size;
    int64_t *counter = run->counters;
    for (const int64_t *code = run->code; code < run->end; code += code[1], counter++) {
        int64_t name = code[0];
        const int64_t *operands = code + 2;
        int is_shared = name == PRODUCT || name == PACKED || name == ATTENTION ||
                        (name == MAP && run->num_threads > 1 && is_large(operands));
        if (is_shared && is_apart) meet(run);
        is_apart = !is_shared;
        if (name == PRODUCT) product(run, operands, counter, room);
        else if (name == PACKED) packed_product(run, operands, counter);
        else if (name == ATTENTION) attention(run, operands, counter);
        else if (is_shared) map(run, operands, counter, SOME);
        else if (thread == 0) alone(run, name, operands, counter);
        if (is_shared && !reads_the_same(code, run->end)) meet(run);
    }
}

PyObject *core_replay(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long code, bases, layers, masks, rows, columns, packed, counters, room, team, team_size;
    long long size, num_counters;
    Run run = {0};
    if (!PyArg_ParseTuple(args, "KLKKKKKKLKLKLiKK", &code, &size, &bases, &layers, &masks, &rows, &columns, &packed,
                          &run.packed_width, &counters, &num_counters, &room, &run.room_size, &run.num_threads, &team,
                          &team_size))
        return NULL;
    if (tiles_for(FP32, LANES) == NULL || run.num_threads < 1 || (run.num_threads > 1 && (team == 0 || team_size == 0))) {
        PyErr_SetString(PyExc_ValueError, "no recorded forward on this processor, or by so many threads");
        return NULL;
    }
    run.code = (const int64_t *)(uintptr_t)code;
    run.end = run.code + size;
    run.bases = (char *const *)(uintptr_t)bases;
    run.layers = (const int64_t *)(uintptr_t)layers;
    run.masks = (const int64_t *)(uintptr_t)masks;
    run.rows = (const int64_t *)(uintptr_t)rows;
    run.columns = (const int64_t *)(uintptr_t)columns;
    run.packed = (const int64_t *)(uintptr_t)packed;
    run.counters = (int64_t *)(uintptr_t)counters;
    run.room = (float *)(uintptr_t)room;
    run.team_size = (int (*)(void))(uintptr_t)team_size;
    Py_BEGIN_ALLOW_THREADS
    memset(run.counters, 0, (size_t)num_counters * sizeof(int64_t));
    if (run.num_threads > 1) ((Team *)(uintptr_t)team)(follow, &run, (unsigned)run.num_threads, 0);
    else follow(&run);
    Py_END_ALLOW_THREADS
    if (run.has_no_memory) return PyErr_NoMemory();
    if (run.is_outside) {
        PyErr_SetString(PyExc_IndexError, "index out of range in self");
        return NULL;
    }
    return new_none();
}
#endif
