/* A double of libnvidia-ml.so.1 for machines without a GPU: what pacekeeper.launcher asks NVML, on a state that lies in
 * the file $NVML_DOUBLE. Tests map the same file (testing/training/nvml.py has the same layout) and so script faults while
 * the calls go on. Handles and event sets point into the state, as NVML's point into its own.
 *
 * To add a call: its value into struct gpu here and in nvml.py, and a function that begins with CALL or CALL_OF; where
 * it only hands one value out, a line ANSWERS. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10 };
enum { GPUS = 8, EVENTS = 64 };
/* Kinds and counters of memory errors, clocks, field values and their type, as NVML numbers them. */
enum { UNCORRECTED = 1, VOLATILE = 0, AGGREGATE = 1, SM_CLOCK = 1 };
enum { NVLINK_REPLAYS = 52, NVLINK_RECOVERIES = 59, MEMORY_TEMPERATURE = 82, UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

struct gpu {
    char uuid[96];
    uint64_t event_types;  /* that it supports */
    uint64_t registered;   /* that the launcher has asked for */
    uint32_t error;        /* of every call about this GPU */
    uint32_t health_error; /* of every call about its health but that for its temperature */
    uint64_t uncorrected_errors, lifetime_errors;
    uint64_t slowdown;     /* reasons for reduced clocks */
    uint64_t nvlink_replays, nvlink_recoveries;
    uint32_t remapped_rows, rows_pending, rows_failed;
    uint32_t clock, clock_maximum;
    uint32_t temperature, memory_temperature;
    uint32_t power;        /* mW */
    uint32_t state;        /* performance state */
    uint32_t pcie_replays;
    uint32_t pcie_width, pcie_width_maximum;
    uint32_t pcie_generation, pcie_generation_maximum;
    uint32_t nvlinks, nvlinks_active;
};

struct field_value {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint32_t type, result;
    union {
        uint32_t small;
        uint64_t large;
    } value;
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

#define HEALTH_OF(gpu)         \
    CALL_OF(gpu)               \
    if ((gpu)->health_error)   \
        return (gpu)->health_error;
#define ANSWERS(function, type, field)                       \
    unsigned function(volatile struct gpu *gpu, type *found) { \
        HEALTH_OF(gpu)                                       \
        *found = gpu->field;                                 \
        return SUCCESS;                                      \
    }

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

ANSWERS(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, slowdown)
ANSWERS(nvmlDeviceGetPowerUsage, unsigned, power)
ANSWERS(nvmlDeviceGetPerformanceState, unsigned, state)
ANSWERS(nvmlDeviceGetPcieReplayCounter, unsigned, pcie_replays)
ANSWERS(nvmlDeviceGetCurrPcieLinkWidth, unsigned, pcie_width)
ANSWERS(nvmlDeviceGetMaxPcieLinkWidth, unsigned, pcie_width_maximum)
ANSWERS(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, pcie_generation)
ANSWERS(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, pcie_generation_maximum)

unsigned nvmlDeviceGetClockInfo(volatile struct gpu *gpu, unsigned clock, unsigned *megahertz) {
    HEALTH_OF(gpu)
    if (clock != SM_CLOCK)
        return INVALID_ARGUMENT;
    *megahertz = gpu->clock;
    return SUCCESS;
}

unsigned nvmlDeviceGetMaxClockInfo(volatile struct gpu *gpu, unsigned clock, unsigned *megahertz) {
    HEALTH_OF(gpu)
    if (clock != SM_CLOCK)
        return INVALID_ARGUMENT;
    *megahertz = gpu->clock_maximum;
    return SUCCESS;
}

unsigned nvmlDeviceGetTotalEccErrors(volatile struct gpu *gpu, unsigned kind, unsigned counter,
                                     unsigned long long *count) {
    HEALTH_OF(gpu)
    if (kind != UNCORRECTED || counter > AGGREGATE)
        return INVALID_ARGUMENT;
    *count = counter == VOLATILE ? gpu->uncorrected_errors : gpu->lifetime_errors;
    return SUCCESS;
}

unsigned nvmlDeviceGetRemappedRows(volatile struct gpu *gpu, unsigned *corrected, unsigned *uncorrected,
                                   unsigned *pending, unsigned *failed) {
    HEALTH_OF(gpu)
    *corrected = 0;
    *uncorrected = gpu->remapped_rows;
    *pending = gpu->rows_pending;
    *failed = gpu->rows_failed;
    return SUCCESS;
}

unsigned nvmlDeviceGetNvLinkState(volatile struct gpu *gpu, unsigned link, unsigned *active) {
    HEALTH_OF(gpu)
    if (link >= gpu->nvlinks)
        return NOT_SUPPORTED;
    *active = link < gpu->nvlinks_active;
    return SUCCESS;
}

unsigned nvmlDeviceGetFieldValues(volatile struct gpu *gpu, int count, struct field_value *values) {
    HEALTH_OF(gpu)
    for (int i = 0; i < count; i++) {
        struct field_value *value = &values[i];
        value->result = SUCCESS;
        value->type = UNSIGNED_LONG_LONG;
        if (value->id == NVLINK_REPLAYS && gpu->nvlinks) {
            value->value.large = gpu->nvlink_replays;
        } else if (value->id == NVLINK_RECOVERIES && gpu->nvlinks) {
            value->value.large = gpu->nvlink_recoveries;
        } else if (value->id == MEMORY_TEMPERATURE) {
            value->type = UNSIGNED_INT;
            value->value.small = gpu->memory_temperature;
        } else {
            value->result = NOT_SUPPORTED;
        }
    }
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
