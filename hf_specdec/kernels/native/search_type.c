/* The search as a Python type: hf_specdec/methods/auto/search.py holds it, and says what its methods do. */

#include "search.h"
#include <string.h>

/* (nodes, tokens, parents, probabilities, depths) */
static PyObject *result_of(const Search *search, const int *found, int count) {
    PyObject *parts[5] = {PyList_New(count)}, *result = NULL;
    int failed = parts[0] == NULL;
    for (int part = 1; part < 5; part++) failed |= (parts[part] = PyTuple_New(count)) == NULL;
    for (int place = 0; !failed && place < count; place++) {
        const Node *node = &search->nodes.at[found[place]];
        int above = node->parent < 0 ? -1 : search->nodes.at[node->parent].place;
        failed = PyList_SetItem(parts[0], place, PyLong_FromLong(found[place])) < 0 ||
                 PyTuple_SetItem(parts[1], place, PyLong_FromLong(node->token)) < 0 ||
                 PyTuple_SetItem(parts[2], place, PyLong_FromLong(above)) < 0 ||
                 PyTuple_SetItem(parts[3], place, PyFloat_FromDouble(node->probability)) < 0 ||
                 PyTuple_SetItem(parts[4], place, PyLong_FromLong(node->depth)) < 0;
    }
    if (!failed && !PyErr_Occurred()) result = PyTuple_Pack(5, parts[0], parts[1], parts[2], parts[3], parts[4]);
    for (int part = 0; part < 5; part++) Py_XDECREF(parts[part]);
    return result;
}

static PyObject *search_likeliest(Search *self, PyObject *args) {
    int budget;
    double floor;
    Arrays arrays;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "id", &budget, &floor)) return NULL;
    if (budget < 0) budget = 0;
    int *found = PyMem_Malloc((size_t)(budget + 1) * sizeof(int));
    if (found == NULL) return PyErr_NoMemory();
    if (arrays_acquire(&arrays, self) == 0) {
        int count = search_find(self, &arrays, budget, floor, found);
        arrays_release(&arrays, self);
        if (count > 0) result = result_of(self, found, count);
    }
    PyMem_Free(found);
    return result;
}

/* The node that an argument names; -1 with an exception where there is none. */
static int node_named(const Search *search, int node) {
    if (node >= 0 && node < search->nodes.count) return node;
    PyErr_SetString(PyExc_IndexError, "no such node");
    return -1;
}

static int node_argument(const Search *search, PyObject *argument) {
    long node = PyLong_AsLong(argument);
    return node == -1 && PyErr_Occurred() ? -1 : node_named(search, (int)node);
}

static PyObject *search_token(Search *self, PyObject *argument) {
    int node = node_argument(self, argument);
    return node < 0 ? NULL : PyLong_FromLong(self->nodes.at[node].token);
}

static PyObject *search_parent(Search *self, PyObject *argument) {
    int node = node_argument(self, argument);
    return node < 0 ? NULL : PyLong_FromLong(self->nodes.at[node].parent);
}

static PyObject *search_probability(Search *self, PyObject *argument) {
    int node = node_argument(self, argument);
    return node < 0 ? NULL : PyFloat_FromDouble(self->nodes.at[node].probability);
}

static PyObject *search_child(Search *self, PyObject *args) {
    int node, token;
    if (!PyArg_ParseTuple(args, "ii", &node, &token) || node_named(self, node) < 0) return NULL;
    return PyLong_FromLong(search_child_of(self, node, token));
}

static PyObject *search_score(Search *self, PyObject *args) {
    int node;
    PyObject *tokens, *values;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "iO!O!", &node, &PyList_Type, &tokens, &PyList_Type, &values)) return NULL;
    if (node_named(self, node) < 0) return NULL;
    count = PyList_Size(tokens) < PyList_Size(values) ? PyList_Size(tokens) : PyList_Size(values);
    Range score = {self->evidence.count, (int)count};
    for (Py_ssize_t place = 0; place < count; place++) {
        long token = PyLong_AsLong(PyList_GetItem(tokens, place));
        double value = PyFloat_AsDouble(PyList_GetItem(values, place));
        int number = PyErr_Occurred() ? -1 : NEW(&self->evidence);
        if (number < 0) return NULL;
        self->evidence.at[number] = (Evidence){(int32_t)token, value};
    }
    self->nodes.at[node].score = score;
    self->nodes.at[node].has_score = 1;
    self->nodes.at[node].has_prediction = 0;
    return new_none();
}

static PyObject *search_value(Search *self, PyObject *args) {
    PyObject *list;
    Arrays arrays;
    double total = 0.0;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return NULL;
    Py_ssize_t count = PyList_Size(list);
    double *reached = PyMem_Calloc((size_t)self->nodes.count, sizeof(double));
    if (reached == NULL) return PyErr_NoMemory();
    reached[0] = 1.0;
    if (arrays_acquire(&arrays, self) == 0) {
        for (Py_ssize_t place = 1; place < count; place++) {
            int node = node_argument(self, PyList_GetItem(list, place));
            if (node < 1) break;
            int above = self->nodes.at[node].parent;
            const Prediction *prediction = predicted(self, &arrays, above);
            if (prediction == NULL) break;
            const Candidate *one = candidate_of(self, prediction, self->nodes.at[node].token);
            reached[node] = one == NULL ? 0.0 : reached[above] * one->probability;
            total += reached[node];
        }
        arrays_release(&arrays, self);
    }
    PyMem_Free(reached);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(total);
}

static PyObject *search_follow(Search *self, PyObject *args) {
    PyObject *lists[3];
    int32_t *numbers[3] = {NULL, NULL, NULL}, *work = NULL;
    Py_ssize_t counts[3];
    Arrays arrays;
    int learned = -1;
    if (!PyArg_ParseTuple(args, "OOO", &lists[0], &lists[1], &lists[2])) return NULL;
    for (int list = 0; list < 3; list++)
        if ((numbers[list] = numbers_of(lists[list], &counts[list])) == NULL) goto done;
    if (counts[0] != counts[1]) {
        PyErr_SetString(PyExc_ValueError, "each node of a tree needs a parent");
    } else if ((work = PyMem_Malloc((size_t)(counts[0] + 1) * sizeof(int32_t))) == NULL) {
        PyErr_NoMemory();
    } else if (arrays_acquire(&arrays, self) == 0) {
        learned = search_learn(self, &arrays, numbers, counts, work);
        arrays_release(&arrays, self);
    }
done:
    PyMem_Free(work);
    for (int list = 0; list < 3; list++) PyMem_Free(numbers[list]);
    if (learned == 0) return new_none();
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

/* [(source, tokens, evidence)] of a node, and the weights of its kind. */
static PyObject *search_said(Search *self, PyObject *argument) {
    Arrays arrays;
    int node = node_argument(self, argument);
    PyObject *said = NULL, *weights = NULL;
    if (node < 0 || arrays_acquire(&arrays, self) < 0) return NULL;
    const Prediction *prediction = predicted(self, &arrays, node);
    if (prediction != NULL && (said = PyList_New(0)) != NULL && (weights = PyList_New(0)) != NULL) {
        for (int place = 0; place < NUM_SOURCES && !PyErr_Occurred(); place++) {
            PyObject *weight = PyFloat_FromDouble(prediction->weights[place + 1]);
            if (weight != NULL) PyList_Append(weights, weight);
            Py_XDECREF(weight);
        }
        for (int number = 0; number < prediction->sources.count && !PyErr_Occurred(); number++) {
            Source source = self->sources.at[prediction->sources.first + number];
            PyObject *tokens = PyList_New(source.count), *values = PyList_New(source.count);
            for (int one = 0; tokens != NULL && values != NULL && one < source.count; one++) {
                Evidence entry = self->evidence.at[source.first + one];
                PyList_SetItem(tokens, one, PyLong_FromLong(entry.token));
                PyList_SetItem(values, one, PyFloat_FromDouble(entry.value));
            }
            PyObject *row = tokens == NULL || values == NULL ? NULL : Py_BuildValue("(iNN)", source.place, tokens, values);
            if (row != NULL) PyList_Append(said, row);
            Py_XDECREF(row);
        }
    }
    arrays_release(&arrays, self);
    if (weights != NULL && !PyErr_Occurred()) return Py_BuildValue("(NN)", said, weights);
    Py_XDECREF(said);
    Py_XDECREF(weights);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyObject *owned(PyObject *object) {
    if (object == Py_None) return NULL;
    Py_INCREF(object);
    return object;
}

static int add_root(Search *search) {
    Arrays arrays;
    if (arrays_acquire(&arrays, search) < 0) return -1;
    search->end = arrays.texts[OWN_TEXT].num_tokens;
    int root = search->end < 1 ? -1 : NEW(&search->nodes);
    if (root == 0) {
        Node *node = &search->nodes.at[root];
        const int32_t *last = arrays.texts[OWN_TEXT].tokens + search->end - 1;
        memset(node, 0, sizeof *node);
        node->token = *last;
        node->parent = node->first_child = node->next_sibling = -1;
        node->probability = 1.0;
        for (; node->num_tail < MAX_TAIL && node->num_tail < search->end; node->num_tail++)
            node->tail[node->num_tail] = last[-node->num_tail];
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "the text must have a token");
    }
    arrays_release(&arrays, search);
    return root;
}

static PyObject *search_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *texts[NUM_TEXTS], *recycled, *learned, *common, *noise;
    int takes_trees, max_depth;
    if (!PyArg_ParseTuple(args, "OOOOO!O!piO!", &texts[0], &texts[1], &texts[2], &recycled, &PyTuple_Type, &learned,
                          &PyTuple_Type, &common, &takes_trees, &max_depth, &PyTuple_Type, &noise)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Search *self = (Search *)allocate(type, 0);
    if (self == NULL) return NULL;
    for (int text = 0; text < NUM_TEXTS; text++) self->texts[text] = owned(texts[text]);
    self->recycled = owned(recycled);
    self->learned = owned(learned);
    self->common_of = owned(common);
    self->noise = owned(noise);
    self->takes_trees = takes_trees;
    self->max_depth = max_depth;
    if (self->texts[OWN_TEXT] != NULL && add_root(self) == 0) return (PyObject *)self;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a search needs a text");
    Py_DECREF(self);
    return NULL;
}

static void search_dealloc(Search *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int text = 0; text < NUM_TEXTS; text++) Py_XDECREF(self->texts[text]);
    Py_XDECREF(self->recycled);
    Py_XDECREF(self->learned);
    Py_XDECREF(self->common_of);
    Py_XDECREF(self->noise);
    void *lists[] = {self->nodes.at, self->matches.at, self->evidence.at, self->sources.at, self->candidates.at, self->common.at};
    for (size_t list = 0; list < sizeof lists / sizeof *lists; list++) PyMem_Free(lists[list]);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"likeliest", (PyCFunction)search_likeliest, METH_VARARGS, NULL},
    {"token", (PyCFunction)search_token, METH_O, NULL},
    {"parent", (PyCFunction)search_parent, METH_O, NULL},
    {"probability", (PyCFunction)search_probability, METH_O, NULL},
    {"child", (PyCFunction)search_child, METH_VARARGS, NULL},
    {"score", (PyCFunction)search_score, METH_VARARGS, NULL},
    {"value", (PyCFunction)search_value, METH_VARARGS, NULL},
    {"follow", (PyCFunction)search_follow, METH_VARARGS, NULL},
    {"said", (PyCFunction)search_said, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, search_new}, {Py_tp_dealloc, search_dealloc}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec search_spec = {"hf_specdec.kernels.native._core.Search", sizeof(Search), 0, Py_TPFLAGS_DEFAULT, slots};
