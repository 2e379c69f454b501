/* Stands for CUDA's driver: devices whose memory is a file without a name, which other processes open by /proc. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEVICES = 4, BLOCKS = 64, OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 101, NO_CONTEXT = 201 };
#define LARGEST (1ul << 30)

typedef struct { unsigned char data[64]; } Handle;
typedef struct { int pid, fd; size_t size; } Named;

static struct { void *address; size_t size; int fd; } blocks[BLOCKS];
static __thread long current[8];
static __thread int depth;

int retained;

static int find(void *address) {
    for (int i = 0; i < BLOCKS; i++)
        if (address && address == blocks[i].address) return i;
    return -1;
}

static int hold(void **address, size_t size, int fd) {
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].address) continue;
        void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (made == MAP_FAILED) return OUT_OF_MEMORY;
        blocks[i].address = *address = made, blocks[i].size = size, blocks[i].fd = fd;
        return OK;
    }
    return OUT_OF_MEMORY;
}

static int drop(void *address) {
    int i = find(address);
    if (!depth || i < 0) return depth ? INVALID : NO_CONTEXT;
    munmap(address, blocks[i].size), close(blocks[i].fd);
    blocks[i].address = NULL;
    return OK;
}

static int inside(char *address, size_t size) {
    for (int i = 0; i < BLOCKS; i++) {
        char *start = blocks[i].address;
        if (start && address >= start && address + size <= start + blocks[i].size) return 1;
    }
    return 0;
}

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGet(int *device, int number) { return *device = number, number < DEVICES ? OK : NO_DEVICE; }
int cuDevicePrimaryCtxRetain(long *context, int device) { return retained++, *context = 100 + device, OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return retained--, OK; }
int cuCtxPushCurrent_v2(long context) { return current[depth++] = context, OK; }
int cuCtxPopCurrent_v2(long *context) { return *context = current[--depth], OK; }
int cuCtxSynchronize(void) { return depth ? OK : NO_CONTEXT; }

int cuMemAlloc_v2(void **address, size_t size) {
    if (!depth) return NO_CONTEXT;
    if (size > LARGEST) return OUT_OF_MEMORY;
    int fd = memfd_create("gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    int code = hold(address, size, fd);
    if (!code) memset(*address, 0xAB, size);
    return code;
}

int cuMemFree_v2(void *address) { return drop(address); }

int cuMemsetD8_v2(void *address, unsigned char value, size_t size) {
    if (!depth || !inside(address, size)) return INVALID;
    return memset(address, value, size), OK;
}

int cuMemcpyDtoH_v2(void *to, void *from, size_t size) {
    if (!depth || !inside(from, size)) return INVALID;
    return memcpy(to, from, size), OK;
}

int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) {
    if (!depth || !inside(to, size)) return INVALID;
    return memcpy(to, from, size), OK;
}

int cuIpcGetMemHandle(Handle *handle, void *address) {
    int i = find(address);
    if (!depth || i < 0) return INVALID;
    Named named = {getpid(), blocks[i].fd, blocks[i].size};
    return memcpy(handle, &named, sizeof named), OK;
}

int cuIpcOpenMemHandle_v2(void **address, Handle handle, unsigned flags) {
    if (!depth || flags != 1) return INVALID;
    Named named;
    char path[64];
    memcpy(&named, &handle, sizeof named);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", named.pid, named.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? INVALID : hold(address, named.size, fd);
}

int cuIpcCloseMemHandle(void *address) { return drop(address); }
