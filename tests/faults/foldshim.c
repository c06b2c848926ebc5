/* foldshim.so: a directory that ignores letter case, for one process, by LD_PRELOAD.
 *
 * Below the directory in the variable FOLDSHIM_ROOT, or in that of `foldshim_fold`, a name
 * that is not there means the entry whose name differs only in the case of ASCII letters,
 * if there is one: what a file system does that ignores case and keeps it, such as those
 * of macOS and Windows.
 *
 * Each function calls the next one of its name, so that faultshim.so sees the path that is
 * used. Python, TensorStore and cp go through the libc symbols below.
 *
 * Build: gcc -O2 -Wall -Wextra -shared -fPIC -o foldshim.so foldshim.c
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIZE = 2 * PATH_MAX };

static char root[PATH_MAX];
static size_t root_length;

void foldshim_fold(const char *directory) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
}

__attribute__((constructor)) static void begin(void) {
    if (getenv("FOLDSHIM_ROOT")) foldshim_fold(getenv("FOLDSHIM_ROOT"));
}

static int exists(const char *path) {
    struct stat st;
    return !syscall(SYS_newfstatat, AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW);
}

/* Replace `name`, of `length` bytes, by the entry of `folder` that it means, if any. */
static void look_up(const char *folder, char *name, size_t length) {
    char buffer[32768];
    int fd = syscall(SYS_openat, AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0) return;
    for (;;) {
        long n = syscall(SYS_getdents64, fd, buffer, sizeof buffer);
        if (n <= 0) break;
        for (long at = 0; at < n;) {
            struct dirent64 *entry = (struct dirent64 *)(buffer + at);
            if (strlen(entry->d_name) == length &&
                !strncasecmp(entry->d_name, name, length))
                memcpy(name, entry->d_name, length);
            at += entry->d_reclen;
        }
    }
    syscall(SYS_close, fd);
}

/* `path`, relative to `dir`, as it is spelled on the disk; as it is if not below root. */
static const char *folded(int dir, const char *path, char *full) {
    char base[PATH_MAX], link[64];
    ssize_t n = 0;
    if (!root_length || !path || !*path) return path;
    if (*path == '/') {
        snprintf(full, SIZE, "%s", path);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        const char *from = dir == AT_FDCWD ? "/proc/self/cwd" : link;
        n = syscall(SYS_readlinkat, AT_FDCWD, from, base, PATH_MAX - 1);
        if (n < 0) return path;
        base[n] = 0;
        snprintf(full, SIZE, "%s/%s", base, path);
    }
    if (strncmp(full, root, root_length) || full[root_length] != '/') return path;
    for (char *name = full + root_length + 1; *name;) {
        char *end = strchrnul(name, '/'), after = *end;
        *end = 0;
        if (!exists(full)) {
            name[-1] = 0;
            look_up(full, name, end - name);
            name[-1] = '/';
        }
        *end = after;
        name = after ? end + 1 : end;
    }
    return full;
}

#define NEXT(name)                        \
    static __typeof__(name) *next;        \
    char full[SIZE];                      \
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode_t mode = va_arg(more, mode_t);                     \
        va_end(more);                                           \
        NEXT(name);                                             \
        return next(folded(AT_FDCWD, path, full), flags, mode); \
    }
#define OPENAT(name)                                           \
    int name(int dir, const char *path, int flags, ...) {      \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode_t mode = va_arg(more, mode_t);                    \
        va_end(more);                                          \
        NEXT(name);                                            \
        return next(dir, folded(dir, path, full), flags, mode); \
    }
#define STAT(name, type)                                   \
    int name(const char *path, struct type *found) {       \
        NEXT(name);                                        \
        return next(folded(AT_FDCWD, path, full), found);  \
    }
#define STATAT(name, type)                                                \
    int name(int dir, const char *path, struct type *found, int flags) {  \
        NEXT(name);                                                       \
        return next(dir, folded(dir, path, full), found, flags);          \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)

int statx(int dir, const char *path, int flags, unsigned mask, struct statx *found) {
    NEXT(statx);
    return next(dir, folded(dir, path, full), flags, mask, found);
}
int access(const char *path, int mode) {
    NEXT(access);
    return next(folded(AT_FDCWD, path, full), mode);
}
int faccessat(int dir, const char *path, int mode, int flags) {
    NEXT(faccessat);
    return next(dir, folded(dir, path, full), mode, flags);
}
ssize_t readlink(const char *path, char *into, size_t size) {
    NEXT(readlink);
    return next(folded(AT_FDCWD, path, full), into, size);
}
DIR *opendir(const char *path) {
    NEXT(opendir);
    return next(folded(AT_FDCWD, path, full));
}
int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    return next(folded(AT_FDCWD, path, full), mode);
}
int mkdirat(int dir, const char *path, mode_t mode) {
    NEXT(mkdirat);
    return next(dir, folded(dir, path, full), mode);
}
int unlink(const char *path) {
    NEXT(unlink);
    return next(folded(AT_FDCWD, path, full));
}
int unlinkat(int dir, const char *path, int flags) {
    NEXT(unlinkat);
    return next(dir, folded(dir, path, full), flags);
}
int rmdir(const char *path) {
    NEXT(rmdir);
    return next(folded(AT_FDCWD, path, full));
}
int rename(const char *from, const char *to) {
    NEXT(rename);
    char other[SIZE];
    return next(folded(AT_FDCWD, from, full), folded(AT_FDCWD, to, other));
}
int renameat2(int dir1, const char *from, int dir2, const char *to, unsigned flags) {
    NEXT(renameat2);
    char other[SIZE];
    return next(dir1, folded(dir1, from, full), dir2, folded(dir2, to, other), flags);
}
