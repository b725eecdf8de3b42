/* NCCL's profiler plugin: what each transfer over the network is doing, in a file that launcher and sidecar map.
 *
 * NCCL moves bytes between machines by "proxy operations": one for each peer, channel and direction of a collective,
 * cut into steps. This plugin writes one record an operation when it starts, and changes it in place until it stops, so
 * that those of a job that hangs can be read, too. The layout is that of pacekeeper_analysis.protocol.transport, which explains
 * the fields; docs/decisions/0018-observe-nccl-with-a-profiler-plugin.md says why it is as it is.
 *
 * What is declared here of NCCL's interface (versions 4, 5 and 6) is all that is used of it; no header is needed.
 *
 * It never waits, allocates or frees after its start, and never follows a pointer that NCCL hands back: handles are
 * numbers, each good for one entry of a table for as long as that has not been given to another. So a handle that is
 * stale, of another process, or NULL is told from a good one, and ignored. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---- NCCL's interface ---- */

enum { NCCL_SUCCESS = 0 };
enum { TYPE_COLLECTIVE = 1 << 1, TYPE_P2P = 1 << 2, TYPE_OPERATION = 1 << 3, TYPE_STEP = 1 << 4 };
enum {
    STATE_SEND_GPU_WAIT = 8,
    STATE_SEND_WAIT = 9,
    STATE_RECV_WAIT = 10,
    STATE_RECV_FLUSH_WAIT = 11,
    STATE_RECV_GPU_WAIT = 12,
    STATE_OPERATION_IN_PROGRESS = 19,
    STATE_SEND_PEER_WAIT = 20,
};

struct event {
    uint64_t type; /* version 4: the first byte only, the others are undefined */
    void *parent;
    int rank;
    union {
        struct {
            uint64_t sequence;
            const char *function;
        } collective;
        struct {
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        struct {
            pid_t pid;
            uint8_t channel;
            int peer;
            int steps;
            int chunk_bytes;
            int is_send;
        } operation;
        struct {
            int number;
        } step;
    };
};
_Static_assert(offsetof(struct event, parent) == 8 && offsetof(struct event, collective) == 24, "as NCCL has it");
_Static_assert(offsetof(struct event, operation.is_send) == 44, "as NCCL has it");
_Static_assert(sizeof(void *) == 8, "a handle holds a 64-bit number");

union state_arguments {
    size_t step_bytes;
};

struct profiler {
    const char *name;
    void (*init)(void); /* its arguments differ by version */
    int (*start_event)(void *context, void **handle, const struct event *event);
    int (*stop_event)(void *handle);
    int (*record_event_state)(void *handle, int state, const union state_arguments *arguments);
    int (*finalize)(void *context);
};

/* ---- The file ---- */

#define MAGIC UINT64_C(0x504B4E43434C0001)
enum { COMMUNICATORS = 256, OPERATIONS = 16384, TASKS = 4096, STEPS = 8 };
enum { SEND = 1, MEASURED = 2, FOREIGN = 4, BEGUN = 8 }; /* flags of a record; `waiting(…)` adds what it waits for */
enum wait { NOTHING, NETWORK, GPU, CREDIT, WAITS };

struct header {
    uint64_t magic;
    uint64_t capacity;
    int32_t pid;
    int32_t version;        /* of the interface that NCCL has taken */
    int64_t steps_until_ns; /* written by readers: steps are measured until then */
    uint8_t padding[32];
    uint64_t operations; /* so many were started; a line of its own, since it is the one word that all write */
    uint8_t more_padding[56];
    uint64_t communicators;
    uint8_t rest[4096 - 136];
};

struct communicator {
    uint64_t order; /* from 1; 0: void */
    uint64_t id;
    int64_t created_ns;
    int64_t finalized_ns; /* 0: it lives */
    int32_t size;
    int32_t rank;
    int32_t nodes;
    char name[20];
};

struct record {
    uint64_t index; /* from 1; 0: void, or being written */
    uint64_t communicator;
    int64_t start_ns;
    int64_t end_ns; /* 0: it runs */
    int64_t bytes;
    uint32_t sequence;
    int32_t peer;
    uint32_t wait_us[WAITS - 1]; /* network, GPU, credit */
    uint8_t channel;
    uint8_t collective;
    uint8_t flags;
    uint8_t steps;
};

struct ring {
    struct header header;
    struct communicator communicators[COMMUNICATORS];
    struct record records[OPERATIONS];
};
_Static_assert(sizeof(struct header) == 4096, "a page");
_Static_assert(sizeof(struct communicator) == 64 && sizeof(struct record) == 64, "as the reader has it");

/* ---- The process' own memory ---- */

struct task { /* a collective, a send or a receive; NCCL stops it before its operations start */
    uint64_t index;
    uint64_t communicator;
    uint64_t sequence;
    uint64_t collective;
};

struct work { /* what is known of a record's operation besides the record */
    uint8_t step[STEPS]; /* what each of its steps waits for */
    uint32_t waiting[WAITS];
    int64_t since_ns[WAITS];
    int64_t total_ns[WAITS];
};

static struct ring *ring; /* NULL: nothing is written */
static struct task tasks[TASKS];
static struct work works[OPERATIONS];
static uint64_t p2p_sequence[COMMUNICATORS];
static uint64_t tasks_started;
static int communicators_alive;
static int *nccl_mask; /* NCCL's own variable, the same for all communicators */
static pid_t own_pid;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

/* Proxy threads, threads of the script and readers of the file meet in single words, never in more. */
#define GET(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#define GET_FIRST(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define SET(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELAXED)
#define SET_LAST(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)
#define VOID(place) ((void)__atomic_exchange_n(&(place), 0, __ATOMIC_ACQ_REL)) /* what follows is not seen before */
#define NEXT(counter) (__atomic_add_fetch(&(counter), 1, __ATOMIC_RELAXED))

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* ---- Handles ---- */

enum kind { NONE, COMMUNICATOR, TASK, OPERATION, STEP };

static void *handle_of(enum kind kind, uint64_t index, unsigned step) {
    return (void *)(uintptr_t)(index << 8 | step << 4 | kind);
}

static enum kind kind_of(const void *handle) { return (uintptr_t)handle & 15; }
static unsigned step_of(const void *handle) { return (uintptr_t)handle >> 4 & (STEPS - 1); }
static uint64_t index_of(const void *handle) { return (uintptr_t)handle >> 8; }

static struct communicator *communicator_of(struct ring *file, const void *context) {
    uint64_t order = index_of(context);
    struct communicator *found = &file->communicators[(order - 1) % COMMUNICATORS];
    return kind_of(context) == COMMUNICATOR && order && GET_FIRST(found->order) == order ? found : NULL;
}

static struct record *running_record(struct ring *file, uint64_t index) {
    struct record *found = &file->records[(index - 1) % OPERATIONS];
    return index && GET_FIRST(found->index) == index && !GET(found->end_ns) ? found : NULL;
}

static struct work *work_of(uint64_t index) { return &works[(index - 1) % OPERATIONS]; }

/* ---- Collectives, sends, receives ---- */

/* As pacekeeper_analysis.protocol.records.Collective numbers them; 0: another one. */
static unsigned collective_of(const char *name) {
    static const char *const names[] = {
        "",       "AllReduce", "Broadcast", "AllGather", "ReduceScatter", "Reduce",
        "Gather", "Scatter",   "AlltoAll",  "",          "Send",          "Recv",
    };
    for (unsigned number = 1; name && number < sizeof names / sizeof *names; number++)
        if (!strcmp(name, names[number])) return number;
    return 0;
}

/* NCCL asks its mask whenever it takes a collective, so that the next ones are measured otherwise. */
static void choose_mask(struct ring *file) {
    int *mask = GET_FIRST(nccl_mask);
    int wanted = TYPE_COLLECTIVE | TYPE_P2P | TYPE_OPERATION;
    int64_t until = GET(file->header.steps_until_ns);
    if (until && now_ns() < until) wanted |= TYPE_STEP;
    if (mask && GET(*mask) != wanted) SET(*mask, wanted);
}

static void *start_task(struct ring *file, const void *context, const struct event *event, int is_p2p) {
    struct communicator *communicator = communicator_of(file, context);
    choose_mask(file);
    if (!communicator) return NULL;
    uint64_t index = NEXT(tasks_started), sequence;
    struct task *task = &tasks[index % TASKS];
    if (is_p2p) /* NCCL does not count them */
        sequence = NEXT(p2p_sequence[(index_of(context) - 1) % COMMUNICATORS]);
    else
        sequence = event->collective.sequence;
    VOID(task->index);
    SET(task->communicator, GET(communicator->id));
    SET(task->sequence, sequence);
    SET(task->collective, collective_of(is_p2p ? event->p2p.function : event->collective.function));
    SET_LAST(task->index, index);
    return handle_of(TASK, index, 0);
}

/* What a record says of the task that it is a part of; nothing where the task's entry is another's by now. */
static void write_task(struct record *record, const void *parent) {
    struct task *task = &tasks[index_of(parent) % TASKS];
    uint64_t index = GET_FIRST(task->index);
    if (kind_of(parent) != TASK || !index || index != index_of(parent)) return;
    uint64_t communicator = GET(task->communicator), sequence = GET(task->sequence);
    uint64_t collective = GET(task->collective);
    if (GET_FIRST(task->index) != index) return;
    SET(record->communicator, communicator);
    SET(record->sequence, (uint32_t)sequence);
    SET(record->collective, (uint8_t)collective);
}

/* ---- Operations and their steps ---- */

static void *start_operation(struct ring *file, const void *context, const struct event *event) {
    int foreign = event->operation.pid != own_pid; /* then its context and parent are numbers of that process */
    struct communicator *communicator = foreign ? NULL : communicator_of(file, context);
    int64_t now = now_ns();
    uint64_t index = NEXT(file->header.operations);
    struct record *record = &file->records[(index - 1) % OPERATIONS];
    struct work *work = work_of(index);
    int64_t most_bytes = 0;
    if (event->operation.steps > 0 && event->operation.chunk_bytes > 0)
        most_bytes = (int64_t)event->operation.steps * event->operation.chunk_bytes;
    VOID(record->index);
    SET(record->communicator, communicator ? GET(communicator->id) : 0);
    SET(record->start_ns, now);
    SET(record->end_ns, 0);
    SET(record->bytes, most_bytes);
    SET(record->sequence, 0);
    SET(record->peer, event->operation.peer);
    SET(record->channel, event->operation.channel);
    SET(record->collective, 0);
    SET(record->flags, (event->operation.is_send ? SEND : 0) | (foreign ? FOREIGN : 0));
    SET(record->steps, 0);
    if (!foreign) write_task(record, event->parent);
    for (unsigned step = 0; step < STEPS; step++) SET(work->step[step], NOTHING);
    for (unsigned wait = NETWORK; wait < WAITS; wait++) {
        SET(record->wait_us[wait - 1], 0);
        SET(work->waiting[wait], 0);
        SET(work->total_ns[wait], 0);
    }
    SET_LAST(record->index, index);
    return handle_of(OPERATION, index, 0);
}

static void begin_operation(struct record *record) {
    if (__atomic_fetch_or(&record->flags, BEGUN, __ATOMIC_RELAXED) & BEGUN) return;
    SET(record->start_ns, now_ns());
}

static uint8_t waiting(unsigned wait) { return 16 << (wait - NETWORK); }

/* A step waits for something else from now on: each time is one in which at least one step waits for that. */
static int change_wait(struct record *record, struct work *work, unsigned step, enum wait to, int64_t now) {
    unsigned from = __atomic_exchange_n(&work->step[step], (uint8_t)to, __ATOMIC_RELAXED);
    if (from == to) return 0;
    if (from != NOTHING && __atomic_sub_fetch(&work->waiting[from], 1, __ATOMIC_RELAXED) == 0) {
        int64_t duration = now - GET(work->since_ns[from]);
        if (duration < 0) duration = 0;
        int64_t us = (__atomic_add_fetch(&work->total_ns[from], duration, __ATOMIC_RELAXED) + 500) / 1000;
        SET(record->wait_us[from - 1], us < UINT32_MAX ? (uint32_t)us : UINT32_MAX);
        __atomic_fetch_and(&record->flags, (uint8_t)~waiting(from), __ATOMIC_RELAXED);
    }
    if (to != NOTHING && __atomic_fetch_add(&work->waiting[to], 1, __ATOMIC_RELAXED) == 0) {
        SET(work->since_ns[to], now);
        __atomic_fetch_or(&record->flags, waiting(to), __ATOMIC_RELAXED);
    }
    return 1;
}

static void *start_step(struct ring *file, const struct event *event) {
    uint64_t index = index_of(event->parent);
    struct record *record = kind_of(event->parent) == OPERATION ? running_record(file, index) : NULL;
    unsigned step = (unsigned)event->step.number & (STEPS - 1); /* NCCL has no more of them in flight */
    if (!record) return NULL;
    if (!(__atomic_fetch_or(&record->flags, MEASURED | BEGUN, __ATOMIC_RELAXED) & MEASURED)) SET(record->bytes, 0);
    if (GET(record->steps) < UINT8_MAX) NEXT(record->steps);
    change_wait(record, work_of(index), step, NOTHING, now_ns());
    return handle_of(STEP, index, step);
}

static void record_step(struct ring *file, const void *handle, int state, const union state_arguments *arguments) {
    uint64_t index = index_of(handle);
    struct record *record = running_record(file, index);
    enum wait to;
    switch (state) {
    case STATE_SEND_WAIT:
    case STATE_RECV_WAIT:
        to = NETWORK;
        break;
    case STATE_SEND_GPU_WAIT:
    case STATE_RECV_GPU_WAIT:
        to = GPU;
        break;
    case STATE_SEND_PEER_WAIT:
        to = CREDIT;
        break;
    case STATE_RECV_FLUSH_WAIT:
        to = NOTHING;
        break;
    default:
        return;
    }
    if (!record || !change_wait(record, work_of(index), step_of(handle), to, now_ns())) return;
    if (arguments && (state == STATE_SEND_WAIT || state == STATE_RECV_FLUSH_WAIT)) /* only then are they this step's */
        __atomic_fetch_add(&record->bytes, (int64_t)(arguments->step_bytes & INT32_MAX), __ATOMIC_RELAXED);
}

static void stop_operation(struct record *record, struct work *work) {
    int64_t now = now_ns(), running = 0;
    for (unsigned step = 0; step < STEPS; step++)
        if (GET(work->step[step]) != NOTHING) change_wait(record, work, step, NOTHING, now);
    __atomic_compare_exchange_n(&record->end_ns, &running, now, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* ---- What NCCL calls ---- */

static int start_event(void *context, void **handle, const struct event *event, uint64_t type) {
    struct ring *file = GET_FIRST(ring);
    void *started = NULL;
    if (file && event) {
        switch (type) {
        case TYPE_COLLECTIVE:
            started = start_task(file, context, event, 0);
            break;
        case TYPE_P2P:
            started = start_task(file, context, event, 1);
            break;
        case TYPE_OPERATION:
            started = start_operation(file, context, event);
            break;
        case TYPE_STEP:
            started = start_step(file, event);
            break;
        }
    }
    if (handle) *handle = started;
    return NCCL_SUCCESS;
}

static int start_event_v4(void *context, void **handle, const struct event *event) {
    return start_event(context, handle, event, event ? *(const uint8_t *)event : 0);
}

static int start_event_v5(void *context, void **handle, const struct event *event) {
    return start_event(context, handle, event, event ? event->type : 0);
}

static int stop_event(void *handle) {
    struct ring *file = GET_FIRST(ring);
    uint64_t index = index_of(handle);
    struct record *record = file ? running_record(file, index) : NULL;
    if (!record) return NCCL_SUCCESS;
    if (kind_of(handle) == OPERATION) stop_operation(record, work_of(index));
    if (kind_of(handle) == STEP) change_wait(record, work_of(index), step_of(handle), NOTHING, now_ns());
    return NCCL_SUCCESS;
}

static int record_event_state(void *handle, int state, const union state_arguments *arguments) {
    struct ring *file = GET_FIRST(ring);
    struct record *record;
    if (!file) return NCCL_SUCCESS;
    if (kind_of(handle) == STEP) record_step(file, handle, state, arguments);
    if (kind_of(handle) == OPERATION && state == STATE_OPERATION_IN_PROGRESS &&
        (record = running_record(file, index_of(handle))))
        begin_operation(record);
    return NCCL_SUCCESS;
}

/* A process that a rank has forked shares the file, but not the numbers: it writes nothing. */
static void forked(void) { SET_LAST(ring, NULL); }

/* Whether this process is the rank whose ring of records lies at $PACEKEEPER_RING, and no program that a rank has
 * started: one inherits its environment. The ring names the rank's process id; 0, or no ring: nobody is left out. */
enum { OWNER_AT = 220 }; /* pacekeeper_analysis.protocol.records.STATE */
static int is_rank(void) {
    const char *path = getenv("PACEKEEPER_RING");
    int32_t owner = 0;
    int file = path && *path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 1;
    if (pread(file, &owner, sizeof owner, OWNER_AT) != (ssize_t)sizeof owner) owner = 0;
    close(file);
    return !owner || owner == (int32_t)getpid();
}

/* The file at $PACEKEEPER_TRANSPORT, whole before it has its name; the first process that asks for it has it. */
static void open_ring(void) {
    const char *path = getenv("PACEKEEPER_TRANSPORT");
    char temporary[4096];
    if (!path || !*path || !is_rank()) return;
    own_pid = getpid();
    if (snprintf(temporary, sizeof temporary, "%s.%d", path, (int)own_pid) >= (int)sizeof temporary) return;
    unlink(temporary);
    int file = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return;
    struct ring *map = MAP_FAILED;
    if (!posix_fallocate(file, 0, sizeof *map)) /* on a full volume the first write would be a SIGBUS */
        map = mmap(NULL, sizeof *map, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map != MAP_FAILED) {
        memset(map, 0, sizeof *map); /* the first touch of a page takes a microsecond, and is not to be NCCL's */
        memset(works, 0, sizeof works);
        memset(tasks, 0, sizeof tasks);
        map->header.capacity = OPERATIONS;
        map->header.pid = own_pid;
        map->header.magic = MAGIC;
        if (!pthread_atfork(NULL, NULL, forked) && !link(temporary, path))
            SET_LAST(ring, map);
        else
            munmap(map, sizeof *map);
    }
    unlink(temporary);
}

static int init(void **context, int *mask, uint64_t id, const char *name, int nodes, int size, int rank, int version) {
    pthread_once(&opened, open_ring);
    struct ring *file = GET_FIRST(ring);
    if (context) *context = NULL;
    if (mask) SET(*mask, 0);
    if (!file || !context || !mask) return NCCL_SUCCESS;
    uint64_t order = NEXT(file->header.communicators);
    struct communicator *communicator = &file->communicators[(order - 1) % COMMUNICATORS];
    VOID(communicator->order);
    SET(file->header.version, version);
    SET(p2p_sequence[(order - 1) % COMMUNICATORS], 0);
    SET(communicator->id, id);
    SET(communicator->created_ns, now_ns());
    SET(communicator->finalized_ns, 0);
    SET(communicator->size, size);
    SET(communicator->rank, rank);
    SET(communicator->nodes, nodes);
    int ended = !name;
    for (unsigned position = 0; position < sizeof communicator->name; position++) {
        ended = ended || position + 1 == sizeof communicator->name || !name[position];
        SET(communicator->name[position], ended ? 0 : name[position]);
    }
    SET_LAST(communicator->order, order);
    NEXT(communicators_alive);
    SET_LAST(nccl_mask, mask);
    choose_mask(file);
    *context = handle_of(COMMUNICATOR, order, 0);
    return NCCL_SUCCESS;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int size, int rank, void *log) {
    (void)log;
    return init(context, mask, id, name, nodes, size, rank, 4);
}

static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int size, int rank, void *log) {
    (void)log;
    return init(context, mask, id, name, nodes, size, rank, 5);
}

static int init_v6(void **context, uint64_t id, int *mask, const char *name, int nodes, int size, int rank, void *log) {
    (void)log;
    return init(context, mask, id, name, nodes, size, rank, 6);
}

static int finalize(void *context) {
    struct ring *file = GET_FIRST(ring);
    struct communicator *communicator = file ? communicator_of(file, context) : NULL;
    int64_t alive = 0;
    if (!communicator || !__atomic_compare_exchange_n(&communicator->finalized_ns, &alive, now_ns(), 0,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return NCCL_SUCCESS;
    if (__atomic_sub_fetch(&communicators_alive, 1, __ATOMIC_RELAXED) == 0) SET_LAST(nccl_mask, NULL);
    return NCCL_SUCCESS;
}

#define EXPORTED __attribute__((visibility("default")))
#define ANY(function) (void (*)(void)) function
EXPORTED const struct profiler ncclProfiler_v4 = {
    "pacekeeper", ANY(init_v4), start_event_v4, stop_event, record_event_state, finalize};
EXPORTED const struct profiler ncclProfiler_v5 = {
    "pacekeeper", ANY(init_v5), start_event_v5, stop_event, record_event_state, finalize};
EXPORTED const struct profiler ncclProfiler_v6 = {
    "pacekeeper", ANY(init_v6), start_event_v5, stop_event, record_event_state, finalize};
