/* The largest few of each row of logits, in one pass: most blocks of a row hold nothing as large as what is kept. */

#include "core.h"
#include <math.h>
#include <string.h>

enum { LANES = 8, BLOCK = 64 };

static float of_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int holds_more(const float *values, float least) {
    float most[LANES];
    for (int lane = 0; lane < LANES; lane++) most[lane] = values[lane];
    for (int start = LANES; start < BLOCK; start += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = values[start + lane] > most[lane] ? values[start + lane] : most[lane];
    int more = 0;
    for (int lane = 0; lane < LANES; lane++) more |= most[lane] > least;
    return more;
}

/* The `most` largest of a row, largest first, the first of equals first; how many compare as numbers above -inf. */
static int64_t top_of(const void *row, int is_half, int64_t width, int64_t most, int64_t *places, float *values) {
    int64_t count = 0;
    float block[BLOCK], least = -INFINITY;
    for (int64_t start = 0; start < width; start += BLOCK) {
        int64_t size = width - start < BLOCK ? width - start : BLOCK;
        if (is_half)
            for (int64_t one = 0; one < size; one++) block[one] = of_bf16(((const uint16_t *)row)[start + one]);
        const float *read = is_half ? block : (const float *)row + start;
        if (size == BLOCK && !holds_more(read, least)) continue;
        for (int64_t one = 0; one < size; one++) {
            if (!(read[one] > least)) continue;
            int64_t place = count < most ? count++ : most - 1;
            for (; place > 0 && values[place - 1] < read[one]; place--) {
                values[place] = values[place - 1];
                places[place] = places[place - 1];
            }
            values[place] = read[one];
            places[place] = start + one;
            if (count == most) least = values[most - 1];
        }
    }
    return count;
}

PyObject *core_top(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *parts[3];
    Py_ssize_t width, most, taken = 0;
    if (!PyArg_ParseTuple(args, "OnOO", &parts[0], &width, &parts[1], &parts[2])) return NULL;
    Py_buffer views[3];
    for (; taken < 3; taken++)
        if (PyObject_GetBuffer(parts[taken], &views[taken], taken ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) break;
    int is_full = taken == 3;
    if (is_full) {
        Py_ssize_t size = views[0].itemsize, rows = width > 0 ? views[0].len / (width * size) : 0;
        most = rows ? views[2].len / (4 * rows) : 0;
        if ((size != 2 && size != 4) || most > width || views[1].len < 8 * most * rows) {
            PyErr_SetString(PyExc_ValueError, "rows of fp32 or bf16 logits need room for at most their width of best ones");
        } else {
            for (Py_ssize_t row = 0; row < rows; row++) {
                const char *logits = (const char *)views[0].buf + row * width * size;
                int64_t *places = (int64_t *)views[1].buf + row * most;
                is_full &= top_of(logits, size == 2, width, most, places, (float *)views[2].buf + row * most) == most;
            }
        }
    }
    while (taken--) PyBuffer_Release(&views[taken]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_full);
}
