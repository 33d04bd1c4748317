// The driver's library as far as Triton's launcher calls it: modules are numbered, a launch is told to a callback.
#include <stddef.h>

typedef int Result;
typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
} Launch;
typedef struct {
  int id;
  char pad[4];
  union {
    char pad[64];
    int value;
  } value;
} Attribute;
typedef int (*Told)(void* function, const unsigned* grid, const unsigned* block, unsigned shared, int overlap, void** parameters);

static Told told;
static const char* said = "";
static unsigned long long modules = 1;
static int processors = 132;

void stub_begin(Told callback, int count) { told = callback, processors = count; }
void stub_say(const char* text) { said = text; }

Result cuInit(unsigned flags) { return 0; }
Result cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
Result cuCtxSetCurrent(void* context) { return 0; }
Result cuCtxGetLimit(size_t* value, int limit) { *value = 0; return 0; }
Result cuCtxSetLimit(int limit, size_t value) { return 0; }
Result cuDeviceGet(int* device, int number) { *device = number; return 0; }
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 97: *value = 232448; break;  // shared memory of a block that asks for it
    case 81: *value = 233472; break;  // of a multiprocessor
    case 16: *value = processors; break;
    case 10: *value = 32; break;     // lanes of a warp
    case 12: *value = 65536; break;  // registers of a block
    default: *value = 1;
  }
  return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)1; return 0; }
Result cuDriverGetVersion(int* version) { *version = 13000; return 0; }
Result cuFuncGetAttribute(int* value, int attribute, void* function) { *value = attribute ? 0 : 1024; return 0; }
Result cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
Result cuFuncSetCacheConfig(void* function, int config) { return 0; }
Result cuGetErrorString(Result code, const char** text) { *text = said; return 0; }
Result cuModuleLoadData(void** module, const void* image) { *module = (void*)modules++; return 0; }
Result cuModuleGetFunction(void** function, void* module, const char* name) { *function = module; return 0; }
Result cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  *(unsigned long long*)value = pointer;
  return 0;
}
Result cuOccupancyMaxActiveClusters(int* count, void* function, void* config) { *count = 1; return 0; }
Result cuTensorMapEncodeTiled(void) { return 1; }
Result cuTensorMapEncodeIm2col(void) { return 1; }
Result cuLaunchKernelEx(const Launch* launch, void* function, void** parameters, void** extra) {
  const Attribute* attributes = (const Attribute*)launch->attributes;
  int overlap = 0;
  for (unsigned i = 0; i < launch->count; i++)
    if (attributes[i].id == 6) overlap = attributes[i].value.value;  // programmatic stream serialization
  return told ? told(function, launch->grid, launch->block, launch->shared, overlap, parameters) : 0;
}
