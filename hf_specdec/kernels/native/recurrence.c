/* Recurrent states after the columns of a tree, each made of its parent's: see hf_specdec/kernels/recurrences.py. All
 * numbers are fp32, and each is summed up in one order, whatever other columns there are. For x86 with AVX2. */

#include "core.h"
#include "tiles.h"

#ifdef AVX2
typedef struct {
    const Tiles *tiles;
    float *state, *out, *rows; /* `out` is NULL where the state is to move on; `rows`: room for each thread */
    const float *query, *key, *value, *decay, *beta; /* (batch, count, heads, ...); `beta` is NULL without a delta rule */
    const int64_t *parents; /* (batch, count): -1 for the state before all columns, below it for what is passed over */
    int64_t batch, heads, key_heads, count, value_dim, key_dim; /* the state is (batch, heads, value_dim, key_dim) */
    int64_t started, next;
} Job;

/* Some rows of a head's `state`, from value `v` on, after each column: `rows` are (count, some, key_dim). Where the state
 * moves on, those after the column `last` are in its place. */
AVX2 static void follow(const Job *job, int64_t unit, int64_t v, int64_t some, int64_t last, float *state, float *rows) {
    int64_t b = unit / job->heads, h = unit % job->heads, size = job->key_dim;
    Tile *tile = (some == 1 ? job->tiles->single : job->tiles->whole)[0];
    float *known = rows + job->count * some * size, sums[TILE_SPACE] = {0.0f};
    for (int64_t c = 0; c <= last; c++) {
        int64_t column = b * job->count + c, place = column * job->heads + h, parent = job->parents[column];
        if (parent < -1) continue;
        int64_t key_place = (column * job->key_heads + h * job->key_heads / job->heads) * size;
        const float *before = parent < 0 ? state : rows + parent * some * size, *value = job->value + place * job->value_dim + v;
        const float *key = job->key + key_place, *decay = job->decay + place * size;
        float *after = job->out == NULL && c == last ? state : rows + c * some * size;
        if (job->beta != NULL) {
            for (int64_t k = 0; k < size; k++) known[k] = decay[k] * key[k];
            tile(known, before, size, (const char *)before, 0, sums, 0);
        }
        for (int64_t r = 0; r < some; r++) {
            float update = job->beta == NULL ? value[r] : (value[r] - sums[r]) * job->beta[place];
            for (int64_t k = 0; k < size; k++) after[r * size + k] = before[r * size + k] * decay[k] + update * key[k];
        }
        if (job->out == NULL) continue;
        tile(job->query + key_place, after, size, (const char *)after, 0, sums, 0);
        for (int64_t r = 0; r < some; r++) job->out[place * job->value_dim + v + r] = sums[r];
    }
}

/* What one thread does: heads of rows of the batch, each of them whichever is next. */
static void work(void *argument) {
    Job *job = argument;
    int64_t size = job->key_dim, most = job->tiles->outputs, unit, last;
    float *rows = job->rows + __atomic_fetch_add(&job->started, 1, __ATOMIC_RELAXED) * (job->count * most + 1) * size;
    while ((unit = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->batch * job->heads) {
        const int64_t *parents = job->parents + unit / job->heads * job->count;
        for (last = job->count - 1; last >= 0 && parents[last] < -1; last--) continue;
        for (int64_t v = 0, some; v < job->value_dim; v += some) {
            some = job->value_dim - v < most ? 1 : most;
            follow(job, unit, v, some, last, job->state + (unit * job->value_dim + v) * size, rows);
        }
    }
}

PyObject *core_recur(PyObject *Py_UNUSED(module), PyObject *args) {
    Job job = {0};
    unsigned long long team, num_threads;
    if (!PyArg_ParseTuple(args, "(KKKKKKKKK)(LLLLLL)KK", &job.state, &job.out, &job.rows, &job.query, &job.key,
                          &job.value, &job.decay, &job.beta, &job.parents, &job.batch, &job.heads, &job.key_heads,
                          &job.count, &job.value_dim, &job.key_dim, &num_threads, &team))
        return NULL;
    if (job.key_dim > 0) job.tiles = tiles_for(FP32, job.key_dim);
    if (job.tiles == NULL || num_threads < 1 || (num_threads > 1 && team == 0)) {
        PyErr_SetString(PyExc_ValueError, "no recurrence of such a size, or on this processor");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (num_threads > 1) ((Team *)(uintptr_t)team)(work, &job, (unsigned)num_threads, 0);
    else work(&job);
    Py_END_ALLOW_THREADS
    return new_none();
}
#endif
