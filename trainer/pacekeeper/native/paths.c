/* Preloaded into ranks: their sockets take the ports that lead by the planned paths through the fabric.
 *
 * Switches choose among equal paths by a hash of addresses and ports. The launcher has found out which ports lead where
 * (launcher/network/path_search.py) and written it into the file that PACEKEEPER_PATHS names, one entry a line:
 *
 *     listen <own address> 0 <port> …                    where a socket that asks for any port listens
 *     connect <address> <port> <source port> …           where a connection to there comes from
 *     label <address> <flow label>                       of queue pairs to there (RoCE v2)
 *
 * The file is read at each call, so that each round has its own. Of several ports the first that can be had is taken.
 * Whatever is missing, taken or refused: the call is the one that it would have been without all this.
 *
 * RoCE is UNPROVEN: nobody has run that part on a network card. It follows from what rdma-core and the kernel document. */
#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef RTLD_NEXT
#define RTLD_NEXT ((void *)-1L)
#endif

enum { FILE_BYTES = 16384, KEY_BYTES = 80, MOST_PORTS = 8 };

typedef int (*socket_call)(int, const struct sockaddr *, socklen_t);

EXPORT const int pacekeeper_paths = 1; /* whoever finds this symbol in its process has been preloaded */

/* dlsym gives a data pointer, which C does not let be called. */
static void find_next(const char *name, void *function)
{
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

static int call_next(const char *name, int fd, const struct sockaddr *address, socklen_t size)
{
    socket_call next;
    find_next(name, &next);
    return next(fd, address, size);
}

/* ---- The file ---- */

/* Numbers of the line that begins with `key`; returns how many. */
static int read_entry(const char *key, uint32_t numbers[MOST_PORTS])
{
    const char *path = getenv("PACEKEEPER_PATHS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return 0;
    char text[FILE_BYTES];
    size_t size = 0;
    ssize_t more;
    while (size < sizeof text - 1 && (more = read(fd, text + size, sizeof text - 1 - size)) > 0)
        size += (size_t)more;
    close(fd);
    if (size == sizeof text - 1)
        return 0; /* a number that is cut off would be another one */
    text[size] = 0;

    int count = 0;
    for (char *line = text, *end; *line; line = end + (*end == '\n')) {
        end = line + strcspn(line, "\n");
        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        for (char *at = line + strlen(key), *after; count < MOST_PORTS; at = after) {
            unsigned long number = strtoul(at, &after, 10);
            if (after == at || after > end)
                break;
            numbers[count++] = (uint32_t)number;
        }
        break;
    }
    return count;
}

/* False where this is no address of the internet. */
static bool make_key(char key[KEY_BYTES], const char *word, const struct sockaddr *address, socklen_t size)
{
    char name[INET6_ADDRSTRLEN];
    const void *number;
    uint16_t port;
    if (address && address->sa_family == AF_INET && size >= sizeof(struct sockaddr_in)) {
        number = &((const struct sockaddr_in *)address)->sin_addr;
        port = ((const struct sockaddr_in *)address)->sin_port;
    } else if (address && address->sa_family == AF_INET6 && size >= sizeof(struct sockaddr_in6)) {
        number = &((const struct sockaddr_in6 *)address)->sin6_addr;
        port = ((const struct sockaddr_in6 *)address)->sin6_port;
    } else {
        return false;
    }
    if (!inet_ntop(address->sa_family, number, name, sizeof name))
        return false;
    return snprintf(key, KEY_BYTES, "%s %s %u ", word, name, ntohs(port)) < KEY_BYTES;
}

/* ---- TCP ---- */

static bool is_tcp(int fd)
{
    int type;
    socklen_t size = sizeof type;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

/* sin_port and sin6_port lie at the same place. */
static uint16_t *port_in(struct sockaddr_storage *address)
{
    _Static_assert(offsetof(struct sockaddr_in, sin_port) == offsetof(struct sockaddr_in6, sin6_port), "one place");
    return &((struct sockaddr_in *)address)->sin_port;
}

/* An unbound socket gets this source port; false: it is as it was. */
static bool take_port(int fd, sa_family_t family, uint32_t port)
{
    struct sockaddr_storage any = {.ss_family = family};
    *port_in(&any) = htons((uint16_t)port);
    int before = 0, yes = 1; /* other connections, to other peers, may come from the same port */
    socklen_t size = sizeof before;
    if (getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &before, &size) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0)
        return false;
    if (call_next("bind", fd, (struct sockaddr *)&any, sizeof any) == 0)
        return true;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &before, sizeof before);
    return false;
}

/* Whether a connection from this port to there can be had. A socket that is bound cannot be unbound again, so another
 * one tries, with packets that end at the first hop; closed, it leaves nothing behind even where they arrived. */
static bool can_connect_from(uint32_t port, const struct sockaddr *to, socklen_t size)
{
    bool v6 = to->sa_family == AF_INET6;
    struct linger none = {.l_onoff = 1};
    int hops = 1, fd = socket(to->sa_family, SOCK_STREAM, 0);
    if (fd < 0)
        return false;
    bool can = fcntl(fd, F_SETFL, O_NONBLOCK) == 0 && take_port(fd, to->sa_family, port) &&
               setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0 &&
               setsockopt(fd, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_UNICAST_HOPS : IP_TTL, &hops, sizeof hops) == 0 &&
               (call_next("connect", fd, to, size) == 0 || errno == EINPROGRESS);
    close(fd);
    return can;
}

static bool is_unbound(int fd)
{
    struct sockaddr_storage own = {0};
    socklen_t size = sizeof own;
    return getsockname(fd, (struct sockaddr *)&own, &size) == 0 && *port_in(&own) == 0;
}

EXPORT int connect(int fd, const struct sockaddr *to, socklen_t size)
{
    int before = errno;
    char key[KEY_BYTES];
    uint32_t ports[MOST_PORTS];
    if (make_key(key, "connect", to, size)) {
        int count = read_entry(key, ports);
        bool ready = count == 0 || !is_tcp(fd) || !is_unbound(fd);
        for (int i = 0; i < count && !ready; i++)
            ready = can_connect_from(ports[i], to, size) && take_port(fd, to->sa_family, ports[i]);
    }
    errno = before;
    return call_next("connect", fd, to, size);
}

EXPORT int bind(int fd, const struct sockaddr *own, socklen_t size)
{
    int before = errno;
    char key[KEY_BYTES];
    uint32_t ports[MOST_PORTS];
    int count = make_key(key, "listen", own, size) && is_tcp(fd) ? read_entry(key, ports) : 0;
    for (int i = 0; i < count; i++) {
        struct sockaddr_storage at = {0};
        memcpy(&at, own, size < sizeof at ? size : sizeof at);
        *port_in(&at) = htons((uint16_t)ports[i]);
        if (call_next("bind", fd, (struct sockaddr *)&at, size) == 0) {
            errno = before;
            return 0;
        }
    }
    errno = before;
    return call_next("bind", fd, own, size);
}

/* ---- RoCE (unproven) ----
 *
 * NCCL finds ibv_modify_qp by dlvsym, and leaves the flow label of its queue pairs at 0. From a label the network card
 * makes the UDP source port of their packets: 0xC000 + its 14 bits, as rdma-core's ibv_flow_label_to_udp_sport says. */

struct attributes { /* as far as ibv_qp_attr of libibverbs 1.1 is used here */
    uint32_t state_to_capabilities[14];
    struct {
        uint8_t destination[16];
        uint32_t flow_label;
        uint8_t rest[3];
    } route;
    uint16_t lid;
    uint8_t level, bits, rate, has_route;
};
_Static_assert(offsetof(struct attributes, route) == 56 && offsetof(struct attributes, has_route) == 85, "as verbs has it");

enum { HAS_ADDRESS = 1 << 7 }; /* IBV_QP_AV */

typedef int (*modify_call)(void *pair, struct attributes *attributes, int which);
typedef void *(*lookup_call)(void *library, const char *name, const char *version);

static modify_call modify_pair;

static uint32_t label_to(const uint8_t destination[16])
{
    static const uint8_t v4_mapped[12] = {[10] = 0xff, [11] = 0xff};
    bool v4 = memcmp(destination, v4_mapped, sizeof v4_mapped) == 0;
    char name[INET6_ADDRSTRLEN], key[KEY_BYTES];
    uint32_t labels[MOST_PORTS];
    if (!inet_ntop(v4 ? AF_INET : AF_INET6, destination + (v4 ? 12 : 0), name, sizeof name))
        return 0;
    snprintf(key, sizeof key, "label %s ", name);
    return read_entry(key, labels) ? labels[0] : 0;
}

static int modify_pair_on_its_path(void *pair, struct attributes *attributes, int which)
{
    bool free = attributes && (which & HAS_ADDRESS) && attributes->has_route && attributes->route.flow_label == 0;
    uint32_t label = free ? label_to(attributes->route.destination) : 0;
    if (label) {
        attributes->route.flow_label = label;
        int failed = modify_pair(pair, attributes, which);
        attributes->route.flow_label = 0;
        if (!failed)
            return 0;
    }
    return modify_pair(pair, attributes, which);
}

EXPORT void *dlvsym(void *library, const char *name, const char *version)
{
    lookup_call next;
    find_next("dlvsym", &next);
    if (strcmp(name, "ibv_modify_qp") != 0)
        return next(library, name, version); /* a tail call: RTLD_NEXT means what is behind the caller */
    void *found = next(library, name, version), *ours;
    if (!found)
        return NULL;
    modify_call function = modify_pair_on_its_path;
    memcpy(&modify_pair, &found, sizeof found);
    memcpy(&ours, &function, sizeof ours);
    return ours;
}
