// Preloaded, it serves posix_memalign, torch's allocation of tensors, from pages of its own: after each block, or with
// GUARD=before before it, lies a page of which every access faults. Freed blocks fault from then on.
#include <sys/mman.h>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

extern "C" void __libc_free(void*);

static const size_t PAGE = 4096, REGION = size_t(1) << 44;
static const size_t ALIGNED = 16;  // of every block: what Triton assumes of a tensor's address
struct Pages {
  char* first;
  size_t size;
};
static std::mutex LOCK;
static char* REGION_START;
static size_t USED;
static std::unordered_map<void*, Pages>* BLOCKS;

extern "C" int posix_memalign(void** out, size_t align, size_t size) {
  std::lock_guard<std::mutex> hold(LOCK);
  if (!REGION_START) {
    void* region = mmap(nullptr, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) return ENOMEM;
    REGION_START = (char*)region;
    BLOCKS = new std::unordered_map<void*, Pages>;
  }
  if (align <= 64) align = ALIGNED;
  size_t spare = align > PAGE ? align : 0, length = (size + spare + PAGE - 1) / PAGE * PAGE;
  if (!length) length = PAGE;
  if (USED + length + 2 * PAGE > REGION) return ENOMEM;
  char* first = REGION_START + USED + PAGE;
  USED += length + PAGE;
  if (mprotect(first, length, PROT_READ | PROT_WRITE)) return ENOMEM;
  const char* where = getenv("GUARD");
  uintptr_t begin = (uintptr_t)first;
  bool before = where && !strcmp(where, "before");
  *out = (void*)((before ? begin + align - 1 : begin + length - size) & ~(uintptr_t)(align - 1));
  (*BLOCKS)[*out] = {first, length};
  memset(*out, 0xff, size);
  return 0;
}

extern "C" void free(void* block) {
  char* at = (char*)block;
  if (!REGION_START || at < REGION_START || at >= REGION_START + REGION) return __libc_free(block);
  std::lock_guard<std::mutex> hold(LOCK);
  auto found = BLOCKS->find(block);
  if (found == BLOCKS->end()) abort();
  Pages pages = found->second;
  BLOCKS->erase(found);
  mmap(pages.first, pages.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
