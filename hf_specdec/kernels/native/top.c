/* The largest few of each row of logits and their log probabilities, read from the logits' own memory. A row is looked
 * at in blocks: first for the largest of each, then for its exponentials, and only the few blocks that hold one of the
 * row's largest number by number. The loops are such that compilers vectorise them. */

#include "core.h"
#include "exponential.h"

#include <math.h>

/* One version for each width of vector registers; the loader takes the processor's. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { BLOCK = 64 };

/* An integer that is larger where a float is larger, and the other way round; what is no number is beyond infinity. */
static inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & INT32_MAX); }

/* A block of a row: its own memory where that is as it should be, else a copy, filled up with -inf. */
static inline const float *block_of(const void *row, int is_half, int64_t start, int64_t width, float *copy) {
    const uint16_t *halves = (const uint16_t *)row + start;
    const float *floats = (const float *)row + start;
    if (width - start >= BLOCK) {
        if (!is_half) return floats;
        for (int place = 0; place < BLOCK; place++) copy[place] = float_of((uint32_t)halves[place] << 16);
        return copy;
    }
    for (int64_t place = 0; place < BLOCK; place++) {
        if (start + place >= width) copy[place] = -INFINITY;
        else copy[place] = is_half ? float_of((uint32_t)halves[place] << 16) : floats[place];
    }
    return copy;
}

static inline float largest(const float *block) {
    int32_t most = INT32_MIN;
    for (int place = 0; place < BLOCK; place++) {
        int32_t value = ordered((int32_t)bits_of(block[place]));
        most = value > most ? value : most;
    }
    return float_of((uint32_t)ordered(most));
}

/* Add e to each of a block, less `most`, to a sum of its own. */
static inline void add_exponentials(const float *block, float most, float *sums) {
    for (int place = 0; place < BLOCK; place++) sums[place] += exponential(block[place] - most);
}

/* Put a value at its rank among the `kept` largest, of which there are at most `count`, behind its equals. */
static inline int64_t keep(float value, float place, int64_t kept, int64_t count, float *values, float *places) {
    int64_t rank = kept < count ? kept++ : count - 1;
    for (; rank > 0 && values[rank - 1] < value; rank--) {
        values[rank] = values[rank - 1];
        places[rank] = places[rank - 1];
    }
    values[rank] = value;
    places[rank] = place;
    return kept;
}

/* The `count` largest of a row, largest first, the first of equals first: their places and log probabilities. 0 where
 * fewer are above -inf, or one is infinite or no number. `peaks`: room for the largest of each block. */
FOR_EACH_PROCESSOR static int read_row(const void *row, int is_half, int64_t width, int64_t count, float *peaks,
                                       float *places, float *values) {
    float copy[BLOCK], sums[BLOCK] = {0.0f}, least = -INFINITY;
    int64_t kept = 0, num_blocks = (width + BLOCK - 1) / BLOCK;
    for (int64_t number = 0; number < num_blocks; number++) {
        float peak = peaks[number] = largest(block_of(row, is_half, number * BLOCK, width, copy));
        if (!(peak < INFINITY)) return 0;
        if (peak > least) kept = keep(peak, (float)number, kept, count, values, places);
        if (kept == count) least = values[count - 1];
    }
    if (kept == 0) return 0;
    float most = values[0];
    double total = 0.0;
    least = kept == count ? least : -INFINITY; /* so many blocks hold a number as large as it */
    kept = 0;
    for (int64_t number = 0; number < num_blocks; number++) {
        const float *block = block_of(row, is_half, number * BLOCK, width, copy);
        add_exponentials(block, most, sums);
        if (peaks[number] < least) continue;
        for (int place = 0; place < BLOCK; place++) {
            float value = block[place];
            if (value < least || value == -INFINITY || (kept == count && value <= values[count - 1])) continue;
            kept = keep(value, (float)(number * BLOCK + place), kept, count, values, places);
        }
    }
    for (int place = 0; place < BLOCK; place++) total += sums[place];
    if (kept < count || !(total > 0.0)) return 0;
    double normaliser = (double)most + log(total);
    for (int64_t rank = 0; rank < count; rank++) values[rank] = (float)((double)values[rank] - normaliser);
    return 1;
}

PyObject *core_read_logits(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *logits, *read;
    Py_ssize_t width, count;
    Py_buffer from, to;
    if (!PyArg_ParseTuple(args, "OOnn", &logits, &read, &width, &count)) return NULL;
    if (PyObject_GetBuffer(logits, &from, PyBUF_SIMPLE) < 0) return NULL;
    if (PyObject_GetBuffer(read, &to, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    Py_ssize_t size = from.itemsize, rows = width > 0 ? from.len / (width * size) : 0, row_size = 1 + 2 * count;
    float *peaks = NULL;
    int is_whole = 1;
    if ((size != 2 && size != 4) || count < 1 || count > width || to.len < rows * row_size * 4) {
        PyErr_SetString(PyExc_ValueError, "rows of fp32 or bf16 logits need room for at most their width of best ones");
    } else if ((peaks = PyMem_Malloc((size_t)(width / BLOCK + 1) * sizeof(float))) == NULL) {
        PyErr_NoMemory();
    } else {
        for (Py_ssize_t row = 0; is_whole && row < rows; row++) {
            const char *begin = (const char *)from.buf + row * width * size;
            float *found = (float *)to.buf + row * row_size;
            is_whole = read_row(begin, size == 2, width, count, peaks, found + 1, found + 1 + count);
            found[0] = found[1];
        }
    }
    PyMem_Free(peaks);
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_whole);
}
