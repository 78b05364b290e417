// Stands in for <metal_stdlib> when clang checks the kernels' Metal text without a Mac: address spaces as attributes, and
// of Metal's library only what the kernels use, with Metal's overloads. Nothing here runs.
#define SPACE(number) __attribute__((address_space(number)))
#define device SPACE(1)
#define constant SPACE(2)
#define threadgroup SPACE(3)
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;
typedef _Float16 half;
typedef __fp16 bfloat;  // a second 16-bit type that converts through float
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
struct uint3 {
  uint x, y, z;
};

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags flags);

float simd_shuffle_xor(float data, ushort mask);
half simd_shuffle_xor(half data, ushort mask);
int simd_shuffle_xor(int data, ushort mask);
uint simd_shuffle_xor(uint data, ushort mask);

template <typename To, typename From>
To as_type(From x);
float log(float x);
half log(half x);
float rint(float x);
half rint(half x);
float exp2(float x);
half exp2(half x);
namespace precise {
float sin(float x);
float cos(float x);
float rsqrt(float x);
}  // namespace precise
float tanh(float x);
half tanh(half x);
float clamp(float x, float low, float high);
int clamp(int x, int low, int high);
float max(float a, float b);
half max(half a, half b);
int max(int a, int b);
uint max(uint a, uint b);
float min(float a, float b);
half min(half a, half b);
int min(int a, int b);
uint min(uint a, uint b);

template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  T elements[2];
  T* thread_elements();
};
template <typename T>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<T, 8, 8>& sum,
    simdgroup_matrix<T, 8, 8> a,
    simdgroup_matrix<T, 8, 8> b,
    simdgroup_matrix<T, 8, 8> c);
