// The kernels' dialect on Metal. MLX puts <metal_stdlib>, `using namespace metal` and its number types before this text.
#define DEVICE device
#define THREAD thread
#define SHARED threadgroup
#define INLINE static inline
#define SHARED_ARRAY(type, name, extent) threadgroup type name extent
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")

typedef long Offset;  // 64 bits: a pool may hold more than 2^31 numbers
typedef uint Word;

INLINE float power_of_two(float x) { return exp2(x); }
INLINE float tangent(float x) { return tanh(clamp(x, -15.0f, 15.0f)); }  // overflows to NaN outside
INLINE float natural_log(float x) { return log(x); }
INLINE float float_of(int bits) { return as_type<float>(bits); }
INLINE float shuffle_xor(float x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }

template <int N, typename T>
INLINE void copy_vector(thread T* to, const device T* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

template <int N, typename T>
INLINE void copy_vector(device T* to, const thread T* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = from[i];
}
