/* Memory in pages of 2 MB, of which a processor finds many more than of 4 KB without walking its tables. */

#include "core.h"

#ifdef __linux__
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MREMAP_MAYMOVE
#define MREMAP_MAYMOVE 1
#define MREMAP_FIXED 2
#endif
extern void *mremap(void *, size_t, size_t, int, ...);

enum { HUGE_PAGE = 1 << 21, PIECE = 1 << 25 };

/* Put a copy of a private file's pages in their place, at the same addresses; 0 where that fails. */
static int replace(char *start, size_t size) {
    char *room = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return 0;
    char *copy = (char *)(((uintptr_t)room + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(copy, size, MADV_HUGEPAGE);
    memcpy(copy, start, size);
    int is_moved = mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, start) != MAP_FAILED;
    if (copy > room) munmap(room, (size_t)(copy - room));
    char *end = room + size + HUGE_PAGE, *rest = copy + size;
    if (!is_moved) munmap(copy, size);
    if (end > rest) munmap(rest, (size_t)(end - rest));
    return is_moved;
}

/* (start, end, is_file): memory that begins and ends at whole pages of 2 MB. Returns bytes that are in such pages now. */
PyObject *core_huge_pages(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long start, end;
    long long done = 0;
    int is_file;
    if (!PyArg_ParseTuple(args, "KKp", &start, &end, &is_file)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (unsigned long long at = start; at < end; at += PIECE) {
        size_t size = end - at < PIECE ? end - at : PIECE;
        char *piece = (char *)(uintptr_t)at;
        int is_done = is_file ? replace(piece, size)
                              : madvise(piece, size, MADV_HUGEPAGE) == 0 && madvise(piece, size, MADV_COLLAPSE) == 0;
        if (is_done) done += (long long)size;
        else if (is_file) break;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(done);
}
#else
PyObject *core_huge_pages(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) { return PyLong_FromLong(0); }
#endif
