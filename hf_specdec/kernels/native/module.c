/* The module: see hf_specdec/kernels/native/_core.pyi for what it offers. */

#include "core.h"
#include "tiles.h"

int32_t *numbers_of(PyObject *sequence, Py_ssize_t *count) {
    PyObject *items = PySequence_Tuple(sequence);
    if (items == NULL) return NULL;
    Py_ssize_t size = PyTuple_Size(items);
    int32_t *numbers = PyMem_Malloc((size_t)(size ? size : 1) * sizeof(int32_t));
    if (numbers == NULL) PyErr_NoMemory();
    for (Py_ssize_t item = 0; numbers != NULL && item < size; item++) {
        long number = PyLong_AsLong(PyTuple_GetItem(items, item));
        if (number == -1 && PyErr_Occurred()) {
            PyMem_Free(numbers);
            numbers = NULL;
        } else {
            numbers[item] = (int32_t)number;
        }
    }
    Py_DECREF(items);
    *count = size;
    return numbers;
}

static PyObject *has_kernels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    return PyBool_FromLong(tiles_for(FP32, 32) != NULL);
}

static PyMethodDef functions[] = {
    {"has_kernels", has_kernels, METH_NOARGS, NULL},
    {"huge_pages", core_huge_pages, METH_VARARGS, NULL},
    {"link", core_link, METH_VARARGS, NULL},
    {"places", core_places, METH_VARARGS, NULL},
    {"put_nodes", core_put_nodes, METH_VARARGS, NULL},
    {"read_logits", core_read_logits, METH_VARARGS, NULL},
#ifdef AVX2
    {"attention", core_attention, METH_VARARGS, NULL},
    {"exponential", core_exponential, METH_VARARGS, NULL},
    {"linear", core_linear, METH_VARARGS, NULL},
    {"packed_linear", core_packed_linear, METH_VARARGS, NULL},
    {"packed_rows", core_packed_rows, METH_VARARGS, NULL},
    {"recur", core_recur, METH_VARARGS, NULL},
    {"replay", core_replay, METH_VARARGS, NULL},
    {"rms_norm", core_rms_norm, METH_VARARGS, NULL},
    {"same_values", core_same_values, METH_VARARGS, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &search_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed || PyModule_AddIntConstant(module, "SOURCES", SOURCES_NUMBER) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
