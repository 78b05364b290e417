// Stands in for CUDA's headers when the system's C++ compiler checks the kernels' CUDA text. Nothing here runs.
#include <cmath>
#define __device__
#define __forceinline__ inline
#define __shared__
#define __global__
struct uint2 {
  unsigned int x, y;
};
struct uint4 {
  unsigned int x, y, z, w;
};
struct dim3 {
  unsigned int x, y, z;
};
extern dim3 threadIdx, blockIdx, gridDim;
void __syncthreads();
float __shfl_xor_sync(unsigned int lanes, float value, int mask);
float rsqrtf(float x);
float __int_as_float(int bits);
int min(int a, int b);
int max(int a, int b);
float min(float a, float b);
float max(float a, float b);
uint2 __ldcs(const uint2* from);
uint4 __ldcs(const uint4* from);
unsigned int __ldcs(const unsigned int* from);
unsigned long __cvta_generic_to_shared(const void* address);
#define asm(...) ;
#define volatile
struct __half {
  unsigned short bits;
  __half() = default;
  __half(float x);
  operator float() const;
};
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x);
  operator float() const;
};
