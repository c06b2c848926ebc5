/* faultshim.so: faults in the file operations of one process, by LD_PRELOAD.
 *
 * Loaded into a process it does nothing until `faultshim_arm` is called (by ctypes). From
 * then on it numbers the file operations of every thread below one directory, 1, 2, ...,
 * and at the n-th
 *   - kills the process with SIGKILL, before the operation is done, or
 *   - lets it fail with an errno, once or from then on for ever, or
 *   - lets a write write only its first half, or
 *   - stops the process with SIGSTOP before the operation, so that another one can do
 *     something then; after a SIGCONT the operation is done, or fails with EIO, or
 *   - waits 20 ms before the operation, as a slow disk does.
 * With `faultshim_log` it appends every operation that succeeded, and the bytes of every
 * write, to a file, from which replay.py computes what a power cut could have left.
 *
 * CPython and TensorStore both go through the libc symbols below. What libc calls
 * internally (fopen) is not seen; neither of the two uses that to change files.
 * While the shim is armed one operation runs at a time, so that the log is in the order in
 * which things happened.
 *
 * Build: gcc -O2 -Wall -Wextra -shared -fPIC -o faultshim.so faultshim.c
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The kinds of operation; the same order as KINDS in shim.py. */
enum kind { CREATE, WRITE, SYNC, RENAME, UNLINK, MKDIR, TRUNCATE, LINK, OPEN, READ, LOCK };
static const char *const NAMES[] = {"create", "write", "sync", "rename",
                                    "unlink", "mkdir", "truncate", "link",
                                    "open", "read", "lock"};

enum { KILL = -1, SHORT = -2, STOP = -3, STOP_EIO = -4, SLOW = -5 }; /* instead of an errno */
enum { GO_ON = 0, FAIL = 1, WRITE_HALF = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile int armed;
static char root[PATH_MAX];
static size_t root_length;
static unsigned counted_kinds; /* bit k: kind k is counted */
static long count, nth;        /* nth = 0: only count */
static int fault, for_ever;    /* an errno, or one of the above */
static int log_fd = -1, report_fd = -1, reported;


/* ---- what Python calls ---- */

/* Report each operation that is hit as a line "kind path" to `fd`. */
void faultshim_report_to(int fd) {
    report_fd = fd;
    reported = 0;
}

/* Append every successful operation to the file at `path`, in replay.py's format. */
int faultshim_log(const char *path) {
    log_fd = syscall(SYS_openat, AT_FDCWD, path,
                     O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0644);
    return log_fd < 0 ? -1 : 0;
}

void faultshim_arm(const char *directory, unsigned kinds, long n, int what, int ever) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    counted_kinds = kinds;
    nth = n;
    fault = what;
    for_ever = ever;
    count = 0;
    armed = 1;
}

/* Returns how many operations were counted. */
long faultshim_disarm(void) {
    armed = 0;
    return count;
}


/* ---- paths ---- */

static int path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return 1;
}

/* A path that goes through an open directory, as `/proc/self/fd/7/d/0`, without that. */
static const char *through_fd(const char *path, char *buffer) {
    char base[PATH_MAX];
    int fd, at = 0;
    if (sscanf(path, "/proc/self/fd/%d/%n", &fd, &at) != 1 || !at) return path;
    if (!path_of_fd(fd, base)) return path;
    snprintf(buffer, 2 * PATH_MAX, "%s/%s", base, path + at);
    return buffer;
}

/* The absolute path of `path` relative to `dir`, in `buffer` (2 * PATH_MAX bytes). */
static const char *absolute(int dir, const char *path, char *buffer) {
    char base[PATH_MAX];
    if (path[0] == '/') return through_fd(path, buffer);
    if (dir == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of_fd(dir, base)) return path;
    snprintf(buffer, 2 * PATH_MAX, "%s/%s", base, path);
    return buffer;
}

static int below_root(const char *path) {
    return !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || path[root_length] == 0);
}


/* ---- one operation: enter, do it, leave ---- */

/* Takes the lock, unless it returns FAIL (then errno is set). */
static int enter(enum kind kind, const char *path) {
    pthread_mutex_lock(&lock);
    if (!(counted_kinds >> kind & 1)) return GO_ON;
    count++;
    if (!nth || !(count == nth || (for_ever && count > nth))) return GO_ON;
    if (report_fd >= 0 && reported++ < 100) /* more could fill a pipe, and wait for ever */
        dprintf(report_fd, "%s %s\n", NAMES[kind], path);
    if (fault == KILL) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (fault == STOP || fault == STOP_EIO) raise(SIGSTOP);
    if (fault == SLOW) usleep(20000);
    if (fault == STOP || fault == SLOW) return GO_ON;
    if (fault == SHORT) return kind == WRITE ? WRITE_HALF : GO_ON;
    pthread_mutex_unlock(&lock);
    errno = fault == STOP_EIO ? EIO : fault;
    return FAIL;
}

/* Logs the operation if it succeeded, and gives the lock back. One record is a line
 * "what \t path \t other \t number \t size \n", then `size` bytes. */
static void leave(long result, const char *what, const char *path, const char *other,
                  long number, const struct iovec *data, int parts) {
    int saved = errno;
    if (log_fd >= 0 && result >= 0 && what) {
        size_t left = data ? (size_t)result : 0;
        char line[5 * PATH_MAX];
        int n = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", what, path,
                         other ? other : "", number, left);
        syscall(SYS_write, log_fd, line, n);
        for (int i = 0; i < parts && left; i++) {
            size_t size = data[i].iov_len < left ? data[i].iov_len : left;
            syscall(SYS_write, log_fd, data[i].iov_base, size);
            left -= size;
        }
    }
    pthread_mutex_unlock(&lock);
    errno = saved;
}

/* A line of the log that is no file operation: "the save returned", for instance. */
void faultshim_note(const char *text) {
    pthread_mutex_lock(&lock);
    leave(0, "note", text, 0, 0, 0, 0);
}


/* ---- open, mkdir ---- */

static int do_open(int dir, const char *path, int flags, mode_t mode) {
    char buffer[2 * PATH_MAX];
    struct stat st;
    if (!armed) return syscall(SYS_openat, dir, path, flags, mode);
    const char *full = absolute(dir, path, buffer);
    if (!below_root(full)) return syscall(SYS_openat, dir, path, flags, mode);
    int existed = !syscall(SYS_newfstatat, AT_FDCWD, full, &st, 0);
    int writes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    if (enter(writes ? CREATE : OPEN, full) == FAIL) return -1;
    int fd = syscall(SYS_openat, dir, path, flags, mode);
    const char *what = existed ? (flags & O_TRUNC ? "truncate" : NULL)
                               : (flags & O_CREAT ? "create" : NULL);
    leave(fd, what, full, 0, 0, 0, 0);
    return fd;
}

#define OPEN_BODY(dir)                                      \
    mode_t mode = 0;                                        \
    if (flags & (O_CREAT | O_TMPFILE)) {                    \
        va_list more;                                       \
        va_start(more, flags);                              \
        mode = va_arg(more, unsigned);                      \
        va_end(more);                                       \
    }                                                       \
    return do_open(dir, path, flags, mode);

int open(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD) }
int open64(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD) }
int openat(int dir, const char *path, int flags, ...) { OPEN_BODY(dir) }
int openat64(int dir, const char *path, int flags, ...) { OPEN_BODY(dir) }
/* The names that code built with _FORTIFY_SOURCE calls. */
int __open_2(const char *p, int flags) { return do_open(AT_FDCWD, p, flags, 0); }
int __open64_2(const char *p, int flags) { return do_open(AT_FDCWD, p, flags, 0); }
int __openat_2(int d, const char *p, int flags) { return do_open(d, p, flags, 0); }
int __openat64_2(int d, const char *p, int flags) { return do_open(d, p, flags, 0); }

/* Listing a directory. libc's own opendir calls none of the functions above. */
DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    char buffer[2 * PATH_MAX];
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "opendir");
    const char *full = armed ? absolute(AT_FDCWD, path, buffer) : path;
    if (!armed || !below_root(full)) return real(path);
    if (enter(OPEN, full) == FAIL) return NULL;
    DIR *result = real(path);
    leave(0, 0, 0, 0, 0, 0, 0);
    return result;
}

int mkdirat(int dir, const char *path, mode_t mode) {
    char buffer[2 * PATH_MAX];
    const char *full = armed ? absolute(dir, path, buffer) : path;
    if (!armed || !below_root(full)) return syscall(SYS_mkdirat, dir, path, mode);
    if (enter(MKDIR, full) == FAIL) return -1;
    int result = syscall(SYS_mkdirat, dir, path, mode);
    leave(result, "mkdir", full, 0, 0, 0, 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }


/* ---- write, read, ftruncate ---- */

static int counted_fd(int fd, char *path) {
    return armed && fd > 2 && fd != log_fd && path_of_fd(fd, path) && below_root(path);
}

static ssize_t real_write(int fd, const struct iovec *data, int parts, off_t offset) {
    if (offset < 0) return syscall(SYS_writev, fd, data, parts);
    return syscall(SYS_pwritev, fd, data, parts, offset, 0);
}

/* `offset` < 0: at the file's own position. */
static ssize_t do_write(int fd, const struct iovec *data, int parts, off_t offset) {
    char path[PATH_MAX];
    struct iovec half;
    if (!counted_fd(fd, path)) return real_write(fd, data, parts, offset);
    int verdict = enter(WRITE, path);
    if (verdict == FAIL) return -1;
    if (verdict == WRITE_HALF && parts) {
        half = data[0];
        half.iov_len = (half.iov_len + 1) / 2;
        data = &half;
        parts = 1;
    }
    off_t at = offset;
    if (at < 0)
        at = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    ssize_t written = real_write(fd, data, parts, offset);
    leave(written, "write", path, 0, at, data, parts);
    return written;
}

ssize_t writev(int fd, const struct iovec *data, int parts) {
    return do_write(fd, data, parts, -1);
}
ssize_t write(int fd, const void *bytes, size_t size) {
    struct iovec data = {(void *)bytes, size};
    return do_write(fd, &data, 1, -1);
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    struct iovec data = {(void *)bytes, size};
    return do_write(fd, &data, 1, offset);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    return pwrite(fd, bytes, size, offset);
}
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t offset) {
    return do_write(fd, data, parts, offset);
}
ssize_t pwritev2(int fd, const struct iovec *data, int parts, off_t offset, int flags) {
    (void)flags;
    return do_write(fd, data, parts, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *data, int parts, off64_t at, int flags) {
    return pwritev2(fd, data, parts, at, flags);
}
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t offset) {
    return do_write(fd, data, parts, offset);
}

/* Reads are counted so that they can fail; they are not logged. */
#define READ_BODY(call)                                     \
    char path[PATH_MAX];                                    \
    if (!counted_fd(fd, path)) return call;                 \
    if (enter(READ, path) == FAIL) return -1;               \
    ssize_t n = call;                                       \
    leave(n, 0, 0, 0, 0, 0, 0);                             \
    return n;

ssize_t read(int fd, void *b, size_t size) { READ_BODY(syscall(SYS_read, fd, b, size)) }
ssize_t pread(int fd, void *b, size_t size, off_t offset) {
    READ_BODY(syscall(SYS_pread64, fd, b, size, offset))
}
ssize_t pread64(int fd, void *b, size_t size, off64_t offset) {
    return pread(fd, b, size, offset);
}

ssize_t preadv(int fd, const struct iovec *into, int parts, off_t offset) {
    READ_BODY(syscall(SYS_preadv, fd, into, parts, offset, 0))
}
ssize_t preadv64(int fd, const struct iovec *into, int parts, off64_t offset) {
    return preadv(fd, into, parts, offset);
}
ssize_t preadv2(int fd, const struct iovec *into, int parts, off_t offset, int flags) {
    READ_BODY(syscall(SYS_preadv2, fd, into, parts, offset, 0, flags))
}
ssize_t preadv64v2(int fd, const struct iovec *into, int parts, off64_t at, int flags) {
    return preadv2(fd, into, parts, at, flags);
}

int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    if (!counted_fd(fd, path)) return syscall(SYS_ftruncate, fd, size);
    if (enter(TRUNCATE, path) == FAIL) return -1;
    int result = syscall(SYS_ftruncate, fd, size);
    leave(result, "truncate", path, 0, size, 0, 0);
    return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }


/* ---- fsync, fdatasync, syncfs ---- */

static int do_sync(int fd, long number, const char *what) {
    char path[PATH_MAX];
    if (!counted_fd(fd, path)) return syscall(number, fd);
    if (enter(SYNC, path) == FAIL) return -1;
    int result = syscall(number, fd);
    leave(result, what, path, 0, 0, 0, 0);
    return result;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync, "fsync"); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync, "fsync"); }
int syncfs(int fd) { return do_sync(fd, SYS_syncfs, "syncfs"); }


/* ---- flock ---- */

/* A process that is stopped here has opened a lock, and does not hold it yet. */
int flock(int fd, int operation) {
    char path[PATH_MAX];
    if (!counted_fd(fd, path)) return syscall(SYS_flock, fd, operation);
    if (enter(LOCK, path) == FAIL) return -1;
    int result = syscall(SYS_flock, fd, operation);
    leave(result, 0, 0, 0, 0, 0, 0);
    return result;
}


/* ---- rename, link, unlink, rmdir ---- */

int renameat2(int dir1, const char *from, int dir2, const char *to, unsigned flags) {
    char buffer1[2 * PATH_MAX], buffer2[2 * PATH_MAX];
    if (!armed) return syscall(SYS_renameat2, dir1, from, dir2, to, flags);
    const char *full1 = absolute(dir1, from, buffer1);
    const char *full2 = absolute(dir2, to, buffer2);
    if (!below_root(full1) && !below_root(full2))
        return syscall(SYS_renameat2, dir1, from, dir2, to, flags);
    if (enter(RENAME, full2) == FAIL) return -1;
    int result = syscall(SYS_renameat2, dir1, from, dir2, to, flags);
    leave(result, flags & RENAME_EXCHANGE ? "exchange" : "rename", full1, full2, 0, 0, 0);
    return result;
}
int rename(const char *from, const char *to) {
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat(int dir1, const char *from, int dir2, const char *to) {
    return renameat2(dir1, from, dir2, to, 0);
}

int linkat(int dir1, const char *from, int dir2, const char *to, int flags) {
    char buffer1[2 * PATH_MAX], buffer2[2 * PATH_MAX];
    const char *full1 = armed ? absolute(dir1, from, buffer1) : from;
    const char *full2 = armed ? absolute(dir2, to, buffer2) : to;
    if (!armed || !below_root(full2))
        return syscall(SYS_linkat, dir1, from, dir2, to, flags);
    if (enter(LINK, full2) == FAIL) return -1;
    int result = syscall(SYS_linkat, dir1, from, dir2, to, flags);
    leave(result, "link", full1, full2, 0, 0, 0);
    return result;
}
int link(const char *from, const char *to) {
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlinkat(int dir, const char *path, int flags) {
    char buffer[2 * PATH_MAX];
    const char *full = armed ? absolute(dir, path, buffer) : path;
    if (!armed || !below_root(full)) return syscall(SYS_unlinkat, dir, path, flags);
    if (enter(UNLINK, full) == FAIL) return -1;
    int result = syscall(SYS_unlinkat, dir, path, flags);
    leave(result, "unlink", full, 0, 0, 0, 0);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int remove(const char *path) {
    int result = unlinkat(AT_FDCWD, path, 0);
    return result && errno == EISDIR ? unlinkat(AT_FDCWD, path, AT_REMOVEDIR) : result;
}
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
