/* A hash table from the bytes of a key to a row number, asked for a whole batch of keys at once.
 *
 * What a lookup costs is waiting for memory: the key's bytes, its slot, and the bytes of the key
 * that stands there, each on a line of its own. A batch asks for all of them early and then finds
 * them near. Slots are probed in a line, four on a cache line, at most half of them taken;
 * a removal moves up what stands behind it, so that nothing is left to be probed past for ever.
 *
 * Keys are made from what strangers send. Which slot a key goes to depends on secrets that each
 * table draws for itself: NH (Black et al., UMAC, 1999) over pieces of eight words, under which two
 * different keys of one length collide with probability 2^-64 whatever they are. That two keys are
 * the same is only ever said of the whole of their bytes.
 *
 * A batch runs no Python code between looking and changing: keys are exactly `bytes`, rows `int`.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "needs a compiler with 128-bit integers; without one the package uses a dict"
#endif

#define PIECE_WORDS 8
#define PIECE_BYTES (8 * PIECE_WORDS)
#define SECRETS (PIECE_WORDS + 2)
#define GROUP 64 /* keys whose lines are asked for before the first of them is looked at */
#define LINE_BYTES 64
#define SLOTS_MIN 16
#define SLOTS_MOST ((size_t)1 << 31) /* a hash has 32 bits */

typedef __uint128_t uint128;

typedef struct {
    uint32_t hash;
    int32_t row;
    PyObject *key; /* NULL: the slot is free */
} slot_t;

typedef struct {
    PyObject_HEAD
    slot_t *slots;
    size_t mask; /* slots - 1, a power of two less one */
    size_t used;
    uint64_t secrets[SECRETS];
} table_t;

static uint64_t word_at(const char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

/* At most eight bytes as a word. */
static uint64_t short_word(const char *bytes, size_t length)
{
    uint64_t word = 0;
    for (size_t at = 0; at < length; at++)
        word |= (uint64_t)(unsigned char)bytes[at] << 8 * at;
    return word;
}

static uint128 times(uint64_t a, uint64_t b)
{
    return (uint128)a * b;
}

/* The NH of at most eight words. The last one ends where the piece does: in a key of eight bytes or
 * more it shares some with the word before it. */
static uint128 nh(const uint64_t *secrets, const char *bytes, size_t length, const char *key)
{
    const char *end = bytes + length;
    uint128 sum = 0;
    for (; end - bytes >= 16; bytes += 16, secrets += 2)
        sum += times(word_at(bytes) + secrets[0], word_at(bytes + 8) + secrets[1]);
    if (end - bytes > 8)
        sum += times(word_at(bytes) + secrets[0], word_at(end - 8) + secrets[1]);
    else if (end > bytes) {
        uint64_t word = end - key >= 8 ? word_at(end - 8) : short_word(bytes, (size_t)(end - bytes));
        sum += times(word + secrets[0], secrets[1]);
    }
    return sum;
}

static uint64_t folded(uint128 product)
{
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint32_t hash_of(const table_t *table, PyObject *key)
{
    const char *first = PyBytes_AS_STRING(key), *bytes = first;
    const uint64_t *secrets = table->secrets;
    size_t left = (size_t)PyBytes_GET_SIZE(key);
    uint64_t state = left;
    for (;;) {
        size_t length = left < PIECE_BYTES ? left : PIECE_BYTES;
        uint128 sum = nh(secrets, bytes, length, first) + state;
        state = folded(times((uint64_t)sum ^ secrets[PIECE_WORDS],
                             (uint64_t)(sum >> 64) ^ secrets[PIECE_WORDS + 1]));
        if (left <= PIECE_BYTES)
            return (uint32_t)(state >> 32);
        left -= length;
        bytes += length;
    }
}

static int same_bytes(const char *a, const char *b, size_t length)
{
    if (length < 8)
        return !memcmp(a, b, length);
    for (size_t at = 0; at + 8 < length; at += 8)
        if (word_at(a + at) != word_at(b + at))
            return 0;
    return word_at(a + length - 8) == word_at(b + length - 8);
}

static int same(PyObject *a, PyObject *b)
{
    return a == b || (PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b) &&
                      same_bytes(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b),
                                 (size_t)PyBytes_GET_SIZE(a)));
}

/* The first slot from `at` on that is free, or has a key with this hash. */
static slot_t *candidate(const table_t *table, uint32_t hash, size_t at)
{
    for (;; at++) {
        slot_t *slot = &table->slots[at & table->mask];
        if (!slot->key || slot->hash == hash)
            return slot;
    }
}

/* Where the key stands, `slot` being its first candidate; NULL if it does not. */
static slot_t *confirm(const table_t *table, slot_t *slot, PyObject *key)
{
    while (slot->key && !same(slot->key, key))
        slot = candidate(table, slot->hash, (size_t)(slot - table->slots) + 1);
    return slot->key ? slot : NULL;
}

static slot_t *find(const table_t *table, uint32_t hash, PyObject *key)
{
    return confirm(table, candidate(table, hash, hash), key);
}

static void ask_for(const void *address)
{
    __builtin_prefetch(address);
}

static void ask_for_key(PyObject *key)
{
    ask_for(key);
    ask_for((const char *)key + LINE_BYTES);
}

/* Fills in the hashes of at most GROUP keys, and has their slots brought near. Raises TypeError
 * where one is not bytes. */
static int prepare(const table_t *table, PyObject *const *keys, Py_ssize_t count, uint32_t *hashes)
{
    for (Py_ssize_t n = 0; n < count; n++)
        ask_for_key(keys[n]);
    for (Py_ssize_t n = 0; n < count; n++) {
        if (!PyBytes_CheckExact(keys[n])) {
            PyErr_Format(PyExc_TypeError, "a key is %.80s, expected bytes",
                         Py_TYPE(keys[n])->tp_name);
            return -1;
        }
        hashes[n] = hash_of(table, keys[n]);
        ask_for(&table->slots[hashes[n] & table->mask]);
    }
    return 0;
}

/* Fills in, too, where each of these keys stands if it does, for `confirm` to say so. */
static int approach(const table_t *table, PyObject *const *keys, Py_ssize_t count,
                    uint32_t *hashes, slot_t **slots)
{
    if (prepare(table, keys, count, hashes))
        return -1;
    for (Py_ssize_t n = 0; n < count; n++) {
        slots[n] = candidate(table, hashes[n], hashes[n]);
        if (slots[n]->key)
            ask_for_key(slots[n]->key);
    }
    return 0;
}

static slot_t *allocate(size_t slots)
{
    slot_t *made = slots > SLOTS_MOST ? NULL : PyMem_Calloc(slots, sizeof(slot_t));
    if (!made)
        PyErr_NoMemory();
    return made;
}

static int resize(table_t *table, size_t slots)
{
    slot_t *old = table->slots, *made = allocate(slots);
    if (!made)
        return -1;
    size_t mask = slots - 1;
    for (size_t from = 0; from <= table->mask; from++)
        if (old[from].key) {
            size_t at = old[from].hash & mask;
            while (made[at].key)
                at = (at + 1) & mask;
            made[at] = old[from];
        }
    table->slots = made;
    table->mask = mask;
    PyMem_Free(old);
    return 0;
}

/* Room for so many keys more, with half of the slots free. */
static int reserve(table_t *table, size_t more)
{
    size_t slots = table->mask + 1, wanted = table->used + more;
    if (wanted > SLOTS_MOST / 2) {
        PyErr_NoMemory();
        return -1;
    }
    while (2 * wanted > slots)
        slots *= 2;
    return slots > table->mask + 1 ? resize(table, slots) : 0;
}

/* A table that has become much too large is made smaller, so that walking it costs what it holds.
 * Where there is no memory for that it stays as it is. */
static void shrink(table_t *table)
{
    size_t slots = table->mask + 1;
    if (slots > SLOTS_MIN && 16 * table->used < slots && resize(table, slots / 4))
        PyErr_Clear();
}

static void put(table_t *table, uint32_t hash, PyObject *key, int32_t row)
{
    slot_t *slot = find(table, hash, key);
    if (slot) {
        slot->row = row;
        return;
    }
    size_t at = hash & table->mask;
    while (table->slots[at].key)
        at = (at + 1) & table->mask;
    Py_INCREF(key);
    table->slots[at] = (slot_t){hash, row, key};
    table->used++;
}

/* Frees a slot. Whatever was probed for past it moves up. */
static void vacate(table_t *table, slot_t *slot)
{
    slot_t *slots = table->slots;
    size_t mask = table->mask, hole = (size_t)(slot - slots);
    PyObject *key = slot->key;
    for (size_t at = (hole + 1) & mask; slots[at].key; at = (at + 1) & mask) {
        size_t home = slots[at].hash & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole].key = NULL;
    table->used--;
    Py_DECREF(key);
}

/* Whether all of these are there (`wanted`), or none of them is; -1 with an error set. */
static int all_are(const table_t *table, PyObject *sequence, int wanted)
{
    PyObject *const *keys = PySequence_Fast_ITEMS(sequence);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    uint32_t hashes[GROUP];
    slot_t *slots[GROUP];
    for (; count > 0; keys += GROUP, count -= GROUP) {
        Py_ssize_t now = count < GROUP ? count : GROUP;
        if (approach(table, keys, now, hashes, slots))
            return -1;
        for (Py_ssize_t n = 0; n < now; n++)
            if ((confirm(table, slots[n], keys[n]) != NULL) != wanted)
                return 0;
    }
    return 1;
}

static PyObject *answer_all(PyObject *self, PyObject *keys, int wanted)
{
    PyObject *sequence = PySequence_Fast(keys, "keys are not a sequence");
    if (!sequence)
        return NULL;
    int answer = all_are((table_t *)self, sequence, wanted);
    Py_DECREF(sequence);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

static PyObject *contains_all(PyObject *self, PyObject *keys)
{
    return answer_all(self, keys, 1);
}

static PyObject *isdisjoint(PyObject *self, PyObject *keys)
{
    return answer_all(self, keys, 0);
}

/* What a batch is asked: how the answer for one key is made, whether it is taken out then. */
typedef enum { WHETHER, ROW, TAKE } verb_t;

/* Fills `answers`, a new list, for these keys. `absent` is the answer for a key that is not there,
 * NULL where that is a KeyError. */
static int fill(table_t *table, PyObject *sequence, verb_t verb, PyObject *absent,
                PyObject *answers)
{
    PyObject *const *keys = PySequence_Fast_ITEMS(sequence);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    uint32_t hashes[GROUP];
    slot_t *slots[GROUP];
    for (Py_ssize_t done = 0; done < count; done += GROUP) {
        Py_ssize_t now = count - done < GROUP ? count - done : GROUP;
        if (approach(table, keys + done, now, hashes, slots))
            return -1;
        for (Py_ssize_t n = 0; n < now; n++) {
            PyObject *key = keys[done + n], *answer;
            /* Those that were taken out before it may have moved it up. */
            slot_t *slot = verb == TAKE ? find(table, hashes[n], key)
                                        : confirm(table, slots[n], key);
            if (verb == WHETHER)
                answer = Py_NewRef(slot ? Py_True : Py_False);
            else if (slot)
                answer = PyLong_FromLong(slot->row);
            else if (absent)
                answer = Py_NewRef(absent);
            else {
                PyErr_SetObject(PyExc_KeyError, key);
                return -1;
            }
            if (!answer)
                return -1;
            PyList_SET_ITEM(answers, done + n, answer);
            if (slot && verb == TAKE)
                vacate(table, slot);
        }
    }
    return 0;
}

static PyObject *answer_each(PyObject *self, PyObject *keys, verb_t verb, PyObject *absent)
{
    table_t *table = (table_t *)self;
    PyObject *sequence = PySequence_Fast(keys, "keys are not a sequence"), *answers;
    if (!sequence)
        return NULL;
    answers = PyList_New(PySequence_Fast_GET_SIZE(sequence));
    if (answers && fill(table, sequence, verb, absent, answers))
        Py_CLEAR(answers);
    if (answers && verb == TAKE)
        shrink(table);
    Py_DECREF(sequence);
    return answers;
}

static PyObject *contains(PyObject *self, PyObject *keys)
{
    return answer_each(self, keys, WHETHER, NULL);
}

static PyObject *rows(PyObject *self, PyObject *keys)
{
    return answer_each(self, keys, ROW, NULL);
}

static PyObject *pop(PyObject *self, PyObject *keys)
{
    return answer_each(self, keys, TAKE, NULL);
}

static PyObject *answer_or(PyObject *self, PyObject *const *args, Py_ssize_t count, verb_t verb)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected keys and an answer", count);
        return NULL;
    }
    return answer_each(self, args[0], verb, args[1]);
}

static PyObject *rows_or(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    return answer_or(self, args, count, ROW);
}

static PyObject *pop_or(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    return answer_or(self, args, count, TAKE);
}

/* Raises where one of these cannot be put in. */
static int check(PyObject *const *keys, PyObject *const *rows, Py_ssize_t count)
{
    for (Py_ssize_t n = 0; n < count; n++) {
        int overflow = 0;
        if (!PyBytes_CheckExact(keys[n]) || !PyLong_Check(rows[n])) {
            PyErr_Format(PyExc_TypeError, "a key and its row are %.80s and %.80s, expected bytes "
                         "and int", Py_TYPE(keys[n])->tp_name, Py_TYPE(rows[n])->tp_name);
            return -1;
        }
        long long row = PyLong_AsLongLongAndOverflow(rows[n], &overflow);
        if (overflow || row < INT32_MIN || row > INT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "row %R does not fit 32 bits", rows[n]);
            return -1;
        }
    }
    return 0;
}

static int add_all(table_t *table, PyObject *key_sequence, PyObject *row_sequence)
{
    PyObject *const *keys = PySequence_Fast_ITEMS(key_sequence);
    PyObject *const *rows = PySequence_Fast_ITEMS(row_sequence);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(key_sequence);
    uint32_t hashes[GROUP];
    if (PySequence_Fast_GET_SIZE(row_sequence) != count) {
        PyErr_Format(PyExc_ValueError, "%zd keys and %zd rows", count,
                     PySequence_Fast_GET_SIZE(row_sequence));
        return -1;
    }
    if (check(keys, rows, count) || reserve(table, (size_t)count))
        return -1;
    for (Py_ssize_t done = 0; done < count; done += GROUP) {
        Py_ssize_t now = count - done < GROUP ? count - done : GROUP;
        if (prepare(table, keys + done, now, hashes))
            return -1;
        for (Py_ssize_t n = 0; n < now; n++)
            put(table, hashes[n], keys[done + n], (int32_t)PyLong_AsLong(rows[done + n]));
    }
    return 0;
}

static PyObject *add(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    table_t *table = (table_t *)self;
    size_t before = table->used;
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected keys and rows", count);
        return NULL;
    }
    PyObject *keys = PySequence_Fast(args[0], "keys are not a sequence");
    PyObject *rows = keys ? PySequence_Fast(args[1], "rows are not a sequence") : NULL;
    int failed = !rows || add_all(table, keys, rows);
    Py_XDECREF(keys);
    Py_XDECREF(rows);
    return failed ? NULL : PyLong_FromSize_t(table->used - before);
}

/* A list of what `make` makes of every slot that is taken. */
static PyObject *listed(const table_t *table, PyObject *(*make)(const slot_t *))
{
    PyObject *found = PyList_New((Py_ssize_t)table->used);
    Py_ssize_t count = 0;
    for (size_t at = 0; found && at <= table->mask && count < PyList_GET_SIZE(found); at++)
        if (table->slots[at].key) {
            PyObject *made = make(&table->slots[at]);
            if (!made) {
                Py_CLEAR(found);
                break;
            }
            PyList_SET_ITEM(found, count++, made);
        }
    if (found) /* less where making the list let somebody take keys out */
        Py_SET_SIZE(found, count);
    return found;
}

static PyObject *key_of(const slot_t *slot)
{
    return Py_NewRef(slot->key);
}

static PyObject *row_of(const slot_t *slot)
{
    return PyLong_FromLong(slot->row);
}

static PyObject *item_of(const slot_t *slot)
{
    return Py_BuildValue("Oi", slot->key, (int)slot->row);
}

static PyObject *keys(PyObject *self, PyObject *unused)
{
    (void)unused;
    return listed((table_t *)self, key_of);
}

static PyObject *values(PyObject *self, PyObject *unused)
{
    (void)unused;
    return listed((table_t *)self, row_of);
}

static PyObject *items(PyObject *self, PyObject *unused)
{
    (void)unused;
    return listed((table_t *)self, item_of);
}

static Py_ssize_t length(PyObject *self)
{
    return (Py_ssize_t)((table_t *)self)->used;
}

static int has(PyObject *self, PyObject *key)
{
    const table_t *table = (table_t *)self;
    uint32_t hash;
    return prepare(table, &key, 1, &hash) ? -1 : find(table, hash, key) != NULL;
}

static int draw_secrets(table_t *table)
{
    PyObject *os = PyImport_ImportModule("os"), *drawn = NULL;
    if (os)
        drawn = PyObject_CallMethod(os, "urandom", "n", (Py_ssize_t)sizeof table->secrets);
    Py_XDECREF(os);
    if (drawn && (!PyBytes_Check(drawn) || PyBytes_GET_SIZE(drawn) != sizeof table->secrets)) {
        PyErr_SetString(PyExc_SystemError, "os.urandom gave something else than it was asked for");
        Py_CLEAR(drawn);
    }
    if (!drawn)
        return -1;
    memcpy(table->secrets, PyBytes_AS_STRING(drawn), sizeof table->secrets);
    Py_DECREF(drawn);
    return 0;
}

static PyObject *new_table(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    if (!PyArg_ParseTuple(args, "") || (keywords && PyDict_GET_SIZE(keywords))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a table takes no arguments");
        return NULL;
    }
    table_t *table = (table_t *)type->tp_alloc(type, 0);
    if (!table)
        return NULL;
    table->mask = SLOTS_MIN - 1;
    table->slots = allocate(SLOTS_MIN);
    if (!table->slots || draw_secrets(table)) {
        Py_DECREF(table);
        return NULL;
    }
    return (PyObject *)table;
}

static void dealloc(PyObject *self)
{
    table_t *table = (table_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (size_t at = 0; table->slots && at <= table->mask; at++)
        Py_XDECREF(table->slots[at].key);
    PyMem_Free(table->slots);
    type->tp_free(self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
    {"contains_all", contains_all, METH_O, "Whether all of these keys are there."},
    {"isdisjoint", isdisjoint, METH_O, "Whether none of these keys is there."},
    {"contains", contains, METH_O, "Of each of these keys, whether it is there."},
    {"rows", rows, METH_O, "Rows of these keys; KeyError for one that is not there."},
    {"rows_or", FAST(rows_or), METH_FASTCALL, "Rows of these keys, or else the second argument."},
    {"add", FAST(add), METH_FASTCALL, "Puts these keys in with these rows; how many are new."},
    {"pop", pop, METH_O, "Takes these keys out; KeyError for one that is not there."},
    {"pop_or", FAST(pop_or), METH_FASTCALL, "Takes out those that are there; rows as rows_or."},
    {"keys", keys, METH_NOARGS, "All keys, in no order."},
    {"values", values, METH_NOARGS, "Their rows, in the order of keys()."},
    {"items", items, METH_NOARGS, "Keys with their rows, in the order of keys()."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_table},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {Py_sq_contains, has},
    {Py_tp_doc, "Row numbers by key; see _table.pyi."},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "backends.table._table.Table",
    .basicsize = sizeof(table_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = type_slots,
};

static int set_up(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&type_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Table", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, set_up},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_table", "Row numbers by key.", 0, NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__table(void)
{
    return PyModuleDef_Init(&definition);
}
