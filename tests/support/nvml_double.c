/* A double of libnvidia-ml.so.1 for machines without a GPU: what pacekeeper.launcher.gpu calls, on a state that lies in
 * the file $NVML_DOUBLE. Tests map the same file (tests/support/nvml.py has the same layout) and so script faults while
 * the calls go on. Handles and event sets point into the state, as NVML's point into its own.
 *
 * To add a call: its value into struct gpu here and in nvml.py, and a function that begins with CALL or CALL_OF. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, TIMEOUT = 10 };
enum { GPUS = 8, EVENTS = 64 };

struct gpu {
    char uuid[96];
    uint64_t event_types;  /* that it supports */
    uint64_t registered;   /* that the launcher has asked for */
    uint32_t error;        /* of every call about this GPU */
    uint32_t temperature;
};

struct event {
    uint32_t gpu;
    uint32_t reserved;
    uint64_t type;
    uint64_t data;
};

struct state {
    uint32_t count;         /* of GPUs */
    uint32_t init_error;
    uint32_t wait_error;    /* of waiting for an event */
    uint32_t blocked;       /* calls do not return while it is not 0 */
    uint32_t calls;         /* that came in */
    uint32_t openings;      /* calls of nvmlInitWithFlags that succeeded */
    uint32_t written, read; /* events */
    struct event events[EVENTS];
    struct gpu gpus[GPUS];
};

struct event_data {
    struct gpu *device;
    unsigned long long type;
    unsigned long long data;
    unsigned int gpu_instance;
    unsigned int compute_instance;
};

static volatile struct state *state;

static void pause_a_moment(void) {
    struct timespec moment = {0, 1000000};
    nanosleep(&moment, 0);
}

static unsigned come_in(void) {
    if (!state) {
        int file = open(getenv("NVML_DOUBLE"), O_RDWR);
        void *map = mmap(0, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (map == MAP_FAILED)
            return UNINITIALIZED;
        state = map;
    }
    __atomic_add_fetch(&state->calls, 1, __ATOMIC_SEQ_CST);
    while (state->blocked)
        pause_a_moment();
    return SUCCESS;
}

#define CALL                        \
    {                               \
        unsigned failed = come_in(); \
        if (failed)                 \
            return failed;          \
    }
#define CALL_OF(gpu)           \
    CALL                       \
    if ((gpu)->error)          \
        return (gpu)->error;

unsigned nvmlInitWithFlags(unsigned flags) {
    CALL
    (void)flags;
    if (!state->init_error)
        state->openings++;
    return state->init_error;
}

unsigned nvmlShutdown(void) {
    CALL
    return SUCCESS;
}

const char *nvmlErrorString(unsigned error) {
    (void)error;
    return "an error of the double";
}

unsigned nvmlDeviceGetCount_v2(unsigned *count) {
    CALL
    *count = state->count;
    return SUCCESS;
}

unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, volatile struct gpu **gpu) {
    CALL
    if (index >= state->count)
        return INVALID_ARGUMENT;
    *gpu = &state->gpus[index];
    return (*gpu)->error;
}

unsigned nvmlDeviceGetUUID(volatile struct gpu *gpu, char *uuid, unsigned length) {
    CALL_OF(gpu)
    strncpy(uuid, (const char *)gpu->uuid, length);
    return SUCCESS;
}

unsigned nvmlDeviceGetTemperature(volatile struct gpu *gpu, unsigned sensor, unsigned *temperature) {
    CALL_OF(gpu)
    (void)sensor;
    *temperature = gpu->temperature;
    return SUCCESS;
}

unsigned nvmlDeviceGetSupportedEventTypes(volatile struct gpu *gpu, unsigned long long *types) {
    CALL_OF(gpu)
    *types = gpu->event_types;
    return SUCCESS;
}

unsigned nvmlEventSetCreate(void **set) {
    CALL
    *set = (void *)state;
    return SUCCESS;
}

unsigned nvmlEventSetFree(void *set) {
    CALL
    (void)set;
    return SUCCESS;
}

unsigned nvmlDeviceRegisterEvents(volatile struct gpu *gpu, unsigned long long types, void *set) {
    CALL_OF(gpu)
    (void)set;
    if (types & ~gpu->event_types)
        return INVALID_ARGUMENT;
    gpu->registered |= types;
    return SUCCESS;
}

unsigned nvmlEventSetWait_v2(void *set, struct event_data *data, unsigned milliseconds) {
    CALL
    (void)set;
    for (unsigned waited = 0;; waited++) {
        if (state->wait_error)
            return state->wait_error;
        if (state->read != state->written)
            break;
        if (waited >= milliseconds)
            return TIMEOUT;
        pause_a_moment();
        while (state->blocked)
            pause_a_moment();
    }
    volatile struct event *event = &state->events[state->read % EVENTS];
    memset(data, 0, sizeof *data);
    data->device = (struct gpu *)&state->gpus[event->gpu];
    data->type = event->type;
    data->data = event->data;
    state->read++;
    return SUCCESS;
}
