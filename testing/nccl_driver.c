/* A stand-in for NCCL, which takes a GPU: loads the profiler plugin as NCCL does, and calls it in the orders that NCCL
 * does, and in those that it never should. tests/unit/trainer/observe/test_nccl_profiler.py reads what comes of it.
 *
 *   nccl_driver PLUGIN VERSION SCENARIO [NUMBER …] */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COLL = 1 << 1, P2P = 1 << 2, PROXY_OP = 1 << 3, PROXY_STEP = 1 << 4 };
enum { SEND_GPU_WAIT = 8, SEND_WAIT = 9, RECV_WAIT = 10, RECV_FLUSH_WAIT = 11, RECV_GPU_WAIT = 12 };
enum { OP_IN_PROGRESS = 19, SEND_PEER_WAIT = 20 };

/* As NCCL's headers lay it out. */
struct descriptor {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct { uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root;
                 const char *datatype; uint8_t channels, warps; const char *algo, *proto; void *group; } coll;
        struct { const char *func; void *buffer; const char *datatype; size_t count; int peer; uint8_t channels;
                 void *group; } p2p;
        struct { pid_t pid; uint8_t channel; int peer, steps, chunk, is_send; } op;
        struct { int step; } step;
        uint64_t room[16];
    };
};
struct plugin {
    const char *name;
    void *init;
    int (*start)(void *, void **, struct descriptor *);
    int (*stop)(void *);
    int (*record)(void *, int, size_t *);
    int (*finalize)(void *);
};
typedef int (*init_v4)(void **, int *, const char *, uint64_t, int, int, int, void *);
typedef int (*init_v5)(void **, uint64_t, int *, const char *, int, int, int, void *);

static struct plugin *plugin;
static int version, mask;

static void check(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "nccl_driver: %s\n", what);
    exit(1);
}

static void *make(uint64_t id, const char *name, int size, int rank) {
    void *context = (void *)1;
    int error = version == 4 ? ((init_v4)plugin->init)(&context, &mask, name, id, 1, size, rank, NULL)
                             : ((init_v5)plugin->init)(&context, id, &mask, name, 1, size, rank, NULL);
    check(!error, "init fails");
    return context;
}

static void *start(void *context, struct descriptor descriptor) {
    void *handle = (void *)1;
    if (version == 4) descriptor.type |= 0xABCDEF00; /* one byte is all that version 4 defines */
    check(!plugin->start(context, &handle, &descriptor), "startEvent fails");
    return handle;
}

static void *start_coll(void *context, uint64_t seq, const char *func) {
    return start(context, (struct descriptor){.type = COLL, .coll = {.seq = seq, .func = func, .count = 10}});
}

static void *start_p2p(void *context, const char *func, int peer) {
    return start(context, (struct descriptor){.type = P2P, .p2p = {.func = func, .peer = peer}});
}

static void *start_op(void *context, void *parent, pid_t pid, int peer, int is_send) {
    struct descriptor descriptor = {.type = PROXY_OP, .parent = parent, .op = {pid, 3, peer, 4, 1000, is_send}};
    return start(context, descriptor);
}

static void *start_step(void *context, void *op, int step) {
    return start(context, (struct descriptor){.type = PROXY_STEP, .parent = op, .step = {step}});
}

static void record(void *handle, int state, size_t bytes) { check(!plugin->record(handle, state, &bytes), "record"); }
static void stop(void *handle) { check(!plugin->stop(handle), "stopEvent fails"); }

static void pass(long ms) {
    struct timespec time = {0, ms * 1000000};
    nanosleep(&time, NULL);
}

/* The plugin asks here, too (-rdynamic): so time can pass without a wait. */
static int64_t skipped_ns;

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!__atomic_load_n(&real, __ATOMIC_RELAXED))
        __atomic_store_n(&real, (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"),
                         __ATOMIC_RELAXED);
    int error = __atomic_load_n(&real, __ATOMIC_RELAXED)(clock, now);
    int64_t ns = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + skipped_ns;
    *now = (struct timespec){ns / 1000000000, ns % 1000000000};
    return error;
}

static void skip(long ms) { skipped_ns += ms * INT64_C(1000000); }

static void measure_steps(void) { /* as a reader of the file asks for it */
    FILE *file = fopen(getenv("PACEKEEPER_TRANSPORT"), "r+");
    int64_t until = INT64_MAX;
    check(file && !fseek(file, 24, SEEK_SET) && fwrite(&until, 8, 1, file) == 1 && !fclose(file), "cannot ask");
}

/* Two communicators; a collective of one, with a send in two overlapping steps and a receive; a send of the other. */
static void normal(void) {
    void *world = make(0xA1, "world", 4, 1), *pair = make(0xFFFFFFFFFFFFFFF1, NULL, 2, 0);
    check(world && pair && world != pair, "no contexts");
    check(mask == (COLL | P2P | PROXY_OP), "mask");
    check(!start(world, (struct descriptor){.type = 1}), "a group is of no interest");
    measure_steps();
    void *coll = start_coll(world, 7, "AllReduce");
    check(mask == (COLL | P2P | PROXY_OP | PROXY_STEP), "mask while steps are asked for");
    stop(coll); /* before its operations, as NCCL does */
    void *op = start_op(world, coll, getpid(), 2, 1);
    pass(5);
    record(op, OP_IN_PROGRESS, 0);
    void *first = start_step(world, op, 0), *second = start_step(world, op, 1);
    record(first, SEND_GPU_WAIT, 99999);
    record(second, SEND_GPU_WAIT, 99999);
    pass(10);
    record(first, SEND_PEER_WAIT, 99999);
    record(first, SEND_PEER_WAIT, 99999); /* the proxy's loop says it again and again */
    pass(5);
    record(first, SEND_WAIT, 600);
    record(second, SEND_WAIT, 400);
    pass(20);
    stop(first);
    stop(second);
    stop(op);
    op = start_op(world, coll, getpid(), 0, 0);
    record(op, OP_IN_PROGRESS, 0);
    first = start_step(world, op, 0);
    record(first, RECV_WAIT, 99999);
    pass(10);
    record(first, RECV_FLUSH_WAIT, 800);
    record(first, RECV_GPU_WAIT, 99999);
    pass(5);
    stop(first);
    stop(op);
    stop(start_op(pair, start_p2p(pair, "Send", 1), getpid(), 1, 1));
    plugin->finalize(pair);
    plugin->finalize(pair);
}

/* A rank sends 20 MB to all others every 5 s, in 12.5 s that are over: 100 ms each, to one of them 500. */
static void traffic(int size, int rank, int slow) {
    skip(-12500);
    void *world = make(0xA1, "world", size, rank);
    measure_steps();
    for (int round = 0; round < 3; round++, skip(5000 - size * 100)) {
        for (int peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            void *op = start_op(world, start_coll(world, round, "AllReduce"), getpid(), peer, 1);
            record(op, OP_IN_PROGRESS, 0);
            void *step = start_step(world, op, 0);
            record(step, SEND_WAIT, 20000000);
            skip(peer == slow ? 500 : 100);
            stop(step);
            stop(op);
        }
    }
}

static void foreign(void) {
    void *world = make(0xA1, "world", 4, 1), *coll = start_coll(world, 7, "AllReduce");
    void *op = start_op(world, coll, getpid() + 1, 2, 1); /* the same numbers, in another process */
    stop(op);
    void *wild = (void *)0x7F0012345678;
    stop(start_op(wild, wild, getpid() + 1, 2, 1));
}

static void late(void) {
    void *world = make(0xA1, "world", 4, 1), *op = start_op(world, NULL, getpid(), 2, 1);
    void *step = start_step(world, op, 0);
    record(step, SEND_WAIT, 500);
    stop(op);
    pass(300);
    record(step, SEND_GPU_WAIT, 500);
    record(step, SEND_WAIT, 500);
    stop(step);
    record(op, OP_IN_PROGRESS, 0);
    check(!start_step(world, op, 1), "a step of an operation that is over");
    stop(op);
    plugin->finalize(world);
    stop(start_op(world, NULL, getpid(), 2, 1)); /* behind the end of its communicator */
}

static void running(void) {
    void *world = make(0xA1, "world", 4, 1);
    start_op(world, start_coll(world, 9, "AllGather"), getpid(), 3, 0); /* its turn never comes */
    void *op = start_op(world, start_coll(world, 8, "Broadcast"), getpid(), 3, 1);
    record(op, OP_IN_PROGRESS, 0);
    record(start_step(world, op, 0), SEND_WAIT, 500);
}

static void lapped(void) {
    void *world = make(0xA1, "world", 4, 1), *coll = start_coll(world, 1, "AllReduce");
    void *oldest = start_op(world, coll, getpid(), 2, 1);
    for (int number = 0; number < 16384; number++) stop(start_op(world, coll, getpid(), number, 1));
    stop(oldest);
    record(oldest, OP_IN_PROGRESS, 0);
    for (int number = 0; number < 4096; number++) start_coll(world, number, "Reduce");
    stop(start_op(world, coll, getpid(), -1, 1)); /* its collective's entry is another's */
    for (int number = 0; number < 256; number++) make(number, "more", 2, 0);
    stop(start_op(world, NULL, getpid(), -2, 1)); /* so is its communicator's */
}

static void forks(void) {
    void *world = make(0xA1, "world", 4, 1);
    pid_t child = fork();
    if (!child) {
        check(!start_coll(world, 1, "AllReduce") && !start_op(world, NULL, getpid(), 2, 1), "a child writes");
        check(!make(0xB2, "child", 2, 0) && !mask, "a child has a communicator");
        _exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child && !status, "the child fails");
}

static void inert(void) { /* where there is no file to be had */
    check(!make(0xA1, "world", 4, 1) && !mask && !start_coll(NULL, 1, "Reduce"), "it runs");
    check(!start_op(NULL, NULL, getpid(), 1, 1), "it runs");
}

/* As a library that is unloaded with its last communicator, and loaded again with the next one. */
static void unloaded(const char *path, void *library) {
    void *world = make(0xA1, "world", 4, 1), *op = start_op(world, NULL, getpid(), 2, 1);
    plugin->finalize(world);
    check(!dlclose(library), "dlclose");
    stop(op);
    check(dlopen(path, RTLD_NOW) != NULL, "dlopen");
    check(make(0xB2, "next", 4, 1) != NULL, "no context the second time");
}

static uint64_t random_number(uint64_t *state) { /* xorshift */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Any call with any handle: good ones, those that are over, of another kind, NULL, and numbers from nowhere. Prints how
 * many events have started, so that the test knows that most calls did something. */
static void play_at_random(uint64_t seed, long calls) {
    enum { CONTEXTS = 8, HANDLES = 64 };
    static const char *const functions[] = {"AllReduce", "Broadcast", "AllGather", "SendRecv", "?", NULL};
    void *contexts[CONTEXTS], *handles[HANDLES] = {NULL};
    uint64_t state = seed * 0x9E3779B97F4A7C15 + 1;
    long started = 0;
    for (int number = 0; number < CONTEXTS; number++) contexts[number] = make(number, "random", 4, number % 4);
    for (long call = 0; call < calls; call++) {
        uint64_t chance = random_number(&state);
        void *context = contexts[chance % CONTEXTS], *one = handles[(chance >> 8) % HANDLES], *made = NULL;
        int number = (int)(chance >> 24);
        if (chance >> 60 == 0) one = (void *)random_number(&state);
        if (chance >> 60 == 1) one = (void *)((uintptr_t)one ^ 0x10);
        if (chance >> 60 == 2) context = one;
        switch ((chance >> 48) % 16) {
        case 0:
            if (number & 255) break;
            plugin->finalize(context);
            contexts[chance % CONTEXTS] = make(chance, "again", number, number);
            break;
        case 1:
        case 2:
            made = start_coll(context, chance, functions[(chance >> 32) % 6]);
            break;
        case 3:
            made = start_p2p(context, functions[(chance >> 32) % 6], number);
            break;
        case 4:
        case 5:
        case 6:
            made = start_op(context, one, chance & 1024 ? getpid() : number, number, number & 1);
            break;
        case 7:
        case 8:
        case 9:
            made = start_step(context, one, number);
            break;
        case 10:
            made = start(context, (struct descriptor){.type = chance >> 20, .parent = one});
            break;
        case 11:
            stop(one);
            break;
        case 12:
            check(!plugin->record(one, (int)(chance >> 32) % 32, NULL), "record without arguments");
            break;
        default:
            record(one, (int)(chance >> 32) % 32, (size_t)random_number(&state));
        }
        if (made) handles[(chance >> 16) % HANDLES] = made, started++;
    }
    check(!plugin->start(NULL, NULL, NULL) && !plugin->stop(NULL) && !plugin->record(NULL, 0, NULL), "NULL");
    check(!plugin->finalize(NULL), "NULL");
    printf("%ld\n", started);
}

static void overrun(void) { /* a fault of the driver's own: does the sanitizer see it? */
    volatile char *few = malloc(8);
    few[8] = 1;
    free((void *)few);
}

static void *one_thread(void *seed) {
    play_at_random((uintptr_t)seed, 40000);
    return NULL;
}

static void threads(void) {
    pthread_t all[4];
    for (uintptr_t number = 0; number < 4; number++)
        check(!pthread_create(&all[number], NULL, one_thread, (void *)(number + 1)), "pthread_create");
    for (int number = 0; number < 4; number++) pthread_join(all[number], NULL);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Prints ns of a collective, of an operation without steps, and of one with 8 steps. */
static void bench(void) {
    enum { TIMES = 200000 };
    void *world = make(0xA1, "world", 4, 1), *coll = NULL;
    double begin = seconds();
    for (int number = 0; number < TIMES; number++) stop(coll = start_coll(world, number, "AllReduce"));
    double colls = seconds();
    for (int number = 0; number < TIMES; number++) {
        void *op = start_op(world, coll, getpid(), 2, 1);
        record(op, OP_IN_PROGRESS, 0);
        stop(op);
    }
    double ops = seconds();
    for (int number = 0; number < TIMES; number++) {
        void *op = start_op(world, coll, getpid(), 2, 1);
        record(op, OP_IN_PROGRESS, 0);
        for (int step = 0; step < 8; step++) {
            void *handle = start_step(world, op, step);
            record(handle, SEND_GPU_WAIT, 0);
            record(handle, SEND_PEER_WAIT, 0);
            record(handle, SEND_WAIT, 1000);
            stop(handle);
        }
        stop(op);
    }
    double steps = seconds();
    printf("%.0f %.0f %.0f\n", (colls - begin) / TIMES * 1e9, (ops - colls) / TIMES * 1e9, (steps - ops) / TIMES * 1e9);
}

int main(int count, char **arguments) {
    check(count > 3, "nccl_driver PLUGIN VERSION SCENARIO");
    version = atoi(arguments[2]);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    check(library != NULL, "dlopen");
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
    plugin = dlsym(library, symbol);
    check(plugin != NULL, symbol);
    const char *scenario = arguments[3];
    if (!strcmp(scenario, "normal")) normal();
    else if (!strcmp(scenario, "traffic")) traffic(atoi(arguments[4]), atoi(arguments[5]), atoi(arguments[6]));
    else if (!strcmp(scenario, "foreign")) foreign();
    else if (!strcmp(scenario, "late")) late();
    else if (!strcmp(scenario, "running")) running();
    else if (!strcmp(scenario, "lapped")) lapped();
    else if (!strcmp(scenario, "forks")) forks();
    else if (!strcmp(scenario, "unloaded")) unloaded(arguments[1], library);
    else if (!strcmp(scenario, "threads")) threads();
    else if (!strcmp(scenario, "bench")) bench();
    else if (!strcmp(scenario, "overrun")) overrun();
    else if (!strcmp(scenario, "inert")) inert();
    else if (!strcmp(scenario, "random")) play_at_random(strtoull(arguments[4], NULL, 10), atol(arguments[5]));
    else check(0, "no such scenario");
    return 0;
}
