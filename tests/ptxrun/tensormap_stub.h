/* Stub of cuTensorMapEncodeTiled for host code that plans launches for ptxrun: writes the
 * self-describing 128-byte handle that ptxrun/tensormap.py decodes.  C or C++, no CUDA needed;
 * types are plain integers so that it can be called with the CUDA enums cast to int. */
#include <stdint.h>
#include <string.h>
static inline int ptxrun_tensormap_encode(void* map128, int dtype, uint32_t rank, const void* addr,
                                          const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                          const uint32_t* estr, int interleave, int swizzle, int oob) {
  unsigned char b[128];
  uint64_t q[6] = {0x50414D5454585450ull, (uint64_t)(uintptr_t)addr, 0, 0, 0, 0};
  uint32_t d[5] = {1, 1, 1, 1, 1};
  uint16_t x[5] = {1, 1, 1, 1, 1};
  unsigned char t[10] = {1, 1, 1, 1, 1};
  if (rank < 1 || rank > 5) return 1;
  for (uint32_t i = 0; i < rank; i++) {
    d[i] = (uint32_t)dims[i];
    x[i] = (uint16_t)box[i];
    t[i] = (unsigned char)(estr ? estr[i] : 1);
    if (i + 1 < rank) q[2 + i] = strides[i];
  }
  t[5] = (unsigned char)rank;
  t[6] = (unsigned char)dtype;
  t[7] = (unsigned char)interleave;
  t[8] = (unsigned char)swizzle;
  t[9] = (unsigned char)oob;
  memset(b, 0, sizeof b);
  memcpy(b, q, 48);
  memcpy(b + 48, d, 20);
  memcpy(b + 68, x, 10);
  memcpy(b + 78, t, 10);
  memcpy(map128, b, 128);
  return 0;
}
