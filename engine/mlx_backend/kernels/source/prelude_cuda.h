// The kernels' dialect on CUDA. MLX includes its number types before this text.
#define DEVICE
#define THREAD
#define SHARED
#define INLINE static __device__ __forceinline__
#define SHARED_ARRAY(type, name, extent) __shared__ type name extent
#define BARRIER() __syncthreads()
#define UNROLL _Pragma("unroll")

typedef long long Offset;
typedef unsigned int Word;

INLINE float power_of_two(float x) { return exp2f(x); }
INLINE float tangent(float x) { return tanhf(x); }
INLINE float natural_log(float x) { return logf(x); }
INLINE float float_of(int bits) { return __int_as_float(bits); }
INLINE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

template <int BYTES> struct Packed;
template <> struct Packed<2> { typedef unsigned short Type; };
template <> struct Packed<4> { typedef unsigned int Type; };
template <> struct Packed<8> { typedef uint2 Type; };
template <> struct Packed<16> { typedef uint4 Type; };

// One load and one store; both ends are aligned to the vector.
template <int N, typename T>
INLINE void copy_vector(T* to, const T* from) {
  typedef typename Packed<N * sizeof(T)>::Type Type;
  *reinterpret_cast<Type*>(to) = *reinterpret_cast<const Type*>(from);
}
