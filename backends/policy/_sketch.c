/* The counters of a count-min sketch, for batches of keys: see FrequencySketch in sketch.py, which
 * owns them and lets them age.
 *
 * A key's four counters are anywhere in as many tables that no cache holds for long: those of a
 * batch are asked for before the first is looked at.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a key's numbers are little endian; on other machines Python reads them"
#endif

#define ROWS 4
#define DIGEST_BYTES (ROWS * (Py_ssize_t)sizeof(uint32_t))
#define GROUP 64

typedef struct {
    uint8_t *counters; /* [ROWS][mask + 1] */
    size_t mask;
} sketch_t;

/* The counters of a key. */
static void places(const sketch_t *sketch, PyObject *key, uint8_t *found[ROWS])
{
    uint32_t numbers[ROWS];
    memcpy(numbers, PyBytes_AS_STRING(key), sizeof numbers);
    for (size_t row = 0; row < ROWS; row++)
        found[row] = sketch->counters + row * (sketch->mask + 1) + (numbers[row] & sketch->mask);
}

static uint8_t least(uint8_t *const found[ROWS])
{
    uint8_t smallest = *found[0];
    for (int row = 1; row < ROWS; row++)
        if (*found[row] < smallest)
            smallest = *found[row];
    return smallest;
}

static int check(PyObject *const *keys, Py_ssize_t count)
{
    for (Py_ssize_t n = 0; n < count; n++)
        if (!PyBytes_CheckExact(keys[n]) || PyBytes_GET_SIZE(keys[n]) < DIGEST_BYTES) {
            PyErr_Format(PyExc_ValueError, "a key is %.80R, expected bytes, at least %zd", keys[n],
                         DIGEST_BYTES);
            return -1;
        }
    return 0;
}

static void add_group(const sketch_t *sketch, PyObject *const *keys, Py_ssize_t count,
                      uint8_t most)
{
    uint8_t *found[GROUP][ROWS];
    for (Py_ssize_t n = 0; n < count; n++) {
        places(sketch, keys[n], found[n]);
        for (int row = 0; row < ROWS; row++)
            __builtin_prefetch(found[n][row], 1);
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        uint8_t smallest = least(found[n]);
        if (smallest < most)
            for (int row = 0; row < ROWS; row++)
                *found[n][row] = *found[n][row] == smallest ? smallest + 1 : *found[n][row];
    }
}

/* A sketch in this buffer; -1 with an error set where it is none. */
static int open_sketch(const Py_buffer *buffer, sketch_t *sketch)
{
    size_t width = (size_t)buffer->len / ROWS;
    if (!width || width & (width - 1) || (size_t)buffer->len % ROWS) {
        PyErr_Format(PyExc_ValueError, "%zd counters are not four times a power of two",
                     buffer->len);
        return -1;
    }
    *sketch = (sketch_t){buffer->buf, width - 1};
    return 0;
}

static PyObject *add(PyObject *module, PyObject *args)
{
    Py_buffer buffer;
    PyObject *keys;
    Py_ssize_t first, end;
    int most;
    sketch_t sketch;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*O!nni", &buffer, &PyList_Type, &keys, &first, &end, &most))
        return NULL;
    if (first < 0 || end < first || end > PyList_GET_SIZE(keys) || most < 0 || most > UINT8_MAX)
        PyErr_Format(PyExc_ValueError, "keys %zd to %zd of %zd, up to %d", first, end,
                     PyList_GET_SIZE(keys), most);
    else if (!open_sketch(&buffer, &sketch)) {
        PyObject *const *items = PySequence_Fast_ITEMS(keys) + first;
        if (!check(items, end - first))
            for (Py_ssize_t left = end - first; left > 0; items += GROUP, left -= GROUP)
                add_group(&sketch, items, left < GROUP ? left : GROUP, (uint8_t)most);
    }
    PyBuffer_Release(&buffer);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *count(PyObject *module, PyObject *args)
{
    Py_buffer buffer;
    PyObject *key, *answer = NULL;
    sketch_t sketch;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O", &buffer, &key))
        return NULL;
    if (!open_sketch(&buffer, &sketch) && !check(&key, 1)) {
        uint8_t *found[ROWS];
        places(&sketch, key, found);
        answer = PyLong_FromLong(least(found));
    }
    PyBuffer_Release(&buffer);
    return answer;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "Counts sights of keys; see _sketch.pyi for the arguments."},
    {"count", count, METH_VARARGS, "The smallest of a key's counters."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_sketch", "Counters of a count-min sketch.", 0, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__sketch(void)
{
    return PyModuleDef_Init(&definition);
}
