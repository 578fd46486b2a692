/* The n-gram index: look-ups and links in the arrays of hf_specdec/methods/common/ngram/index.py. */

#include "core.h"

#define SEED UINT64_C(0x9E3779B97F4A7C15)
#define FACTOR UINT64_C(0xD6E8FEB86659FD93)

static uint64_t mixed(uint64_t state, int32_t token) {
    uint64_t product = (state ^ (uint32_t)token) * FACTOR;
    return product ^ product >> 32;
}

int ngrams_acquire(Ngrams *index, PyObject *arrays) {
    PyObject *parts[3];
    Py_ssize_t orders;
    if (!PyArg_ParseTuple(arrays, "OOOn", &parts[0], &parts[1], &parts[2], &orders)) return -1;
    for (int part = 0; part < 3; part++) {
        if (PyObject_GetBuffer(parts[part], &index->views[part], PyBUF_WRITABLE) < 0) {
            while (part--) PyBuffer_Release(&index->views[part]);
            return -1;
        }
    }
    index->tokens = index->views[0].buf;
    index->older = index->views[1].buf;
    index->slots = index->views[2].buf;
    index->num_tokens = index->views[0].len / 4;
    index->num_links = index->views[1].len / 4;
    index->last_slot = index->views[2].len / 4 - 1;
    index->orders = orders;
    if (orders < 1 || index->last_slot < 0 || (index->last_slot & (index->last_slot + 1)) != 0) {
        PyErr_SetString(PyExc_ValueError, "the slots of an n-gram table must be a power of two");
        ngrams_release(index);
        return -1;
    }
    return 0;
}

void ngrams_release(Ngrams *index) {
    for (int part = 0; part < 3; part++) PyBuffer_Release(&index->views[part]);
}

/* Where the n-gram stands, or the empty slot that it would take; a table is never full. */
static int64_t slot_of(const Ngrams *index, const int32_t *ngram, int64_t size, uint64_t state) {
    int64_t place = (int64_t)(state & (uint64_t)index->last_slot);
    for (;; place = (place + 1) & index->last_slot) {
        int32_t slot = index->slots[place];
        if (slot == 0) return place;
        if (slot % index->orders != size - 1) continue;
        const int32_t *known = index->tokens + slot / index->orders - size;
        int64_t same = 0;
        while (same < size && known[same] == ngram[same]) same++;
        if (same == size) return place;
    }
}

int ngrams_places(const Ngrams *index, const int32_t *ngram, int64_t size, int64_t end, int limit, int32_t *found) {
    if (size < 1 || size > index->orders) return 0;
    uint64_t state = SEED;
    for (int64_t token = size - 1; token >= 0; token--) state = mixed(state, ngram[token]);
    int64_t place = index->slots[slot_of(index, ngram, size, state)] / index->orders;
    int count = 0;
    while (place && count < limit) {
        if (place < end) found[count++] = (int32_t)place;
        int64_t link = (place - 1) * index->orders + size - 1;
        if (link >= index->num_links) break;
        place = index->older[link];
    }
    return count;
}

PyObject *core_places(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *arrays = PyTuple_GetSlice(args, 0, 4), *result = NULL;
    if (arrays == NULL) return NULL;
    Py_ssize_t size, limit;
    PyObject *ngram = PyTuple_GetItem(args, 4), *most = PyTuple_GetItem(args, 5);
    Ngrams index;
    if (ngram == NULL || most == NULL || (limit = PyLong_AsSsize_t(most)) < 0 || ngrams_acquire(&index, arrays) < 0) {
        Py_DECREF(arrays);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "limit must not be below 0");
        return NULL;
    }
    if (limit > index.num_tokens) limit = (Py_ssize_t)index.num_tokens;
    int32_t *wanted = numbers_of(ngram, &size);
    int32_t *found = PyMem_Malloc((size_t)(limit + 1) * sizeof(int32_t));
    if (wanted != NULL && found != NULL) {
        int count = ngrams_places(&index, wanted, size, index.num_tokens, (int)limit, found);
        result = PyList_New(count);
        for (int place = 0; result != NULL && place < count; place++) {
            PyObject *number = PyLong_FromLong(found[place]);
            if (number == NULL || PyList_SetItem(result, place, number) < 0) Py_CLEAR(result);
        }
    } else if (found == NULL) {
        PyErr_NoMemory();
    }
    PyMem_Free(wanted);
    PyMem_Free(found);
    ngrams_release(&index);
    Py_DECREF(arrays);
    return result;
}

/* Enter and link the n-grams that end with the tokens from `start` on; Python has made room for them. */
static PyObject *link_from(Ngrams *index, int64_t start) {
    int64_t orders = index->orders, added = 0;
    if (index->num_links < index->num_tokens * orders || index->num_tokens > (INT32_MAX - orders) / orders) {
        PyErr_SetString(PyExc_ValueError, "an n-gram index needs a link for each token and order, below 2**31 in all");
        return NULL;
    }
    PyObject *followers = PyList_New(0);
    if (followers == NULL) return NULL;
    for (int64_t end = start + 1; end <= index->num_tokens; end++) {
        uint64_t state = SEED;
        for (int64_t size = 1; size <= orders && size <= end; size++) {
            const int32_t *ngram = index->tokens + end - size;
            state = mixed(state, ngram[0]);
            int64_t place = slot_of(index, ngram, size, state);
            int32_t known = (int32_t)(index->slots[place] / orders);
            if (known == 0) {
                added++;
                if (size == 2 && ngram[1] >= 0) {
                    PyObject *token = PyLong_FromLong(ngram[1]);
                    if (token == NULL || PyList_Append(followers, token) < 0) {
                        Py_XDECREF(token);
                        Py_DECREF(followers);
                        return NULL;
                    }
                    Py_DECREF(token);
                }
            }
            index->older[(end - 1) * orders + size - 1] = known;
            index->slots[place] = (int32_t)(end * orders + size - 1);
        }
    }
    return Py_BuildValue("(LN)", (long long)added, followers);
}

PyObject *core_link(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *arrays = PyTuple_GetSlice(args, 0, 4), *result = NULL;
    if (arrays == NULL) return NULL;
    PyObject *first = PyTuple_GetItem(args, 4);
    Py_ssize_t start = first == NULL ? -1 : PyLong_AsSsize_t(first);
    Ngrams index;
    if (start >= 0 && ngrams_acquire(&index, arrays) == 0) {
        result = link_from(&index, start);
        ngrams_release(&index);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "start must not be below 0");
    }
    Py_DECREF(arrays);
    return result;
}
