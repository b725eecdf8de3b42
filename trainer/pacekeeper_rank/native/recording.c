/*
What a rank does for its records in each step, without Python: `native_recorder.py` puts it in the place of what it repeats.

The reference is in Python (`record_ring.py`, `recorder.py`, `collectives/`), and each type here is a base of a class
that has the Python one as its other base. So an attribute that both work with lives here once, and whatever is seldom
(a device's clock, a phase other than training, a window) is the Python method's: it is called with the same object.
Only what is called by the thread that holds Python's lock is here, and nothing is kept across a call into Python that
such a call might change.

Of Python's limited API: one build is for all versions from 3.11 on. Layouts are Python's: those of the state are given
(`Ring.connect`), that of a record and all numbers are told (`RECORD`, `NUMBERS`) and compared when this is imported.
*/
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define API __attribute__((visibility("default")))

enum kind { STEP = 1, COMPUTE = 2, COLLECTIVE = 3, DATA = 4 };
enum phase { START = 0, PREPARE = 5, LOAD = 8 };
enum { NOTICED_LATE = 1, POINT_TO_POINT = 10, SYMMETRIC = 1 << 1 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 9 };
enum { END_NOTICE_RESOLUTION_NS = 1000000, NO_PEER = -1 };

static const struct {
    const char *name;
    long value;
} NUMBERS[] = {
    {"STEP", STEP}, {"COMPUTE", COMPUTE}, {"COLLECTIVE", COLLECTIVE}, {"DATA", DATA},
    {"START", START}, {"PREPARE", PREPARE}, {"LOAD", LOAD},
    {"NOTICED_LATE", NOTICED_LATE}, {"POINT_TO_POINT", POINT_TO_POINT}, {"SYMMETRIC", SYMMETRIC},
    {"END_NOTICE_RESOLUTION_NS", END_NOTICE_RESOLUTION_NS},
};

typedef struct {
    uint64_t index;
    uint8_t kind, phase, collective, flags;
    uint32_t step, sequence, group;
    int64_t start_ns, end_ns, bytes;
    double value;
    int32_t peer, reserved;
} Record;

#define FIELD(name) {#name, offsetof(Record, name), sizeof(((Record *)0)->name)}
static const struct {
    const char *name;
    size_t offset, size;
} RECORD[] = {
    FIELD(index), FIELD(kind), FIELD(phase), FIELD(collective), FIELD(flags), FIELD(step), FIELD(sequence),
    FIELD(group), FIELD(start_ns), FIELD(end_ns), FIELD(bytes), FIELD(value), FIELD(peer), FIELD(reserved),
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Attributes and methods of others, by their names. */
#define WORDS(word)                                                                                                    \
    word(name) word(async_op) word(input_tensors) word(output_tensors) word(root) word(work) word(nbytes) word(is_cpu) \
    word(is_completed) word(get_future) word(done) word(clock) word(captures) word(mark) word(ns)                      \
    word(entered) word(waited) word(reduced) word(backward_computed) word(backward_ended) word(end_step)               \
    word(load) word(_notice_timed) word(_issued_at_once)
#define DECLARE(word) static PyObject *s_##word;
WORDS(DECLARE)

/* ------------------------------------------------------------------------------------------------ small helpers --- */

/* Nanoseconds of CLOCK_MONOTONIC, or by `clock`, a callable. -1: it has raised. */
static int now(PyObject *clock, int64_t *ns)
{
    if (clock == NULL) {
        struct timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        *ns = (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
        return 0;
    }
    PyObject *told = PyObject_CallNoArgs(clock);
    if (told == NULL)
        return -1;
    *ns = PyLong_AsLongLong(told);
    Py_DECREF(told);
    return *ns == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Takes the reference to `object`. -1: it was NULL, or is no such number. */
static int whole(PyObject *object, int64_t *number)
{
    if (object == NULL)
        return -1;
    *number = PyLong_AsLongLong(object);
    Py_DECREF(object);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Takes the reference to `object`. -1: it was NULL, or does not say whether it is true. */
static int truth(PyObject *object)
{
    if (object == NULL)
        return -1;
    int is = PyObject_IsTrue(object);
    Py_DECREF(object);
    return is;
}

/* Takes the reference to what a call has returned that returns nothing. */
static int done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *none_or_error(int failed)
{
    if (failed < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The new reference, or none, in place of the old one, which goes last: it may call anything. */
static void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;
    *place = object;
    Py_XDECREF(before);
}

static int unconnected(void *what)
{
    if (what != NULL)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "it is used before it is connected, or as garbage");
    return -1;
}

static void dealloc(PyObject *self, int (*clear)(PyObject *))
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define GOES(pointer) /* for `clear` and `traverse` of a list of references */                                         \
    do {                                                                                                               \
        PyObject *gone = (PyObject *)(pointer);                                                                        \
        (pointer) = NULL;                                                                                              \
        Py_XDECREF(gone);                                                                                              \
    } while (0)

/* --------------------------------------------------------------------------------------------------------- Ring --- */

/* Of the state that is written here, in the order in which `connect` is given where they lie. */
enum place {
    PHASE_NOW, PHASE_SINCE, COLLECTIVE_NOW, GROUP, SEQUENCE, COLLECTIVE_SINCE, ENTERED, STEP_DONE, STEPS, STEP_END,
    LONGEST_LOAD, PLACES
};
static const struct {
    const char *name;
    size_t size;
} STATE[PLACES] = {
    {"phase", 4}, {"phase_since_ns", 8}, {"collective", 4}, {"group", 4}, {"sequence", 8}, {"collective_since_ns", 8},
    {"collectives_entered", 8}, {"step", 8}, {"steps_in_round", 8}, {"step_end_ns", 8}, {"longest_load_ns", 8},
};

typedef struct {
    PyObject_HEAD
    Py_buffer map; /* map.obj == NULL: not connected */
    char *records;
    uint64_t capacity, written;
    size_t header;
    uint32_t *halves[PLACES];
    int64_t *words[PLACES];
} Ring;

static void store(Ring *self, enum place place, int64_t value)
{
    if (STATE[place].size == 8)
        __atomic_store_n(self->words[place], value, __ATOMIC_RELEASE);
    else
        __atomic_store_n(self->halves[place], (uint32_t)value, __ATOMIC_RELEASE);
}

static int64_t load_word(Ring *self, enum place place)
{
    return __atomic_load_n(self->words[place], __ATOMIC_RELAXED);
}

/* Appends a record; `record->index` is given here. */
static void put(Ring *self, const Record *record)
{
    uint64_t index = ++self->written;
    Record *slot = (Record *)self->records + (index - 1) % self->capacity;
    /* The slot is void while its fields change; its index, stored last, makes it valid. */
    __atomic_store_n(&slot->index, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)slot + sizeof slot->index, (const char *)record + sizeof slot->index, sizeof *slot - sizeof slot->index);
    __atomic_store_n(&slot->index, index, __ATOMIC_RELEASE);
}

/* The map refers to nothing, so that it is in no circle: it stays for as long as the ring, and records can be written. */
static int ring_clear(PyObject *Py_UNUSED(object))
{
    return 0;
}

static int ring_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int ring_release(PyObject *object)
{
    Ring *self = (Ring *)object;
    if (self->map.obj != NULL)
        PyBuffer_Release(&self->map);
    return 0;
}

static void ring_dealloc(PyObject *object)
{
    dealloc(object, ring_release);
}

PyDoc_STRVAR(ring_connect_doc, "connect(map, header_bytes, capacity, written, places): `places` are offsets (bytes) of "
                               "STATE's fields in `map`; `written`: index of the last record.");

static PyObject *ring_connect(PyObject *object, PyObject *args)
{
    Ring *self = (Ring *)object;
    PyObject *map, *places;
    Py_ssize_t header;
    unsigned long long capacity, written;
    if (!PyArg_ParseTuple(args, "OnKKO!", &map, &header, &capacity, &written, &PyTuple_Type, &places))
        return NULL;
    if (self->map.obj != NULL || PyTuple_Size(places) != PLACES) {
        PyErr_SetString(PyExc_ValueError, "a ring is connected once, with an offset for each field of STATE");
        return NULL;
    }
    if (PyObject_GetBuffer(map, &self->map, PyBUF_WRITABLE) < 0)
        return NULL;
    char *start = self->map.buf;
    bool fits = header > 0 && header % 8 == 0 && header <= self->map.len && (uintptr_t)start % 8 == 0 && capacity > 0 &&
                capacity <= (uint64_t)(self->map.len - header) / sizeof(Record);
    for (Py_ssize_t place = 0; fits && place < PLACES; place++) {
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(places, place));
        Py_ssize_t size = (Py_ssize_t)STATE[place].size;
        fits = offset >= 0 && offset % size == 0 && offset + size <= header;
        if (fits) {
            self->halves[place] = (uint32_t *)(start + offset);
            self->words[place] = (int64_t *)(start + offset);
        }
    }
    if (!fits) {
        PyBuffer_Release(&self->map);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "such a ring, with such a state, does not fit into the map");
        return NULL;
    }
    self->records = start + header;
    self->header = (size_t)header;
    self->capacity = capacity;
    self->written = written;
    Py_RETURN_NONE;
}

enum parameter { KIND, START_NS, END_NS, STEP_NUMBER, PHASE, VALUE, WHICH, OF_GROUP, NUMBER, BYTES, PEER, FLAGS, PARAMETERS };
static const struct {
    const char *name;
    long long least, most; /* 0, 0: any */
} PARAMETER[PARAMETERS] = {
    {"kind", 0, UINT8_MAX}, {"start_ns", 0, 0}, {"end_ns", 0, 0}, {"step", 0, UINT32_MAX}, {"phase", 0, UINT8_MAX},
    {"value", 0, 0}, {"collective", 0, UINT8_MAX}, {"group", 0, UINT32_MAX}, {"sequence", 0, UINT32_MAX},
    {"nbytes", 0, 0}, {"peer", INT32_MIN, INT32_MAX}, {"flags", 0, UINT8_MAX},
};

static int which_parameter(PyObject *name)
{
    for (int each = 0; each < PARAMETERS; each++)
        if (PyUnicode_CompareWithASCIIString(name, PARAMETER[each].name) == 0)
            return each;
    PyErr_Format(PyExc_TypeError, "write() has no parameter %R", name);
    return -1;
}

static PyObject *ring_write(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Ring *self = (Ring *)object;
    int64_t numbers[PARAMETERS] = {[PEER] = NO_PEER};
    double value = 0.0;
    bool given[PARAMETERS] = {false};
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (unconnected(self->map.obj) < 0)
        return NULL;
    if (count > PARAMETERS)
        return PyErr_Format(PyExc_TypeError, "write() takes %d arguments at most, not %zd", PARAMETERS, count);
    for (Py_ssize_t position = 0; position < count + named; position++) {
        int each = position < count ? (int)position : which_parameter(PyTuple_GetItem(names, position - count));
        if (each < 0)
            return NULL;
        if (given[each])
            return PyErr_Format(PyExc_TypeError, "write() is given %s twice", PARAMETER[each].name);
        given[each] = true;
        if (each == VALUE)
            value = PyFloat_AsDouble(args[position]);
        else
            numbers[each] = PyLong_AsLongLong(args[position]);
        if ((each == VALUE ? value == -1.0 : numbers[each] == -1) && PyErr_Occurred())
            return NULL;
        long long least = PARAMETER[each].least, most = PARAMETER[each].most;
        if (least != most && (numbers[each] < least || numbers[each] > most))
            return PyErr_Format(PyExc_ValueError, "%s=%lld of a record is not from %lld to %lld", PARAMETER[each].name,
                                (long long)numbers[each], least, most);
    }
    if (!given[KIND] || !given[START_NS] || !given[END_NS])
        return PyErr_Format(PyExc_TypeError, "write() needs kind, start_ns and end_ns");
    Record record = {
        .kind = (uint8_t)numbers[KIND], .phase = (uint8_t)numbers[PHASE], .collective = (uint8_t)numbers[WHICH],
        .flags = (uint8_t)numbers[FLAGS], .step = (uint32_t)numbers[STEP_NUMBER], .sequence = (uint32_t)numbers[NUMBER],
        .group = (uint32_t)numbers[OF_GROUP], .start_ns = numbers[START_NS], .end_ns = numbers[END_NS],
        .bytes = numbers[BYTES], .value = value, .peer = (int32_t)numbers[PEER],
    };
    put(self, &record);
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------- Recorder --- */

/* Its clock is the host's while `on_host`, and the step is told by `start_ns` and `waits_ns`; what Python has asked for
(`_step`) is told by that object until the step ends. */
typedef struct {
    PyObject_HEAD
    Ring *ring;
    PyObject *reference; /* the Python class whose methods do what is not done here */
    PyObject *host_mark; /* HostMark */
    PyObject *step_of; /* makes a step of its start and waits */
    PyObject *nothing_waits; /* what `notice_wait` is while nobody listens */
    PyObject *graph_task;
    PyObject *loading; /* Phase.LOAD */
    PyObject *clock_ns, *mark_ns; /* callables; NULL: CLOCK_MONOTONIC. The latter's are a host clock's marks. */
    PyObject *phase, *notice_ends, *step_ended, *notice_wait;
    PyObject *owner; /* weak reference to the optimizer whose steps are the job's */
    PyObject *step_object;
    PyObject *entry_object;
    int64_t entry_ns, start_ns, waits_ns;
    long long step, mode, away;
    unsigned long training_thread;
    char managed, waiting, unwaited, on_host, has_entry_ns;
} Recorder;

#define RECORDER_REFERENCES(each)                                                                                      \
    each(ring) each(reference) each(host_mark) each(step_of) each(nothing_waits) each(graph_task) each(loading)        \
    each(clock_ns) each(mark_ns) each(phase) each(notice_ends) each(step_ended) each(notice_wait) each(owner)          \
    each(step_object) each(entry_object)

static int recorder_clear(PyObject *object)
{
    Recorder *self = (Recorder *)object;
#define CLEAR(name) GOES(self->name);
    RECORDER_REFERENCES(CLEAR)
    return 0;
}

static int recorder_traverse(PyObject *object, visitproc visit, void *arg)
{
    Recorder *self = (Recorder *)object;
    Py_VISIT(Py_TYPE(object));
#define VISIT(name) Py_VISIT(self->name);
    RECORDER_REFERENCES(VISIT)
    return 0;
}

static void recorder_dealloc(PyObject *object)
{
    dealloc(object, recorder_clear);
}

static PyTypeObject *ring_type, *recorder_type, *watcher_type, *hooks_type;

PyDoc_STRVAR(recorder_connect_doc, "connect(ring, reference, host_mark, step_of, nothing_waits, graph_task, loading, "
                                   "clock): `clock` gives nanoseconds; None: CLOCK_MONOTONIC.");

static PyObject *recorder_connect(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    PyObject *ring, *reference, *host_mark, *step_of, *nothing_waits, *graph_task, *loading, *clock;
    if (!PyArg_ParseTuple(args, "O!OOOOOOO", ring_type, &ring, &reference, &host_mark, &step_of, &nothing_waits,
                          &graph_task, &loading, &clock))
        return NULL;
    if (unconnected(((Ring *)ring)->map.obj) < 0)
        return NULL;
    if (self->ring != NULL)
        return PyErr_Format(PyExc_ValueError, "a recorder is connected once");
    self->ring = (Ring *)Py_NewRef(ring);
    self->reference = Py_NewRef(reference);
    self->host_mark = Py_NewRef(host_mark);
    self->step_of = Py_NewRef(step_of);
    self->nothing_waits = Py_NewRef(nothing_waits);
    self->graph_task = Py_NewRef(graph_task);
    self->loading = Py_NewRef(loading);
    self->clock_ns = clock == Py_None ? NULL : Py_NewRef(clock);
    Py_RETURN_NONE;
}

/* The Python class's method, with up to two arguments (NULL: none). */
static PyObject *by_reference(Recorder *self, PyObject *method, PyObject *first, PyObject *second)
{
    return PyObject_CallMethodObjArgs(self->reference, method, (PyObject *)self, first, second, NULL);
}

/* -1: an error. The number of the backward pass that the calling thread is in, -1 for none, goes into `pass`. */
static int backward_pass(Recorder *self, int64_t *pass)
{
    return whole(PyObject_CallNoArgs(self->graph_task), pass);
}

static int phase_number(Recorder *self, long *phase)
{
    if (self->phase == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a recorder without a phase");
        return -1;
    }
    *phase = PyLong_AsLong(self->phase);
    return *phase == -1 && PyErr_Occurred() ? -1 : 0;
}

/* As the property `is_wait_counted`, by the host's clock, which has no streams. -1: an error. */
static int counts(Recorder *self)
{
    if (self->waiting || self->away)
        return 0;
    if (PyThread_get_thread_ident() == self->training_thread)
        return 1;
    int64_t pass;
    return backward_pass(self, &pass) < 0 ? -1 : pass >= 0;
}

static void set_entry(Recorder *self, bool known, int64_t ns)
{
    self->has_entry_ns = known;
    self->entry_ns = ns;
    replace(&self->entry_object, NULL);
}

static int entered(Recorder *self, bool in_backward)
{
    if (in_backward) {
        self->unwaited = 1;
        set_entry(self, false, 0);
        return 0;
    }
    if (!self->on_host)
        return done(by_reference(self, s_entered, Py_False, NULL));
    int count = counts(self);
    int64_t ns;
    if (count <= 0 || now(self->mark_ns, &ns) < 0)
        return count == 0 ? 0 : -1;
    self->unwaited = 1;
    set_entry(self, true, ns);
    return 0;
}

static int backward_computed(Recorder *self)
{
    if (!self->on_host)
        return done(by_reference(self, s_backward_computed, NULL, NULL));
    int64_t ns;
    if (!self->unwaited)
        return 0;
    if (now(self->mark_ns, &ns) < 0)
        return -1;
    set_entry(self, true, ns);
    return 0;
}

/* Whether a wait is no more than nanoseconds to be added. */
static bool waits_are_counted(Recorder *self)
{
    return self->on_host && self->step_object == NULL && self->notice_wait == self->nothing_waits;
}

static int reduced(Recorder *self)
{
    if (!self->unwaited || (!self->has_entry_ns && self->entry_object == NULL))
        return 0;
    if (!waits_are_counted(self) || !self->has_entry_ns)
        return done(by_reference(self, s_reduced, NULL, NULL));
    int64_t ns, entry = self->entry_ns;
    if (now(self->mark_ns, &ns) < 0)
        return -1;
    self->waits_ns += ns - entry;
    self->unwaited = 0;
    return 0;
}

static int optimizer_begins(Recorder *self)
{
    if (self->notice_ends != NULL && done(PyObject_CallNoArgs(self->notice_ends)) < 0)
        return -1;
    return reduced(self);
}

/* By the host's clock, behind the first step of a round. */
static int end_of_step(Recorder *self, double samples, long phase)
{
    int64_t end, told;
    if (now(self->mark_ns, &end) < 0)
        return -1;
    if (self->clock_ns == self->mark_ns)
        told = end;
    else if (now(self->clock_ns, &told) < 0)
        return -1;
    Ring *ring = self->ring;
    store(ring, STEP_DONE, self->step);
    store(ring, STEPS, load_word(ring, STEPS) + 1);
    store(ring, STEP_END, told);
    int64_t own = end - self->start_ns - self->waits_ns;
    Record record = {
        .kind = STEP, .phase = (uint8_t)phase, .flags = (uint8_t)self->mode, .step = (uint32_t)self->step,
        .start_ns = self->start_ns, .end_ns = end, .value = samples, .peer = NO_PEER,
    };
    put(ring, &record);
    record.kind = COMPUTE;
    record.flags = 0;
    record.end_ns = self->start_ns + (own > 0 ? own : 0);
    put(ring, &record);
    self->step += 1;
    self->start_ns = end;
    self->waits_ns = 0;
    self->unwaited = 0;
    return self->step_ended == NULL ? 0 : done(PyObject_CallNoArgs(self->step_ended));
}

static int end_step(Recorder *self, PyObject *samples, PyObject *lengths)
{
    long phase;
    if (phase_number(self, &phase) < 0)
        return -1;
    if (!self->on_host || self->step_object != NULL || phase == START || lengths != Py_None)
        return done(by_reference(self, s_end_step, samples, lengths));
    double value = samples == NULL ? 0.0 : PyFloat_AsDouble(samples);
    if (value == -1.0 && PyErr_Occurred())
        return -1;
    return end_of_step(self, value, phase);
}

static PyObject *recorder_end_step(PyObject *object, PyObject *args, PyObject *options)
{
    static char *names[] = {"samples", "lengths", NULL};
    Recorder *self = (Recorder *)object;
    PyObject *samples = NULL, *lengths = Py_None;
    if (unconnected(self->ring) < 0 || !PyArg_ParseTupleAndKeywords(args, options, "|OO", names, &samples, &lengths))
        return NULL;
    if (samples != NULL)
        return none_or_error(end_step(self, samples, lengths));
    PyObject *unknown = PyLong_FromLong(0);
    if (unknown == NULL)
        return NULL;
    int failed = end_step(self, unknown, lengths);
    Py_DECREF(unknown);
    return none_or_error(failed);
}

static PyObject *recorder_entered(PyObject *object, PyObject *in_backward)
{
    Recorder *self = (Recorder *)object;
    int is = unconnected(self->ring) < 0 ? -1 : PyObject_IsTrue(in_backward);
    return none_or_error(is < 0 ? -1 : entered(self, is));
}

static PyObject *recorder_backward_computed(PyObject *object, PyObject *Py_UNUSED(none))
{
    Recorder *self = (Recorder *)object;
    return none_or_error(unconnected(self->ring) < 0 ? -1 : backward_computed(self));
}

static PyObject *recorder_reduced(PyObject *object, PyObject *Py_UNUSED(none))
{
    Recorder *self = (Recorder *)object;
    return none_or_error(unconnected(self->ring) < 0 ? -1 : reduced(self));
}

static PyObject *recorder_optimizer_begins(PyObject *object, PyObject *Py_UNUSED(none))
{
    Recorder *self = (Recorder *)object;
    return none_or_error(unconnected(self->ring) < 0 ? -1 : optimizer_begins(self));
}

static PyObject *recorder_waited(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    PyObject *start, *end;
    if (unconnected(self->ring) < 0 || !PyArg_ParseTuple(args, "OO", &start, &end))
        return NULL;
    PyTypeObject *mark = (PyTypeObject *)self->host_mark;
    if (!waits_are_counted(self) || Py_TYPE(start) != mark || Py_TYPE(end) != mark)
        return by_reference(self, s_waited, start, end);
    int64_t began, ended;
    if (whole(PyObject_GetAttr(start, s_ns), &began) < 0 || whole(PyObject_GetAttr(end, s_ns), &ended) < 0)
        return NULL;
    self->waits_ns += ended - began;
    self->unwaited = 0;
    Py_RETURN_NONE;
}

/* Back in the phase before, which is recorded with the load's. */
static int end_load(Recorder *self, PyObject *before, long phase, int64_t start)
{
    int64_t end;
    if (now(self->clock_ns, &end) < 0)
        return -1;
    Ring *ring = self->ring;
    replace(&self->phase, Py_NewRef(before));
    store(ring, PHASE_SINCE, end);
    store(ring, PHASE_NOW, phase);
    Record record = {
        .kind = DATA, .phase = (uint8_t)phase, .step = (uint32_t)self->step, .start_ns = start, .end_ns = end,
        .peer = NO_PEER,
    };
    put(ring, &record);
    if (end - start > load_word(ring, LONGEST_LOAD))
        store(ring, LONGEST_LOAD, end - start);
    return 0;
}

/* load(fetch, *arguments) */
static PyObject *recorder_load(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    Py_ssize_t count = PyTuple_Size(args);
    long phase;
    int64_t start;
    if (unconnected(self->ring) < 0 || phase_number(self, &phase) < 0)
        return NULL;
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "load() needs what fetches");
    PyObject *fetch = PyTuple_GetItem(args, 0), *arguments = PyTuple_GetSlice(args, 1, count);
    if (arguments == NULL)
        return NULL;
    if (phase == LOAD || phase == PREPARE) { /* nested calls count once */
        PyObject *fetched = PyObject_CallObject(fetch, arguments);
        Py_DECREF(arguments);
        return fetched;
    }
    if (now(self->clock_ns, &start) < 0) {
        Py_DECREF(arguments);
        return NULL;
    }
    PyObject *before = Py_NewRef(self->phase);
    replace(&self->phase, Py_NewRef(self->loading));
    store(self->ring, PHASE_SINCE, start);
    store(self->ring, PHASE_NOW, LOAD);
    PyObject *fetched = PyObject_CallObject(fetch, arguments);
    Py_DECREF(arguments);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int failed = end_load(self, before, phase, start);
    Py_DECREF(before);
    if (failed < 0) {
        Py_XDECREF(fetched);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return NULL;
    }
    PyErr_Restore(type, value, trace);
    return fetched;
}

/* The optimizer whose steps are the job's, borrowed; None: there is none, or it is gone. */
static PyObject *owner_of_steps(Recorder *self)
{
    return self->owner == NULL ? Py_None : PyWeakref_GetObject(self->owner);
}

static PyObject *recorder_begin_optimizer_step(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    PyObject *optimizer = PyTuple_GetItem(args, 0);
    if (optimizer == NULL || unconnected(self->ring) < 0)
        return NULL;
    if (self->managed)
        Py_RETURN_NONE;
    if (owner_of_steps(self) == Py_None) {
        PyObject *owner = PyWeakref_NewRef(optimizer, NULL);
        if (owner == NULL)
            return NULL;
        replace(&self->owner, owner);
    }
    return none_or_error(owner_of_steps(self) == optimizer ? optimizer_begins(self) : 0);
}

static PyObject *recorder_end_optimizer_step(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    PyObject *optimizer = PyTuple_GetItem(args, 0);
    if (optimizer == NULL || unconnected(self->ring) < 0)
        return NULL;
    if (self->managed || owner_of_steps(self) != optimizer)
        Py_RETURN_NONE;
    PyObject *unknown = PyLong_FromLong(0);
    if (unknown == NULL)
        return NULL;
    int failed = end_step(self, unknown, Py_None);
    Py_DECREF(unknown);
    return none_or_error(failed);
}

PyDoc_STRVAR(recorder_go_on_doc, "go_on(start_ns, clock): a step has begun by the host's clock, whose marks `clock` "
                                 "gives (None: CLOCK_MONOTONIC).");

static PyObject *recorder_go_on(PyObject *object, PyObject *args)
{
    Recorder *self = (Recorder *)object;
    long long start;
    PyObject *clock;
    if (unconnected(self->ring) < 0 || !PyArg_ParseTuple(args, "LO", &start, &clock))
        return NULL;
    replace(&self->mark_ns, clock == Py_None ? NULL : Py_NewRef(clock));
    self->start_ns = start;
    self->waits_ns = 0;
    self->on_host = 1;
    replace(&self->step_object, NULL);
    Py_RETURN_NONE;
}

static PyObject *get_step(PyObject *object, void *Py_UNUSED(closure))
{
    Recorder *self = (Recorder *)object;
    if (self->step_object == NULL) {
        if (unconnected(self->ring) < 0)
            return NULL;
        PyObject *step = PyObject_CallFunction(self->step_of, "LL", (long long)self->start_ns, (long long)self->waits_ns);
        if (step == NULL)
            return NULL;
        replace(&self->step_object, step);
    }
    return Py_NewRef(self->step_object);
}

static int set_step(PyObject *object, PyObject *step, void *Py_UNUSED(closure))
{
    replace(&((Recorder *)object)->step_object, Py_XNewRef(step));
    return 0;
}

static PyObject *get_entry(PyObject *object, void *Py_UNUSED(closure))
{
    Recorder *self = (Recorder *)object;
    if (self->has_entry_ns)
        return PyObject_CallFunction(self->host_mark, "L", (long long)self->entry_ns);
    return Py_NewRef(self->entry_object == NULL ? Py_None : self->entry_object);
}

static int set_entry_object(PyObject *object, PyObject *entry, void *Py_UNUSED(closure))
{
    Recorder *self = (Recorder *)object;
    int64_t ns = 0;
    bool of_host = entry != NULL && (PyObject *)Py_TYPE(entry) == self->host_mark;
    if (of_host && whole(PyObject_GetAttr(entry, s_ns), &ns) < 0)
        return -1;
    set_entry(self, of_host, ns);
    if (!of_host && entry != Py_None)
        replace(&self->entry_object, Py_XNewRef(entry));
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ Watcher --- */

/* A collective of which a rank knows when it was entered. */
typedef struct {
    PyObject *work;
    int64_t start_ns, bytes, number, step;
    uint32_t group;
    int32_t peer;
    uint8_t collective, phase;
    bool on_host;
} Entry;

enum { FORMS = 64, FEWEST = 16 };

typedef struct {
    PyObject_HEAD
    Recorder *recorder;
    PyObject *timed; /* Python's, of works that a device does */
    PyObject *queue_callback;
    PyObject *backward_computed, *backward_ended; /* its own, bound */
    PyObject *collectives; /* by their forms' names and numbers */
    PyObject *report_failure; /* takes the name and the error of a hook that fails; NULL: the error is raised */
    char inactive; /* hooks do nothing */
    Entry *pending; /* in the order in which they were entered, from `first` on, round about */
    Py_ssize_t room, first, count;
    int64_t noticed_ns, backward;
    uint32_t without_future; /* a bit a collective */
    int8_t forms[FORMS]; /* the collective of the form with this number; -1: none */
} Watcher;

static Entry *pending_at(Watcher *self, Py_ssize_t position)
{
    return &self->pending[(self->first + position) % self->room];
}

static void forget_pending(Watcher *self)
{
    while (self->count > 0) {
        PyObject *work = pending_at(self, 0)->work;
        self->first = (self->first + 1) % self->room;
        self->count--;
        Py_DECREF(work);
    }
}

static int watcher_clear(PyObject *object)
{
    Watcher *self = (Watcher *)object;
    GOES(self->recorder); /* first: without it nothing is added any more */
    forget_pending(self);
    PyMem_Free(self->pending);
    self->pending = NULL;
    self->room = 0;
    GOES(self->timed);
    GOES(self->queue_callback);
    GOES(self->backward_computed);
    GOES(self->backward_ended);
    GOES(self->collectives);
    GOES(self->report_failure);
    return 0;
}

static int watcher_traverse(PyObject *object, visitproc visit, void *arg)
{
    Watcher *self = (Watcher *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t position = 0; position < self->count; position++)
        Py_VISIT(pending_at(self, position)->work);
    Py_VISIT(self->recorder);
    Py_VISIT(self->timed);
    Py_VISIT(self->queue_callback);
    Py_VISIT(self->backward_computed);
    Py_VISIT(self->backward_ended);
    Py_VISIT(self->collectives);
    Py_VISIT(self->report_failure);
    return 0;
}

static void watcher_dealloc(PyObject *object)
{
    dealloc(object, watcher_clear);
}

/* Collectives by their forms' numbers; -1: an error. */
static int read_forms(Watcher *self, PyObject *collectives)
{
    PyObject *form, *collective;
    Py_ssize_t position = 0;
    memset(self->forms, -1, sizeof self->forms);
    while (PyDict_Next(collectives, &position, &form, &collective)) {
        long its = PyLong_AsLong(collective);
        if (its == -1 && PyErr_Occurred())
            return -1;
        if (its < 0 || its >= 31) {
            PyErr_Format(PyExc_ValueError, "there is no collective %ld", its);
            return -1;
        }
        if (!PyLong_Check(form))
            continue;
        long number = PyLong_AsLong(form);
        if (number < 0 || number >= FORMS) { /* looked up in the dictionary */
            PyErr_Clear();
            continue;
        }
        self->forms[number] = (int8_t)its;
    }
    return 0;
}

PyDoc_STRVAR(watcher_connect_doc, "connect(recorder, timed, queue_callback, collectives)");

static PyObject *watcher_connect(PyObject *object, PyObject *args)
{
    Watcher *self = (Watcher *)object;
    PyObject *recorder, *timed, *queue_callback, *collectives;
    if (!PyArg_ParseTuple(args, "O!OOO!", recorder_type, &recorder, &timed, &queue_callback, &PyDict_Type, &collectives))
        return NULL;
    if (unconnected(((Recorder *)recorder)->ring) < 0 || read_forms(self, collectives) < 0)
        return NULL;
    if (self->recorder != NULL)
        return PyErr_Format(PyExc_ValueError, "a watcher is connected once");
    PyObject *computed = PyObject_GetAttr(object, s_backward_computed);
    PyObject *ended = PyObject_GetAttr(object, s_backward_ended);
    if (computed == NULL || ended == NULL) {
        Py_XDECREF(computed);
        Py_XDECREF(ended);
        return NULL;
    }
    self->backward_computed = computed;
    self->backward_ended = ended;
    self->timed = Py_NewRef(timed);
    self->queue_callback = Py_NewRef(queue_callback);
    self->collectives = Py_NewRef(collectives);
    self->backward = -1;
    self->recorder = (Recorder *)Py_NewRef(recorder);
    Py_RETURN_NONE;
}

/* 1: something is under way; -1: an error. */
static int under_way(Watcher *self)
{
    if (self->count > 0)
        return 1;
    Py_ssize_t timed = PyObject_Size(self->timed);
    return timed < 0 ? -1 : timed > 0;
}

static int leave_if_all_ended(Watcher *self)
{
    int is = under_way(self);
    if (is == 0)
        store(self->recorder->ring, COLLECTIVE_NOW, 0);
    return is < 0 ? -1 : 0;
}

/* The entry's own reference to its work is the watcher's from now on. */
static int add_pending(Watcher *self, const Entry *entry)
{
    for (Py_ssize_t position = self->count - 1; position >= 0; position--) {
        Entry *other = pending_at(self, position);
        if (other->work == entry->work) { /* issued anew: as an entry of a dictionary would be */
            *other = *entry;
            Py_DECREF(entry->work);
            return 0;
        }
    }
    if (self->count == self->room) {
        Py_ssize_t room = self->room == 0 ? FEWEST : 2 * self->room;
        Entry *pending = PyMem_Malloc((size_t)room * sizeof *pending);
        if (pending == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t position = 0; position < self->count; position++)
            pending[position] = *pending_at(self, position);
        PyMem_Free(self->pending);
        self->pending = pending;
        self->room = room;
        self->first = 0;
    }
    self->count++;
    *pending_at(self, self->count - 1) = *entry;
    return 0;
}

/* Takes it out; the reference to its work is the caller's. */
static Entry take_pending(Watcher *self, Py_ssize_t position)
{
    Entry entry = *pending_at(self, position);
    if (position == 0) {
        self->first = (self->first + 1) % self->room;
    } else {
        for (; position + 1 < self->count; position++)
            *pending_at(self, position) = *pending_at(self, position + 1);
    }
    self->count--;
    return entry;
}

/* As Python has it: `_Entry` of collectives/collective_monitor.py. */
static PyObject *entry_in_python(const Entry *entry)
{
    return Py_BuildValue("iLLLLLiiO", (int)entry->collective, (long long)entry->group, (long long)entry->number,
                         (long long)entry->start_ns, (long long)entry->bytes, (long long)entry->step, (int)entry->phase,
                         (int)entry->peer, entry->on_host ? Py_True : Py_False);
}

/* As `_is_nearly_done` of collectives/collective_monitor.py. -1: an error. */
static int is_nearly_done(Watcher *self, const Entry *entry)
{
    uint32_t bit = 1u << entry->collective;
    if (!entry->on_host || self->without_future & bit)
        return 0;
    PyObject *future = PyObject_CallMethodObjArgs(entry->work, s_get_future, NULL);
    int is = future == NULL ? -1 : truth(PyObject_CallMethodObjArgs(future, s_done, NULL));
    Py_XDECREF(future);
    if (is < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        self->without_future |= bit;
        return 0;
    }
    return is;
}

/* One look at what has ended, in order, up to the first that has not. */
static int notice(Watcher *self, int64_t ns, bool late)
{
    Recorder *recorder = self->recorder;
    self->noticed_ns = ns;
    while (self->count > 0) {
        Entry entry = *pending_at(self, 0);
        Py_INCREF(entry.work);
        int is = truth(PyObject_CallMethodObjArgs(entry.work, s_is_completed, NULL));
        if (is == 0 && !late)
            is = is_nearly_done(self, &entry);
        if (is <= 0) {
            Py_DECREF(entry.work);
            if (is < 0)
                return -1;
            break;
        }
        int failed = 0;
        if (self->count > 0 && pending_at(self, 0)->work == entry.work) { /* no other thread has seen to it meanwhile */
            take_pending(self, 0);
            bool exact = entry.on_host && !late;
            /* What the rank has waited for at last is the one that it entered last. */
            bool held = exact && self->count == 0 && recorder->unwaited && recorder->has_entry_ns;
            int64_t from = recorder->entry_ns > entry.start_ns ? recorder->entry_ns : entry.start_ns;
            Record record = {
                .kind = COLLECTIVE, .phase = entry.phase, .collective = entry.collective,
                .flags = exact ? 0 : NOTICED_LATE, .step = (uint32_t)entry.step, .sequence = (uint32_t)entry.number,
                .group = entry.group, .start_ns = entry.start_ns, .end_ns = ns, .bytes = entry.bytes,
                .value = held ? (double)(ns - from) * 1e-9 : 0.0, .peer = entry.peer,
            };
            put(recorder->ring, &record);
            failed = leave_if_all_ended(self);
            Py_DECREF(entry.work); /* that of the list */
        }
        Py_DECREF(entry.work);
        if (failed < 0)
            return -1;
    }
    Py_ssize_t timed = PyObject_Size(self->timed);
    if (timed > 0)
        return done(PyObject_CallMethodObjArgs((PyObject *)self, s__notice_timed, NULL));
    return timed < 0 ? -1 : 0;
}

static int notice_ends(Watcher *self)
{
    int64_t ns;
    int is = under_way(self);
    if (is <= 0)
        return is;
    return now(self->recorder->clock_ns, &ns) < 0 ? -1 : notice(self, ns, false);
}

static int usable(Watcher *self)
{
    return unconnected(self->recorder) < 0 ? -1 : unconnected(self->recorder->ring);
}

/* What a hook of torch's returns. Its error is not the script's: `report_failure` makes all hooks inactive, and raises
only what a signal handler of the script has raised. */
static PyObject *end_hook(Watcher *self, const char *hook, int failed)
{
    if (failed >= 0)
        Py_RETURN_NONE;
    if (self == NULL || self->report_failure == NULL || !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyObject *type, *value, *trace, *report = Py_NewRef(self->report_failure);
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    PyObject *reported = PyObject_CallFunction(report, "sO", hook, value);
    Py_DECREF(report);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return none_or_error(done(reported));
}

static PyObject *watcher_forget_pending(PyObject *object, PyObject *Py_UNUSED(none))
{
    forget_pending((Watcher *)object);
    Py_RETURN_NONE;
}

static PyObject *watcher_notice_ends(PyObject *object, PyObject *Py_UNUSED(none))
{
    Watcher *self = (Watcher *)object;
    return none_or_error(usable(self) < 0 ? -1 : notice_ends(self));
}

static PyObject *watcher_backward_computed(PyObject *object, PyObject *Py_UNUSED(none))
{
    Watcher *self = (Watcher *)object;
    if (self->inactive)
        Py_RETURN_NONE;
    int failed = usable(self) < 0 || backward_computed(self->recorder) < 0 ? -1 : 0;
    if (failed == 0)
        failed = done(PyObject_CallFunctionObjArgs(self->queue_callback, self->backward_ended, NULL));
    return end_hook(self, "a backward pass", failed);
}

static PyObject *watcher_backward_ended(PyObject *object, PyObject *Py_UNUSED(none))
{
    Watcher *self = (Watcher *)object;
    if (self->inactive)
        Py_RETURN_NONE;
    self->backward = -1;
    return end_hook(self, "a backward pass", usable(self) < 0 || notice_ends(self) < 0 ? -1 : reduced(self->recorder));
}

static PyObject *watcher_take(PyObject *object, PyObject *work)
{
    Watcher *self = (Watcher *)object;
    for (Py_ssize_t position = 0; position < self->count; position++) {
        if (pending_at(self, position)->work == work) {
            Entry entry = take_pending(self, position);
            PyObject *taken = entry_in_python(&entry);
            Py_DECREF(entry.work);
            return taken;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *get_has_pending(PyObject *object, void *Py_UNUSED(closure))
{
    Watcher *self = (Watcher *)object;
    int is = usable(self) < 0 ? -1 : under_way(self);
    return is < 0 ? NULL : PyBool_FromLong(is);
}

/* -------------------------------------------------------------------------------------------------------- Hooks --- */

/* Of one process group: as `enter` and `issued` of `CollectiveMonitor.monitor_group` in collectives/collective_monitor.py. */
typedef struct {
    PyObject_HEAD
    Watcher *watcher;
    PyObject *introduce; /* returns the group's GroupLane */
    PyObject *channel; /* returns that of a send or receive: of its collective and root */
    PyObject *begun; /* a mark: of `entry`, where a stream may be going to wait for it at once */
    int64_t number; /* of its collectives, so far */
    int64_t *entered; /* in the ring's state; NULL: not introduced */
    uint32_t group;
    bool inside; /* of the collective of `entry` */
    Entry entry;
} Hooks;

static int hooks_clear(PyObject *object)
{
    Hooks *self = (Hooks *)object;
    self->entered = NULL;
    self->inside = false;
    GOES(self->introduce);
    GOES(self->channel);
    GOES(self->begun);
    GOES(self->watcher);
    return 0;
}

static int hooks_traverse(PyObject *object, visitproc visit, void *arg)
{
    Hooks *self = (Hooks *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->watcher);
    Py_VISIT(self->introduce);
    Py_VISIT(self->channel);
    Py_VISIT(self->begun);
    return 0;
}

static void hooks_dealloc(PyObject *object)
{
    dealloc(object, hooks_clear);
}

PyDoc_STRVAR(hooks_connect_doc, "connect(watcher, introduce, channel)");

static PyObject *hooks_connect(PyObject *object, PyObject *args)
{
    Hooks *self = (Hooks *)object;
    PyObject *watcher, *introduce, *channel;
    if (!PyArg_ParseTuple(args, "O!OO", watcher_type, &watcher, &introduce, &channel))
        return NULL;
    if (unconnected(((Watcher *)watcher)->recorder) < 0)
        return NULL;
    if (self->watcher != NULL)
        return PyErr_Format(PyExc_ValueError, "hooks are connected once");
    self->introduce = Py_NewRef(introduce);
    self->channel = Py_NewRef(channel);
    self->watcher = (Watcher *)Py_NewRef(watcher);
    Py_RETURN_NONE;
}

/* What a GroupLane tells, whose reference is taken. -1: it was NULL, or is none. `number`: the next of its sequence. */
static int read_lane(Ring *ring, PyObject *lane, uint32_t *group, int64_t **entered, int64_t *number, int32_t *peer)
{
    unsigned long long identity;
    Py_ssize_t place;
    PyObject *sequence;
    int failed = -1;
    if (lane == NULL)
        return -1;
    if (!PyTuple_Check(lane)) {
        PyErr_SetString(PyExc_TypeError, "this is no GroupLane");
    } else if (PyArg_ParseTuple(lane, "KnOi", &identity, &place, &sequence, peer)) {
        if (place < 0 || (size_t)place >= ring->header / sizeof(int64_t)) {
            PyErr_Format(PyExc_ValueError, "a ring's state has no place %zd", place);
        } else {
            *group = (uint32_t)identity;
            *entered = (int64_t *)ring->map.buf + place;
            failed = number == NULL ? 0 : whole(PyIter_Next(sequence), number);
            if (failed < 0 && !PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a GroupLane's sequence has come to an end");
        }
    }
    Py_DECREF(lane);
    return failed;
}

/* The collective that `call` is a form of; -1: none that is recorded; -2: an error. */
static int collective_of(Watcher *self, PyObject *call)
{
    int collective = -2;
    PyObject *form = PyObject_GetAttr(call, s_name), *number = NULL;
    if (form == NULL)
        return -2;
    if (!PyUnicode_Check(form)) {
        number = PyNumber_Long(form);
        if (number == NULL)
            goto out;
        long its = PyLong_AsLong(number);
        if (its == -1 && PyErr_Occurred())
            PyErr_Clear();
        else if (its >= 0 && its < FORMS) {
            collective = self->forms[its];
            goto out;
        }
    }
    PyObject *found = PyDict_GetItemWithError(self->collectives, number == NULL ? form : number);
    if (found != NULL)
        collective = (int)PyLong_AsLong(found); /* from 0 to 30: see read_forms */
    else if (!PyErr_Occurred())
        collective = -1;
out:
    Py_XDECREF(number);
    Py_DECREF(form);
    return collective;
}

/* Bytes of what goes in, or of what comes out where nothing does, and how many tensors, and whether they are the host's. */
static int ask_tensors(PyObject *call, int64_t *bytes, Py_ssize_t *count, bool *on_host)
{
    PyObject *tensors = PyObject_GetAttr(call, s_input_tensors);
    Py_ssize_t length = tensors == NULL ? -1 : PySequence_Size(tensors);
    if (length == 0) {
        Py_DECREF(tensors);
        tensors = PyObject_GetAttr(call, s_output_tensors);
        length = tensors == NULL ? -1 : PySequence_Size(tensors);
    }
    *bytes = 0;
    *on_host = true;
    *count = length;
    for (Py_ssize_t position = 0; position < length; position++) {
        PyObject *tensor = PySequence_GetItem(tensors, position);
        int64_t its;
        int is = 1;
        bool failed = tensor == NULL || whole(PyObject_GetAttr(tensor, s_nbytes), &its) < 0;
        if (!failed && position == 0) {
            is = truth(PyObject_GetAttr(tensor, s_is_cpu));
            *on_host = is > 0;
        }
        Py_XDECREF(tensor);
        if (failed || is < 0) {
            length = -1;
            break;
        }
        *bytes += its;
    }
    Py_XDECREF(tensors);
    return length < 0 ? -1 : 0;
}

/* Whether what is launched goes into a graph: to ask how far works are would break its capture. -1: an error. */
static int captures(Recorder *recorder)
{
    if (recorder->on_host)
        return 0;
    PyObject *clock = PyObject_GetAttr((PyObject *)recorder, s_clock);
    int is = clock == NULL ? -1 : truth(PyObject_GetAttr(clock, s_captures));
    Py_XDECREF(clock);
    return is;
}

/* The caller goes on: at the latest at the end of the backward pass, if it is in one, it will have waited. */
static int enter_asynchronously(Watcher *self, int collective)
{
    int64_t pass;
    if (backward_pass(self->recorder, &pass) < 0)
        return -1;
    if (pass != -1 && pass != self->backward) {
        self->backward = pass;
        if (done(PyObject_CallFunctionObjArgs(self->queue_callback, self->backward_computed, NULL)) < 0)
            return -1;
    }
    return SYMMETRIC & 1 << collective ? entered(self->recorder, pass != -1) : 0;
}

static int mark_here(Hooks *self)
{
    PyObject *clock = PyObject_GetAttr((PyObject *)self->watcher->recorder, s_clock);
    PyObject *mark = clock == NULL ? NULL : PyObject_CallMethodObjArgs(clock, s_mark, NULL);
    Py_XDECREF(clock);
    if (mark != NULL)
        replace(&self->begun, mark);
    return mark == NULL ? -1 : 0;
}

static int enter(Hooks *self, PyObject *call)
{
    Watcher *watcher = self->watcher;
    Recorder *recorder = watcher->recorder;
    Ring *ring = recorder->ring;
    self->inside = false;
    replace(&self->begun, NULL);
    int collective = collective_of(watcher, call);
    if (collective < 0)
        return collective == -1 ? 0 : -1;
    int is = captures(recorder);
    if (is != 0)
        return is < 0 ? -1 : 0;
    int32_t peer = NO_PEER;
    if (self->entered == NULL && /* torch says later than when it tells of a group who is in it */
        read_lane(ring, PyObject_CallNoArgs(self->introduce), &self->group, &self->entered, NULL, &peer) < 0)
        return -1;
    uint32_t group = self->group;
    int64_t number, start, *place = self->entered;
    if (collective < POINT_TO_POINT) {
        number = ++self->number;
    } else {
        PyObject *root = PyObject_GetAttr(call, s_root);
        PyObject *lane = root == NULL ? NULL : PyObject_CallFunction(self->channel, "iO", collective, root);
        Py_XDECREF(root);
        if (read_lane(ring, lane, &group, &place, &number, &peer) < 0)
            return -1;
    }
    if (now(recorder->clock_ns, &start) < 0 || (is = under_way(watcher)) < 0)
        return -1;
    if (is && start - watcher->noticed_ns > END_NOTICE_RESOLUTION_NS && notice(watcher, start, true) < 0)
        return -1;
    store(ring, COLLECTIVE_SINCE, start);
    store(ring, SEQUENCE, number);
    __atomic_store_n(place, number, __ATOMIC_RELEASE);
    store(ring, GROUP, group);
    store(ring, ENTERED, load_word(ring, ENTERED) + 1);
    store(ring, COLLECTIVE_NOW, collective);
    int64_t bytes;
    Py_ssize_t tensors;
    bool on_host;
    long phase;
    if (ask_tensors(call, &bytes, &tensors, &on_host) < 0 || phase_number(recorder, &phase) < 0)
        return -1;
    self->entry = (Entry){
        .start_ns = start, .bytes = bytes, .number = number, .step = recorder->step, .group = group, .peer = peer,
        .collective = (uint8_t)collective, .phase = (uint8_t)phase, .on_host = on_host,
    };
    self->inside = true;
    is = truth(PyObject_GetAttr(call, s_async_op));
    if (is > 0)
        return enter_asynchronously(watcher, collective);
    if (is == 0 && (!on_host || tensors == 0)) /* a barrier has none, wherever it is */
        return mark_here(self);
    return is;
}

static int issued(Hooks *self, PyObject *call)
{
    if (!self->inside)
        return 0;
    self->inside = false;
    Entry entry = self->entry;
    PyObject *begun = self->begun;
    self->begun = NULL;
    int failed = -1;
    entry.work = PyObject_GetAttr(call, s_work);
    if (entry.work == NULL)
        goto out;
    if (entry.work != Py_None) {
        failed = add_pending(self->watcher, &entry);
        if (failed < 0)
            Py_DECREF(entry.work);
        goto out;
    }
    Py_DECREF(entry.work);
    if (begun == NULL) {
        failed = leave_if_all_ended(self->watcher);
        goto out;
    }
    PyObject *in_python = entry_in_python(&entry);
    if (in_python != NULL)
        failed = done(PyObject_CallMethodObjArgs((PyObject *)self->watcher, s__issued_at_once, in_python, begun, NULL));
    Py_XDECREF(in_python);
out:
    Py_XDECREF(begun);
    return failed;
}

static PyObject *hooks_enter(PyObject *object, PyObject *call)
{
    Hooks *self = (Hooks *)object;
    Watcher *watcher = self->watcher;
    if (watcher != NULL && watcher->inactive)
        Py_RETURN_NONE;
    return end_hook(watcher, "a collective", unconnected(watcher) < 0 || usable(watcher) < 0 ? -1 : enter(self, call));
}

static PyObject *hooks_issued(PyObject *object, PyObject *call)
{
    Hooks *self = (Hooks *)object;
    Watcher *watcher = self->watcher;
    if (watcher != NULL && watcher->inactive)
        Py_RETURN_NONE;
    return end_hook(watcher, "a collective", unconnected(watcher) < 0 || usable(watcher) < 0 ? -1 : issued(self, call));
}

/* ------------------------------------------------------------------------------------------------------- module --- */

#define METHOD(function) (PyCFunction)(void (*)(void))function

static PyMethodDef ring_methods[] = {
    {"connect", ring_connect, METH_VARARGS, ring_connect_doc},
    {"write", METHOD(ring_write), METH_FASTCALL | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef recorder_methods[] = {
    {"connect", recorder_connect, METH_VARARGS, recorder_connect_doc},
    {"go_on", recorder_go_on, METH_VARARGS, recorder_go_on_doc},
    {"end_step", METHOD(recorder_end_step), METH_VARARGS | METH_KEYWORDS, NULL},
    {"entered", recorder_entered, METH_O, NULL},
    {"backward_computed", recorder_backward_computed, METH_NOARGS, NULL},
    {"reduced", recorder_reduced, METH_NOARGS, NULL},
    {"optimizer_begins", recorder_optimizer_begins, METH_NOARGS, NULL},
    {"waited", recorder_waited, METH_VARARGS, NULL},
    {"load", recorder_load, METH_VARARGS, NULL},
    {"begin_optimizer_step", recorder_begin_optimizer_step, METH_VARARGS, NULL},
    {"end_optimizer_step", recorder_end_optimizer_step, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef recorder_members[] = {
    {"step", T_LONGLONG, offsetof(Recorder, step), 0, NULL},
    {"mode", T_LONGLONG, offsetof(Recorder, mode), 0, NULL},
    {"phase", T_OBJECT, offsetof(Recorder, phase), 0, NULL},
    {"managed", T_BOOL, offsetof(Recorder, managed), 0, NULL},
    {"notice_ends", T_OBJECT, offsetof(Recorder, notice_ends), 0, NULL},
    {"step_ended", T_OBJECT, offsetof(Recorder, step_ended), 0, NULL},
    {"notice_wait", T_OBJECT, offsetof(Recorder, notice_wait), 0, NULL},
    {"training_thread", T_ULONG, offsetof(Recorder, training_thread), 0, NULL},
    {"on_host", T_BOOL, offsetof(Recorder, on_host), 0, NULL},
    {"start_ns", T_LONGLONG, offsetof(Recorder, start_ns), READONLY, NULL},
    {"_waiting", T_BOOL, offsetof(Recorder, waiting), 0, NULL},
    {"_away", T_LONGLONG, offsetof(Recorder, away), 0, NULL},
    {"_unwaited", T_BOOL, offsetof(Recorder, unwaited), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef recorder_properties[] = {
    {"_step", get_step, set_step, NULL, NULL},
    {"_entry", get_entry, set_entry_object, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef watcher_methods[] = {
    {"connect", watcher_connect, METH_VARARGS, watcher_connect_doc},
    {"notice_ends", watcher_notice_ends, METH_NOARGS, NULL},
    {"backward_computed", watcher_backward_computed, METH_NOARGS, NULL},
    {"backward_ended", watcher_backward_ended, METH_NOARGS, NULL},
    {"_take", watcher_take, METH_O, NULL},
    {"_forget_pending", watcher_forget_pending, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef watcher_members[] = {
    {"report_failure", T_OBJECT, offsetof(Watcher, report_failure), 0, NULL},
    {"inactive", T_BOOL, offsetof(Watcher, inactive), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef watcher_properties[] = {
    {"_has_pending", get_has_pending, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef hooks_methods[] = {
    {"connect", hooks_connect, METH_VARARGS, hooks_connect_doc},
    {"enter", hooks_enter, METH_O, NULL},
    {"issued", hooks_issued, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

#define LIFE(type)                                                                                                     \
    {Py_tp_dealloc, type##_dealloc}, {Py_tp_traverse, type##_traverse}, {Py_tp_clear, type##_clear},                   \
        {Py_tp_methods, type##_methods}
static PyType_Slot ring_slots[] = {LIFE(ring), {0, NULL}};
static PyType_Slot recorder_slots[] = {
    LIFE(recorder), {Py_tp_members, recorder_members}, {Py_tp_getset, recorder_properties}, {0, NULL}};
static PyType_Slot watcher_slots[] = {
    LIFE(watcher), {Py_tp_members, watcher_members}, {Py_tp_getset, watcher_properties}, {0, NULL}};
static PyType_Slot hooks_slots[] = {LIFE(hooks), {0, NULL}};

#define FLAGS_OF_TYPES (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC)
static struct {
    PyTypeObject **type;
    const char *name;
    PyType_Spec spec;
} TYPES[] = {
    {&ring_type, "Ring", {"pacekeeper_rank.native.recording.Ring", sizeof(Ring), 0, FLAGS_OF_TYPES, ring_slots}},
    {&recorder_type, "Recorder", {"pacekeeper_rank.native.recording.Recorder", sizeof(Recorder), 0, FLAGS_OF_TYPES, recorder_slots}},
    {&watcher_type, "Watcher", {"pacekeeper_rank.native.recording.Watcher", sizeof(Watcher), 0, FLAGS_OF_TYPES, watcher_slots}},
    {&hooks_type, "Hooks", {"pacekeeper_rank.native.recording.Hooks", sizeof(Hooks), 0, FLAGS_OF_TYPES, hooks_slots}},
};

/* Takes the reference to `value`. */
static int add(PyObject *module, const char *name, PyObject *value)
{
    int failed = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static int set_item(PyObject *dictionary, const char *name, PyObject *value)
{
    int failed = dictionary == NULL || value == NULL ? -1 : PyDict_SetItemString(dictionary, name, value);
    Py_XDECREF(value);
    return failed;
}

/* What Python compares with its own. */
static int add_layouts(PyObject *module)
{
    PyObject *numbers = PyDict_New(), *record = PyDict_New(), *state = PyDict_New();
    int failed = 0;
    for (size_t each = 0; each < COUNT(NUMBERS) && failed == 0; each++)
        failed = set_item(numbers, NUMBERS[each].name, PyLong_FromLong(NUMBERS[each].value));
    for (size_t each = 0; each < COUNT(RECORD) && failed == 0; each++)
        failed = set_item(record, RECORD[each].name, Py_BuildValue("nn", (Py_ssize_t)RECORD[each].offset, (Py_ssize_t)RECORD[each].size));
    for (size_t each = 0; each < PLACES && failed == 0; each++)
        failed = set_item(state, STATE[each].name, PyLong_FromSize_t(STATE[each].size));
    failed = failed == 0 ? add(module, "NUMBERS", Py_XNewRef(numbers)) : -1;
    failed = failed == 0 ? add(module, "RECORD", Py_XNewRef(record)) : -1;
    failed = failed == 0 ? add(module, "STATE", Py_XNewRef(state)) : -1;
    Py_XDECREF(numbers);
    Py_XDECREF(record);
    Py_XDECREF(state);
    return failed;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "recording", "What a rank does for its records in each step.", -1, NULL, NULL, NULL, NULL, NULL,
};

API PyMODINIT_FUNC PyInit_recording(void)
{
#define INTERN(word)                                                                                                   \
    if (s_##word == NULL && (s_##word = PyUnicode_InternFromString(#word)) == NULL)                                    \
        return NULL;
    WORDS(INTERN)
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    int failed = add_layouts(module);
    for (size_t each = 0; each < COUNT(TYPES) && failed == 0; each++) {
        PyObject *type = PyType_FromSpec(&TYPES[each].spec);
        *TYPES[each].type = (PyTypeObject *)type;
        failed = add(module, TYPES[each].name, Py_XNewRef(type));
    }
    if (failed < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
