/* A stand-in for NVIDIA's library for management, as far as Baton calls it: two GPUs, the second one in MIG mode
   with two slices in seven places. With FAKE_NVML=broken the driver does not answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *uuid, *name; unsigned long long total, free; int slice; } Device;
typedef struct { unsigned long long total, free, used; } Memory;

#define GIB (1ULL << 30)
static Device devices[] = {
    {"GPU-aaaa-1", "H100", 80 * GIB, 79 * GIB, 0},
    {"GPU-bbbb-2", "H100", 80 * GIB, 78 * GIB, 0},
    {"MIG-cccc-3", "H100 MIG 3g.40gb", 40 * GIB, 40 * GIB, 1},
    {"MIG-dddd-4", "H100 MIG 1g.10gb", 10 * GIB, 10 * GIB, 1},
};

static int text(const char *from, char *out, unsigned length) {
    return snprintf(out, length, "%s", from) < (int)length ? 0 : 7;
}
int nvmlInit_v2(void) {
    const char *how = getenv("FAKE_NVML");
    return how && !strcmp(how, "broken") ? 9 : 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned length) { return text("580.95.05", out, length); }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) { *out = &devices[index]; return index > 1 ? 2 : 0; }
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
    *out = 7;
    return device == &devices[1] ? 0 : 3;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned place, Device **out) {
    if (place != 0 && place != 2) return 6;
    *out = &devices[place ? 3 : 2];
    return 0;
}
int nvmlDeviceGetUUID(Device *device, char *out, unsigned length) { return text(device->uuid, out, length); }
int nvmlDeviceGetName(Device *device, char *out, unsigned length) { return text(device->name, out, length); }
int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
    out->total = device->total;
    out->free = device->free;
    out->used = device->total - device->free;
    return 0;
}
