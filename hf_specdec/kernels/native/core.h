/* What the files of the compiled core share. Every function but `attention`, `exponential`, `linear` and `recur` holds the
 * interpreter's lock from start to end, so what it reads and writes in the arrays that Python hands over is never seen half
 * done; no buffer outlives a call. */

#ifndef HF_SPECDEC_CORE_H
#define HF_SPECDEC_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Of these files, by the build (sources.py): a library built from other sources is left alone. */
#ifndef SOURCES_NUMBER
#define SOURCES_NUMBER 0
#endif

/* None, owned by the caller. Python 3.12's Py_RETURN_NONE counts no reference, for the stable ABI of 3.11 either: a core
 * built there would take None from Python 3.11, which ends the process. */
static inline PyObject *new_none(void) {
    Py_INCREF(Py_None);
    return Py_None;
}

/* An n-gram index: see hf_specdec/methods/common/ngram/index.py. */
typedef struct {
    Py_buffer views[3];
    int32_t *tokens, *older, *slots;
    int64_t num_tokens, num_links, last_slot, orders;
} Ngrams;

/* A table of recycled logits: see hf_specdec/methods/auto/recycled_logits.py. */
typedef struct {
    Py_buffer views[4];
    int64_t *keys, num_sets, num_ways;
    int32_t *stamps, *tokens;
    float *evidence;
} Table;

enum { NUM_KEPT = 16, MAX_KEY = 3, TOKEN_BITS = 21 };

/* What the token that many places before the last adds to a key; what it has above TOKEN_BITS may fall off. */
static inline int64_t key_part(int64_t token, int places) { return (int64_t)((uint64_t)token << (places * TOKEN_BITS)); }

/* (tokens, older, slots, orders); -1 with an exception where that is no index. */
int ngrams_acquire(Ngrams *index, PyObject *arrays);
void ngrams_release(Ngrams *index);
/* At most `limit` positions below `end` that follow `ngram` in the text, newest first; how many. */
int ngrams_places(const Ngrams *index, const int32_t *ngram, int64_t size, int64_t end, int limit, int32_t *found);

/* (keys, stamps, tokens, evidence, num_sets, num_ways); -1 with an exception where that is no table. */
int table_acquire(Table *table, PyObject *arrays);
void table_release(Table *table);
/* The place of `key`, -1 where it has no entry. */
int64_t table_find(const Table *table, int64_t key);

PyObject *core_attention(PyObject *module, PyObject *args);
PyObject *core_linear(PyObject *module, PyObject *args);
PyObject *core_exponential(PyObject *module, PyObject *args);
PyObject *core_huge_pages(PyObject *module, PyObject *args);
PyObject *core_link(PyObject *module, PyObject *args);
PyObject *core_packed_linear(PyObject *module, PyObject *args);
PyObject *core_packed_rows(PyObject *module, PyObject *args);
PyObject *core_places(PyObject *module, PyObject *args);
PyObject *core_put_nodes(PyObject *module, PyObject *args);
PyObject *core_read_logits(PyObject *module, PyObject *args);
PyObject *core_recur(PyObject *module, PyObject *args);
PyObject *core_replay(PyObject *module, PyObject *args);
PyObject *core_same_values(PyObject *module, PyObject *args);
PyObject *core_rms_norm(PyObject *module, PyObject *args);
extern PyType_Spec search_spec;

/* The C numbers of a sequence of Python numbers, freed by the caller; NULL with an exception. */
int32_t *numbers_of(PyObject *sequence, Py_ssize_t *count);

#endif
