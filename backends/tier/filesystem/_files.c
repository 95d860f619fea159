/* Whole block files, written, read, renamed and looked at with one release of the GIL each.
 *
 * Nothing here decides anything: these are the sequences of calls that io.py's OsIo makes one by
 * one. To let go of the interpreter and to wait for it again between them costs more than most of
 * them do, as soon as several I/O threads run. Errors are given as errno, and 0 where all went well.
 *
 * A block's checksum is made on its way between the row and the buffer that it goes through, if
 * it goes through one: then it costs next to nothing. What stands where in a header is said in
 * backends/block.py.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_ring.h"
#include "_xxh3.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

#define FILE_MODE 0600
/* O_DIRECT goes on at such places only. */
#define ALIGNMENT_BYTES 4096
#define NS_PER_S 1000000000LL

#define HEADER_BYTES 4096
#define FLAGS_AT 140
#define PAYLOAD_SUM_AT 144
#define CHECKSUM_AT 4088
#define SEALED 1U

/* Up to where a file came. */
enum step { STEP_DONE = 0, STEP_OPEN = 1, STEP_LATER = 2 };

static struct timespec timespec_of(int64_t ns)
{
    struct timespec time = {.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
    if (time.tv_nsec < 0) {
        time.tv_nsec += NS_PER_S;
        time.tv_sec -= 1;
    }
    return time;
}

static int64_t ns_of(struct timespec time)
{
    return (int64_t)time.tv_sec * NS_PER_S + time.tv_nsec;
}

/* Opens what is beneath a directory, following no link on the way. */
static int open_beneath(int directory, const char *path, int flags)
{
    int fd;
    if (strchr(path, '/') == NULL) {
        do
            fd = openat(directory, path, flags | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
        while (fd < 0 && errno == EINTR);
        return fd;
    }
    struct open_how how = {
        .flags = (uint64_t)(flags | O_CLOEXEC),
        .mode = flags & O_CREAT ? FILE_MODE : 0,
        .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH,
    };
    /* EAGAIN: a rename elsewhere made it impossible to prove that the path stays beneath. */
    do
        fd = (int)syscall(SYS_openat2, directory, path, &how, sizeof how);
    while (fd < 0 && (errno == EINTR || errno == EAGAIN));
    return fd;
}

static xxh3_stripes_t *stripes;

/* What block.seal does, and copies the block if `copy`. */
static void seal_block(char *row, size_t size, char *copy)
{
    uint32_t flags = SEALED, found;
    uint64_t sum = xxh3_sum(stripes, row, CHECKSUM_AT, NULL, 0);
    memcpy(&found, row + FLAGS_AT, sizeof found);
    if (found == SEALED && memcmp(row + CHECKSUM_AT, &sum, sizeof sum) == 0) {
        if (copy != NULL)
            memcpy(copy, row, size);
        return;
    }
    /* Where it is copied, it is the copy that the disk reads, and that is to stay in the cache. */
    sum = xxh3_sum(stripes, row + HEADER_BYTES, size - HEADER_BYTES,
                   copy ? copy + HEADER_BYTES : NULL, copy != NULL);
    memcpy(row + PAYLOAD_SUM_AT, &sum, sizeof sum);
    memcpy(row + FLAGS_AT, &flags, sizeof flags);
    sum = xxh3_sum(stripes, row, CHECKSUM_AT, NULL, 0);
    memcpy(row + CHECKSUM_AT, &sum, sizeof sum);
    if (copy != NULL)
        memcpy(copy, row, HEADER_BYTES);
}

/* Copies a block's first `size` bytes, which are all of them where the payload's sum is wanted. */
static uint64_t copy_block(char *row, const char *from, size_t size, int summed)
{
    if (!summed) {
        memcpy(row, from, size);
        return 0;
    }
    memcpy(row, from, HEADER_BYTES);
    return xxh3_sum(stripes, from + HEADER_BYTES, size - HEADER_BYTES, row + HEADER_BYTES, 0);
}

static int fits(const Py_buffer *bounce, Py_ssize_t size)
{
    return bounce->buf != NULL && bounce->len >= size;
}

/* Whole pages of it. */
static Py_ssize_t half_of(const Py_buffer *bounce)
{
    return bounce->len / 2 / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
}

static const Py_buffer no_bounce;

/* Sets errno and gives -1 where not all was written; `done` says how much was. With a `bounce`
 * buffer the bytes go through it, a buffer at a time. */
static int write_whole(int fd, const char *data, Py_ssize_t size, const Py_buffer *bounce,
                       Py_ssize_t *done)
{
    Py_ssize_t at = 0;
    for (;;) {
        const char *from = data + at;
        size_t length = (size_t)(size - at);
        if (bounce->buf != NULL) {
            if (length > (size_t)bounce->len)
                length = (size_t)bounce->len;
            memcpy(bounce->buf, from, length);
            from = bounce->buf;
        }
        ssize_t written = pwrite(fd, from, length, (off_t)at);
        if (written < 0) {
            if (errno == EINTR)
                continue;
            return -1;
        }
        *done = at + written;
        if (*done == size)
            return 0;
        /* What lies behind the last aligned place is written once more. */
        Py_ssize_t next = *done / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        if (next <= at) {
            errno = ENOSPC;
            return -1;
        }
        at = next;
    }
}

/* Fills `into`; fewer bytes only if the file ends there. -1 with errno where reading fails. */
static Py_ssize_t read_whole(int fd, char *into, Py_ssize_t size, const Py_buffer *bounce)
{
    Py_ssize_t done = 0;
    while (done < size) {
        char *to = into + done;
        size_t length = (size_t)(size - done);
        if (bounce->buf != NULL) {
            if (length > (size_t)bounce->len)
                length = (size_t)bounce->len;
            to = bounce->buf;
        }
        ssize_t got = pread(fd, to, length, (off_t)done);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return -1;
        }
        if (bounce->buf != NULL)
            memcpy(into + done, to, (size_t)got);
        done += got;
        if (got == 0 || done % ALIGNMENT_BYTES)
            break;
    }
    return done;
}

static int flush(int fd, const char *durability)
{
    if (strcmp(durability, "data") == 0)
        return fdatasync(fd);
    if (strcmp(durability, "full") == 0)
        return fsync(fd);
    return 0;
}

/* A converter for PyArg_ParseTuple: None, or a buffer of whole pages; releases it if what comes
 * after it cannot be parsed. */
static int take_bounce(PyObject *given, void *bounce)
{
    Py_buffer *view = bounce;
    if (given == NULL) {
        PyBuffer_Release(view);
        return 1;
    }
    if (given == Py_None)
        return Py_CLEANUP_SUPPORTED;
    if (PyObject_GetBuffer(given, view, PyBUF_WRITABLE) < 0)
        return 0;
    if (view->len == 0 || view->len % ALIGNMENT_BYTES) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "a bounce buffer is a number of whole pages");
        return 0;
    }
    return Py_CLEANUP_SUPPORTED;
}

typedef struct {
    const char *name;
    int flags, error;
    Py_buffer data;
    long long atime_ns, mtime_ns;
    Py_ssize_t done;
} write_t;

/* What remains to be done to a file; `from` is what has still to be written, or NULL. */
static void end_file(int fd, write_t *file, const char *from, const char *durability,
                     const Py_buffer *bounce)
{
    struct timespec times[2] = {timespec_of(file->atime_ns), timespec_of(file->mtime_ns)};
    if ((from != NULL && write_whole(fd, from, file->data.len, bounce, &file->done) < 0) ||
        futimens(fd, times) < 0 || flush(fd, durability) < 0)
        file->error = errno;
    /* The last moment at which some filesystems refuse a write. Never tried again: whatever close
     * says, the number may be somebody else's by now. */
    if (close(fd) < 0 && errno != EINTR && !file->error)
        file->error = errno;
}

static void write_file(int directory, write_t *file, const char *durability,
                       const Py_buffer *bounce)
{
    int fd = open_beneath(directory, file->name, file->flags);
    if (fd < 0) {
        file->error = errno;
        return;
    }
    char *row = file->data.buf, *copy = fits(bounce, file->data.len) ? bounce->buf : NULL;
    seal_block(row, (size_t)file->data.len, copy);
    if (copy != NULL)
        end_file(fd, file, copy, durability, &no_bounce);
    else
        end_file(fd, file, row, durability, bounce);
}

/* Files whose bytes lie in one half of a buffer. */
typedef struct {
    char *memory;
    size_t count;
    ring_write_t writes[RING_MOST];
    write_t *files[RING_MOST];
} half_t;

/* Opens and seals as many files as there is room for; how many were tried, all if none is open. */
static Py_ssize_t prepare(int directory, half_t *half, write_t *files, Py_ssize_t count,
                          Py_ssize_t room)
{
    Py_ssize_t tried = 0, used = 0;
    half->count = 0;
    for (; tried < count && half->count < RING_MOST; tried++) {
        write_t *file = &files[tried];
        if (file->data.len > room - used)
            break;
        int fd = open_beneath(directory, file->name, file->flags);
        if (fd < 0) {
            file->error = errno;
            continue;
        }
        char *copy = half->memory + used;
        used += file->data.len;
        seal_block(file->data.buf, (size_t)file->data.len, copy);
        half->files[half->count] = file;
        half->writes[half->count++] =
            (ring_write_t){.fd = fd, .data = copy, .size = (size_t)file->data.len};
    }
    return tried;
}

static void end_half(half_t *half, const char *durability)
{
    for (size_t i = 0; i < half->count; i++) {
        const ring_write_t *write = &half->writes[i];
        write_t *file = half->files[i];
        if (write->is_whole)
            file->done = file->data.len;
        end_file(write->fd, file, write->is_whole ? NULL : write->data, durability, &no_bounce);
    }
}

/* Files each of which fits into half of the buffer. While the disk has one half, the other is
 * filled, and handed over before anything else is done: a disk that is given the next bytes only
 * when somebody has made them stands still for a tenth of the time. */
static void write_together(int directory, write_t *files, Py_ssize_t count,
                           const char *durability, const Py_buffer *bounce)
{
    Py_ssize_t room = half_of(bounce);
    half_t halves[2] = {{.memory = bounce->buf}, {.memory = (char *)bounce->buf + room}};
    Py_ssize_t at = prepare(directory, &halves[0], files, count, room);
    ring_begin(halves[0].writes, halves[0].count);
    for (int turn = 0; halves[turn].count; turn = !turn) {
        half_t *half = &halves[turn], *next = &halves[!turn];
        at += prepare(directory, next, &files[at], count - at, room);
        ring_end(half->writes, half->count);
        ring_begin(next->writes, next->count);
        end_half(half, durability);
    }
}

PyDoc_STRVAR(write_doc, "See _files.pyi.");
static PyObject *files_write(PyObject *module, PyObject *arguments)
{
    int directory;
    PyObject *given, *results = NULL;
    const char *durability;
    Py_buffer bounce = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iO!sO&", &directory, &PyList_Type, &given, &durability,
                          take_bounce, &bounce))
        return NULL;
    /* A copy: the caller's list could change while the GIL is not held. */
    PyObject *files = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    if (files == NULL) {
        PyBuffer_Release(&bounce);
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(files), parsed = 0;
    write_t *writes = PyMem_Calloc((size_t)(count ? count : 1), sizeof *writes);
    if (writes == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; parsed < count; parsed++) {
        write_t *file = &writes[parsed];
        PyObject *item = PyList_GET_ITEM(files, parsed);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "each file is given in a tuple");
            goto done;
        }
        if (!PyArg_ParseTuple(item, "siw*LL", &file->name, &file->flags, &file->data,
                              &file->atime_ns, &file->mtime_ns))
            goto done;
        if (file->data.len <= HEADER_BYTES + XXH3_SHORT_BYTES) {
            PyErr_Format(PyExc_ValueError, "a block of %zd bytes", file->data.len);
            parsed++;
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0, next; i < count; i = next) {
        next = i;
        while (next < count && writes[next].data.len <= half_of(&bounce))
            next++;
        if (next > i + 1) {
            write_together(directory, &writes[i], next - i, durability, &bounce);
        } else {
            write_file(directory, &writes[i], durability, &bounce);
            next = i + 1;
        }
    }
    Py_END_ALLOW_THREADS;
    results = PyList_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        PyObject *result = Py_BuildValue("in", writes[i].error, writes[i].done);
        if (result == NULL)
            Py_CLEAR(results);
        else
            PyList_SET_ITEM(results, i, result);
    }
done:
    for (Py_ssize_t i = 0; i < parsed; i++)
        PyBuffer_Release(&writes[i].data);
    PyMem_Free(writes);
    PyBuffer_Release(&bounce);
    Py_DECREF(files);
    return results;
}

typedef struct {
    const char *path;
    Py_buffer into;
    long long used_ns, before_ns;
    enum step step;
    int error;
    struct stat found;
    Py_ssize_t got;
    int summed;
    uint64_t sum;
} read_t;

/* Fills the row, and makes the payload's sum if that is wanted and all of it is there. */
static Py_ssize_t read_block(int fd, read_t *file, const Py_buffer *bounce)
{
    char *row = file->into.buf;
    Py_ssize_t got, size = file->into.len;
    if (fits(bounce, size)) {
        got = read_whole(fd, bounce->buf, size, &no_bounce);
        file->summed &= got == size;
        if (got > 0)
            file->sum = copy_block(row, bounce->buf, (size_t)got, file->summed);
        return got;
    }
    got = read_whole(fd, row, size, bounce);
    file->summed &= got == size;
    if (file->summed)
        file->sum = xxh3_sum(stripes, row + HEADER_BYTES, (size_t)size - HEADER_BYTES, NULL, 0);
    return got;
}

static void read_file(int directory, int flags, read_t *file, const Py_buffer *bounce)
{
    int fd = open_beneath(directory, file->path, flags);
    if (fd < 0) {
        file->step = STEP_OPEN;
        file->error = errno;
        return;
    }
    if (fstat(fd, &file->found) < 0) {
        file->step = STEP_LATER;
        file->error = errno;
    } else if (S_ISREG(file->found.st_mode) && file->found.st_size == (off_t)file->into.len) {
        Py_ssize_t got = read_block(fd, file, bounce);
        if (got < 0) {
            file->step = STEP_LATER;
            file->error = errno;
        } else {
            file->got = got;
            if (got == file->into.len && ns_of(file->found.st_atim) < file->before_ns) {
                struct timespec times[2] = {timespec_of(file->used_ns), file->found.st_mtim};
                /* A read-only disk is no reason to miss. */
                if (futimens(fd, times) == 0)
                    file->found.st_atim = times[0];
            }
        }
    }
    close(fd);
}

PyDoc_STRVAR(read_doc, "See _files.pyi.");
static PyObject *files_read(PyObject *module, PyObject *arguments)
{
    int directory, flags, summed;
    PyObject *given, *results = NULL;
    Py_buffer bounce = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iiO!pO&", &directory, &flags, &PyList_Type, &given, &summed,
                          take_bounce, &bounce))
        return NULL;
    PyObject *files = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    if (files == NULL) {
        PyBuffer_Release(&bounce);
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(files), parsed = 0;
    read_t *reads = PyMem_Calloc((size_t)(count ? count : 1), sizeof *reads);
    if (reads == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; parsed < count; parsed++) {
        read_t *file = &reads[parsed];
        PyObject *item = PyList_GET_ITEM(files, parsed);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "each file is given in a tuple");
            goto done;
        }
        if (!PyArg_ParseTuple(item, "sw*LL", &file->path, &file->into, &file->used_ns,
                              &file->before_ns))
            goto done;
        file->summed = summed && file->into.len > HEADER_BYTES + XXH3_SHORT_BYTES;
    }
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < count; i++)
        read_file(directory, flags, &reads[i], &bounce);
    Py_END_ALLOW_THREADS;
    results = PyList_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        const struct stat *found = &reads[i].found;
        PyObject *one = Py_BuildValue(
            "iiILKKLniK", (int)reads[i].step, reads[i].error, (unsigned int)found->st_mode,
            (long long)found->st_size, (unsigned long long)found->st_dev,
            (unsigned long long)found->st_ino, (long long)ns_of(found->st_atim), reads[i].got,
            reads[i].summed && reads[i].step == STEP_DONE && reads[i].got == reads[i].into.len,
            (unsigned long long)reads[i].sum);
        if (one == NULL)
            Py_CLEAR(results);
        else
            PyList_SET_ITEM(results, i, one);
    }
done:
    for (Py_ssize_t i = 0; i < parsed; i++)
        PyBuffer_Release(&reads[i].into);
    PyMem_Free(reads);
    PyBuffer_Release(&bounce);
    Py_DECREF(files);
    return results;
}

/* One name in each of up to two directories. The strings belong to objects that the caller holds. */
typedef struct {
    int directory, new_directory, error;
    const char *name, *new_name;
    struct stat found;
} entry_t;

/* NULL with an exception set where `names` is not a list of tuples of this `format`. */
static entry_t *entries_of(PyObject *names, const char *format)
{
    Py_ssize_t count = PyList_GET_SIZE(names);
    entry_t *entries = PyMem_Calloc((size_t)(count ? count : 1), sizeof *entries);
    if (entries == NULL)
        return (entry_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        entry_t *entry = &entries[i];
        PyObject *item = PyList_GET_ITEM(names, i);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "each name is given in a tuple");
            PyMem_Free(entries);
            return NULL;
        }
        if (!PyArg_ParseTuple(item, format, &entry->directory, &entry->name,
                              &entry->new_directory, &entry->new_name)) {
            PyMem_Free(entries);
            return NULL;
        }
    }
    return entries;
}

PyDoc_STRVAR(rename_doc, "See _files.pyi.");
static PyObject *files_rename(PyObject *module, PyObject *arguments)
{
    PyObject *given;
    int exclusive;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!p", &PyList_Type, &given, &exclusive))
        return NULL;
    /* A copy: the caller's list could change while the GIL is not held. */
    PyObject *names = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    entry_t *entries = names ? entries_of(names, "isis") : NULL;
    PyObject *errors = NULL;
    if (entries) {
        Py_ssize_t count = PyList_GET_SIZE(names);
        unsigned int flags = exclusive ? RENAME_NOREPLACE : 0;
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count; i++) {
            entry_t *entry = &entries[i];
            long result = syscall(SYS_renameat2, entry->directory, entry->name,
                                  entry->new_directory, entry->new_name, flags);
            entry->error = result < 0 ? errno : 0;
            /* What other threads wait for may have to be ended by a kernel thread that waits for
             * this processor, for as long as a turn of dozens of renames. */
            sched_yield();
        }
        Py_END_ALLOW_THREADS;
        errors = PyList_New(count);
        for (Py_ssize_t i = 0; errors && i < count; i++) {
            PyObject *error = PyLong_FromLong(entries[i].error);
            if (error == NULL)
                Py_CLEAR(errors);
            else
                PyList_SET_ITEM(errors, i, error);
        }
    }
    PyMem_Free(entries);
    Py_XDECREF(names);
    return errors;
}

PyDoc_STRVAR(stat_doc, "See _files.pyi.");
static PyObject *files_stat(PyObject *module, PyObject *given)
{
    (void)module;
    if (!PyList_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "names are given in a list");
        return NULL;
    }
    PyObject *names = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    entry_t *entries = names ? entries_of(names, "is") : NULL;
    PyObject *all = NULL;
    if (entries) {
        Py_ssize_t count = PyList_GET_SIZE(names);
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count; i++) {
            entry_t *entry = &entries[i];
            int result =
                fstatat(entry->directory, entry->name, &entry->found, AT_SYMLINK_NOFOLLOW);
            entry->error = result < 0 ? errno : 0;
        }
        Py_END_ALLOW_THREADS;
        all = PyList_New(count);
        for (Py_ssize_t i = 0; all && i < count; i++) {
            const struct stat *found = &entries[i].found;
            PyObject *one = Py_BuildValue("iIKKL", entries[i].error, (unsigned int)found->st_mode,
                                          (unsigned long long)found->st_size,
                                          (unsigned long long)found->st_nlink,
                                          (long long)ns_of(found->st_atim));
            if (one == NULL)
                Py_CLEAR(all);
            else
                PyList_SET_ITEM(all, i, one);
        }
    }
    PyMem_Free(entries);
    Py_XDECREF(names);
    return all;
}

PyDoc_STRVAR(sum_doc, "See _files.pyi.");
static PyObject *files_sum(PyObject *module, PyObject *arguments)
{
    Py_buffer data;
    int portable;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*p", &data, &portable))
        return NULL;
    PyObject *sum = NULL;
    if (data.len > XXH3_SHORT_BYTES)
        sum = PyLong_FromUnsignedLongLong(
            xxh3_sum(portable ? xxh3_stripes : stripes, data.buf, (size_t)data.len, NULL, 0));
    else
        PyErr_Format(PyExc_ValueError, "a sum of %zd bytes", data.len);
    PyBuffer_Release(&data);
    return sum;
}

PyDoc_STRVAR(use_ring_doc, "See _files.pyi.");
static PyObject *files_use_ring(PyObject *module, PyObject *wanted)
{
    (void)module;
    int is_wanted = PyObject_IsTrue(wanted);
    if (is_wanted < 0)
        return NULL;
    return PyBool_FromLong(ring_use(is_wanted));
}

static PyMethodDef methods[] = {
    {"write", files_write, METH_VARARGS, write_doc},
    {"read", files_read, METH_VARARGS, read_doc},
    {"rename", files_rename, METH_VARARGS, rename_doc},
    {"stat", files_stat, METH_O, stat_doc},
    {"sum", files_sum, METH_VARARGS, sum_doc},
    {"use_ring", files_use_ring, METH_O, use_ring_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_files", "See _files.pyi.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__files(void)
{
    stripes = xxh3_fastest();
    return PyModule_Create(&definition);
}
