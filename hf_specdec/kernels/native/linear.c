/* Linear layers of a few tokens: every weight is read from memory once, whatever the number of tokens. For x86 with
 * AVX2; elsewhere `has_kernels` says that there are none. Halves are multiplied and summed up as fp32, and each result
 * is rounded once. */

#include "core.h"
#include "halves.h"
#include "replay.h"
#include "tiles.h"

#ifdef AVX2
#include <stdlib.h>

enum { BLOCK = 24, BLOCK_NUMBERS = 24 * 1280 }; /* weights that stay in the second cache while all tokens meet them */
enum { LONG_BLOCK = 96 };                        /* where all tokens are in one tile, which needs each weight once */

enum { SHORT_ROW = 4096 }; /* bytes; in longer ones the processor itself sees what is next */
enum { PRODUCTS = LONG_BLOCK + TILE_SPACE }; /* from one token's to the next one's */
enum { AHEAD = 2 };                     /* tiles, from the one that is multiplied to the one that comes from memory */
enum { LANES = 8 };                     /* floats of a register */
enum { COLUMNS = 512, DEPTH = 8 }; /* of weights that stay in the first cache, where inputs are their rows */

/* Where the block that begins at an output ends. */
static inline int64_t end_of(const Product *job, int64_t first) { return min_of(first + job->block, job->num_out); }

/* The first output of a block that no thread has taken yet. */
static inline int64_t next_block(Product *job) { return __atomic_fetch_add(job->next, job->block, __ATOMIC_RELAXED); }

/* Round a token's products for `count` outputs from `output` on, with the bias. */
AVX2 static inline void put(const Product *job, int64_t token, int64_t output, const float *products, int64_t count) {
    int64_t place = token * job->num_out + output, o = 0;
    for (; o + LANES <= count; o += LANES) {
        __m256 eight = _mm256_loadu_ps(products + o);
        if (job->bias != NULL) eight = _mm256_add_ps(eight, eight_at(job->bias, job->kind, output + o));
        put_eight(job->out, job->kind, place + o, eight);
    }
    for (; o < count; o++) {
        float bias = job->bias == NULL ? 0.0f : number_at(job->bias, job->kind, output + o);
        put_number(job->out, job->kind, place + o, products[o] + bias);
    }
}

/* All tokens with the outputs from `first` to `end`. Meanwhile the weights come from memory that this thread needs next:
 * those of a tile ahead where all tokens are in one, else those of the block that begins at `next`. */
AVX2 static void multiply(const Product *job, int64_t first, int64_t end, int64_t next) {
    const Tiles *tiles = job->tiles;
    float products[TILE_TOKENS * PRODUCTS];
    int64_t size = size_of(job->kind), token_size = tiles->widens_tokens ? 4 : size, row = job->num_in * size;
    const char *weights = (const char *)job->weights + first * row, *ahead = (const char *)job->weights + next * row;
    int64_t num_lines = job->num_in / tiles->lanes * tiles->lines;
    int64_t step = row <= SHORT_ROW ? tiles->outputs * row / num_lines : 0;
    if (job->num_tokens > TILE_TOKENS) {
        int64_t num_tiles = (end - first) / tiles->outputs + (end - first) % tiles->outputs;
        num_tiles *= (job->num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        step = next < job->num_out ? (end_of(job, next) - next) * row / (num_tiles * num_lines) : 0;
    }
    for (int64_t token = 0; token < job->num_tokens; token += TILE_TOKENS) {
        int64_t count = min_of(job->num_tokens - token, TILE_TOKENS);
        const char *tokens = (const char *)job->tokens + token * job->num_in * token_size;
        for (int64_t output = first, width; output < end; output += width) {
            width = end - output < tiles->outputs ? 1 : tiles->outputs;
            Tile *tile = (width == tiles->outputs ? tiles->whole : tiles->single)[count - 1];
            if (job->num_tokens <= TILE_TOKENS) {
                int64_t later = output + AHEAD * tiles->outputs;
                ahead = (const char *)job->weights + (later < end ? later : next + later - end) * row;
            }
            float *place = products + (output - first);
            tile(tokens, weights + (output - first) * row, job->num_in, ahead, step, place, PRODUCTS);
            ahead += step * num_lines;
        }
        for (int64_t t = 0; t < count; t++) put(job, token + t, first, products + t * PRODUCTS, end - first);
    }
}

/* The same of transposed weights; `sums` has room for (num_tokens, COLUMNS). */
AVX2 static void multiply_transposed(const Product *job, int64_t first, int64_t end, float *sums) {
    int64_t size = size_of(job->kind), row = job->num_out * size;
    for (int64_t s = 0; s < job->num_tokens * COLUMNS; s++) sums[s] = 0.0f;
    for (int64_t input = 0; input < job->num_in; input += DEPTH) {
        int64_t depth = min_of(job->num_in - input, DEPTH);
        const char *weights = (const char *)job->weights + input * row + first * size;
        for (int64_t token = 0; token < job->num_tokens; token += TILE_TOKENS)
            mixes[job->kind][min_of(job->num_tokens - token, TILE_TOKENS) - 1](
                (const float *)job->tokens + token * job->num_in + input, job->num_in, weights, job->num_out, depth,
                end - first, sums + token * COLUMNS, COLUMNS, token ? 0 : DEPTH * row);
    }
    for (int64_t token = 0; token < job->num_tokens; token++)
        put(job, token, first, sums + token * COLUMNS, end - first);
}

/* What one thread does: blocks of outputs, each of them whichever is next. */
void product_work(void *argument) {
    Product *job = argument;
    float *sums = NULL;
    if (job->is_transposed && (sums = malloc((size_t)(job->num_tokens * COLUMNS) * sizeof(float))) == NULL) {
        __atomic_store_n(&job->has_no_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t first = next_block(job), next; first < job->num_out; first = next) {
        next = next_block(job);
        if (job->is_transposed) multiply_transposed(job, first, end_of(job, first), sums);
        else multiply(job, first, end_of(job, first), next);
    }
    free(sums);
}

/* As many outputs as fit into the cache, and few enough that every thread gets some; whole tiles. */
static int64_t block_of(const Product *job, int64_t num_threads) {
    int64_t outputs = job->is_transposed ? MIX_WIDTH : job->tiles->outputs;
    int64_t block = min_of(BLOCK, BLOCK_NUMBERS / job->num_in), shares = 2 * num_threads;
    if (job->is_transposed) block = COLUMNS;
    else if (job->num_tokens <= TILE_TOKENS) block = LONG_BLOCK, shares = 4 * num_threads;
    block = min_of(block, job->num_out / shares + 1);
    return block < outputs ? outputs : block - block % outputs;
}

int64_t product_room(int kind, int64_t num_tokens, int64_t num_in, int is_transposed) {
    const Tiles *tiles = tiles_for(kind, num_in);
    return kind != FP32 && (is_transposed || tiles->widens_tokens) ? num_tokens * num_in : 0;
}

void product_begin(Product *job, int64_t num_threads, float *room) {
    job->tiles = tiles_for(job->kind, job->num_in);
    if (product_room(job->kind, job->num_tokens, job->num_in, job->is_transposed)) {
        widen(job->tokens, job->kind, job->num_tokens * job->num_in, room);
        job->tokens = room;
    }
    job->block = block_of(job, num_threads);
}

/* The product; 0 where there is no memory for it. */
static int run(Product *job, Team *team, unsigned num_threads) {
    int64_t count = product_room(job->kind, job->num_tokens, job->num_in, job->is_transposed);
    float *room = malloc((size_t)(count ? count : 1) * sizeof(float));
    if (room == NULL) return 0;
    product_begin(job, num_threads, room);
    if (num_threads > 1) team(product_work, job, num_threads, 0);
    else product_work(job);
    free(room);
    return !job->has_no_memory;
}

PyObject *core_linear(PyObject *Py_UNUSED(module), PyObject *args) {
    int64_t first = 0;
    Product job = {.next = &first};
    unsigned long long tokens, weights, bias, out, team;
    long long num_tokens, num_out, num_in;
    unsigned num_threads;
    if (!PyArg_ParseTuple(args, "KKKKLLLipIK", &tokens, &weights, &bias, &out, &num_tokens, &num_out, &num_in,
                          &job.kind, &job.is_transposed, &num_threads, &team))
        return NULL;
    if (job.kind >= FP32 && job.kind <= FP16 && num_in > 0) job.tiles = tiles_for(job.kind, num_in);
    if (job.tiles == NULL || (job.is_transposed && num_out % MIX_WIDTH) || num_threads < 1 ||
        (num_threads > 1 && team == 0)) {
        PyErr_SetString(PyExc_ValueError, "no product of such a size, of such numbers, or on this processor");
        return NULL;
    }
    job.tokens = (const void *)(uintptr_t)tokens;
    job.weights = (const void *)(uintptr_t)weights;
    job.bias = (const void *)(uintptr_t)bias;
    job.out = (void *)(uintptr_t)out;
    job.num_tokens = num_tokens, job.num_out = num_out, job.num_in = num_in;
    int is_done;
    Py_BEGIN_ALLOW_THREADS
    is_done = run(&job, (Team *)(uintptr_t)team, num_threads);
    Py_END_ALLOW_THREADS
    if (!is_done) return PyErr_NoMemory();
    return new_none();
}
#endif
