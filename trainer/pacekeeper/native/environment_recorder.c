/* Run in the image of a watched container, as an init container: records a variable that the image sets.
 *
 *     environment_recorder <file> <name>
 *
 * The injection sets PYTHONPATH of the container, which hides the value of the image. This program runs without that
 * variable of the pod, so it still sees the value of the image, or of the container's `envFrom`. It writes the value to
 * the file, as it is, and an empty file if there is none. The boot code of the watch restores it.
 *
 * The image may have no libc and no shell, so the program is linked statically and uses nothing of the image.
 *
 * It fails only if the variable is set and cannot be recorded: the job would miss it. Nothing else is a reason to hold
 * up the pod. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static bool write_all(int file, const char *data, size_t size) {
    while (size > 0) {
        ssize_t written = write(file, data, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        data += written;
        size -= (size_t)written;
    }
    return true;
}

/* Ranks may have run in this pod before: its folder is not trusted, so a file or link that is there is not followed. */
static bool record_value(const char *path, const char *value) {
    char temporary[PATH_BYTES];
    int length = snprintf(temporary, sizeof temporary, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof temporary)
        return false;
    if (unlink(temporary) != 0 && errno != ENOENT)
        return false;
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0)
        return false;
    bool is_written = write_all(file, value, strlen(value));
    bool is_closed = close(file) == 0;
    return is_written && is_closed && rename(temporary, path) == 0;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    const char *value = getenv(argv[2]);
    if (record_value(argv[1], value ? value : ""))
        return 0;
    fprintf(stderr, "pacekeeper: %s cannot be written: %s\n", argv[1], strerror(errno));
    return value ? 1 : 0;
}
