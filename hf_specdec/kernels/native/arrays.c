/* Takes and gives back the arrays of one call, all or none. */

#include "search.h"

static int buffer_of(PyObject *learned, int place, Py_buffer *view) {
    PyObject *array = PyTuple_GetItem(learned, place);
    return array == NULL ? -1 : PyObject_GetBuffer(array, view, PyBUF_WRITABLE);
}

void arrays_release(Arrays *arrays, const Search *search) {
    for (int text = 0; text < NUM_TEXTS; text++)
        if (search->texts[text] != NULL) ngrams_release(&arrays->texts[text]);
    if (search->recycled != NULL) table_release(&arrays->recycled);
    for (int view = 0; view < 6; view++) PyBuffer_Release(&arrays->views[view]);
}

int arrays_acquire(Arrays *arrays, const Search *search) {
    int texts = 0, has_table = 0, views = 0;
    for (; texts < NUM_TEXTS; texts++)
        if (search->texts[texts] != NULL && ngrams_acquire(&arrays->texts[texts], search->texts[texts]) < 0) goto failed;
    if (search->recycled != NULL && table_acquire(&arrays->recycled, search->recycled) < 0) goto failed;
    has_table = search->recycled != NULL;
    for (; views < 6; views++)
        if (buffer_of(search->learned, views, &arrays->views[views]) < 0) goto failed;
    arrays->weights = arrays->views[0].buf;
    arrays->seen = arrays->views[1].buf;
    arrays->expected = arrays->views[2].buf;
    arrays->accepted = arrays->views[3].buf;
    arrays->factors = arrays->views[4].buf;
    arrays->record = arrays->views[5].buf;
    arrays->num_kinds = (int)(arrays->views[1].len / 8);
    int fits = arrays->views[0].len == (Py_ssize_t)arrays->num_kinds * WIDTH * 8 && arrays->views[5].len == 16;
    for (int view = 2; view < 5; view++) fits = fits && arrays->views[view].len == NUM_BINS * 8;
    if (fits && arrays->texts[OWN_TEXT].num_tokens >= search->end) return 0;
    PyErr_SetString(PyExc_ValueError, "the arrays of what was learned must be of their sizes");
failed:
    while (texts--)
        if (search->texts[texts] != NULL) ngrams_release(&arrays->texts[texts]);
    if (has_table) table_release(&arrays->recycled);
    while (views--) PyBuffer_Release(&arrays->views[views]);
    return -1;
}
