/* The table of recycled logits: see hf_specdec/methods/auto/recycled_logits.py. */

#include "core.h"
#include <math.h>
#include <string.h>

#define FLOOR 7.0
#define LEAST_SHARE 1e-6

int table_acquire(Table *table, PyObject *arrays) {
    PyObject *parts[4];
    Py_ssize_t num_sets, num_ways;
    if (!PyArg_ParseTuple(arrays, "OOOOnn", &parts[0], &parts[1], &parts[2], &parts[3], &num_sets, &num_ways)) return -1;
    for (int part = 0; part < 4; part++) {
        if (PyObject_GetBuffer(parts[part], &table->views[part], PyBUF_WRITABLE) < 0) {
            while (part--) PyBuffer_Release(&table->views[part]);
            return -1;
        }
    }
    table->keys = table->views[0].buf;
    table->stamps = table->views[1].buf;
    table->tokens = table->views[2].buf;
    table->evidence = table->views[3].buf;
    table->num_sets = num_sets;
    table->num_ways = num_ways;
    int64_t count = table->views[0].len / 8;
    if (num_sets < 1 || num_ways < 1 || num_sets * num_ways > count || table->views[1].len / 4 < count ||
        table->views[2].len / (4 * NUM_KEPT) < count || table->views[3].len / (4 * NUM_KEPT) < count) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a table of recycled logits must be of its size");
        table_release(table);
        return -1;
    }
    return 0;
}

void table_release(Table *table) {
    for (int part = 0; part < 4; part++) PyBuffer_Release(&table->views[part]);
}

/* The first place that a key can stand in: the remainder is not below 0, as in Python, where the key is. */
static int64_t first_place(const Table *table, int64_t key) {
    int64_t set = key % table->num_sets;
    return (set < 0 ? set + table->num_sets : set) * table->num_ways;
}

int64_t table_find(const Table *table, int64_t key) {
    int64_t first = first_place(table, key);
    for (int64_t place = first; place < first + table->num_ways; place++)
        if (table->keys[place] == key) return place;
    return -1;
}

/* A key's own place, else an empty one, else the one not written to for the longest time. */
static int64_t place_for(const Table *table, int64_t key) {
    int64_t first = first_place(table, key), oldest = first;
    for (int64_t place = first; place < first + table->num_ways; place++) {
        if (table->keys[place] == key) return place;
        if (table->stamps[place] < table->stamps[oldest]) oldest = place;
    }
    return oldest;
}

/* Have a line of memory brought here, as the next loop looks at it. */
#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* Keep row i % num_rows under key i. All keys choose before any is written; those that lose their place to another
 * choose again in the next round, one tick of the clock later. */
static int64_t put_keys(Table *table, int64_t clock, int64_t *keys, int64_t *rows, int64_t *places, int64_t count,
                        const int32_t *best, const float *evidence) {
    while (count) {
        clock++;
        for (int64_t key = 0; key < count; key++) {
            int64_t first = first_place(table, keys[key]);
            PREFETCH(table->keys + first);
            PREFETCH(table->stamps + first);
        }
        for (int64_t key = 0; key < count; key++) {
            places[key] = place_for(table, keys[key]);
            PREFETCH(table->tokens + places[key] * NUM_KEPT);
            PREFETCH(table->evidence + places[key] * NUM_KEPT);
        }
        for (int64_t key = 0; key < count; key++) {
            int64_t place = places[key];
            table->keys[place] = keys[key];
            table->stamps[place] = (int32_t)clock;
            memcpy(table->tokens + place * NUM_KEPT, best + rows[key] * NUM_KEPT, NUM_KEPT * sizeof(int32_t));
            memcpy(table->evidence + place * NUM_KEPT, evidence + rows[key] * NUM_KEPT, NUM_KEPT * sizeof(float));
        }
        int64_t lost = 0;
        for (int64_t key = 0; key < count; key++) {
            if (table->keys[places[key]] == keys[key]) continue;
            keys[lost] = keys[key];
            rows[lost++] = rows[key];
        }
        count = lost;
    }
    return clock;
}

/* Keys of a tree's nodes by one, two and three tokens, (MAX_KEY, count). */
static void keys_of_nodes(const int32_t *tokens, const int32_t *parents, const int32_t *before, Py_ssize_t num_before,
                          Py_ssize_t count, int64_t *keys) {
    for (Py_ssize_t node = 0; node < count; node++) {
        int64_t key = (int64_t)tokens[node] + 1;
        Py_ssize_t above = node, outside = 0;
        keys[node] = key;
        for (int size = 1; size < MAX_KEY; size++) {
            int64_t token = 0;  /* in front of the text */
            if (above > 0) {
                above = parents[above];
                token = (int64_t)tokens[above] + 1;
            } else if (outside < num_before) {
                token = (int64_t)before[num_before - 1 - outside++] + 1;
            }
            key |= key_part(token, size);
            keys[size * count + node] = key;
        }
    }
}

static float evidence_of(float log_prob) {
    double share = exp((double)log_prob), odds;
    if (!(share > LEAST_SHARE)) share = LEAST_SHARE;
    if (share > 1.0 - LEAST_SHARE) share = 1.0 - LEAST_SHARE;
    odds = log(share / (1.0 - share)) + FLOOR;
    return (float)(odds > 0.0 ? odds : 0.0);
}

/* Rows of `num_best` tokens and log probabilities as rows of NUM_KEPT tokens and evidence. */
static void fill_rows(const int32_t *best, const float *log_probs, Py_ssize_t count, Py_ssize_t num_best, int32_t *tokens,
                      float *evidence) {
    for (Py_ssize_t row = 0; row < count; row++)
        for (Py_ssize_t place = 0; place < NUM_KEPT; place++) {
            int is_there = place < num_best;
            *tokens++ = is_there ? best[row * num_best + place] : -1;
            *evidence++ = is_there ? evidence_of(log_probs[row * num_best + place]) : 0.0f;
        }
}

PyObject *core_put_nodes(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *arrays, *lists[3], *kept[2], *result = NULL;
    long long clock;
    if (!PyArg_ParseTuple(args, "OLOOOOO", &arrays, &clock, &lists[0], &lists[1], &lists[2], &kept[0], &kept[1])) return NULL;
    Table table;
    Py_buffer rows[2];
    Py_ssize_t counts[3] = {0, 0, 0};
    int32_t *numbers[3] = {NULL, NULL, NULL};
    int64_t *work = NULL;
    if (table_acquire(&table, arrays) < 0) return NULL;
    if (PyObject_GetBuffer(kept[0], &rows[0], PyBUF_SIMPLE) < 0) goto no_rows;
    if (PyObject_GetBuffer(kept[1], &rows[1], PyBUF_SIMPLE) < 0) goto one_row;
    for (int list = 0; list < 3; list++)
        if ((numbers[list] = numbers_of(lists[list], &counts[list])) == NULL) goto done;
    Py_ssize_t count = counts[0];
    int is_tree = counts[1] == count && count > 0;
    for (Py_ssize_t node = 1; is_tree && node < count; node++)
        is_tree = numbers[1][node] >= 0 && numbers[1][node] < node;
    Py_ssize_t num_best = is_tree ? rows[0].len / (4 * count) : 0;
    if (!is_tree || num_best > NUM_KEPT || rows[0].len != 4 * num_best * count || rows[1].len != rows[0].len) {
        PyErr_SetString(PyExc_ValueError, "each node needs a parent before it and a row of tokens and log probabilities");
        goto done;
    }
    if ((work = PyMem_Malloc((size_t)((3 * MAX_KEY + NUM_KEPT) * count) * sizeof(int64_t))) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *keys = work, *row_of = work + MAX_KEY * count, *places = row_of + MAX_KEY * count;
    int32_t *best = (int32_t *)(places + MAX_KEY * count);
    float *evidence = (float *)(best + NUM_KEPT * count);
    fill_rows(rows[0].buf, rows[1].buf, count, num_best, best, evidence);
    keys_of_nodes(numbers[0], numbers[1], numbers[2], counts[2], count, keys);
    for (Py_ssize_t key = 0; key < MAX_KEY * count; key++) row_of[key] = key % count;
    clock = put_keys(&table, clock, keys, row_of, places, MAX_KEY * count, best, evidence);
    result = PyLong_FromLongLong(clock);
done:
    PyMem_Free(work);
    for (int list = 0; list < 3; list++) PyMem_Free(numbers[list]);
    PyBuffer_Release(&rows[1]);
one_row:
    PyBuffer_Release(&rows[0]);
no_rows:
    table_release(&table);
    return result;
}
