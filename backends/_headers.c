/* The headers of many of the region's rows at once: see HeaderRows in backends/block.py, which says
 * what stands in them and gives the form that is filled in here.
 *
 * A header is some lines of a page of its own, far from the next one: all of a batch are asked for
 * before the first is written. The caller vouches for the address; rows and keys are checked here,
 * all of them before anything is written.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headers are little endian; on other machines numpy fills them"
#endif

#define LINE_BYTES 64
#define STATE_AT 12
#define HASH_LENGTH_AT 20
#define HASH_AT 24
#define HASH_BYTES_MAX 64
#define CREATED_AT 96
#define CHECKSUM_AT 4088
#define HEADER_BYTES 4096
#define FORM_BYTES_MIN 152

typedef struct {
    char *first;
    Py_ssize_t stride_bytes, count;
} headers_t;

static char *row_at(const headers_t *headers, PyObject *row)
{
    return headers->first + PyLong_AsSsize_t(row) * headers->stride_bytes;
}

static int check_rows(const headers_t *headers, PyObject *sequence)
{
    PyObject *const *rows = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(sequence); n++) {
        if (!PyLong_CheckExact(rows[n])) {
            PyErr_Format(PyExc_TypeError, "a row is %.80s, expected int", Py_TYPE(rows[n])->tp_name);
            return -1;
        }
        Py_ssize_t row = PyLong_AsSsize_t(rows[n]);
        if (row < 0 || row >= headers->count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "row %zd of %zd", row, headers->count);
            return -1;
        }
    }
    return 0;
}

static int check_keys(PyObject *sequence, Py_ssize_t count)
{
    PyObject *const *keys = PySequence_Fast_ITEMS(sequence);
    if (PySequence_Fast_GET_SIZE(sequence) != count) {
        PyErr_Format(PyExc_ValueError, "%zd keys and %zd rows", PySequence_Fast_GET_SIZE(sequence),
                     count);
        return -1;
    }
    for (Py_ssize_t n = 0; n < count; n++)
        if (!PyBytes_CheckExact(keys[n]) || PyBytes_GET_SIZE(keys[n]) > HASH_BYTES_MAX) {
            PyErr_Format(PyExc_ValueError, "a key is %.200R, expected at most %d bytes", keys[n],
                         HASH_BYTES_MAX);
            return -1;
        }
    return 0;
}

/* These lines are about to be written. */
static void ask_for(const char *header, Py_ssize_t bytes)
{
    for (Py_ssize_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(header + at, 1);
}

static void fill(char *header, const char *form, Py_ssize_t form_bytes, PyObject *key,
                 uint64_t created_ns)
{
    uint32_t length = (uint32_t)PyBytes_GET_SIZE(key);
    memcpy(header, form, (size_t)form_bytes);
    memcpy(header + HASH_LENGTH_AT, &length, sizeof length);
    memcpy(header + HASH_AT, PyBytes_AS_STRING(key), length);
    memcpy(header + CREATED_AT, &created_ns, sizeof created_ns);
    memset(header + CHECKSUM_AT, 0, 8);
}

static PyObject *announce(PyObject *module, PyObject *args)
{
    headers_t headers;
    unsigned long long address, created_ns;
    const char *form;
    Py_ssize_t form_bytes;
    PyObject *key_argument, *row_argument, *keys = NULL, *rows = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "Knny#OOK", &address, &headers.stride_bytes, &headers.count, &form,
                          &form_bytes, &key_argument, &row_argument, &created_ns))
        return NULL;
    headers.first = (char *)(uintptr_t)address;
    if (form_bytes < FORM_BYTES_MIN || form_bytes > CHECKSUM_AT)
        return PyErr_Format(PyExc_ValueError, "a form of %zd bytes", form_bytes);
    if (!(keys = PySequence_Fast(key_argument, "keys are not a sequence")) ||
        !(rows = PySequence_Fast(row_argument, "rows are not a sequence")) ||
        check_rows(&headers, rows) || check_keys(keys, PySequence_Fast_GET_SIZE(rows))) {
        Py_XDECREF(keys);
        Py_XDECREF(rows);
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(rows);
    for (Py_ssize_t n = 0; n < count; n++) {
        char *header = row_at(&headers, PySequence_Fast_GET_ITEM(rows, n));
        ask_for(header, form_bytes);
        ask_for(header + CHECKSUM_AT, 1);
    }
    for (Py_ssize_t n = 0; n < count; n++)
        fill(row_at(&headers, PySequence_Fast_GET_ITEM(rows, n)), form, form_bytes,
             PySequence_Fast_GET_ITEM(keys, n), created_ns);
    Py_DECREF(keys);
    Py_DECREF(rows);
    Py_RETURN_NONE;
}

static PyObject *set_states(PyObject *module, PyObject *args)
{
    headers_t headers;
    unsigned long long address;
    unsigned int state;
    PyObject *row_argument, *rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnnOI", &address, &headers.stride_bytes, &headers.count,
                          &row_argument, &state))
        return NULL;
    headers.first = (char *)(uintptr_t)address;
    if (!(rows = PySequence_Fast(row_argument, "rows are not a sequence")))
        return NULL;
    if (check_rows(&headers, rows)) {
        Py_DECREF(rows);
        return NULL;
    }
    uint32_t word = (uint32_t)state;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(rows);
    for (Py_ssize_t n = 0; n < count; n++)
        ask_for(row_at(&headers, PySequence_Fast_GET_ITEM(rows, n)), 1);
    for (Py_ssize_t n = 0; n < count; n++)
        memcpy(row_at(&headers, PySequence_Fast_GET_ITEM(rows, n)) + STATE_AT, &word, sizeof word);
    Py_DECREF(rows);
    Py_RETURN_NONE;
}

static PyObject *clear(PyObject *module, PyObject *args)
{
    headers_t headers;
    unsigned long long address;
    Py_ssize_t first_byte;
    PyObject *row_argument, *rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnnnO", &address, &headers.stride_bytes, &headers.count,
                          &first_byte, &row_argument))
        return NULL;
    headers.first = (char *)(uintptr_t)address;
    if (first_byte < 0 || first_byte > HEADER_BYTES)
        return PyErr_Format(PyExc_ValueError, "byte %zd of a header", first_byte);
    if (!(rows = PySequence_Fast(row_argument, "rows are not a sequence")))
        return NULL;
    if (check_rows(&headers, rows)) {
        Py_DECREF(rows);
        return NULL;
    }
    for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(rows); n++)
        memset(row_at(&headers, PySequence_Fast_GET_ITEM(rows, n)) + first_byte, 0,
               (size_t)(HEADER_BYTES - first_byte));
    Py_DECREF(rows);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"clear", clear, METH_VARARGS, "Zeroes what is behind the first bytes of headers."},
    {"announce", announce, METH_VARARGS, "Fills headers; see _headers.pyi for the arguments."},
    {"set_states", set_states, METH_VARARGS, "Changes the state of headers alone."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_headers", "Headers of the region's rows.", 0, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__headers(void)
{
    return PyModuleDef_Init(&definition);
}
