/* The time of day of one process, off by the seconds in a file; to be preloaded.

   Time since start-up is left alone, as by a real clock that is set, and so are the times of files.
   Waits for a time of day, which the kernel ends by its own clock, are told in that (Abseil's, and so
   TensorStore's). libfaketime does more: with it Python's timed waits last as long as the clock is
   off, or fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;
static long (*call_kernel)(long, ...);

__attribute__((constructor)) static void open_shift(void)
{
    call_kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    const char *name = getenv("CLOCK_SHIFT_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *memory = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (memory != MAP_FAILED)
        shift = memory;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)call_kernel(SYS_clock_gettime, clock, now);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift;
    return failed;
}

time_t time(time_t *seconds)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds)
        *seconds = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict moment, void *restrict zone)
{
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    moment->tv_sec = now.tv_sec;
    moment->tv_usec = now.tv_nsec / 1000;
    return 0;
}

long syscall(long number, ...)
{
    long given[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_clock_gettime)
        return clock_gettime((clockid_t)given[0], (struct timespec *)given[1]);
    struct timespec until;
    if (number == SYS_futex && shift && given[3] && given[1] & FUTEX_CLOCK_REALTIME) {
        until = *(struct timespec *)given[3];
        until.tv_sec = until.tv_sec > *shift ? until.tv_sec - *shift : 0;
        given[3] = (long)&until;
    }
    return call_kernel(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
