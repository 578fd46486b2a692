/* Whether dictionaries still hold what they held, object by object: of all modules of a model, before each forward. */

#include "core.h"
#include "tiles.h"

#ifdef AVX2
#include <immintrin.h>

enum { AHEAD = 8 }; /* dictionaries that are on their way from memory */

/* (dictionaries, values, skipped): whether the values of the former, one after the other and without those of the class
 * `skipped` and its subclasses, are the objects in the tuple `values`. */
PyObject *core_same_values(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *dictionaries, *values, *skipped, *key, *value;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &dictionaries, &PyTuple_Type, &values, &PyType_Type, &skipped))
        return NULL;
    Py_ssize_t count = PyTuple_Size(values), seen = 0, size = PyTuple_Size(dictionaries);
    for (Py_ssize_t number = 0; number < size; number++) {
        if (number + AHEAD < size) _mm_prefetch((const char *)PyTuple_GetItem(dictionaries, number + AHEAD), _MM_HINT_T0);
        PyObject *dictionary = PyTuple_GetItem(dictionaries, number);
        if (!PyDict_Check(dictionary)) {
            PyErr_SetString(PyExc_TypeError, "values of something that is no dictionary");
            return NULL;
        }
        for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value);) {
            if (seen < count && PyTuple_GetItem(values, seen) == value) seen++;
            else if (!PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)skipped)) return PyBool_FromLong(0);
        }
    }
    return PyBool_FromLong(seen == count);
}
#endif
