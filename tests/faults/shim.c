/* Between a program and libc: fails, cuts or records its calls on files below a folder, and moves the wall clock.

   What it does is said by environment variables, which tests/faults/shim.py writes and explains. Calls are counted in
   a file that all processes of a command map, so "call number N" is one of the whole command. Real calls are made by
   syscall(2): nothing here can call itself. Streams of stdio are not seen, because libc writes them without these names. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L
#define LOG_DESCRIPTOR 900 /* above what programs count on */

struct state {
    unsigned long calls, clocks;
    char what[PAGE - 16]; /* the call that was hit, for messages */
};

static struct state *state;
static const char *folder, *calls;
static unsigned long at, clock_at;
static long clock_jump;
static int lasting, error, recording = -1;
static enum { NONE, FAIL, SHORT, CUT, KILL } how;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("FAULTS_STATE"), *text;
    if (!file) return;
    int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    void *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (mapped == MAP_FAILED) return;
    state = mapped;
    folder = getenv("FAULTS_FOLDER");
    calls = (text = getenv("FAULTS_CALLS")) ? text : "";
    at = (text = getenv("FAULTS_AT")) ? strtoul(text, NULL, 10) : 0;
    lasting = getenv("FAULTS_LASTING") != NULL;
    clock_at = (text = getenv("FAULTS_CLOCK_AT")) ? strtoul(text, NULL, 10) : 0;
    clock_jump = (text = getenv("FAULTS_CLOCK_JUMP")) ? atol(text) : 0;
    text = (text = getenv("FAULTS_HOW")) ? text : "";
    how = !strcmp(text, "short") ? SHORT : !strcmp(text, "cut") ? CUT : !strcmp(text, "kill") ? KILL : FAIL;
    error = how == FAIL && *text ? atoi(text) : EIO;
    if ((text = getenv("FAULTS_LOG"))) {
        int log = syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        recording = syscall(SYS_fcntl, log, F_DUPFD_CLOEXEC, LOG_DESCRIPTOR);
        syscall(SYS_close, log);
    }
}

/* Paths */

static int path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

static void absolute(int at_folder, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (at_folder == AT_FDCWD)
        syscall(SYS_getcwd, base, sizeof base);
    else
        path_of(at_folder, base);
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

static int inside(const char *path) {
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int counts(const char *call) {
    size_t length = strlen(call);
    for (const char *p = calls; p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : "")
        if (!strncmp(p, call, length) && (p[length] == ',' || !p[length])) return 1;
    return 0;
}

/* Whether something happens to this call. */
static int hit(const char *call, const char *path) {
    if (!state || !inside(path) || !counts(call)) return 0;
    unsigned long number = __atomic_add_fetch(&state->calls, 1, __ATOMIC_SEQ_CST);
    if (!at || number < at || (number > at && !lasting)) return 0;
    if (number == at) snprintf(state->what, sizeof state->what, "%s %s", call, path);
    if (how == KILL) kill(getpid(), SIGKILL);
    return 1;
}

static int fails(const char *call, const char *path) {
    if (!hit(call, path) || how != FAIL) return 0;
    errno = error;
    return 1;
}

/* Recording: a line, and after a write its data. */

static void record(const char *call, const char *path, const char *to, long offset, const struct iovec *data, long size) {
    char line[2 * PATH_MAX + 128];
    if (recording < 0 || !(inside(path) || inside(to))) return;
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%ld\n", call, path, to, offset, data ? size : 0L);
    size_t left = data ? (size_t)size : 0;
    char *entry = malloc(length + left), *end = entry + length;
    if (!entry) abort();
    memcpy(entry, line, length);
    for (; left; data++) {
        size_t part = data->iov_len < left ? data->iov_len : left;
        memcpy(end, data->iov_base, part);
        end += part;
        left -= part;
    }
    syscall(SYS_write, recording, entry, (size_t)(end - entry)); /* one write: entries of processes do not mix */
    free(entry);
}

static int exists(const char *path) {
    return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

/* Files are opened for writing, and made */

static int opened(int at_folder, const char *name, int flags, mode_t mode) {
    if (!state) return syscall(SYS_openat, at_folder, name, flags, mode);
    char path[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    absolute(at_folder, name, path);
    if (writes && fails("open", path)) return -1;
    int unnamed = (flags & O_TMPFILE) == O_TMPFILE, before = !unnamed && exists(path), kept = errno;
    errno = kept;
    int descriptor = syscall(SYS_openat, at_folder, name, flags, mode);
    if (descriptor >= 0 && !unnamed) {
        if ((flags & O_CREAT) && !before) record("create", path, "", 0, NULL, 0);
        if (writes && (flags & O_TRUNC) && before) record("truncate", path, "", 0, NULL, 0);
    }
    return descriptor;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int where, const char *name, int flags, ...) { MODE(flags) return opened(where, name, flags, mode); }
int openat64(int where, const char *name, int flags, ...) { MODE(flags) return opened(where, name, flags, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Data */

/* Half of a transfer; of direct I/O and of large transfers in whole pages, as a disk would do. */
static size_t half_of(int descriptor, size_t size) {
    int direct = syscall(SYS_fcntl, descriptor, F_GETFL) & O_DIRECT;
    if (size >= 2 * PAGE) return size / 2 / PAGE * PAGE;
    return direct || size < 2 ? size : size / 2;
}

/* Moves `count` buffers at `offset`, -1: where the file stands. */
static ssize_t moved(int writes, int descriptor, const struct iovec *buffers, int count, long offset, int flags) {
    char path[PATH_MAX];
    struct iovec half = count ? buffers[0] : (struct iovec){0};
    long start = offset;
    int kept = errno;
    if (state && path_of(descriptor, path) && inside(path)) {
        errno = kept;
        if (hit(writes ? "write" : "read", path)) {
            struct stat status;
            if (how == FAIL) return errno = error, -1;
            if (how == SHORT) {
                half.iov_len = half_of(descriptor, half.iov_len);
                buffers = &half;
                count = count ? 1 : 0;
            }
            if (how == CUT && !syscall(SYS_fstat, descriptor, &status)) {
                char link[64]; /* not its path: the file may have none, and be open for reading only */
                snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
                syscall(SYS_truncate, link, status.st_size / 2);
            }
        }
        if (writes && recording >= 0 && start < 0) {
            int appends = syscall(SYS_fcntl, descriptor, F_GETFL) & O_APPEND;
            struct stat status;
            start = syscall(SYS_lseek, descriptor, 0L, SEEK_CUR);
            if (appends && !syscall(SYS_fstat, descriptor, &status)) start = status.st_size;
        }
    } else
        path[0] = 0;
    errno = kept;
    ssize_t done;
    if (offset >= 0)
        done = syscall(writes ? SYS_pwritev2 : SYS_preadv2, descriptor, buffers, count, offset, 0L, flags);
    else
        done = syscall(writes ? SYS_writev : SYS_readv, descriptor, buffers, count);
    if (writes && done > 0 && path[0]) record("write", path, "", start, buffers, done);
    return done;
}

#define ONE(buffer, size) (&(struct iovec){(void *)(buffer), size}), 1
typedef const struct iovec *Buffers;
ssize_t write(int d, const void *b, size_t n) { return moved(1, d, ONE(b, n), -1, 0); }
ssize_t pwrite(int d, const void *b, size_t n, off_t o) { return moved(1, d, ONE(b, n), o, 0); }
ssize_t pwrite64(int d, const void *b, size_t n, off64_t o) { return moved(1, d, ONE(b, n), o, 0); }
ssize_t writev(int d, Buffers b, int n) { return moved(1, d, b, n, -1, 0); }
ssize_t pwritev(int d, Buffers b, int n, off_t o) { return moved(1, d, b, n, o, 0); }
ssize_t pwritev64(int d, Buffers b, int n, off64_t o) { return moved(1, d, b, n, o, 0); }
ssize_t pwritev2(int d, Buffers b, int n, off_t o, int f) { return moved(1, d, b, n, o, f); }
ssize_t pwritev64v2(int d, Buffers b, int n, off64_t o, int f) { return moved(1, d, b, n, o, f); }
ssize_t read(int d, void *b, size_t n) { return moved(0, d, ONE(b, n), -1, 0); }
ssize_t pread(int d, void *b, size_t n, off_t o) { return moved(0, d, ONE(b, n), o, 0); }
ssize_t pread64(int d, void *b, size_t n, off64_t o) { return moved(0, d, ONE(b, n), o, 0); }
ssize_t readv(int d, Buffers b, int n) { return moved(0, d, b, n, -1, 0); }
ssize_t preadv(int d, Buffers b, int n, off_t o) { return moved(0, d, b, n, o, 0); }
ssize_t preadv64(int d, Buffers b, int n, off64_t o) { return moved(0, d, b, n, o, 0); }
ssize_t preadv2(int d, Buffers b, int n, off_t o, int f) { return moved(0, d, b, n, o, f); }
ssize_t preadv64v2(int d, Buffers b, int n, off64_t o, int f) { return moved(0, d, b, n, o, f); }

static int allocated(int descriptor, long offset, long size) {
    char path[PATH_MAX];
    int kept = errno, failed = state && path_of(descriptor, path) && fails("write", path);
    int code = failed ? error : syscall(SYS_fallocate, descriptor, 0, offset, size) ? errno : 0;
    errno = kept;
    return code; /* posix_fallocate returns what others leave in errno */
}
int posix_fallocate(int d, off_t o, off_t n) { return allocated(d, o, n); }
int posix_fallocate64(int d, off64_t o, off64_t n) { return allocated(d, o, n); }

static int resized(int descriptor, long size) {
    char path[PATH_MAX];
    if (!state || !path_of(descriptor, path)) return syscall(SYS_ftruncate, descriptor, size);
    if (fails("truncate", path)) return -1;
    int code = syscall(SYS_ftruncate, descriptor, size);
    if (!code) record("truncate", path, "", size, NULL, 0);
    return code;
}
int ftruncate(int d, off_t n) { return resized(d, n); }
int ftruncate64(int d, off64_t n) { return resized(d, n); }

static int synced(long number, int descriptor) {
    char path[PATH_MAX];
    if (!state || !path_of(descriptor, path)) return syscall(number, descriptor);
    if (fails("sync", path)) return -1;
    int code = syscall(number, descriptor);
    if (!code) record("sync", path, "", 0, NULL, 0);
    return code;
}
int fsync(int d) { return synced(SYS_fsync, d); }
int fdatasync(int d) { return synced(SYS_fdatasync, d); }

/* Names */

static int renamed(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char old[PATH_MAX], new[PATH_MAX];
    if (!state) return syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    absolute(from_folder, from, old);
    absolute(to_folder, to, new);
    if (fails("rename", new)) return -1;
    int code = syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (!code) record("rename", old, new, 0, NULL, 0);
    return code;
}
int rename(const char *a, const char *b) { return renamed(AT_FDCWD, a, AT_FDCWD, b, 0); }
int renameat(int d, const char *a, int e, const char *b) { return renamed(d, a, e, b, 0); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { return renamed(d, a, e, b, f); }

static int made(int at_folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!state) return syscall(SYS_mkdirat, at_folder, name, mode);
    absolute(at_folder, name, path);
    if (fails("mkdir", path)) return -1;
    int code = syscall(SYS_mkdirat, at_folder, name, mode);
    if (!code) record("mkdir", path, "", 0, NULL, 0);
    return code;
}
int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int d, const char *name, mode_t mode) { return made(d, name, mode); }

static int removed(int at_folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!state) return syscall(SYS_unlinkat, at_folder, name, flags);
    absolute(at_folder, name, path);
    if (fails("unlink", path)) return -1;
    int code = syscall(SYS_unlinkat, at_folder, name, flags);
    if (!code) record("unlink", path, "", 0, NULL, 0);
    return code;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int d, const char *name, int flags) { return removed(d, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }

/* The wall clock, which jumps once after so many looks at it */

static long jump(void) {
    if (!state || !clock_jump) return 0;
    return __atomic_add_fetch(&state->clocks, 1, __ATOMIC_SEQ_CST) > clock_at ? clock_jump : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, now, zone);
    if (!code) now->tv_sec += jump();
    return code;
}
time_t time(time_t *now) {
    struct timespec found;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &found);
    found.tv_sec += jump();
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
